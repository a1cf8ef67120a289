/*
 * Shared by tables.c and tables_boxes.c, which read the tables of index.h5 and of full files.
 */
#pragma once

#include "hdf5/reader.h"
#include "hdf5/tables.h"

/** The tables in memory. Pointers are into one block of the checkpoint's arena. */
typedef struct fc_h5_tables {
    fc_checkpoint *checkpoint;
    const char *path;
    uint64_t file_size; /**< of the file with the tables */
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
    const fc_placement **parsed; /**< one per row of `placements` */
    fc_tensor *tensors;
    fc_chunk *chunks;    /**< of all tensors: one per box, or one per HDF5 chunk of a compressed box */
    uint64_t next;       /**< the next row of `boxes` */
    uint64_t nchunks;    /**< number of chunks so far */
    uint64_t compressed; /**< number of HDF5 chunks among them */
    const int64_t **box_dims;
    bool no_memory; /**< an allocation failed, so what follows is no damage */
} fc_h5_tables;

static inline uint64_t fc_h5_rows(const fc_h5_tables *t, fc_h5_table table) {
    return t->manifest->tables[table][1];
}

/** @return the error for an invalid row, or for memory that was missing to read it. */
fc_code fc_h5_tables_damaged(const fc_h5_tables *t, fc_error *err, const char *what, uint64_t row);

/** Checks the table `grids`. */
fc_code fc_h5_tables_grids(fc_h5_tables *t, fc_error *err);

/** Sets the chunks of `tensor` from the next `count` rows of `boxes`. Its other fields must be set. */
fc_code fc_h5_tables_boxes(fc_h5_tables *t, fc_tensor *tensor, uint64_t count, fc_error *err);
