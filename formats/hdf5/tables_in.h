/*
 * Reading the tables of index.h5: what tables.c and tables_boxes.c share.
 */
#ifndef FSDPCKPT_FORMATS_HDF5_TABLES_IN_H
#define FSDPCKPT_FORMATS_HDF5_TABLES_IN_H

#ifndef FSDPCKPT_PRIVATE
#error "this header is private to fsdpckpt: include <fsdpckpt/...> instead"
#endif

#include "hdf5/reader.h"
#include "hdf5/tables.h"

/** The tables in memory: pointers into one run of bytes of the checkpoint's arena. */
typedef struct fc_h5_tables {
    fc_checkpoint *checkpoint;
    const char *path;
    const fc_h5_manifest_row *manifest;
    const fc_h5_file_row *files;
    const fc_h5_mesh_row *mesh;
    const fc_h5_tensor_row *rows;
    const int64_t *dims;
    const fc_h5_placements_row *placements;
    const fc_h5_box_row *boxes;
    const fc_h5_grid_row *grids;
    const fc_h5_chunk_row *h5_chunks;
    const char *text;
    const fc_placement **parsed; /**< of each row of `placements` */
    fc_tensor *tensors;
    fc_chunk *chunks;    /**< of all tensors: one for each box, or for each HDF5 chunk of it */
    uint64_t next;       /**< box */
    uint64_t nchunks;    /**< so far */
    uint64_t compressed; /**< of these */
    const int64_t **box_dims;
} fc_h5_tables;

static inline uint64_t fc_h5_rows(const fc_h5_tables *t, fc_h5_table table) {
    return t->manifest->tables[table][1];
}

/** The error for a row that makes no sense. */
fc_code fc_h5_tables_damaged(const fc_h5_tables *t, fc_error *err, const char *what, uint64_t row);

/** Checks the table `grids`. */
fc_code fc_h5_tables_grids(fc_h5_tables *t, fc_error *err);

/** Sets the chunks of `tensor`, which has all else, from the next `count` rows of `boxes`. */
fc_code fc_h5_tables_boxes(fc_h5_tables *t, fc_tensor *tensor, uint64_t count, fc_error *err);

#endif
