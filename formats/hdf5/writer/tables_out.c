/*
 * Writes the tables from what was recorded about the files with data. For other programs, each table is also a
 * dataset, in a group that only the root attribute `tables` refers to, so that a walk through the file shows the model
 * alone.
 */
#include "hdf5/writer/writer.h"

#include "fsdpckpt/try.h"
#include "hdf5/writer/tables_out.h"

#include <stddef.h>
#include <stdlib.h>
#include <string.h>

/* ---- rows ---- */

/* The tables under construction. */
typedef struct tables {
    const fc_h5_writer *w;
    const char *path; /* of the file, for messages */
    fc_h5_buffer rows[FC_H5_T_COUNT];
    char (*placements)[FC_H5_PLACEMENTS]; /* the lists that already have a row */
    size_t nplacements, placements_capacity;
} tables;

static const size_t row_sizes[FC_H5_T_COUNT] = {
    sizeof(fc_h5_file_row), sizeof(fc_h5_mesh_row),       sizeof(fc_h5_tensor_row),
    sizeof(int64_t),        sizeof(fc_h5_placements_row), sizeof(fc_h5_box_row),
    sizeof(fc_h5_grid_row), sizeof(fc_h5_chunk_row),      1};

static size_t count_rows(const tables *t, fc_h5_table table) {
    return t->rows[table].size / row_sizes[table];
}

static uint32_t add_text(tables *t, const char *text) {
    const size_t length = strlen(text);
    fc_h5_add_bytes(&t->rows[FC_H5_T_TEXT], text, length);
    t->rows[FC_H5_T_TEXT].failed |= length > UINT32_MAX;
    return (uint32_t)length;
}

static void add_mesh(tables *t) {
    const fc_mesh *mesh = t->w->target->mesh;
    for (int i = 0; i < mesh->ndim; i++) {
        fc_h5_mesh_row row = {.size = mesh->sizes[i]};
        memcpy(row.name, mesh->names[i], strlen(mesh->names[i]));
        fc_h5_add_bytes(&t->rows[FC_H5_T_MESH], &row, sizeof row);
    }
}

/* Finds or adds the row of a tensor's placements. Equal lists share a row. */
static fc_code placements_row(tables *t, const fc_target_tensor *tensor, uint32_t *row, fc_error *err) {
    char text[FC_H5_PLACEMENTS] = "";
    FC_TRY(fc_h5_placements_text(t->w, tensor, t->path, text, err));
    for (*row = 0; *row < t->nplacements; ++*row) {
        if (strcmp(t->placements[*row], text) == 0) {
            return FC_OK;
        }
    }
    FC_NEED(fc_grow(&t->placements, &t->placements_capacity, t->nplacements + 1, sizeof *t->placements), err, t->path);
    fc_h5_placements_row r = {t->rows[FC_H5_T_TEXT].size, strlen(text)};
    memcpy(t->placements[t->nplacements++], text, sizeof text);
    add_text(t, text);
    fc_h5_add_bytes(&t->rows[FC_H5_T_PLACEMENTS], &r, sizeof r);
    return FC_OK;
}

/* Adds the kind of the group of each element of the path. @return the number of elements. */
static uint32_t add_kinds(tables *t, uint32_t node) {
    const fc_h5_node *nodes = t->w->tree.nodes;
    unsigned char *at = fc_h5_more(&t->rows[FC_H5_T_TEXT], nodes[node].depth);
    const uint32_t depth = nodes[node].depth;
    for (uint32_t n = node; at && n != 0; n = nodes[n].parent) {
        at[nodes[n].depth - 1] = nodes[nodes[n].parent].kind;
    }
    return depth;
}

static fc_code add_object_row(tables *t, const fc_target_tensor *tensor, fc_h5_tensor_row *row, fc_arena *scratch,
                              fc_error *err) {
    const char *json = NULL;
    FC_TRY(fc_checkpoint_object_json(t->w->target->source, tensor->source, scratch, &json, err));
    row->encoding = add_text(t, tensor->source->object->encoding);
    row->json = add_text(t, json);
    return FC_OK;
}

static fc_code add_tensor_row(tables *t, uint32_t index, const uint64_t *first_box, fc_arena *scratch, fc_error *err) {
    const fc_target_tensor *tensor = &t->w->target->tensors[index];
    const fc_tensor *source = tensor->source;
    const uint32_t node = t->w->tree.leaves[index];
    const char *path = fc_h5_tree_path(&t->w->tree, node, scratch);
    fc_h5_tensor_row row = {.text = 0,
                            .dims = count_rows(t, FC_H5_T_DIMS),
                            .ndim = (uint32_t)source->ndim,
                            .box = first_box[0],
                            .boxes = first_box[1] - first_box[0],
                            .placements = FC_H5_NO_PLACEMENTS};
    FC_NEED(path, err, t->path);
    if (!source->object && t->w->target->mesh->ndim > 0) { /* adds its text before that of the row */
        FC_TRY(placements_row(t, tensor, &row.placements, err));
    }
    const char *dtype = fc_dtype_get(tensor->dtype)->torch_name;
    memcpy(row.dtype, dtype, strlen(dtype));
    row.text = t->rows[FC_H5_T_TEXT].size;
    row.path = add_text(t, path + 1);
    row.kinds = add_kinds(t, node);
    row.fqn = fc_h5_needs_fqn(tensor) ? add_text(t, tensor->name) : 0;
    FC_TRY(source->object ? add_object_row(t, tensor, &row, scratch, err) : FC_OK);
    fc_h5_add_bytes(&t->rows[FC_H5_T_DIMS], source->shape, (size_t)source->ndim * sizeof(int64_t));
    fc_h5_add_bytes(&t->rows[FC_H5_T_TENSORS], &row, sizeof row);
    return FC_OK;
}

/* Adds empty rows of boxes. `first` receives the row of each tensor's first box, and the end. */
static fc_code add_boxes(tables *t, uint64_t *first, fc_error *err) {
    const fc_h5_writer *w = t->w;
    const fc_h5_written *written = &w->written;
    const size_t n = w->target->ntensors;
    uint64_t *counts = calloc(n + 1, sizeof *counts);
    FC_NEED(counts, err, t->path);
    for (size_t i = 0; i < written->nboxes; i++) {
        counts[written->boxes[i].tensor]++;
    }
    for (size_t i = 0; i < n; i++) {
        first[i + 1] = first[i] + counts[w->tree.order[i]];
    }
    free(counts);
    fc_h5_add_zeros(&t->rows[FC_H5_T_BOXES], written->nboxes * sizeof(fc_h5_box_row));
    return FC_OK;
}

static fc_code add_tensors(tables *t, fc_error *err) {
    const fc_h5_writer *w = t->w;
    uint64_t *first = calloc(w->target->ntensors + 1, sizeof *first);
    fc_arena *scratch = NULL;
    fc_code rc;
    FC_TRY_GOTO(first ? add_boxes(t, first, err) : fc_no_memory(err, t->path), rc, out);
    for (size_t i = 0; i < w->target->ntensors; i++) {
        fc_arena_free(scratch);
        scratch = fc_arena_new();
        FC_TRY_GOTO(scratch ? add_tensor_row(t, w->tree.order[i], first + i, scratch, err) : fc_no_memory(err, t->path),
                    rc, out);
    }
out:
    fc_arena_free(scratch);
    free(first);
    return rc;
}

static void add_grids(tables *t) {
    const fc_h5_written *written = &t->w->written;
    const uint64_t first = count_rows(t, FC_H5_T_DIMS);
    fc_h5_add_bytes(&t->rows[FC_H5_T_DIMS], written->grid_dims.data, written->grid_dims.size);
    for (size_t i = 0; i < written->ngrids; i++) {
        fc_h5_grid_row row = written->grids[i];
        row.dims += first;
        fc_h5_add_bytes(&t->rows[FC_H5_T_GRIDS], &row, sizeof row);
    }
    fc_h5_add_zeros(&t->rows[FC_H5_T_CHUNKS], written->nchunks * sizeof *written->chunks);
}

/* ---- datasets for other programs ---- */

typedef struct field {
    const char *name;
    size_t at;
    hid_t type;
    size_t count; /* 0: a scalar; otherwise elements of an array, or bytes of a text */
} field;

static hid_t text_of(size_t size) {
    hid_t type = H5Tcopy(H5T_C_S1);
    if (type >= 0 && (H5Tset_size(type, size) < 0 || H5Tset_strpad(type, H5T_STR_NULLPAD) < 0)) {
        H5Tclose(type);
        return H5I_INVALID_HID;
    }
    return type;
}

/* @return a compound type of `count` fields; H5T_C_S1 stands for a text of field.count bytes. */
static hid_t compound(size_t size, const field *fields, size_t count) {
    hid_t type = H5Tcreate(H5T_COMPOUND, size);
    for (size_t i = 0; i < count && type >= 0; i++) {
        const hsize_t dim = fields[i].count;
        hid_t member = fields[i].count == 0         ? H5Tcopy(fields[i].type)
                       : fields[i].type == H5T_C_S1 ? text_of(fields[i].count)
                                                    : H5Tarray_create2(fields[i].type, 1, &dim);
        const bool ok = member >= 0 && H5Tinsert(type, fields[i].name, fields[i].at, member) >= 0;
        if (member >= 0) {
            H5Tclose(member);
        }
        if (!ok) {
            H5Tclose(type);
            return H5I_INVALID_HID;
        }
    }
    return type;
}

#define COMPOUND(row, fields) compound(sizeof(row), fields, sizeof(fields) / sizeof *(fields))

static hid_t manifest_type(void) {
#define PLACE(name, table)                                                                                             \
    { name, offsetof(fc_h5_manifest_row, tables) + 16 * (table), H5T_STD_U64LE, 2 }
    const field fields[] = {{"magic", offsetof(fc_h5_manifest_row, magic), H5T_C_S1, 8},
                            {"version", offsetof(fc_h5_manifest_row, version), H5T_STD_U64LE, 0},
                            {"file_size", offsetof(fc_h5_manifest_row, file_size), H5T_STD_U64LE, 0},
                            {"bytes", offsetof(fc_h5_manifest_row, bytes), H5T_STD_U64LE, 0},
                            {"crc64", offsetof(fc_h5_manifest_row, crc64), H5T_STD_U64LE, 0},
                            {"objects", offsetof(fc_h5_manifest_row, objects), H5T_STD_U64LE, 2},
                            {"objects_crc64", offsetof(fc_h5_manifest_row, objects_crc64), H5T_STD_U64LE, 0},
                            {"producer", offsetof(fc_h5_manifest_row, producer), H5T_STD_U64LE, 2},
                            PLACE("files", FC_H5_T_FILES),
                            PLACE("mesh", FC_H5_T_MESH),
                            PLACE("tensors", FC_H5_T_TENSORS),
                            PLACE("dims", FC_H5_T_DIMS),
                            PLACE("placements", FC_H5_T_PLACEMENTS),
                            PLACE("boxes", FC_H5_T_BOXES),
                            PLACE("grids", FC_H5_T_GRIDS),
                            PLACE("chunks", FC_H5_T_CHUNKS),
                            PLACE("text", FC_H5_T_TEXT)};
#undef PLACE
    return COMPOUND(fc_h5_manifest_row, fields);
}

static hid_t tensor_type(void) {
    const field fields[] = {{"text", offsetof(fc_h5_tensor_row, text), H5T_STD_U64LE, 0},
                            {"path", offsetof(fc_h5_tensor_row, path), H5T_STD_U32LE, 0},
                            {"kinds", offsetof(fc_h5_tensor_row, kinds), H5T_STD_U32LE, 0},
                            {"fqn", offsetof(fc_h5_tensor_row, fqn), H5T_STD_U32LE, 0},
                            {"encoding", offsetof(fc_h5_tensor_row, encoding), H5T_STD_U32LE, 0},
                            {"json", offsetof(fc_h5_tensor_row, json), H5T_STD_U64LE, 0},
                            {"dtype", offsetof(fc_h5_tensor_row, dtype), H5T_C_S1, 16},
                            {"dims", offsetof(fc_h5_tensor_row, dims), H5T_STD_U64LE, 0},
                            {"ndim", offsetof(fc_h5_tensor_row, ndim), H5T_STD_U32LE, 0},
                            {"placements", offsetof(fc_h5_tensor_row, placements), H5T_STD_U32LE, 0},
                            {"box", offsetof(fc_h5_tensor_row, box), H5T_STD_U64LE, 0},
                            {"boxes", offsetof(fc_h5_tensor_row, boxes), H5T_STD_U64LE, 0},
                            {"crc64", offsetof(fc_h5_tensor_row, crc64), H5T_STD_U64LE, 0}};
    return COMPOUND(fc_h5_tensor_row, fields);
}

static hid_t row_type(fc_h5_table table) {
    const field file[] = {{"size", offsetof(fc_h5_file_row, size), H5T_STD_U64LE, 0},
                          {"header_crc64", offsetof(fc_h5_file_row, header_crc64), H5T_STD_U64LE, 0},
                          {"header_crc64_at", offsetof(fc_h5_file_row, header_crc64_at), H5T_STD_U64LE, 0}};
    const field mesh[] = {{"name", offsetof(fc_h5_mesh_row, name), H5T_C_S1, 16},
                          {"size", offsetof(fc_h5_mesh_row, size), H5T_STD_I64LE, 0}};
    const field placements[] = {{"text", offsetof(fc_h5_placements_row, text), H5T_STD_U64LE, 0},
                                {"size", offsetof(fc_h5_placements_row, size), H5T_STD_U64LE, 0}};
    const field box[] = {{"offset", offsetof(fc_h5_box_row, offset), H5T_STD_U64LE, 0},
                         {"length", offsetof(fc_h5_box_row, length), H5T_STD_U64LE, 0},
                         {"crc64", offsetof(fc_h5_box_row, crc64), H5T_STD_U64LE, 0},
                         {"rank", offsetof(fc_h5_box_row, rank), H5T_STD_U32LE, 0},
                         {"grid", offsetof(fc_h5_box_row, grid), H5T_STD_U32LE, 0}};
    const field grid[] = {{"dims", offsetof(fc_h5_grid_row, dims), H5T_STD_U64LE, 0},
                          {"ndim", offsetof(fc_h5_grid_row, ndim), H5T_STD_U32LE, 0},
                          {"filters", offsetof(fc_h5_grid_row, filters), H5T_STD_U8LE, 4}};
    const field chunk[] = {{"offset", offsetof(fc_h5_chunk_row, offset), H5T_STD_U64LE, 0},
                           {"length", offsetof(fc_h5_chunk_row, length), H5T_STD_U32LE, 0},
                           {"mask", offsetof(fc_h5_chunk_row, mask), H5T_STD_U32LE, 0}};
    switch (table) {
    case FC_H5_T_FILES:
        return COMPOUND(fc_h5_file_row, file);
    case FC_H5_T_MESH:
        return COMPOUND(fc_h5_mesh_row, mesh);
    case FC_H5_T_TENSORS:
        return tensor_type();
    case FC_H5_T_DIMS:
        return H5Tcopy(H5T_STD_I64LE);
    case FC_H5_T_PLACEMENTS:
        return COMPOUND(fc_h5_placements_row, placements);
    case FC_H5_T_BOXES:
        return COMPOUND(fc_h5_box_row, box);
    case FC_H5_T_GRIDS:
        return COMPOUND(fc_h5_grid_row, grid);
    case FC_H5_T_CHUNKS:
        return COMPOUND(fc_h5_chunk_row, chunk);
    case FC_H5_T_TEXT:
        return H5Tcopy(H5T_STD_U8LE);
    case FC_H5_T_COUNT:
        break;
    }
    return manifest_type();
}

static fc_code add_dataset(fc_h5_image *image, hid_t type, uint64_t address, uint64_t rows, uint64_t bytes,
                           uint64_t *header, fc_error *err) {
    const size_t start = fc_h5_object_begin(image);
    fc_code rc = fc_h5_image_list_shape(image, type, rows, err);
    fc_h5_image_among_headers(image, address, bytes);
    fc_h5_object_end(image, start);
    *header = image->objects_at + start;
    return rc;
}

/* Adds the datasets over the bytes at `at`, and their group. */
static fc_code add_datasets(const tables *t, fc_h5_image *image, size_t at, const fc_h5_manifest_row *manifest,
                            uint64_t *address, fc_error *err) {
    static const char *const names[FC_H5_T_COUNT + 1] = {"files", "mesh",  "tensors", "dims", "placements",
                                                         "boxes", "grids", "chunks",  "text", "manifest"};
    fc_h5_member members[FC_H5_T_COUNT + 1];
    const uint64_t start = image->objects_at + at;
    for (int i = 0; i < FC_H5_T_COUNT; i++) {
        members[i].link = names[i];
        FC_TRY(add_dataset(image, row_type((fc_h5_table)i), start + manifest->tables[i][0], manifest->tables[i][1],
                           t->rows[i].size, &members[i].address, err));
    }
    members[FC_H5_T_COUNT].link = names[FC_H5_T_COUNT];
    FC_TRY(add_dataset(image, manifest_type(), start, 1, sizeof *manifest, &members[FC_H5_T_COUNT].address, err));
    fc_h5_group group = {.members = members, .count = FC_H5_T_COUNT + 1};
    FC_TRY(fc_h5_image_group(image, &group, err));
    *address = group.address;
    return FC_OK;
}

fc_code fc_h5_tables_add(fc_h5_writer *w, fc_h5_image *image, uint64_t *group, fc_error *err) {
    tables t = {.w = w, .path = image->path};
    fc_h5_buffer *to = &image->objects;
    fc_h5_manifest_row manifest = {
        .magic = "", .version = FC_H5_TABLES_VERSION, .producer = {0, strlen(FC_H5_PRODUCER)}};
    memcpy(manifest.magic, FC_H5_TABLES_MAGIC, sizeof manifest.magic);
    add_text(&t, FC_H5_PRODUCER);
    fc_h5_add_bytes(&t.rows[FC_H5_T_FILES], w->written.files, w->written.nfiles * sizeof *w->written.files);
    add_mesh(&t);
    fc_code rc;
    FC_TRY_GOTO(add_tensors(&t, err), rc, out);
    add_grids(&t);
    fc_h5_pad(to, FC_H5_TABLES_ALIGN);
    const size_t at = image->tables_at = to->size;
    fc_h5_add_zeros(to, sizeof manifest);
    for (int i = 0; i < FC_H5_T_COUNT; i++) {
        fc_h5_add_zeros(to, (FC_H5_TABLES_ALIGN - (to->size - at) % FC_H5_TABLES_ALIGN) % FC_H5_TABLES_ALIGN);
        manifest.tables[i][0] = to->size - at;
        manifest.tables[i][1] = count_rows(&t, (fc_h5_table)i);
        fc_h5_add_bytes(to, t.rows[i].data, t.rows[i].size);
        if (t.rows[i].failed || to->failed) {
            rc = fc_no_memory(err, t.path);
            goto out;
        }
    }
    manifest.bytes = image->tables_size = to->size - at;
    memcpy(to->data + at, &manifest, sizeof manifest);
    rc = add_datasets(&t, image, at, &manifest, group, err);
out:
    for (int i = 0; i < FC_H5_T_COUNT; i++) {
        free(t.rows[i].data);
    }
    free(t.placements);
    return rc;
}

fc_code fc_h5_tables_fill(const fc_h5_writer *w, const uint64_t *digests, fc_h5_image *image, fc_error *err) {
    const fc_h5_written *written = &w->written;
    unsigned char *start = image->objects.data + image->tables_at;
    uint64_t *next = calloc(w->target->ntensors + 1, sizeof *next); /* per tensor: the row of its next box */
    fc_h5_manifest_row manifest;
    FC_NEED(next, err, image->path);
    memcpy(&manifest, start, sizeof manifest);
    for (size_t i = 0; i < w->target->ntensors; i++) {
        const uint32_t tensor = w->tree.order[i];
        unsigned char *at = start + manifest.tables[FC_H5_T_TENSORS][0] + i * sizeof(fc_h5_tensor_row);
        fc_h5_tensor_row row;
        memcpy(&row, at, sizeof row);
        row.crc64 = digests[tensor];
        next[tensor] = row.box;
        memcpy(at, &row, sizeof row);
    }
    for (size_t i = 0; i < written->nboxes; i++) {
        const fc_h5_written_box *b = &written->boxes[i];
        memcpy(start + manifest.tables[FC_H5_T_BOXES][0] + next[b->tensor]++ * sizeof b->row, &b->row, sizeof b->row);
    }
    if (written->nchunks > 0) {
        memcpy(start + manifest.tables[FC_H5_T_CHUNKS][0], written->chunks, written->nchunks * sizeof *written->chunks);
    }
    free(next);
    return FC_OK;
}
