/*
 * Device memory for unsharded parameters and temporary gradients, which are short-lived. A block that was given back is
 * reused after the work that used it last. Events keep that order, so the host never waits, and memory does not grow
 * with how far the host runs ahead of the device (torch needs a rate limiter for that).
 */
#ifndef FSDPCKPT_TRAIN_POOL_H
#define FSDPCKPT_TRAIN_POOL_H

#ifndef FSDPCKPT_PRIVATE
#error "this header is private to fsdpckpt: include <fsdpckpt/...> instead"
#endif

#include "fsdpckpt/device.h"

/** A block of device memory, owned by its pool. */
typedef struct fc_block {
    struct fc_block *next;
    void *memory;
    size_t bytes;   /**< size of the memory */
    size_t taken;   /**< bytes that were requested; 0 if the block is free */
    fc_event *done; /**< the end of the work that used the block last; owned */
    bool recorded;  /**< whether `done` has been recorded */
} fc_block;

/** A pool; all zero except for `device`, it is empty. */
typedef struct fc_pool {
    fc_device *device;
    fc_block *blocks;
    size_t in_use, peak; /**< requested bytes of the taken blocks, now and at most so far */
} fc_pool;

/** Takes a block of `bytes` bytes for work on `stream`. */
fc_code fc_pool_take(fc_pool *pool, size_t bytes, fc_stream *stream, fc_block **out, fc_error *err);

/** Gives the block back and sets *block to NULL. Its next user waits for the work that `stream` has so far. */
fc_code fc_pool_give(fc_pool *pool, fc_block **block, fc_stream *stream, fc_error *err);

/** Releases all blocks, including those that are taken. All work that uses them must be done. */
void fc_pool_clear(fc_pool *pool);

#endif
