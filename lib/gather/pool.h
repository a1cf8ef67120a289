/*
 * Device memory for unsharded parameters and temporary gradients, which are short-lived. A block that was given back is
 * reused after the work that used it last. Events keep that order, so the host never waits, and memory does not grow
 * with how far the host runs ahead of the device (torch's limiter, limit_all_gathers, stops the host for that).
 *
 * A block may still be busy on the stream that gave it back. Its new user would then wait, and a gather would not
 * overlap with the computation before it. So a stream prefers blocks that it gave back itself, which cost no wait. Else
 * it takes the block that was given back the longest ago, but only if there are `spare` free ones; until then memory is
 * allocated.
 */
#pragma once

#include "fsdpckpt/gather/device_comm.h"

/** A block of device memory, owned by its pool. */
typedef struct fc_block {
    struct fc_block *next;
    void *memory;
    size_t bytes;   /**< size of the memory */
    size_t taken;   /**< bytes that were requested; 0 if the block is free */
    fc_event *done; /**< the end of the work that used the block last; owned */
    uint64_t given; /**< when it was given back, as a number that grows; 0: never */
    fc_stream *giver;
} fc_block;

/** A pool. An empty one is all zero except for `device`, `comm` and `spare`. */
typedef struct fc_pool {
    fc_device *device;
    fc_comm *comm; /**< allocates the memory; borrowed; NULL: the device does */
    int spare;     /**< free blocks that a stream needs to see before it waits for another stream's */
    fc_block *blocks;
    uint64_t gives;
    size_t in_use, peak; /**< requested bytes of the taken blocks, now and at most so far */
    size_t allocated;    /**< bytes of all blocks */
} fc_pool;

/** Takes a block of `bytes` bytes for work on `stream`. */
fc_code fc_pool_take(fc_pool *pool, size_t bytes, fc_stream *stream, fc_block **out, fc_error *err);

/** Gives the block back and sets *block to NULL. Its next user waits for the work that `stream` has so far. */
fc_code fc_pool_give(fc_pool *pool, fc_block **block, fc_stream *stream, fc_error *err);

/** Releases all blocks, including those that are taken. All work that uses them must be done. */
void fc_pool_clear(fc_pool *pool);
