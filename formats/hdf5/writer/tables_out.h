/*
 * Writing the tables of index.h5.
 */
#ifndef FSDPCKPT_FORMATS_HDF5_WRITER_TABLES_OUT_H
#define FSDPCKPT_FORMATS_HDF5_WRITER_TABLES_OUT_H

#ifndef FSDPCKPT_PRIVATE
#error "this header is private to fsdpckpt: include <fsdpckpt/...> instead"
#endif

#include "fsdpckpt/target.h"
#include "hdf5/tables.h"
#include "hdf5/writer/image.h"

/** A box that a shard file stores. */
typedef struct fc_h5_written_box {
    uint32_t tensor;
    fc_h5_box_row row;
} fc_h5_written_box;

/** What is noted while the shard files are made. */
typedef struct fc_h5_written {
    fc_h5_file_row *files; /**< one per rank */
    size_t nfiles, files_capacity;
    fc_h5_written_box *boxes; /**< in the order of ranks */
    size_t nboxes, boxes_capacity;
    bool compressed; /**< some tensor is in compressed chunks, which the tables do not describe: there are none */
} fc_h5_written;

/** Notes what a finished shard file stores. */
fc_code fc_h5_note_file(fc_h5_written *written, const fc_target *target, const fc_target_file *file,
                        const fc_h5_file_row *row, fc_error *err);
void fc_h5_written_free(fc_h5_written *written);

struct fc_h5_writer;

/** Adds the tables to the image of index.h5, whose heap is closed. @param group receives the address of their group.
 *  @param at receives where they begin in image->objects. */
fc_code fc_h5_tables_add(struct fc_h5_writer *w, const uint64_t *digests, fc_h5_image *image, uint64_t *group,
                         size_t *at, fc_error *err);

/** When the size of index.h5 is known: sets it, and the digest of the tables. */
void fc_h5_tables_seal(fc_h5_image *image, size_t at);

#endif
