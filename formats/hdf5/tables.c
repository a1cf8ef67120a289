/*
 * Opens a sharded checkpoint from the tables of index.h5, or a full file from its own, without libhdf5: with one read.
 * Every number is checked before it is used. The shard files are not opened; sharded.c compares their sizes, and
 * fc_h5_check_identity checks the identity of a file before its bytes are used.
 *
 * If there are no tables, or another program has changed the file, the files are walked instead, which is not an
 * error. Such a change is found by the size of the file and by the digest of the object headers. Damaged tables are an
 * error.
 */
#include "hdf5/tables_in.h"

#include "base/checked.h"
#include "base/crc.h"
#include "base/text.h"
#include "checkpoint/own_files.h"
#include "fsdpckpt/try.h"
#include "hdf5/header_file.h"
#include "hdf5/writer/tree.h"
#include "io/file.h"
#include "io/stand_in.h"
#include "sharding/recorded.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MAX_RANKS = 1 << 20 };

/* ---- finding the tables ---- */

/* Finds the schema in the attributes that the header of the root group has itself. */
static fc_code has_schema(const char *path, bool *has, fc_error *err) {
    fc_h5_header_file f = {.path = path, .fd = -1, .err = err};
    uint64_t schema;
    FC_TRY(fc_open_input(path, &f.fd, &f.size, err));
    *has = fc_h5_root_number(&f, FC_H5_A_SCHEMA, &schema);
    close(f.fd);
    return f.read;
}

static fc_code take_schema(void *context, size_t number, const fc_h5_file *file, fc_error *err) {
    (void)number;
    (void)err;
    *(bool *)context = file->root.schema != 0;
    return FC_OK;
}

fc_code fc_h5_is_ours(const char *path, bool *ours, fc_error *err) {
    fc_arena *arena = NULL;
    *ours = false;
    FC_TRY(has_schema(path, ours, err));
    if (*ours || !fc_h5_has_signature(path)) {
        return FC_OK;
    }
    /* Where another program has added many attributes, they are in a heap, which libhdf5 reads. */
    arena = fc_arena_new();
    bool found = false, read;
    fc_code rc = fc_own_if_read(
        arena ? fc_h5_scan_files(arena, &path, 1, 0, false, take_schema, &found, err) : fc_no_memory(err, path), &read);
    fc_arena_free(arena);
    *ours = read && found;
    return rc;
}

/* Adds the bytes of the file from `at` to `end` to `*crc`; those of `zero` and the checksum over it count as 0. */
static bool add_headers(fc_h5_header_file *f, uint64_t at, uint64_t end, const fc_h5_field *zero, uint64_t *crc) {
    const uint64_t from[] = {zero->value, zero->check}, to[] = {zero->value + 8, zero->check + 4};
    while (at < end) {
        const uint64_t size = end - at < FC_H5_VIEW ? end - at : FC_H5_VIEW;
        if (!fc_h5_header_bytes(f, at, size)) {
            return false;
        }
        for (size_t i = 0; i < 2; i++) {
            const uint64_t first = from[i] > at ? from[i] : at, last = to[i] < at + size ? to[i] : at + size;
            if (first < last) {
                memset(f->viewed + (first - at), 0, (size_t)(last - first));
            }
        }
        *crc = fc_crc64(*crc, f->viewed, (size_t)size);
        at += size;
    }
    return true;
}

/* @return false if another program has changed the object headers: an attribute, a name, a shape. */
static bool headers_unchanged(fc_h5_header_file *f, uint64_t at, const fc_h5_manifest_row *manifest) {
    const uint64_t start = manifest->objects[0], end = start + manifest->objects[1];
    fc_h5_field zero;
    uint64_t crc = 0;
    return manifest->file_size == f->size && fc_range_within(start, manifest->objects[1], f->size) && at >= start &&
           fc_range_within(at, manifest->bytes, end) && fc_h5_root_field(f, FC_H5_A_HEADER_CRC64, &zero) &&
           add_headers(f, start, at, &zero, &crc) && add_headers(f, at + manifest->bytes, end, &zero, &crc) &&
           crc == manifest->objects_crc64;
}

/* @return false if there are no tables of a known version. */
static bool find_manifest(fc_h5_header_file *f, uint64_t *at, fc_h5_manifest_row *manifest) {
    uint64_t schema;
    const unsigned char *p;
    if (!fc_h5_root_number(f, FC_H5_A_SCHEMA, &schema) || schema != FC_H5_SCHEMA ||
        !fc_h5_root_number(f, FC_H5_A_TABLES_AT, at) || !(p = fc_h5_header_bytes(f, *at, sizeof *manifest))) {
        return false;
    }
    memcpy(manifest, p, sizeof *manifest);
    return memcmp(manifest->magic, FC_H5_TABLES_MAGIC, sizeof manifest->magic) == 0 &&
           manifest->version == FC_H5_TABLES_VERSION && manifest->bytes >= sizeof *manifest &&
           headers_unchanged(f, *at, manifest);
}

/* ---- reading the tables ---- */

/* @return the start of a table, or NULL if it is not within the bytes. */
static const void *table_at(const fc_h5_tables *t, fc_h5_table table, uint64_t row_size) {
    const uint64_t at = t->manifest->tables[table][0];
    uint64_t size;
    if (at % 8 != 0 || at < sizeof *t->manifest || !fc_mul_u64(fc_h5_rows(t, table), row_size, &size) ||
        !fc_range_within(at, size, t->manifest->bytes)) {
        return NULL;
    }
    return (const unsigned char *)t->manifest + at;
}

static fc_code load(fc_h5_tables *t, fc_h5_header_file *f, uint64_t at, uint64_t bytes, fc_error *err) {
    unsigned char *data = bytes <= SIZE_MAX ? fc_arena_alloc(t->checkpoint->arena, (size_t)bytes) : NULL;
    FC_NEED(data, err, t->path);
    FC_TRY(fc_pread_full(f->fd, data, (size_t)bytes, at, t->path, err));
    fc_h5_manifest_row *manifest = (fc_h5_manifest_row *)data; /* the arena aligns it to 16 bytes */
    const uint64_t recorded = manifest->crc64;
    manifest->crc64 = 0;
    const uint64_t found = fc_crc64(0, data, (size_t)bytes);
    manifest->crc64 = recorded;
    if (found != recorded) {
        return fc_fail(err, FC_ECORRUPT,
                       "%s: its tables are damaged: their CRC-64 is %016" PRIx64 ", but %016" PRIx64 " is recorded"
                       ": restore the file, or write the checkpoint again",
                       t->path, found, recorded);
    }
    t->manifest = manifest;
    t->files = table_at(t, FC_H5_T_FILES, sizeof *t->files);
    t->mesh = table_at(t, FC_H5_T_MESH, sizeof *t->mesh);
    t->rows = table_at(t, FC_H5_T_TENSORS, sizeof *t->rows);
    t->dims = table_at(t, FC_H5_T_DIMS, sizeof *t->dims);
    t->placements = table_at(t, FC_H5_T_PLACEMENTS, sizeof *t->placements);
    t->boxes = table_at(t, FC_H5_T_BOXES, sizeof *t->boxes);
    t->grids = table_at(t, FC_H5_T_GRIDS, sizeof *t->grids);
    t->h5_chunks = table_at(t, FC_H5_T_CHUNKS, sizeof *t->h5_chunks);
    t->text = table_at(t, FC_H5_T_TEXT, 1);
    const bool ok = manifest->bytes == bytes && t->files && t->mesh && t->rows && t->dims && t->placements &&
                    t->boxes && t->grids && t->h5_chunks && t->text;
    return ok ? FC_OK : fc_h5_tables_damaged(t, err, "manifest", 0);
}

/*
 * @return a copy of `size` bytes of the table `text`; NULL if they are missing or not plain text, or when out of
 * memory.
 */
static const char *copy_text(fc_h5_tables *t, uint64_t at, uint64_t size) {
    if (!fc_range_within(at, size, fc_h5_rows(t, FC_H5_T_TEXT)) || !fc_is_plain_text(t->text + at, (size_t)size)) {
        return NULL;
    }
    const char *copy = fc_arena_strndup(t->checkpoint->arena, t->text + at, (size_t)size);
    t->no_memory |= !copy;
    return copy;
}

static fc_code read_mesh(fc_h5_tables *t, fc_error *err) {
    fc_mesh *mesh = &t->checkpoint->mesh;
    const uint64_t ndim = fc_h5_rows(t, FC_H5_T_MESH);
    int64_t ranks = 1;
    bool ok = ndim <= FC_MAX_MESH_DIMS;
    *mesh = (fc_mesh){.ndim = ok ? (int)ndim : 0};
    for (int i = 0; ok && i < mesh->ndim; i++) {
        const fc_h5_mesh_row *row = &t->mesh[i];
        const size_t length = strnlen(row->name, sizeof row->name);
        ok = length > 0 && length < sizeof mesh->names[i] && fc_is_plain_text(row->name, length) && row->size >= 1 &&
             fc_mul_i64(ranks, row->size, &ranks) && ranks <= MAX_RANKS;
        if (ok) {
            memcpy(mesh->names[i], row->name, length);
            mesh->sizes[i] = row->size;
        }
    }
    return ok && (ndim > 0 ? (uint64_t)ranks : 0) == fc_h5_rows(t, FC_H5_T_FILES)
               ? FC_OK
               : fc_h5_tables_damaged(t, err, "mesh", 0);
}

static fc_code read_placements(fc_h5_tables *t, fc_error *err) {
    fc_arena *arena = t->checkpoint->arena;
    const uint64_t count = fc_h5_rows(t, FC_H5_T_PLACEMENTS);
    const int n = t->checkpoint->mesh.ndim;
    t->parsed = fc_arena_calloc(arena, (size_t)count + 1, sizeof *t->parsed);
    FC_NEED(t->parsed, err, t->path);
    for (uint64_t i = 0; i < count; i++) {
        const char *text = copy_text(t, t->placements[i].text, t->placements[i].size);
        fc_placement *list = text ? fc_arena_calloc(arena, (size_t)n, sizeof *list) : NULL;
        t->no_memory |= text && !list;
        if (!list || !fc_placements_parse(text, n, list)) {
            return fc_h5_tables_damaged(t, err, "placements", i);
        }
        t->parsed[i] = list;
    }
    return FC_OK;
}

static fc_dtype find_dtype(const char name[16]) {
    fc_dtype found = FC_OPAQUE;
    const bool object = strncmp(name, fc_dtype_get(FC_OPAQUE)->torch_name, 16) == 0;
    return object || fc_dtype_find(name, strnlen(name, 16), &found) ? found : FC_DTYPE_COUNT;
}

/* Reads the texts of a row. A length of 0 means none, except for kinds, which are bytes. */
static bool read_texts(fc_h5_tables *t, const fc_h5_tensor_row *row, fc_h5_dataset *d) {
    uint64_t at = row->text, end = 0;
    const bool ok = fc_add_u64(at, (uint64_t)row->path + row->kinds + row->fqn + row->encoding, &end) &&
                    fc_range_within(end, row->json, fc_h5_rows(t, FC_H5_T_TEXT));
    if (!ok) {
        return false;
    }
    d->path = copy_text(t, at, row->path);
    at += row->path;
    d->lists = (fc_h5_bytes){(const unsigned char *)t->text + at, row->kinds};
    at += row->kinds;
    d->fqn = row->fqn ? copy_text(t, at, row->fqn) : NULL;
    at += row->fqn;
    d->encoding = row->encoding ? copy_text(t, at, row->encoding) : NULL;
    at += row->encoding;
    d->json = row->json ? copy_text(t, at, row->json) : NULL;
    return d->path && fc_h5_path_is_sane(d) && (!row->fqn || d->fqn) && (!row->encoding || d->encoding) &&
           (!row->json || d->json);
}

static bool kinds_are_known(const fc_h5_dataset *d) {
    for (size_t i = 0; i < d->lists.size; i++) {
        if (d->lists.data[i] > FC_H5_NUMBERS) {
            return false;
        }
    }
    return true;
}

/* Converts a row to the dataset of index.h5 that it describes. */
static fc_code read_row(fc_h5_tables *t, uint64_t number, fc_h5_dataset *d, fc_error *err) {
    const fc_h5_tensor_row *row = &t->rows[number];
    const fc_dtype dtype = find_dtype(row->dtype);
    const bool object = dtype == FC_OPAQUE, placed = row->placements != FC_H5_NO_PLACEMENTS;
    int64_t numel;
    *d = (fc_h5_dataset){.kind = object ? FC_H5_OBJECT : FC_H5_TENSOR,
                         .where = FC_H5_ELSEWHERE,
                         .dtype = dtype,
                         .has_crc64 = true,
                         .crc64 = row->crc64,
                         .owner = -1,
                         .nglobal_shape = -1,
                         .noffsets = -1};
    bool ok = dtype != FC_DTYPE_COUNT && row->ndim <= FC_MAX_DIMS &&
              placed == (!object && t->checkpoint->mesh.ndim > 0) &&
              (!placed || row->placements < fc_h5_rows(t, FC_H5_T_PLACEMENTS)) &&
              (object ? row->ndim == 1 && row->encoding > 0 : row->encoding == 0) &&
              fc_range_within(row->dims, row->ndim, fc_h5_rows(t, FC_H5_T_DIMS)) && row->box == t->next &&
              fc_range_within(row->box, row->boxes, fc_h5_rows(t, FC_H5_T_BOXES));
    if (ok) {
        d->element = fc_dtype_size(d->dtype);
        d->ndim = (int)row->ndim;
        d->shape = t->dims + row->dims;
    }
    for (int k = 0; ok && k < d->ndim; k++) {
        ok = d->shape[k] >= 0;
    }
    uint64_t total;
    ok = ok && fc_numel(d->ndim, d->shape, &numel) && fc_mul_u64((uint64_t)numel, d->element, &total) &&
         (numel == 0) == (row->boxes == 0) && read_texts(t, row, d) && kinds_are_known(d);
    return ok ? FC_OK : fc_h5_tables_damaged(t, err, "tensors", number);
}

static fc_code read_tensors(fc_h5_tables *t, fc_error *err) {
    fc_checkpoint *checkpoint = t->checkpoint;
    const size_t count = (size_t)fc_h5_rows(t, FC_H5_T_TENSORS);
    fc_h5_dataset *datasets = fc_arena_calloc(checkpoint->arena, count, sizeof *datasets);
    t->tensors = fc_arena_calloc(checkpoint->arena, count, sizeof *t->tensors);
    t->chunks =
        fc_arena_calloc(checkpoint->arena, (size_t)fc_h5_rows(t, FC_H5_T_BOXES) + (size_t)fc_h5_rows(t, FC_H5_T_CHUNKS),
                        sizeof *t->chunks);
    fc_code rc;
    FC_TRY_GOTO(datasets && t->tensors && t->chunks ? FC_OK : fc_no_memory(err, t->path), rc, out);
    for (size_t i = 0; i < count; i++) {
        FC_TRY_GOTO(read_row(t, i, &datasets[i], err), rc, out);
        FC_TRY_GOTO(fc_h5_name_tensor(checkpoint->arena, &datasets[i], true, t->path, &t->tensors[i], err), rc, out);
        FC_TRY_GOTO(fc_h5_fill_tensor(checkpoint, &datasets[i], &t->tensors[i], err), rc, out);
        if (t->rows[i].placements != FC_H5_NO_PLACEMENTS) {
            t->tensors[i].placements = t->parsed[t->rows[i].placements];
        }
        FC_TRY_GOTO(fc_h5_tables_boxes(t, &t->tensors[i], t->rows[i].boxes, err), rc, out);
    }
    if (t->next != fc_h5_rows(t, FC_H5_T_BOXES)) {
        FC_TRY_GOTO(fc_h5_tables_damaged(t, err, "boxes", t->next), rc, out);
    }
    rc = fc_h5_check_names(checkpoint->arena, t->tensors, count, false, t->path, err);
out:
    checkpoint->tensors = t->tensors;
    checkpoint->ntensors = count;
    return rc;
}

static fc_code read_tables(fc_h5_tables *t, fc_error *err) {
    fc_h5_state *state = t->checkpoint->state;
    const size_t ranks = (size_t)fc_h5_rows(t, FC_H5_T_FILES);
    FC_TRY(read_mesh(t, err));
    FC_TRY(read_placements(t, err));
    FC_TRY(fc_h5_tables_grids(t, err));
    FC_TRY(read_tensors(t, err));
    t->checkpoint->producer = copy_text(t, t->manifest->producer[0], t->manifest->producer[1]);
    state->known = fc_arena_calloc(t->checkpoint->arena, ranks, sizeof *state->known);
    state->files = t->files;
    state->boxes = t->boxes;
    state->grids = t->grids;
    state->dims = t->dims;
    state->box_dims = t->box_dims;
    return state->known && !t->no_memory ? FC_OK : fc_no_memory(err, t->path);
}

fc_code fc_h5_open_tables(fc_checkpoint *checkpoint, const char *path, bool sharded, bool *used, fc_error *err) {
    fc_h5_tables t = {.checkpoint = checkpoint, .path = path};
    fc_h5_header_file f = {.path = path};
    fc_h5_manifest_row manifest;
    uint64_t at;
    *used = false;
    FC_TRY(fc_open_input(path, &f.fd, &f.size, err));
    *used = find_manifest(&f, &at, &manifest) && (manifest.tables[FC_H5_T_MESH][1] > 0) == sharded;
    t.file_size = f.size;
    fc_code rc = FC_OK;
    if (*used) {
        FC_TRY_GOTO(load(&t, &f, at, manifest.bytes, err), rc, out);
        rc = read_tables(&t, err);
    }
out:
    close(f.fd);
    return rc;
}

/* ---- the files ---- */

static fc_code read_identity(const char *path, const fc_h5_file_row *row, uint64_t *found, fc_error *err) {
    uint64_t size;
    int fd;
    FC_TRY(fc_open_input(path, &fd, &size, err));
    fc_code rc = size == row->size ? fc_pread_full(fd, found, sizeof *found, row->header_crc64_at, path, err)
                                   : fc_h5_other_size(path, size, row->size, err);
    close(fd);
    return rc;
}

fc_code fc_h5_check_identity(const fc_checkpoint *checkpoint, size_t index, fc_error *err) {
    fc_h5_state *state = checkpoint->state;
    if (!state->files || index == 0 || atomic_load_explicit(&state->known[index - 1], memory_order_acquire)) {
        return FC_OK;
    }
    const fc_h5_file_row *row = &state->files[index - 1];
    const char *path = checkpoint->files[index].path;
    uint64_t found = 0;
    FC_TRY(read_identity(path, row, &found, err));
    if (found != row->header_crc64) {
        FC_TRY(fc_check_stand_in(path, err));
        return fc_fail(err, FC_ECORRUPT,
                       "%s: not the file that index.h5 was written with: its header_crc64 is %016" PRIx64
                       ", but index.h5 has %016" PRIx64
                       ": files of two runs are mixed here, or the file is damaged: restore it",
                       path, found, row->header_crc64);
    }
    atomic_store_explicit(&state->known[index - 1], true, memory_order_release);
    return FC_OK;
}

fc_code fc_h5_other_size(const char *path, uint64_t size, uint64_t expected, fc_error *err) {
    FC_TRY(fc_check_stand_in(path, err));
    return fc_fail(err, FC_ECORRUPT,
                   "%s: not the file that index.h5 was written with: it has %" PRIu64
                   " bytes, but index.h5 says %" PRIu64
                   ": it is %s, from another run, or changed by another program: restore it",
                   path, size, expected, size < expected ? "truncated" : "longer");
}
