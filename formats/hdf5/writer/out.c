/*
 * Writes one HDF5 file: opens it through our driver, keeps the groups that lead to the current dataset open, and turns
 * libhdf5's error stacks into one line. What goes into the file is decided by writer.c and index.c.
 */
#include "hdf5/writer/out.h"

#include "base/checked.h"
#include "base/try.h"
#include "hdf5/schema.h"
#include "hdf5/writer/types_write.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Above this number libhdf5 stores the root's attributes elsewhere than in its header, where the digests are put. */
enum { MOST_ROOT_ATTRIBUTES = 16 };

/* The innermost message of HDF5's error stack is the cause; the others repeat it on the way up. */
static herr_t first_message(unsigned n, const H5E_error2_t *entry, void *context) {
    const char **message = context;
    if (n == 0 && entry->desc) {
        *message = entry->desc;
    }
    return 0;
}

/* The callers add the tensor's name, so the place in the file need not be said. */
static fc_code fail(fc_h5_out *out, fc_error *err, const char *what) {
    const fc_h5_channel *c = &out->channel;
    if (c->errnum != 0 && c->offset == 0) {
        return fc_fail_errno(err, c->errnum, "%s: %s", out->path, c->doing);
    }
    if (c->errnum != 0) {
        return fc_fail_errno(err, c->errnum, "%s: %s at offset %llu", out->path, c->doing,
                             (unsigned long long)c->offset);
    }
    const char *message = "no reason given";
    H5Ewalk2(H5E_DEFAULT, H5E_WALK_UPWARD, first_message, &message);
    fc_code code = strstr(message, "memory allocation failed") ? FC_ENOMEM : FC_EIO;
    return fc_fail(err, code, "%s: %s: libhdf5: %s", out->path, what, message);
}

static fc_code make_shared_ids(fc_h5_out *out, fc_error *err) {
    out->scalar = H5Screate(H5S_SCALAR);
    out->text_type = H5Tcopy(H5T_C_S1);
    out->link_props = H5Pcreate(H5P_LINK_CREATE);
    out->group_props = H5Pcreate(H5P_GROUP_CREATE);
    out->stored_props = H5Pcreate(H5P_DATASET_CREATE);
    out->empty_props = H5Pcreate(H5P_DATASET_CREATE);
    if (H5Tset_size(out->text_type, H5T_VARIABLE) < 0 || H5Tset_cset(out->text_type, H5T_CSET_UTF8) < 0 ||
        H5Pset_char_encoding(out->link_props, H5T_CSET_UTF8) < 0 || H5Pset_obj_track_times(out->group_props, 0) < 0 ||
        H5Pset_link_creation_order(out->group_props, H5P_CRT_ORDER_TRACKED | H5P_CRT_ORDER_INDEXED) < 0 ||
        H5Pset_obj_track_times(out->stored_props, 0) < 0 || H5Pset_layout(out->stored_props, H5D_CONTIGUOUS) < 0 ||
        H5Pset_alloc_time(out->stored_props, H5D_ALLOC_TIME_EARLY) < 0 ||
        H5Pset_fill_time(out->stored_props, H5D_FILL_TIME_NEVER) < 0 ||
        H5Pset_obj_track_times(out->empty_props, 0) < 0 || out->scalar < 0) {
        return fail(out, err, "preparing");
    }
    return FC_OK;
}

/* Measured with 1.10.8 on files of 1 to 10,000 datasets: enough, and little too much. */
static uint64_t header_bytes(const fc_h5_estimate *e) {
    return 5120 + 256 * e->datasets + 80 * e->attributes + 90 * e->mappings + 2 * e->text + e->indexes +
           32 * e->segments;
}

static fc_code create_file(fc_h5_out *out, const fc_h5_estimate *estimate, fc_error *err) {
    hid_t access = H5Pcreate(H5P_FILE_ACCESS), create = H5Pcreate(H5P_FILE_CREATE);
    /* 3 KB a mapping of a virtual dataset, until the file is closed. But not where datasets are opened again for their
       chunks: after a failed write their headers would be nowhere, and libhdf5 cannot close what it cannot read. */
    const bool evict = !out->channel.shared;
    /* 1.8's format has checksums and scales to any number of links; virtual datasets bring 1.10's along as needed. */
    if (H5Pset_libver_bounds(access, H5F_LIBVER_V18, H5F_LIBVER_V110) >= 0 &&
        H5Pset_fclose_degree(access, H5F_CLOSE_SEMI) >= 0 && H5Pset_evict_on_close(access, evict) >= 0 &&
        fc_h5_driver_use(access, out->driver, header_bytes(estimate), &out->channel) >= 0 &&
        H5Pset_obj_track_times(create, 0) >= 0 && H5Pset_attr_phase_change(create, MOST_ROOT_ATTRIBUTES, 0) >= 0 &&
        H5Pset_link_creation_order(create, H5P_CRT_ORDER_TRACKED | H5P_CRT_ORDER_INDEXED) >= 0) {
        out->file = H5Fcreate(out->path, H5F_ACC_EXCL, create, access);
    }
    fc_code rc = out->file < 0 ? fail(out, err, "creating the file") : FC_OK;
    H5Pclose(access);
    H5Pclose(create);
    return rc;
}

fc_code fc_h5_out_open(fc_h5_out *out, const fc_h5_tree *tree, const char *path, const fc_h5_estimate *estimate,
                       fc_error *err) {
    memset(out, 0, sizeof *out);
    out->tree = tree;
    out->path = path;
    out->channel.shared = estimate->indexes > 0; /* the engine writes chunks while it is open */
    out->file = out->scalar = out->text_type = H5I_INVALID_HID;
    out->link_props = out->group_props = out->stored_props = out->empty_props = H5I_INVALID_HID;
    for (int i = 0; i < FC_DTYPE_COUNT; i++) {
        out->types[i] = H5I_INVALID_HID;
    }
    H5Eget_auto2(H5E_DEFAULT, &out->print_errors, &out->print_errors_context);
    H5Eset_auto2(H5E_DEFAULT, NULL, NULL);
    out->driver = fc_h5_driver_register();
    out->made = calloc(tree->count, 1);
    out->stack = calloc((size_t)tree->depth + 1, sizeof *out->stack);
    out->stack_nodes = calloc((size_t)tree->depth + 1, sizeof *out->stack_nodes);
    out->chain = calloc((size_t)tree->depth + 1, sizeof *out->chain);
    fc_code rc = FC_OK;
    if (!out->made || !out->stack || !out->stack_nodes || !out->chain) {
        rc = fc_no_memory(err, path);
        goto out;
    } else if (out->driver < 0) {
        rc = fail(out, err, "preparing");
        goto out;
    }
    FC_TRY_GOTO(make_shared_ids(out, err), rc, out);
    FC_TRY_GOTO(create_file(out, estimate, err), rc, out);
    if (tree->nodes[0].kind) {
        FC_TRY_GOTO(fc_h5_out_text(out, out->file, fc_h5_attribute_get(FC_H5_A_KIND)->name,
                                   fc_h5_group_kind_text(tree->nodes[0].kind), err),
                    rc, out);
    }
out:
    return rc == FC_OK ? rc : fc_h5_out_close(out, rc, err);
}

static void close_groups(fc_h5_out *out, uint32_t keep) {
    while (out->depth > keep) {
        H5Gclose(out->stack[--out->depth]);
    }
}

fc_code fc_h5_out_close(fc_h5_out *out, fc_code rc, fc_error *err) {
    close_groups(out, 0);
    for (int i = 0; i < FC_DTYPE_COUNT; i++) {
        if (out->types[i] >= 0) {
            H5Tclose(out->types[i]);
        }
    }
    const hid_t lists[] = {out->link_props, out->group_props, out->stored_props, out->empty_props};
    for (size_t i = 0; i < sizeof lists / sizeof *lists; i++) {
        if (lists[i] >= 0) {
            H5Pclose(lists[i]);
        }
    }
    if (out->text_type >= 0) {
        H5Tclose(out->text_type);
    }
    if (out->scalar >= 0) {
        H5Sclose(out->scalar);
    }
    bool closed = out->file < 0 || H5Fclose(out->file) >= 0;
    if (rc == FC_OK && (!closed || out->channel.errnum != 0)) {
        rc = fail(out, err, "closing the file");
    }
    if (out->driver >= 0) {
        H5FDunregister(out->driver);
    }
    H5Eset_auto2(H5E_DEFAULT, out->print_errors, out->print_errors_context);
    free(out->made);
    free(out->stack);
    free(out->stack_nodes);
    free(out->chain);
    if (rc != FC_OK) {
        fc_h5_out_release(out);
    }
    return rc;
}

void fc_h5_out_release(fc_h5_out *out) {
    free(out->channel.blocks.items);
    out->channel.blocks = (fc_h5_blocks){NULL, 0, 0};
}

fc_code fc_h5_out_finish_file(fc_h5_out *out, const fc_h5_patch *patches, size_t count, fc_error *err) {
    fc_code rc = fc_h5_headers_finish(out->path, &out->channel.blocks, patches, count, err);
    fc_h5_out_release(out);
    return rc;
}

fc_code fc_h5_out_address(fc_h5_out *out, hid_t object, uint64_t *address, fc_error *err) {
    H5O_info_t info;
    if (H5Oget_info2(object, &info, H5O_INFO_BASIC) < 0) {
        return fail(out, err, "asking for the place of a header");
    }
    *address = info.addr;
    return FC_OK;
}

/* Opens the group `node` below the last open one, making it when this file has not seen it yet. */
static fc_code push_group(fc_h5_out *out, uint32_t node, fc_error *err) {
    const fc_h5_node *n = &out->tree->nodes[node];
    hid_t parent = out->depth ? out->stack[out->depth - 1] : out->file;
    hid_t id = out->made[node] ? H5Gopen2(parent, n->link, H5P_DEFAULT)
                               : H5Gcreate2(parent, n->link, out->link_props, out->group_props, H5P_DEFAULT);
    if (id < 0) {
        return fail(out, err, "creating the group");
    }
    out->stack[out->depth] = id;
    out->stack_nodes[out->depth++] = node;
    fc_code rc = FC_OK;
    if (!out->made[node] && n->kind) {
        rc = fc_h5_out_text(out, id, fc_h5_attribute_get(FC_H5_A_KIND)->name, fc_h5_group_kind_text(n->kind), err);
    }
    out->made[node] = 1;
    return rc;
}

/* The open group that `node` is in. Only its ancestors stay open, so the number of open groups is the depth. */
static fc_code enter_parent(fc_h5_out *out, uint32_t node, hid_t *parent, fc_error *err) {
    const fc_h5_node *nodes = out->tree->nodes;
    uint32_t wanted = nodes[node].depth - 1, common = 0;
    for (uint32_t at = nodes[node].parent, d = wanted; d > 0; at = nodes[at].parent) {
        out->chain[--d] = at;
    }
    while (common < wanted && common < out->depth && out->stack_nodes[common] == out->chain[common]) {
        common++;
    }
    close_groups(out, common);
    for (uint32_t d = common; d < wanted; d++) {
        FC_TRY(push_group(out, out->chain[d], err));
    }
    *parent = wanted ? out->stack[wanted - 1] : out->file;
    return FC_OK;
}

static hid_t type_of(fc_h5_out *out, fc_dtype dtype) {
    if (out->types[dtype] < 0) {
        out->types[dtype] = fc_h5_type_new(dtype);
    }
    return out->types[dtype];
}

static hid_t space_of(int ndim, const int64_t *shape) {
    hsize_t dims[FC_MAX_DIMS] = {0};
    for (int i = 0; i < ndim; i++) {
        dims[i] = (hsize_t)shape[i];
    }
    return ndim ? H5Screate_simple(ndim, dims, NULL) : H5Screate(H5S_SCALAR);
}

static fc_code make_dataset(fc_h5_out *out, uint32_t node, fc_dtype dtype, int ndim, const int64_t *shape, hid_t props,
                            hid_t *id, fc_error *err) {
    hid_t parent, type = type_of(out, dtype);
    *id = H5I_INVALID_HID;
    FC_TRY(enter_parent(out, node, &parent, err));
    hid_t space = space_of(ndim, shape);
    if (space >= 0 && type >= 0) {
        out->channel.reserving = props == out->stored_props;
        *id = H5Dcreate2(parent, out->tree->nodes[node].link, type, space, out->link_props, props, H5P_DEFAULT);
        out->channel.reserving = false;
    }
    bool made = *id >= 0 && out->channel.errnum == 0;
    fc_code rc = made ? FC_OK : fail(out, err, "creating the dataset");
    if (space >= 0) {
        H5Sclose(space);
    }
    if (!made && *id >= 0) {
        H5Dclose(*id);
        *id = H5I_INVALID_HID;
    }
    return rc;
}

fc_code fc_h5_out_stored(fc_h5_out *out, uint32_t node, fc_dtype dtype, int ndim, const int64_t *shape, hid_t *id,
                         uint64_t *offset, fc_error *err) {
    bool empty = false;
    for (int i = 0; i < ndim; i++) {
        empty |= shape[i] == 0;
    }
    *offset = 0;
    FC_TRY(make_dataset(out, node, dtype, ndim, shape, empty ? out->empty_props : out->stored_props, id, err));
    if (empty) {
        return FC_OK;
    }
    *offset = H5Dget_offset(*id);
    if (*offset == HADDR_UNDEF) {
        fc_code rc = fail(out, err, "reserving space");
        H5Dclose(*id);
        *id = H5I_INVALID_HID;
        return rc;
    }
    return FC_OK;
}

fc_code fc_h5_out_chunked(fc_h5_out *out, uint32_t node, fc_dtype dtype, int ndim, const int64_t *shape,
                          const int64_t *chunk, int level, hid_t *id, fc_error *err) {
    hsize_t sizes[FC_MAX_DIMS];
    for (int i = 0; i < ndim; i++) {
        sizes[i] = (hsize_t)chunk[i];
    }
    *id = H5I_INVALID_HID;
    hid_t props = H5Pcreate(H5P_DATASET_CREATE);
    fc_code rc = FC_OK;
    if (H5Pset_obj_track_times(props, 0) < 0 || H5Pset_fill_time(props, H5D_FILL_TIME_NEVER) < 0 ||
        H5Pset_chunk(props, ndim, sizes) < 0 ||
        (fc_h5_filters(fc_dtype_size(dtype)) > 1 && H5Pset_shuffle(props) < 0) ||
        H5Pset_deflate(props, (unsigned)level) < 0) {
        rc = fail(out, err, "preparing a compressed dataset");
        goto out;
    }
    rc = make_dataset(out, node, dtype, ndim, shape, props, id, err);
out:
    if (props >= 0) {
        H5Pclose(props);
    }
    return rc;
}

fc_code fc_h5_out_reopen(fc_h5_out *out, uint32_t node, hid_t *id, fc_error *err) {
    hid_t parent;
    *id = H5I_INVALID_HID;
    FC_TRY(enter_parent(out, node, &parent, err));
    *id = H5Dopen2(parent, out->tree->nodes[node].link, H5P_DEFAULT);
    return *id < 0 ? fail(out, err, "opening the dataset") : FC_OK;
}

fc_code fc_h5_out_place(fc_h5_out *out, hid_t id, int ndim, const int64_t *start, uint32_t mask, uint64_t size,
                        uint64_t *offset, fc_error *err) {
    static const char later = 0; /* the driver writes nothing, libhdf5 only asks that there be a buffer */
    hsize_t at[FC_MAX_DIMS];
    for (int i = 0; i < ndim; i++) {
        at[i] = (hsize_t)start[i];
    }
    out->channel.place = 0;
    out->channel.placing = true;
    herr_t done = H5Dwrite_chunk(id, H5P_DEFAULT, mask, at, (size_t)size, &later);
    out->channel.placing = false;
    *offset = out->channel.place;
    if (done < 0 || out->channel.errnum != 0 || *offset == 0) {
        return fail(out, err, "adding a chunk");
    }
    return FC_OK;
}

fc_code fc_h5_out_external(fc_h5_out *out, uint32_t node, fc_dtype dtype, int ndim, const int64_t *shape,
                           const fc_h5_segment *segments, size_t count, hid_t *id, fc_error *err) {
    hid_t props = H5Pcreate(H5P_DATASET_CREATE);
    bool ok = H5Pset_obj_track_times(props, 0) >= 0 && H5Pset_fill_time(props, H5D_FILL_TIME_NEVER) >= 0;
    *id = H5I_INVALID_HID;
    for (size_t i = 0; i < count && ok; i++) {
        ok = H5Pset_external(props, segments[i].file, (off_t)segments[i].offset, segments[i].length) >= 0;
    }
    fc_code rc = ok ? make_dataset(out, node, dtype, ndim, shape, props, id, err)
                    : fail(out, err, "preparing an external dataset");
    if (props >= 0) {
        H5Pclose(props);
    }
    return rc;
}

fc_code fc_h5_out_mappings(fc_h5_out *out, hid_t *list, fc_error *err) {
    *list = H5Pcreate(H5P_DATASET_CREATE);
    if (*list < 0 || H5Pset_obj_track_times(*list, 0) < 0) {
        return fail(out, err, "preparing a virtual dataset");
    }
    return FC_OK;
}

/* In the source of a virtual dataset "%b" counts blocks and "%%" is a percent sign. */
static char *escape_percent(const char *path) {
    size_t len = strlen(path), size;
    char *escaped = fc_mul_size(len, 2, &size) && fc_add_size(size, 1, &size) ? malloc(size) : NULL;
    char *at = escaped;
    for (; escaped && *path; path++) {
        *at++ = *path;
        if (*path == '%') {
            *at++ = '%';
        }
    }
    if (escaped) {
        *at = '\0';
    }
    return escaped;
}

/* The elements of the source of a mapping. */
static hid_t source_space(int ndim, const fc_h5_mapping *mapping) {
    const fc_h5_run *run = mapping->run;
    if (!run) {
        return space_of(ndim, mapping->sizes);
    }
    hsize_t start = (hsize_t)run->start, stride = (hsize_t)run->stride, count = (hsize_t)run->count,
            block = (hsize_t)run->block;
    hid_t space = space_of(1, &run->extent);
    if (space >= 0 && H5Sselect_hyperslab(space, H5S_SELECT_SET, &start, &stride, &count, &block) < 0) {
        H5Sclose(space);
        return H5I_INVALID_HID;
    }
    return space;
}

fc_code fc_h5_out_map(fc_h5_out *out, hid_t list, int ndim, const int64_t *shape, const fc_h5_mapping *mapping,
                      const char *source, fc_error *err) {
    hsize_t start[FC_MAX_DIMS], count[FC_MAX_DIMS];
    for (int i = 0; i < ndim; i++) {
        start[i] = (hsize_t)mapping->offsets[i];
        count[i] = (hsize_t)mapping->sizes[i];
    }
    char *escaped = escape_percent(source);
    if (!escaped) {
        return fc_no_memory(err, out->path);
    }
    hid_t whole = space_of(ndim, shape), piece = source_space(ndim, mapping);
    fc_code rc = FC_OK;
    if (whole < 0 || piece < 0 || (ndim && H5Sselect_hyperslab(whole, H5S_SELECT_SET, start, NULL, count, NULL) < 0) ||
        H5Pset_virtual(list, whole, mapping->file, escaped, piece) < 0) {
        rc = fail(out, err, "mapping a virtual dataset");
    }
    if (whole >= 0) {
        H5Sclose(whole);
    }
    if (piece >= 0) {
        H5Sclose(piece);
    }
    free(escaped);
    return rc;
}

fc_code fc_h5_out_virtual(fc_h5_out *out, uint32_t node, fc_dtype dtype, int ndim, const int64_t *shape, hid_t list,
                          hid_t *id, fc_error *err) {
    unsigned char absent[FC_H5_ELEMENT_MAX];
    hid_t type = type_of(out, dtype);
    *id = H5I_INVALID_HID;
    fc_h5_absent_value(dtype, absent);
    if (type < 0 || H5Pset_fill_value(list, type, absent) < 0) {
        return fail(out, err, "preparing a virtual dataset");
    }
    return make_dataset(out, node, dtype, ndim, shape, list, id, err);
}

/* Takes over `space`. */
static fc_code write_attribute(fc_h5_out *out, hid_t object, const char *name, hid_t file_type, hid_t memory_type,
                               hid_t space, const void *values, fc_error *err) {
    hid_t id = space < 0 ? space : H5Acreate2(object, name, file_type, space, H5P_DEFAULT, H5P_DEFAULT);
    fc_code rc = FC_OK;
    if (id < 0 || (values && H5Awrite(id, memory_type, values) < 0) || out->channel.errnum != 0) {
        char what[64];
        snprintf(what, sizeof what, "writing the attribute %s", name);
        rc = fail(out, err, what);
    }
    if (id >= 0) {
        H5Aclose(id);
    }
    if (space >= 0) {
        H5Sclose(space);
    }
    return rc;
}

fc_code fc_h5_out_text(fc_h5_out *out, hid_t object, const char *name, const char *value, fc_error *err) {
    return write_attribute(out, object, name, out->text_type, out->text_type, H5Scopy(out->scalar), &value, err);
}

static hid_t list_space(size_t count) {
    hsize_t dim = count;
    return H5Screate_simple(1, &dim, NULL);
}

fc_code fc_h5_out_texts(fc_h5_out *out, hid_t object, const char *name, size_t count, const char *const *values,
                        fc_error *err) {
    return write_attribute(out, object, name, out->text_type, out->text_type, list_space(count), count ? values : NULL,
                           err);
}

fc_code fc_h5_out_int(fc_h5_out *out, hid_t object, const char *name, int64_t value, fc_error *err) {
    return write_attribute(out, object, name, H5T_STD_I64LE, H5T_NATIVE_INT64, H5Scopy(out->scalar), &value, err);
}

fc_code fc_h5_out_crc(fc_h5_out *out, hid_t object, const char *name, uint64_t value, fc_error *err) {
    return write_attribute(out, object, name, H5T_STD_U64LE, H5T_NATIVE_UINT64, H5Scopy(out->scalar), &value, err);
}

fc_code fc_h5_out_ints(fc_h5_out *out, hid_t object, const char *name, size_t count, const int64_t *values,
                       fc_error *err) {
    return write_attribute(out, object, name, H5T_STD_I64LE, H5T_NATIVE_INT64, list_space(count), count ? values : NULL,
                           err);
}
