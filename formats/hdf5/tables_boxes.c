/*
 * The rows of `boxes`, `grids` and `chunks` of the tables, as chunks of tensors. Every number is checked before it is
 * used.
 */
#include "hdf5/tables_in.h"

#include "base/checked.h"
#include "fsdpckpt/box.h"

#include <inttypes.h>
#include <string.h>

fc_code fc_h5_tables_damaged(const fc_h5_tables *t, fc_error *err, const char *what, uint64_t row) {
    if (t->no_memory) {
        return fc_no_memory(err, t->path);
    }
    return fc_fail(err, FC_ECORRUPT,
                   "%s: its tables are damaged: %s, row %" PRIu64 ": restore the file, or write the checkpoint again",
                   t->path, what, row);
}

static bool is_full(const fc_h5_tables *t) {
    return t->checkpoint->mesh.ndim == 0;
}

/* @return the size of the file that has the boxes of `rank`. */
static uint64_t size_of_file(const fc_h5_tables *t, uint64_t rank) {
    return is_full(t) ? t->file_size : t->files[rank].size;
}

/* Writes the box of `rank` into `dims`: the one that the placements give it, or a whole object. */
static bool box_of(const fc_h5_tables *t, const fc_tensor *tensor, uint64_t rank, int64_t *dims) {
    int64_t coordinate[FC_MAX_MESH_DIMS];
    if (tensor->object || is_full(t)) {
        memset(dims, 0, (size_t)tensor->ndim * sizeof *dims);
        memcpy(dims + tensor->ndim, tensor->shape, (size_t)tensor->ndim * sizeof *dims);
        return true;
    }
    fc_mesh_coordinate(&t->checkpoint->mesh, (int64_t)rank, coordinate);
    return fc_local_box(tensor->ndim, tensor->shape, &t->checkpoint->mesh, tensor->placements, coordinate, dims,
                        dims + tensor->ndim, NULL) == FC_OK;
}

fc_code fc_h5_tables_grids(fc_h5_tables *t, fc_error *err) {
    const uint64_t count = fc_h5_rows(t, FC_H5_T_GRIDS);
    for (uint64_t i = 0; i < count; i++) {
        const fc_h5_grid_row *row = &t->grids[i];
        bool ok = row->ndim >= 1 && row->ndim <= FC_MAX_DIMS && row->filters[0] != 0 &&
                  fc_range_within(row->dims, row->ndim, fc_h5_rows(t, FC_H5_T_DIMS));
        for (uint32_t k = 0; ok && k < row->ndim; k++) {
            ok = t->dims[row->dims + k] >= 1;
        }
        for (size_t k = 0; ok && k < sizeof row->filters; k++) { /* 0: end of the list */
            ok = row->filters[k] <= 3 && (k == 0 || row->filters[k] == 0 || row->filters[k - 1] != 0);
        }
        if (!ok) {
            return fc_h5_tables_damaged(t, err, "grids", i);
        }
    }
    t->box_dims =
        fc_arena_calloc(t->checkpoint->arena, count ? (size_t)fc_h5_rows(t, FC_H5_T_BOXES) : 0, sizeof *t->box_dims);
    return t->box_dims || count == 0 ? FC_OK : fc_no_memory(err, t->path);
}

/* Adds the HDF5 chunk at `at` of a compressed box, and advances `at` in the grid. */
static bool add_h5_chunk(fc_h5_tables *t, const fc_chunk *box, const int64_t *unit, int ndim, int64_t *at,
                         const fc_h5_chunk_row *row, uint32_t nfilters) {
    int64_t *dims = fc_arena_calloc(t->checkpoint->arena, 2 * (size_t)ndim, sizeof *dims);
    fc_chunk *chunk = &t->chunks[t->nchunks++];
    const int64_t *sizes = box->dims + ndim;
    const uint64_t size = size_of_file(t, t->boxes[t->next].rank);
    t->no_memory = !dims;
    if (!dims || row->mask >> nfilters != 0 || row->length == 0 || !fc_range_within(row->offset, row->length, size)) {
        return false;
    }
    *chunk = *box;
    chunk->dims = dims;
    chunk->place = fc_place_bytes(box->place.file, row->offset, row->length);
    chunk->detail = FC_H5_COMPRESSED | t->next << FC_H5_MASK_BITS | row->mask;
    for (int k = 0; k < ndim; k++) {
        const int64_t left = sizes[k] - at[k];
        dims[k] = box->dims[k] + at[k];
        dims[ndim + k] = unit[k] < left ? unit[k] : left;
    }
    for (int k = ndim - 1; k >= 0; k--) {
        at[k] += unit[k] < sizes[k] - at[k] ? unit[k] : sizes[k] - at[k];
        if (at[k] < sizes[k]) {
            break;
        }
        at[k] = 0;
    }
    return true;
}

/* Reads a compressed box: each of its HDF5 chunks becomes a chunk. */
static bool read_compressed(fc_h5_tables *t, const fc_h5_box_row *row, const fc_chunk *box, int ndim) {
    int64_t at[FC_MAX_DIMS] = {0};
    uint64_t count = 1;
    const fc_h5_grid_row *grid = row->grid < fc_h5_rows(t, FC_H5_T_GRIDS) ? &t->grids[row->grid] : NULL;
    if (!grid || grid->ndim != (uint32_t)ndim) {
        return false;
    }
    const int64_t *unit = t->dims + grid->dims, *sizes = box->dims + ndim;
    for (int k = 0; k < ndim; k++) {
        count *= (uint64_t)((sizes[k] - 1) / unit[k] + 1); /* at most the number of elements */
    }
    if (count != row->length || !fc_range_within(row->offset, count, fc_h5_rows(t, FC_H5_T_CHUNKS)) ||
        count > fc_h5_rows(t, FC_H5_T_CHUNKS) - t->compressed) { /* each row belongs to one box */
        return false;
    }
    uint32_t nfilters = 0;
    while (nfilters < sizeof grid->filters && grid->filters[nfilters] != 0) {
        nfilters++;
    }
    t->compressed += count;
    t->box_dims[t->next] = box->dims;
    for (uint64_t i = 0; i < count; i++) {
        if (!add_h5_chunk(t, box, unit, ndim, at, &t->h5_chunks[row->offset + i], nfilters)) {
            return false;
        }
    }
    return true;
}

/* Reads a box of `bytes` bytes. */
static bool read_box(fc_h5_tables *t, const fc_h5_box_row *row, int64_t *dims, int ndim, uint64_t bytes) {
    const fc_chunk chunk = {.dims = dims,
                            .place = fc_place_bytes(is_full(t) ? 0 : row->rank + 1, row->offset, row->length),
                            .rank = is_full(t) ? FC_NO_RANK : row->rank,
                            .detail = t->next};
    if (row->grid != FC_H5_NO_GRID) {
        return read_compressed(t, row, &chunk, ndim);
    }
    t->chunks[t->nchunks++] = chunk;
    return bytes == row->length && fc_range_within(row->offset, row->length, size_of_file(t, row->rank));
}

fc_code fc_h5_tables_boxes(fc_h5_tables *t, fc_tensor *tensor, uint64_t count, fc_error *err) {
    const size_t ndim = (size_t)tensor->ndim;
    int64_t *dims = fc_arena_calloc(t->checkpoint->arena, (size_t)count, 2 * ndim * sizeof *dims);
    const uint64_t first = t->nchunks, ranks = is_full(t) ? 1 : fc_h5_rows(t, FC_H5_T_FILES);
    if (!dims && count > 0) {
        return fc_no_memory(err, t->path);
    }
    for (uint64_t i = 0; i < count; i++, t->next++, dims += 2 * ndim) {
        const fc_h5_box_row *row = &t->boxes[t->next];
        const fc_box box = {tensor->ndim, dims, dims + ndim};
        uint64_t bytes;
        if (row->rank >= ranks || (i > 0 && row->rank <= row[-1].rank) || (tensor->object && i > 0) ||
            !box_of(t, tensor, row->rank, dims) ||
            !fc_mul_u64((uint64_t)fc_box_volume(&box), fc_dtype_size(tensor->dtype), &bytes) || bytes == 0 ||
            (tensor->object && row->grid != FC_H5_NO_GRID) || !read_box(t, row, dims, tensor->ndim, bytes)) {
            return fc_h5_tables_damaged(t, err, "boxes", t->next);
        }
    }
    tensor->chunks = t->chunks + first;
    tensor->nchunks = (size_t)(t->nchunks - first);
    return FC_OK;
}
