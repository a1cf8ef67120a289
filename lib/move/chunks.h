/*
 * Hands out the compressed chunks of a target file in the order in which they are written. Each comes with the proof
 * that the source covers it.
 */
#pragma once

#include "fsdpckpt/plan.h"
#include "fsdpckpt/select.h"
#include "integrity/tile_digest.h"

/* A worker takes at most this many consecutive chunks at once. Neighbours overlap the same chunks of the source. */
enum { FC_RUN_CHUNKS = 4 };

/** A target item whose chunks are being compressed. The last user frees it. */
typedef struct fc_chunked_item {
    const fc_target_item *item;
    const fc_target_tensor *target;
    fc_coverage *coverage;
    fc_item_digest digest;
    const struct fc_chunks *chunks;
    unsigned users;
} fc_chunked_item;

/** Walks over all chunks of a target file, in the order of writing. */
typedef struct fc_chunk_walk {
    const fc_target *target;
    fc_target_item **items; /**< the items that are stored in chunks, sorted by offset; owned */
    size_t nitems;
    size_t next;                /**< the item of the next chunk; nitems: none is left */
    int64_t start[FC_MAX_DIMS]; /**< of the next chunk, in elements within the item */
    uint64_t number;            /**< of the next chunk, from 0 */
} fc_chunk_walk;

fc_code fc_chunk_walk_init(fc_chunk_walk *walk, const fc_target *target, const fc_target_file *file, fc_error *err);
void fc_chunk_walk_free(fc_chunk_walk *walk);

/** Goes to the next chunk. There must be one. */
void fc_chunk_walk_step(fc_chunk_walk *walk);

/** Returns the number of chunks of an item. */
uint64_t fc_chunk_count(const fc_target *target, const fc_target_item *item);

/** One chunk to compress. */
typedef struct fc_chunk_job {
    fc_chunked_item *of;
    uint64_t number;             /**< position in the order of writing among the chunks of this process, from 0 */
    int64_t start[FC_MAX_DIMS];  /**< in elements, within the item */
    int64_t offset[FC_MAX_DIMS]; /**< in elements, within the whole tensor */
    int64_t sizes[FC_MAX_DIMS];  /**< in elements; smaller than item->chunk at the item's edge */
    fc_tile_digest digest;       /**< out: digests of the compressed elements */
} fc_chunk_job;

/** The chunks of one target file that this process compresses. Not thread-safe: the caller holds a lock around each
 *  call. */
typedef struct fc_chunks {
    const fc_target *target;
    const fc_target_file *file;
    fc_chunk_walk walk;
    bool crc32;        /**< see fc_move_options */
    uint64_t *digests; /**< see fc_move_options; may be NULL */
    /** Several processes take bands of chunks in turn: this one the bands `share`, `share` + `shares`, …
     *  `shares` 0: one process. */
    uint64_t share, shares, band;
    fc_chunked_item *current; /**< the item of the next chunk, once a chunk of it was handed out; NULL before */
    int run;                  /**< chunks of `current` to hand out together */
    int longest_run;
    uint64_t taken;
} fc_chunks;

fc_code fc_chunks_init(fc_chunks *chunks, const fc_target *target, const fc_target_file *file, int longest_run,
                       fc_error *err);

/** Frees everything that is left, also after an error. No job may be in use. */
void fc_chunks_destroy(fc_chunks *chunks);

/** Takes up to FC_RUN_CHUNKS jobs, all of the same item. Sets `*count` to 0 when no chunk is left. */
fc_code fc_chunks_take(fc_chunks *chunks, fc_chunk_job *jobs, int *count, fc_error *err);

/** Returns a job and adds its digest to the item's. Call it for every job taken, also after a failure. */
void fc_chunks_give_back(fc_chunk_job *job);

/** Returns the bytes of a whole chunk of `item` with elements of `element` bytes. */
size_t fc_chunk_bytes(const fc_target *target, const fc_target_item *item, uint32_t element);
