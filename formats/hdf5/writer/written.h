/*
 * The content of the files with data, recorded as they are made, for the tables.
 */
#pragma once

#include "fsdpckpt/target.h"
#include "hdf5/tables.h"
#include "hdf5/writer/buffer.h"
#include "hdf5/writer/image.h"

/** A stored box. */
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

/** What is known of an item only when its file is finished: offsets in fc_h5_image.objects. SIZE_MAX: there is none. */
typedef struct fc_h5_item_fields {
    size_t crc64;   /**< of its digest; none if another file stores the item */
    size_t address; /**< of the address of its bytes; none if it has no bytes or is compressed */
} fc_h5_item_fields;

/**
 * Sets the boxes to those of the full file `image`. Before its data is written, only their numbers count. The places
 * are those in the object headers, not those of the items, so that the tables and the headers cannot disagree.
 * @param fields one per item
 */
fc_code fc_h5_note_boxes(fc_h5_written *written, const fc_target *target, const fc_target_file *file,
                         const fc_h5_image *image, const fc_h5_item_fields *fields, fc_error *err);

/** Records the content of the finished shard file `image`. */
fc_code fc_h5_note_file(fc_h5_written *written, const fc_target *target, const fc_target_file *file,
                        const fc_h5_image *image, const fc_h5_item_fields *fields, const fc_h5_file_row *row,
                        fc_error *err);

/** The notes of files without compressed boxes; see fc_format_notes. */
bool fc_h5_written_take(fc_h5_written *written, struct fc_notes *notes);
fc_code fc_h5_written_add(fc_h5_written *written, const void *notes, fc_error *err);
void fc_h5_written_free(fc_h5_written *written);
