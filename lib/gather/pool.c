/*
 * The pool of device memory. The sizes of a unit repeat in every step, so earlier blocks fit.
 */
#include "gather/pool.h"

#include "fsdpckpt/try.h"

#include <stdlib.h>

/* A block may be at most twice as large as requested, so that no small buffer occupies a large block. */
static bool block_fits(const fc_block *b, size_t bytes) {
    return b->taken == 0 && b->bytes >= bytes && b->bytes / 2 <= bytes;
}

/* Returns the smallest block that `stream` gave back itself. */
static fc_block *own_block(const fc_pool *pool, size_t bytes, const fc_stream *stream) {
    fc_block *best = NULL;
    for (fc_block *b = pool->blocks; b; b = b->next) {
        if (block_fits(b, bytes) && b->giver == stream && (!best || b->bytes < best->bytes)) {
            best = b;
        }
    }
    return best;
}

/* Returns the block that was given back the longest ago, if enough of them are free. */
static fc_block *oldest_block(const fc_pool *pool, size_t bytes) {
    fc_block *oldest = NULL;
    int found = 0;
    for (fc_block *b = pool->blocks; b; b = b->next) {
        if (block_fits(b, bytes)) {
            found++;
            oldest = !oldest || b->given < oldest->given ? b : oldest;
        }
    }
    return found >= pool->spare ? oldest : NULL;
}

static fc_code allocate_memory(const fc_pool *pool, size_t bytes, void **out, fc_error *err) {
    return pool->comm ? pool->comm->on_device->alloc(pool->comm, bytes, out, err)
                      : pool->device->alloc(pool->device, bytes, out, err);
}

static void release_memory(const fc_pool *pool, void *memory) {
    if (pool->comm) {
        pool->comm->on_device->release(pool->comm, memory);
    } else {
        pool->device->release(pool->device, memory);
    }
}

static fc_code new_block(fc_pool *pool, size_t bytes, fc_block **out, fc_error *err) {
    fc_block *b = calloc(1, sizeof *b);
    FC_NEED(b, err, NULL);
    fc_code rc;
    FC_TRY_GOTO(pool->device->event_new(pool->device, &b->done, err), rc, fail);
    FC_TRY_GOTO(allocate_memory(pool, bytes, &b->memory, err), rc, fail);
    b->bytes = bytes;
    pool->allocated += bytes;
    b->next = pool->blocks;
    pool->blocks = b;
    *out = b;
    return FC_OK;
fail:
    if (b->done) {
        pool->device->event_free(pool->device, b->done);
    }
    free(b);
    return rc;
}

fc_code fc_pool_take(fc_pool *pool, size_t bytes, fc_stream *stream, fc_block **out, fc_error *err) {
    bytes = bytes > 0 ? bytes : 1;
    fc_block *b = own_block(pool, bytes, stream);
    b = b ? b : oldest_block(pool, bytes);
    if (!b) {
        FC_TRY(new_block(pool, bytes, &b, err));
    }
    if (b->given > 0 && b->giver != stream) {
        FC_TRY(pool->device->wait(pool->device, stream, b->done, err));
    }
    b->taken = bytes;
    pool->in_use += bytes;
    pool->peak = pool->in_use > pool->peak ? pool->in_use : pool->peak;
    *out = b;
    return FC_OK;
}

fc_code fc_pool_give(fc_pool *pool, fc_block **block, fc_stream *stream, fc_error *err) {
    fc_block *b = *block;
    if (!b) {
        return FC_OK;
    }
    FC_TRY(pool->device->record(pool->device, b->done, stream, err));
    pool->in_use -= b->taken;
    b->taken = 0;
    b->given = ++pool->gives;
    b->giver = stream;
    *block = NULL;
    return FC_OK;
}

void fc_pool_clear(fc_pool *pool) {
    while (pool->blocks) {
        fc_block *b = pool->blocks;
        pool->blocks = b->next;
        pool->device->event_free(pool->device, b->done);
        release_memory(pool, b->memory);
        free(b);
    }
    pool->in_use = pool->allocated = 0;
}
