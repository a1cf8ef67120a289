/*
 * The compressed chunks of a part, handed out in the order in which they are written. From the chunked items to jobs
 * for workers, with the proof that the source covers what they need.
 */
#ifndef FSDPCKPT_ENGINE_CHUNKS_H
#define FSDPCKPT_ENGINE_CHUNKS_H

#ifndef FSDPCKPT_PRIVATE
#error "this header is private to fsdpckpt: include <fsdpckpt/...> instead"
#endif

#include "engine/tile_digest.h"
#include "fsdpckpt/plan.h"
#include "fsdpckpt/select.h"

/* Consecutive chunks that one worker takes at once, at most: they share the chunks of the source that they cut. */
enum { FC_RUN_CHUNKS = 4 };

/** An item whose chunks are being compressed. Freed when the last of them is given back. */
typedef struct fc_chunked {
    const fc_target_item *item;
    const fc_target_tensor *target;
    fc_coverage *coverage;
    fc_item_digest digest;
    const struct fc_chunks *chunks;
    unsigned users;
} fc_chunked;

/** One chunk. */
typedef struct fc_chunk_job {
    fc_chunked *of;
    uint64_t number;             /**< in the order of writing, from 0 */
    int64_t start[FC_MAX_DIMS];  /**< within the item */
    int64_t offset[FC_MAX_DIMS]; /**< in the global tensor */
    int64_t sizes[FC_MAX_DIMS];  /**< what of it lies within the item */
    fc_tile_digest digest;       /**< out: what was compressed */
} fc_chunk_job;

/** Not thread-safe: the caller has the lock. */
typedef struct fc_chunks {
    const fc_target *target;
    const fc_target_file *file;
    fc_target_item **items; /* the chunked ones, by offset */
    bool crc32;             /* see fc_move_options */
    uint64_t *digests;      /* see fc_move_options; may be NULL */
    size_t nitems, next;
    fc_chunked *current; /* whose chunks are not all handed out; NULL between items */
    int run;             /* chunks of it that are handed out together */
    int longest_run;
    int64_t start[FC_MAX_DIMS]; /* of its next chunk */
    uint64_t number;
} fc_chunks;

fc_code fc_chunks_init(fc_chunks *chunks, const fc_target *target, const fc_target_file *file, int longest_run,
                       fc_error *err);

/** Frees what is left, also after an error; no job may be held any more. */
void fc_chunks_destroy(fc_chunks *chunks);

/** The next jobs, of one item: at most FC_RUN_CHUNKS. `*count` is 0 when there is nothing left. */
fc_code fc_chunks_take(fc_chunks *chunks, fc_chunk_job *jobs, int *count, fc_error *err);

/** Gives a job back, done or not, and adds up its digest. */
void fc_chunks_give_back(fc_chunk_job *job);

/** Bytes of a whole chunk of `item` in elements of `element` bytes. */
size_t fc_chunk_bytes(const fc_target *target, const fc_target_item *item, uint32_t element);

#endif
