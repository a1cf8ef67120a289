/*
 * Device memory for what comes and goes in a step: unsharded parameters and temporary gradients. A block that is given
 * back is used again by whoever takes it, after the work that used it last: the order is kept by events, nobody waits
 * on the host, and memory does not grow with how far the host runs ahead (what torch needs its rate limiter for).
 */
#ifndef FSDPCKPT_TRAIN_POOL_H
#define FSDPCKPT_TRAIN_POOL_H

#ifndef FSDPCKPT_PRIVATE
#error "this header is private to fsdpckpt: include <fsdpckpt/...> instead"
#endif

#include "fsdpckpt/device.h"

typedef struct fc_block {
    struct fc_block *next;
    void *memory;
    size_t bytes; /* that it has room for */
    size_t asked; /* 0: free */
    fc_event *done;
    bool used; /* `done` has been recorded */
} fc_block;

typedef struct fc_pool {
    fc_device *device;
    fc_block *blocks;
    size_t now, peak; /* bytes asked for */
} fc_pool;

/** A block of `bytes` for work on `stream`. */
fc_code fc_pool_take(fc_pool *pool, size_t bytes, fc_stream *stream, fc_block **out, fc_error *err);

/** Gives the block back, to be used again after what `stream` has been given so far; *block becomes NULL. */
fc_code fc_pool_give(fc_pool *pool, fc_block **block, fc_stream *stream, fc_error *err);

/** Releases all memory, of blocks that are taken, too. All streams must be done. */
void fc_pool_clear(fc_pool *pool);

#endif
