/*
 * The content of the shard files, recorded as they are made, for the tables of index.h5.
 */
#pragma once

#include "fsdpckpt/target.h"
#include "hdf5/tables.h"
#include "hdf5/writer/buffer.h"
#include "hdf5/writer/image.h"

/** A box that a shard file stores. */
typedef struct fc_h5_written_box {
    uint32_t tensor;
    fc_h5_box_row row;
} fc_h5_written_box;

typedef struct fc_h5_written {
    fc_h5_file_row *files; /**< one per rank */
    size_t nfiles, files_capacity;
    fc_h5_written_box *boxes; /**< in the order of ranks */
    size_t nboxes, boxes_capacity;
    fc_h5_chunk_row *chunks;
    size_t nchunks, chunks_capacity;
    fc_h5_grid_row *grids; /**< `dims` is an index in grid_dims */
    size_t ngrids, grids_capacity;
    fc_h5_buffer grid_dims; /**< int64 */
    uint32_t *last_grid;    /**< per tensor: the row of its last box; NULL if no tensor is compressed */
} fc_h5_written;

/** Records the content of the finished shard file `image`. */
fc_code fc_h5_note_file(fc_h5_written *written, const fc_target *target, const fc_target_file *file,
                        const fc_h5_image *image, const fc_h5_file_row *row, fc_error *err);

/** The notes of files without compressed boxes; see fc_format_notes. */
bool fc_h5_written_take(fc_h5_written *written, struct fc_notes *notes);
fc_code fc_h5_written_add(fc_h5_written *written, const void *notes, fc_error *err);
void fc_h5_written_free(fc_h5_written *written);
