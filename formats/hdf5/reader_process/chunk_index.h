/*
 * Reads the indexes of filtered chunks that HDF5 2.0 writes, as bytes: fixed arrays, extensible arrays, B-trees of
 * version 2 (HDF5 File Format Specification 4.0, VII.C to VII.E and III.A.2). Runs in the reader process.
 */
#pragma once

#include "hdf5/reader_process/newer.h"

/** What the chunks of a dataset are counted with. */
typedef struct fc_h5_chunk_grid {
    int ndim;
    const hsize_t *dims, *most, *chunk; /**< shape, largest shape, shape of a chunk */
} fc_h5_chunk_grid;

/** A chunk that is stored. `at` has its first element. */
typedef struct fc_h5_indexed_chunk {
    uint64_t address, size;
    uint32_t mask;
    const hsize_t *at;
} fc_h5_indexed_chunk;

/** @return false to end the walk. */
typedef bool (*fc_h5_indexed_fn)(void *context, const fc_h5_indexed_chunk *chunk);

/** Visits the stored chunks within the shape. @return false if the index is damaged, or `visit` ended the walk. */
bool fc_h5_index_walk(const fc_h5_source *source, const fc_h5_chunk_index *index, const fc_h5_chunk_grid *grid,
                      fc_h5_indexed_fn visit, void *context);
