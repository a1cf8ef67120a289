/*
 * Writes the files of a target, and what the ranks of a conversion share of that work.
 */
#pragma once

#include "base/grow.h"
#include "fsdpckpt/move.h"

struct fc_shards; /* shards.h */

/** A target being written. */
typedef struct fc_conversion {
    const fc_target *target;
    fc_comm *comm;
    bool leads;
    bool apart;       /**< each rank writes whole files, on its own */
    uint64_t *movers; /**< with own_shards: for each chunk of the source, the rank that moves it (held.h). Else NULL */
    size_t *first_chunks; /**< with movers: for each tensor of the source, the index of its first chunk */
    const char *staging;  /**< where the target is written */
    fc_writer writer;     /**< of rank 0; of every rank if they write files apart */
    fc_move_options move;
    fc_convert_report *report;
    bool *unmoved; /**< one per tensor: the format writes it in its own way, so no digest of its bytes is known */
    /** Moves the data of a file. NULL: fc_move_file. */
    fc_code (*move_file)(const struct fc_conversion *m, const fc_target_file *file, fc_error *err);
    const struct fc_shards *shards; /**< for move_file */
} fc_conversion;

/** Whether this rank has a writer. */
static inline bool fc_has_writer(const fc_conversion *m) {
    return m->leads || m->apart;
}

/** Whether the ranks write whole files apart. If there are few files, they write each together, but never in a bucket,
 * where the processes cannot share a file. */
bool fc_writes_apart(const fc_target *target, const fc_format *format, const fc_comm *comm, bool in_bucket);

/** Writes the files of one rank on its own, and adds what the writer keeps of them: the number of bytes, and the bytes.
 */
fc_code fc_write_noted(fc_conversion *m, uint32_t rank, fc_notes *notes, fc_error *err);

/** Turns the sums m->move.digests into the tensors' digests, and compares them with those that the source records. */
fc_code fc_finish_digests(const fc_conversion *m, fc_error *err);

/** Writes all files but the index. Collective. */
fc_code fc_write_files(fc_conversion *m, fc_error *err);
