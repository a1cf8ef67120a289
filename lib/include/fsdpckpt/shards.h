/*
 * A sharded target that several processes write without a communicator: each writes the files of its rank into a common
 * directory and returns notes, and one that has the notes of all ranks writes the index. The processes exchange the
 * notes in their own way, as torch.distributed.checkpoint does.
 */
#pragma once

#include "fsdpckpt/move.h"

FC_BEGIN_DECLS

/** What all processes agree on. */
typedef struct fc_shards {
    const fc_format *format;
    const char *staging; /**< an existing directory; use fc_commit_begin, and fc_commit_join in the other processes */
    /** All values, with a recorded layout (fc_memory_set_layout). A rank needs only its own chunks with data, and
     *  the process that writes the index needs the data of objects. */
    const fc_checkpoint *source;
    const uint32_t *owner_offsets; /**< as in fc_selection */
    bool trust_objects;
    /**
     * Called before values of the source are written that have no data yet: provides that of the `count` values
     * `indices` (fc_memory_set_data), which are stored by this rank and have `batch_bytes` bytes or are a single value.
     * The data of the values before them is no longer needed. NULL: every chunk of the rank has its data.
     */
    fc_code (*fetch)(void *context, const size_t *indices, size_t count, fc_error *err);
    void *context;
    uint64_t batch_bytes;
} fc_shards;

/**
 * Writes and syncs the files of `rank`.
 * @param notes receives what fc_shards_finish needs, malloc'ed.
 * @return FC_EUNSUPPORTED if the format's files cannot be written apart.
 */
fc_code fc_shards_write(const fc_shards *shards, uint32_t rank, const fc_work_options *options, void **notes,
                        size_t *size, fc_error *err);

/** Writes what spans all files. @param notes of all ranks, in their order. */
fc_code fc_shards_finish(const fc_shards *shards, const void *const *notes, const size_t *sizes, size_t count,
                         fc_error *err);

FC_END_DECLS
