/*
 * Datasets of compressed chunks in an image. A dataset's chunk index is a B-tree of version 1, which every HDF5
 * since 1.8 reads. Its size follows from the number of chunks, so its place among the headers is known before any chunk
 * is; the entries are filled in as the chunks get their places.
 */
#ifndef FSDPCKPT_FORMATS_HDF5_WRITER_IMAGE_CHUNKS_H
#define FSDPCKPT_FORMATS_HDF5_WRITER_IMAGE_CHUNKS_H

#ifndef FSDPCKPT_PRIVATE
#error "this header is private to fsdpckpt: include <fsdpckpt/...> instead"
#endif

#include "hdf5/tables.h"
#include "hdf5/writer/image.h"

/** The grid of chunks of a dataset. `shape` and `chunk` are borrowed; no dimension is 0. */
typedef struct fc_h5_grid {
    int ndim;
    uint32_t element; /**< bytes */
    const int64_t *shape, *chunk;
} fc_h5_grid;

typedef struct fc_h5_chunk_index {
    fc_h5_grid grid;
    size_t at;       /**< where the first leaf is in fc_h5_image.objects */
    uint64_t chunks; /**< in the grid: each is stored */
    uint64_t placed;
} fc_h5_chunk_index;

/** Filters of a dataset of compressed chunks: shuffle, unless its elements are of one byte, then deflate. */
static inline int fc_h5_filters(uint32_t element) {
    return element > 1 ? 2 : 1;
}

/** Sets the size of the nodes so that the indexes of these grids are small. Called before any index is added. */
void fc_h5_image_choose_nodes(fc_h5_image *image, const fc_h5_grid *grids, size_t count);

/** Adds an index; not while an object header is open. @return its number. */
size_t fc_h5_image_add_index(fc_h5_image *image, const fc_h5_grid *grid);

/** Fill value, filters and layout of the dataset with index `number`. @param level of deflate */
void fc_h5_image_chunked(fc_h5_image *image, size_t number, int level);

/**
 * Gives a chunk its place, after fc_h5_image_lay_out: `size` bytes at `*offset`.
 * @param start where it begins in the dataset. @param raw all filters were skipped.
 */
fc_code fc_h5_image_place(fc_h5_image *image, size_t number, const int64_t *start, bool raw, uint64_t size,
                          uint64_t *offset, fc_error *err);

/** HDF5 chunk `chunk` of index `number`, in row-major order. */
fc_h5_chunk_row fc_h5_image_placed(const fc_h5_image *image, size_t number, uint64_t chunk);

/** Completes the indexes, when all chunks have their places. @return FC_EIO: some have none. */
fc_code fc_h5_image_finish_indexes(fc_h5_image *image, fc_error *err);

#endif
