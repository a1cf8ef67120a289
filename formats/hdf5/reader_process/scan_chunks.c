/*
 * In the reader process: lists the stored chunks of a dataset and their offsets, in CHUNKS records.
 *
 * libhdf5 1.10 has two ways. By number, it walks the whole index for each chunk, and ignores the user block. By grid
 * position, it finds a chunk at once, but returns only its size. So the size is queried by position, and the driver
 * sees the offset when the bytes of the chunk are requested (see fc_h5_capture). Indexes of HDF5 2.0 are read without
 * it.
 */
#include "hdf5/reader_process/chunk_index.h"
#include "hdf5/reader_process/scan.h"

#include <string.h>

typedef struct chunk_list {
    const fc_h5_chunked *d;
    uint64_t count;  /* chunks in the open record */
    size_t count_at; /* in the record, which moves when records before it are sent */
    hsize_t found;   /* chunks in all records */
} chunk_list;

static void begin_chunks(chunk_list *list) {
    fc_h5_sink *out = list->d->walk->out;
    fc_h5_begin(out, FC_H5_CHUNKS);
    list->count_at = out->used - out->start;
    list->count = 0;
    fc_h5_put_u64(out, 0);
}

static void end_chunks(chunk_list *list) {
    fc_h5_sink *out = list->d->walk->out;
    if (!out->failed) {
        memcpy(out->buf + out->start + list->count_at, &list->count, sizeof list->count);
    }
    fc_h5_end(out);
}

/* Adds a chunk to the open record. */
static bool add_chunk(chunk_list *list, const fc_h5_indexed_chunk *c) {
    fc_h5_sink *out = list->d->walk->out;
    fc_h5_put_u64(out, c->address);
    fc_h5_put_u64(out, c->size);
    fc_h5_put_u64(out, c->mask);
    for (int k = 0; k < list->d->ndim; k++) {
        fc_h5_put_u64(out, c->at[k]);
    }
    list->found++;
    if (++list->count == FC_H5_CHUNKS_PER_RECORD) {
        end_chunks(list);
        atomic_fetch_add(&list->d->walk->shared->beats, 1);
        begin_chunks(list);
    }
    return !out->failed;
}

/* Finds the chunk at `at`, if it is stored, and adds it. @return false when the index is damaged. */
static bool note_chunk(chunk_list *list, const hsize_t *at) {
    const fc_h5_chunked *d = list->d;
    fc_h5_capture *capture = d->walk->capture;
    hsize_t size = 0;
    uint32_t mask = 0;
    char nothing;
    if (H5Dget_chunk_storage_size(d->dataset, at, &size) < 0) {
        H5Eclear2(H5E_DEFAULT);
        return true; /* libhdf5 returns this if it is not stored, but also if its index is damaged: the total is
                        compared later */
    }
    if (size == 0) {
        return true;
    }
    capture->armed = true;
    capture->hit = false;
    /* Nothing is read; the driver only records the address. */
    herr_t rc = H5Dread_chunk(d->dataset, H5P_DEFAULT, at, &mask, &nothing);
    capture->armed = false;
    if (rc < 0 || !capture->hit || capture->size != size) {
        return false;
    }
    const fc_h5_indexed_chunk c = {capture->address, size, mask, at};
    return add_chunk(list, &c);
}

/* Queries every chunk of the grid, which is fast for each. */
static bool list_by_grid(chunk_list *list) {
    const fc_h5_chunked *d = list->d;
    hsize_t at[H5S_MAX_RANK] = {0};
    int k = d->ndim;
    while (k >= 0) {
        if (!note_chunk(list, at)) {
            return false;
        }
        for (k = d->ndim - 1; k >= 0; k--) {
            at[k] += d->chunk[k];
            if (at[k] < d->dims[k]) {
                break;
            }
            at[k] = 0;
        }
    }
    return true;
}

/* Queries the stored chunks by number, which walks the index for each. For grids that are nearly empty. */
static bool list_by_number(chunk_list *list, hsize_t stored) {
    const fc_h5_chunked *d = list->d;
    for (hsize_t i = 0; i < stored; i++) {
        hsize_t at[H5S_MAX_RANK] = {0};
        unsigned mask;
        haddr_t address;
        hsize_t size;
        if (H5Dget_chunk_info(d->dataset, d->space, i, at, &mask, &address, &size) < 0 || !note_chunk(list, at)) {
            return false;
        }
    }
    return true;
}

static bool add_indexed(void *context, const fc_h5_indexed_chunk *c) {
    return add_chunk(context, c);
}

/* Reads the index as bytes. */
static bool list_by_index(chunk_list *list) {
    const fc_h5_chunked *d = list->d;
    hsize_t most[H5S_MAX_RANK];
    const fc_h5_chunk_grid grid = {d->ndim, d->dims, most, d->chunk};
    return H5Sget_simple_extent_dims(d->space, NULL, most) == d->ndim &&
           fc_h5_index_walk(d->walk->source, d->index, &grid, add_indexed, list);
}

fc_h5_way fc_h5_choose_way(const fc_h5_chunked *d, hsize_t *stored) {
    const double by_grid_cost = 0.5e-6, by_number_cost = 50e-9, patience = 120; /* seconds, measured on 1.10.8 */
    double grid = 1;
    *stored = 0;
    if (d->index) {
        return FC_H5_BY_INDEX;
    }
    for (int k = 0; k < d->ndim; k++) {
        grid *= (double)((d->dims[k] - 1) / d->chunk[k] + 1);
    }
    d->walk->capture->failed = false;
    if (H5Dget_num_chunks(d->dataset, d->space, stored) < 0 || d->walk->capture->failed) {
        return FC_H5_DAMAGED;
    }
    if (*stored == 0) {
        return FC_H5_NO_CHUNKS;
    }
    double by_grid = grid * by_grid_cost, by_number = (double)*stored * (double)*stored * by_number_cost;
    if (by_grid > patience && by_number > patience) {
        return FC_H5_TOO_SPARSE;
    }
    return by_grid <= by_number ? FC_H5_BY_GRID : FC_H5_BY_NUMBER;
}

bool fc_h5_send_chunks(const fc_h5_chunked *d, fc_h5_way way, hsize_t stored) {
    chunk_list list = {.d = d};
    begin_chunks(&list);
    bool ok = way == FC_H5_BY_INDEX  ? list_by_index(&list)
              : way == FC_H5_BY_GRID ? list_by_grid(&list)
                                     : list_by_number(&list, stored);
    end_chunks(&list);
    if (way == FC_H5_BY_INDEX) {
        return ok && !d->walk->capture->failed;
    }
    /* libhdf5 also reports "not stored" if it cannot read the index, and missing chunks would become fill values. */
    return ok && list.found == stored && !d->walk->capture->failed;
}
