/*
 * Datasets of compressed chunks in an image. A dataset's chunk index is a B-tree of version 1, which every HDF5 since
 * 1.8 reads. The number of chunks determines its size, so it gets its place among the headers before the chunks have
 * theirs. Entries are filled in as chunks are placed.
 */
#pragma once

#include "hdf5/tables.h"
#include "hdf5/writer/image.h"

/** The grid of chunks of a dataset. `shape` and `chunk` are borrowed; no dimension is 0. */
typedef struct fc_h5_grid {
    int ndim;
    uint32_t element; /**< bytes per element */
    const int64_t *shape, *chunk;
} fc_h5_grid;

typedef struct fc_h5_chunk_index {
    fc_h5_grid grid;
    size_t at;       /**< offset of the first leaf in fc_h5_image.objects */
    uint64_t chunks; /**< number of chunks in the grid, all of which are stored */
    uint64_t placed;
} fc_h5_chunk_index;

/** @return the number of filters of a compressed dataset: shuffle (unless elements have one byte), then deflate. */
static inline int fc_h5_filters(uint32_t element) {
    return element > 1 ? 2 : 1;
}

/** Sets the size of nodes so that the indexes of these grids are small. Call it before adding an index. */
void fc_h5_image_choose_nodes(fc_h5_image *image, const fc_h5_grid *grids, size_t count);

/** Adds an index. No object header may be open. @return its number. */
size_t fc_h5_image_add_index(fc_h5_image *image, const fc_h5_grid *grid);

/** Adds the fill value, filters and layout of the dataset with index `number`. @param level of deflate */
void fc_h5_image_chunked(fc_h5_image *image, size_t number, int level);

/**
 * Reserves `size` bytes for a chunk, at `*offset`. Call it after fc_h5_image_lay_out.
 * @param start its offsets in the dataset. @param raw whether all filters were skipped.
 */
fc_code fc_h5_image_place(fc_h5_image *image, size_t number, const int64_t *start, bool raw, uint64_t size,
                          uint64_t *offset, fc_error *err);

/** @return HDF5 chunk `chunk` of index `number`, in row-major order. */
fc_h5_chunk_row fc_h5_image_placed(const fc_h5_image *image, size_t number, uint64_t chunk);

/** Completes the indexes. @return FC_EIO if a chunk was not placed. */
fc_code fc_h5_image_finish_indexes(fc_h5_image *image, fc_error *err);
