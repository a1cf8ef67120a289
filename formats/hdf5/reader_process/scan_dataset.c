/*
 * In the reader process: describes one dataset as a DATASET record, with its type, its shape and the location of its
 * bytes. scan_chunks.c lists its chunks.
 */
#include "base/checked.h"
#include "hdf5/reader_process/child.h"
#include "hdf5/reader_process/scan.h"
#include "hdf5/reader_process/types_read.h"
#include "hdf5/reader_process/values.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_TEXT_OBJECT = 16 << 20, MAX_FILL = 64 };

#define SAVE_AGAIN                                                                                                     \
    "HDF5 2.0 compressed it, and libhdf5 cannot read that; save it again with libver=(\"earliest\", \"v110\")"

/* The dataset that is described, and buffers that the record borrows. */
typedef struct description {
    fc_h5_walk *walk;
    hid_t dataset, type, space;
    hid_t dcpl;      /* not set if `mapped` or `plain` */
    bool mapped;     /* whether it is a dataset with elements in index.h5 */
    bool plain;      /* whether it has elements, which are stored at `address` without chunks or filters */
    haddr_t address; /* HADDR_UNDEF: its bytes are not in one place of this file */
    fc_h5_dataset record;
    fc_h5_chunk_index index; /* its kind is not 0 if libhdf5 would misread the index of chunks */
    hsize_t dims[H5S_MAX_RANK], chunk[H5S_MAX_RANK + 1];
    int64_t shape[FC_MAX_DIMS], chunk64[FC_MAX_DIMS], global_shape[FC_MAX_DIMS], offsets[FC_MAX_DIMS];
    uint64_t total; /* bytes of all elements */
    unsigned char fill[MAX_FILL];
    unsigned char *inline_bytes;
    fc_text text;
    char *names[5];
} description;

/* `d` has the path, the place, the code and the message. */
static void put_unreadable(fc_h5_walk *walk, fc_h5_dataset *d) {
    d->kind = FC_H5_UNREADABLE;
    d->owner = d->nglobal_shape = d->noffsets = -1;
    fc_h5_put_dataset(walk->out, d);
}

void fc_h5_scan_unreadable(fc_h5_walk *walk, const char *path, const unsigned char *lists, size_t nlists, fc_code code,
                           const char *fmt, ...) {
    char message[700];
    va_list args;
    va_start(args, fmt);
    vsnprintf(message, sizeof message, fmt, args);
    va_end(args);
    fc_make_utf8(message);
    fc_h5_dataset d = {
        .path = path, .lists = {lists, nlists}, .where = FC_H5_NOWHERE, .code = code, .message = message};
    put_unreadable(walk, &d);
}

void fc_h5_scan_without_plugin(fc_h5_walk *walk, const char *path, const unsigned char *lists, size_t nlists,
                               const char *message) {
    fc_h5_dataset d = {
        .path = path, .lists = {lists, nlists}, .where = FC_H5_BY_LIBRARY, .code = FC_EUNSUPPORTED, .message = message};
    put_unreadable(walk, &d);
}

void fc_h5_scan_elsewhere(fc_h5_walk *walk, const char *path, const unsigned char *lists, size_t nlists,
                          const char *message) {
    fc_h5_dataset d = {
        .path = path, .lists = {lists, nlists}, .where = FC_H5_ELSEWHERE, .code = FC_EUNSUPPORTED, .message = message};
    put_unreadable(walk, &d);
}

/* ---- the record ---- */

static void refuse_dataset(description *d, fc_code code, const char *text) {
    char why[256];
    const fc_code found = fc_h5_library_failure(d->walk, why, sizeof why);
    code = code == FC_ECORRUPT ? found : code;
    fc_h5_scan_unreadable(d->walk, d->record.path, d->record.lists.data, d->record.lists.size, code, text, why);
}

/* Like refuse, for a reason that does not come from libhdf5. */
static void refuse_plainly(description *d, fc_code code, const char *text) {
    fc_h5_scan_unreadable(d->walk, d->record.path, d->record.lists.data, d->record.lists.size, code, "%s", text);
}

static bool read_shape(description *d) {
    H5S_class_t cls = H5Sget_simple_extent_type(d->space);
    if (cls == H5S_NULL) { /* h5py.Empty: a type without elements */
        d->record.ndim = 1;
        d->shape[0] = 0;
        d->total = 0;
        return true;
    }
    d->record.ndim = cls == H5S_NO_CLASS ? -1 : H5Sget_simple_extent_ndims(d->space);
    if (d->record.ndim < 0 || H5Sget_simple_extent_dims(d->space, d->dims, NULL) < 0) {
        return false;
    }
    d->total = d->record.element;
    for (int k = 0; k < d->record.ndim; k++) {
        if (d->dims[k] > INT64_MAX) {
            return false;
        }
        d->shape[k] = (int64_t)d->dims[k];
    }
    for (int k = 0; k < d->record.ndim; k++) {
        if (d->dims[k] == 0) {
            d->total = 0;
        }
    }
    for (int k = 0; k < d->record.ndim; k++) {
        if (!fc_mul_u64(d->total, d->dims[k], &d->total)) {
            return false;
        }
    }
    return d->total <= INT64_MAX;
}

static char *text_if(const description *d, uint32_t present, fc_h5_attribute attribute) {
    return present >> attribute & 1 ? fc_h5_attribute_text(d->dataset, fc_h5_attribute_get(attribute)->name) : NULL;
}

static int64_t i64s_if(const description *d, uint32_t present, fc_h5_attribute attribute, int64_t *values, size_t max) {
    return present >> attribute & 1 ? fc_h5_read_i64s(d->dataset, fc_h5_attribute_get(attribute)->name, values, max)
                                    : -1;
}

static void read_our_attributes(description *d, uint32_t present) {
    int64_t owner;
    d->names[0] = text_if(d, present, FC_H5_A_DTYPE);
    if (!d->walk->ours) {
        return; /* in foreign files only the attribute dtype has a meaning */
    }
    d->record.dtype_name = d->names[0];
    d->record.placements = d->names[1] = text_if(d, present, FC_H5_A_PLACEMENTS);
    d->record.encoding = d->names[2] = text_if(d, present, FC_H5_A_ENCODING);
    d->record.json = d->names[3] = text_if(d, present, FC_H5_A_JSON);
    d->record.fqn = d->names[4] = text_if(d, present, FC_H5_A_FQN);
    d->record.owner = i64s_if(d, present, FC_H5_A_OWNER, &owner, 1) == 1 ? owner : -1;
    d->record.nglobal_shape = i64s_if(d, present, FC_H5_A_GLOBAL_SHAPE, d->global_shape, FC_MAX_DIMS);
    d->record.noffsets = i64s_if(d, present, FC_H5_A_OFFSETS, d->offsets, FC_MAX_DIMS);
    d->record.has_crc64 = present >> FC_H5_A_CRC64 & 1 &&
                          fc_h5_read_u64(d->dataset, fc_h5_attribute_get(FC_H5_A_CRC64)->name, &d->record.crc64);
    d->record.global_shape = d->global_shape;
    d->record.offsets = d->offsets;
}

static void read_fill(description *d) {
    H5D_fill_value_t defined = H5D_FILL_VALUE_UNDEFINED;
    H5Pfill_value_defined(d->dcpl, &defined);
    if (d->record.element <= MAX_FILL && defined == H5D_FILL_VALUE_USER_DEFINED) {
        H5Pget_fill_value(d->dcpl, d->type, d->fill);
    }
    d->record.bytes = (fc_h5_bytes){d->fill, d->record.element};
}

/* Reads all bytes through libhdf5 in the type of the file, so nothing is converted. */
static bool read_inline(description *d) {
    d->inline_bytes = fc_h5_child_calloc((size_t)d->total + 1, 1);
    if (H5Dread(d->dataset, d->type, H5S_ALL, H5S_ALL, H5P_DEFAULT, d->inline_bytes) < 0) {
        return false;
    }
    d->record.where = FC_H5_IN_RECORD;
    d->record.bytes = (fc_h5_bytes){d->inline_bytes, (size_t)d->total};
    return true;
}

/* Strings become JSON text, which shows their shape. Variable-length strings have no fixed bytes. */
static void describe_strings(description *d) {
    if (!fc_text_dataset(&d->text, d->dataset) || d->text.size > MAX_TEXT_OBJECT) {
        refuse_dataset(d, FC_EUNSUPPORTED, "its strings cannot be read, or are more than 16 MiB (%s)");
        return;
    }
    fc_h5_dataset *r = &d->record;
    r->kind = FC_H5_OBJECT;
    r->encoding = "hdf5.string";
    r->where = FC_H5_IN_RECORD;
    r->bytes = (fc_h5_bytes){(const unsigned char *)d->text.data, d->text.size};
    r->ndim = 1;
    d->shape[0] = (int64_t)d->text.size;
    r->dtype = FC_OPAQUE;
    r->element = 1;
    fc_h5_put_dataset(d->walk->out, r);
}

/* Appends the datatype as encoded by H5Tencode, so that the bytes can be interpreted outside this file. */
static void append_encoded_type(description *d) {
    size_t size = 0;
    unsigned char *encoded = H5Tencode(d->type, NULL, &size) >= 0 ? fc_h5_child_calloc(size + 1, 1) : NULL;
    if (encoded && H5Tencode(d->type, encoded, &size) >= 0) {
        fc_text_raw(&d->text, ", \"H5Tencode\": ");
        fc_text_base64(&d->text, encoded, size);
    }
    free(encoded);
}

/* Turns the record into an object. Its bytes have one dimension; its `json` shows the shape of a foreign dataset. */
static void become_object(description *d) {
    fc_h5_dataset *r = &d->record;
    char type[64], number[32];
    if (!r->encoding) {
        fc_h5_type_text(d->type, type, sizeof type);
        fc_text_raw(&d->text, "{\"$hdf5\": {\"type\": \"");
        fc_text_raw(&d->text, type);
        fc_text_raw(&d->text, "\", \"shape\": [");
        for (int k = 0; k < r->ndim; k++) {
            snprintf(number, sizeof number, "%s%lld", k ? ", " : "", (long long)d->shape[k]);
            fc_text_raw(&d->text, number);
        }
        fc_text_raw(&d->text, "]");
        append_encoded_type(d);
        fc_text_raw(&d->text, "}}");
        fc_text_nul(&d->text);
        if (d->text.no_memory) {
            fc_h5_child_no_memory();
        }
        r->encoding = "hdf5.bytes";
        r->json = d->text.data;
    }
    r->kind = FC_H5_OBJECT;
    r->ndim = 1;
    r->element = 1;
    d->shape[0] = (int64_t)d->total;
}

/* Whether this is one of our objects, but without its encoding. */
static bool lost_encoding(const description *d) {
    const char *dtype = d->record.dtype_name;
    return d->walk->ours && d->record.dtype == FC_OPAQUE && !d->record.encoding && dtype &&
           strcmp(dtype, fc_dtype_get(FC_OPAQUE)->torch_name) == 0;
}

static H5D_layout_t layout_of(const description *d) {
    return d->mapped ? H5D_VIRTUAL : d->plain ? H5D_CONTIGUOUS : H5Pget_layout(d->dcpl);
}

/* Like fc_h5_indirect. */
static int indirection_of(const description *d) {
    return d->mapped ? 1 : d->plain ? 0 : fc_h5_indirect(d->dcpl);
}

/* Locates the bytes. @return false if a record was already sent, or if the dataset must be refused with `text`. */
static bool locate_data(description *d, bool in_other_file, const char **text) {
    fc_h5_dataset *r = &d->record;
    bool library = false, object = r->dtype == FC_OPAQUE;
    const H5D_layout_t layout = layout_of(d);
    for (int k = 0; k < r->ndim; k++) {
        d->chunk64[k] = 1;
    }
    r->where = FC_H5_NOWHERE;
    if (d->total == 0) {
        return true;
    }
    if (layout == H5D_VIRTUAL && d->walk->copies) {
        r->where = FC_H5_ELSEWHERE;
        return true;
    }
    if (layout == H5D_CHUNKED) {
        if (H5Pget_chunk(d->dcpl, H5S_MAX_RANK, d->chunk) != r->ndim) {
            *text = "its chunk shape is damaged (%s)";
            return false;
        }
        for (int k = 0; k < r->ndim; k++) {
            d->chunk64[k] = (int64_t)d->chunk[k];
        }
        if (!fc_h5_scan_filters(d->walk, d->dcpl, &d->record, &library)) {
            return false;
        }
    }
    const int indirect = indirection_of(d);
    const bool by_library = in_other_file || indirect != 0 || library || (object && layout == H5D_CHUNKED);
    if (by_library && d->walk->newer.is_newer && layout == H5D_CHUNKED) {
        refuse_plainly(d, FC_EUNSUPPORTED, SAVE_AGAIN);
        return false;
    }
    if (d->index.kind) {
        r->where = FC_H5_IN_CHUNKS;
        return true;
    }
    d->walk->capture->failed = false;
    const hsize_t stored = H5Dget_storage_size(d->dataset); /* also 0 if the index cannot be read */
    if (d->walk->capture->failed) {
        *text = "its chunk index cannot be read (%s)";
        return false;
    }
    if (layout != H5D_COMPACT && indirect == 0 && stored == 0 && !object) {
        return true; /* never written, so it has fill values */
    }
    if (layout == H5D_COMPACT) {
        *text = "its bytes cannot be read (%s)";
        return read_inline(d);
    }
    if (by_library) {
        r->where = FC_H5_BY_LIBRARY;
        return true;
    }
    if (layout == H5D_CHUNKED) {
        r->where = FC_H5_IN_CHUNKS;
        return true;
    }
    if (d->address == HADDR_UNDEF) {
        r->where = object ? FC_H5_BY_LIBRARY : FC_H5_NOWHERE;
        return true;
    }
    r->where = FC_H5_AT_OFFSET;
    r->offset = d->address;
    r->length = d->total;
    *text = "its storage is shorter than its shape (%s)";
    return stored == d->total;
}

/* Refuses a dataset whose bytes are in other files that are missing, or that must not be followed. */
static bool refuse_sources(description *d, int indirect) {
    char why[600];
    char directory[4096];
    const fc_h5_scan *scan = d->walk->scan;
    if (indirect == 0 || d->total == 0 || (indirect == 1 && d->walk->copies) ||
        fc_h5_sources_exist(d->walk->file, d->walk->file_path, d->dcpl, scan->follow_external, d->walk->capture->others,
                            directory, sizeof directory, why, sizeof why)) {
        return false;
    }
    if (scan->follow_external) {
        refuse_plainly(d, FC_ECORRUPT, why);
    } else {
        fc_h5_scan_elsewhere(d->walk, d->record.path, d->record.lists.data, d->record.lists.size, why);
    }
    return true;
}

/* Sends the record, followed by the chunks of a chunked dataset. */
static void send_record(description *d) {
    fc_h5_dataset *r = &d->record;
    bool has_unit = r->where == FC_H5_IN_CHUNKS || (r->where == FC_H5_BY_LIBRARY && r->kind == FC_H5_TENSOR);
    r->chunk = has_unit ? d->chunk64 : NULL;
    hsize_t stored = 0;
    fc_h5_chunked chunked = {
        d->walk, d->dataset, d->space, r->ndim, d->dims, d->chunk, d->index.kind ? &d->index : NULL};
    fc_h5_way way = r->where == FC_H5_IN_CHUNKS ? fc_h5_choose_way(&chunked, &stored) : FC_H5_NO_CHUNKS;
    if (way == FC_H5_TOO_SPARSE) {
        refuse_plainly(d, FC_EUNSUPPORTED, "it has too many scattered chunks to list");
        return;
    }
    if (way == FC_H5_DAMAGED) {
        refuse_dataset(d, FC_ECORRUPT, "its chunk index cannot be read (%s)");
        return;
    }
    fc_h5_put_dataset(d->walk->out, r);
    if (way != FC_H5_NO_CHUNKS && !fc_h5_send_chunks(&chunked, way, stored)) {
        /* Records were already sent, so the dataset can no longer be listed as unreadable. */
        char why[600];
        fc_h5_library_error(why, sizeof why);
        fc_h5_scan_failure(d->walk, FC_ECORRUPT,
                           "corrupt HDF5 file: the chunk index of dataset /%s cannot be read (%s)", r->path, why);
    }
}

static void describe_dataset(description *d, bool in_other_file) {
    fc_h5_dataset *r = &d->record;
    const char *text = NULL;
    fc_h5_type type = fc_h5_type_read(d->type, d->names[0], d->walk->ours);
    r->dtype = type.dtype;
    r->swap = type.swap;
    r->element = (uint32_t)type.size;
    if (type.size == 0 || type.size > UINT32_MAX || !read_shape(d)) {
        refuse_dataset(d, FC_ECORRUPT, "its shape or type is damaged (%s)");
        return;
    }
    const int indirect = indirection_of(d);
    if (refuse_sources(d, indirect)) {
        return;
    }
    if (type.cls == FC_H5_STRINGS && indirect == 2) {
        /* It was opened without the prefix for its files, so libhdf5 would silently read nothing. */
        refuse_plainly(d, FC_EUNSUPPORTED, "text in external files cannot be read");
        return;
    }
    if (type.cls == FC_H5_STRINGS && d->index.kind) {
        refuse_plainly(d, FC_EUNSUPPORTED, SAVE_AGAIN);
        return;
    }
    if (type.cls == FC_H5_STRINGS) {
        describe_strings(d);
        return;
    }
    if (type.cls == FC_H5_POINTERS) {
        char name[600];
        fc_h5_type_text(d->type, name, sizeof name);
        fc_h5_scan_unreadable(d->walk, r->path, r->lists.data, r->lists.size, FC_EUNSUPPORTED,
                              "%s: references and variable-length data have no meaning outside this file", name);
        return;
    }
    if (!locate_data(d, in_other_file, &text)) {
        if (text) {
            refuse_dataset(d, FC_ECORRUPT, text);
        }
        return;
    }
    if (lost_encoding(d)) {
        refuse_plainly(d, FC_ECORRUPT, "its attribute encoding is missing; copy the file again, or convert again");
        return;
    }
    if (r->dtype == FC_OPAQUE) {
        become_object(d);
    } else if (r->where == FC_H5_NOWHERE || r->where == FC_H5_IN_CHUNKS) {
        read_fill(d);
    }
    send_record(d);
}

void fc_h5_scan_dataset(fc_h5_walk *walk, hid_t dataset, const char *path, const unsigned char *lists, size_t nlists,
                        bool in_other_file, uint32_t present) {
    description *d = fc_h5_child_calloc(1, sizeof *d);
    d->walk = walk;
    d->dataset = dataset;
    d->record.path = path;
    d->record.lists = (fc_h5_bytes){lists, nlists};
    d->record.shape = d->shape;
    d->record.owner = d->record.nglobal_shape = d->record.noffsets = -1;
    d->type = H5Dget_type(dataset);
    d->space = H5Dget_space(dataset);
    /*
     * In index.h5, a dataset without an address is virtual. Its list of mappings is not read: copying it would take
     * half of the time of opening, and the shard files have the same information.
     */
    const bool has_elements = H5Sget_simple_extent_npoints(d->space) > 0;
    d->address = H5Dget_offset(dataset);
    d->mapped = walk->index && has_elements && d->address == HADDR_UNDEF;
    /* Copying the properties takes a tenth of the time of opening, and a dataset with an address has none to ask for.
     */
    d->plain = has_elements && d->address != HADDR_UNDEF && H5Dget_storage_size(dataset) > 0;
    const bool needs_properties = !d->mapped && !d->plain;
    d->dcpl = needs_properties ? H5Dget_create_plist(dataset) : H5I_INVALID_HID;
    /* Without filters, the index is one that libhdf5 can read. */
    d->index = d->dcpl >= 0 && H5Pget_nfilters(d->dcpl) > 0 ? walk->newer.index : (fc_h5_chunk_index){0};
    if (d->type < 0 || d->space < 0 || (d->dcpl < 0 && needs_properties)) {
        refuse_dataset(d, FC_ECORRUPT, "its header is corrupt (%s)");
    } else {
        read_our_attributes(d, present);
        describe_dataset(d, in_other_file);
    }
    if (d->dcpl >= 0) {
        H5Pclose(d->dcpl);
    }
    H5Sclose(d->space);
    H5Tclose(d->type);
    for (size_t i = 0; i < sizeof d->names / sizeof *d->names; i++) {
        free(d->names[i]);
    }
    fc_text_free(&d->text);
    free(d->inline_bytes);
    free(d);
}
