/*
 * See pool.h. A unit's sizes repeat every step, so a list and best fit find the block that was there before.
 */
#include "train/pool.h"

#include <stdlib.h>

/* A block may be up to twice as large as asked for; more would let one small buffer hold a large one. */
static bool fits(const fc_block *b, size_t bytes) {
    return b->asked == 0 && b->bytes >= bytes && b->bytes / 2 <= bytes;
}

static fc_block *best_fit(const fc_pool *pool, size_t bytes) {
    fc_block *best = NULL;
    for (fc_block *b = pool->blocks; b; b = b->next) {
        if (fits(b, bytes) && (!best || b->bytes < best->bytes)) {
            best = b;
        }
    }
    return best;
}

static fc_code new_block(fc_pool *pool, size_t bytes, fc_block **out, fc_error *err) {
    fc_block *b = calloc(1, sizeof *b);
    if (!b) {
        return fc_no_memory(err, NULL);
    }
    fc_code rc = pool->device->event_new(pool->device, &b->done, err);
    if (rc == FC_OK) {
        rc = pool->device->alloc(pool->device, bytes, &b->memory, err);
    }
    if (rc != FC_OK) {
        if (b->done) {
            pool->device->event_free(pool->device, b->done);
        }
        free(b);
        return rc;
    }
    b->bytes = bytes;
    b->next = pool->blocks;
    pool->blocks = b;
    *out = b;
    return FC_OK;
}

fc_code fc_pool_take(fc_pool *pool, size_t bytes, fc_stream *stream, fc_block **out, fc_error *err) {
    bytes = bytes > 0 ? bytes : 1;
    fc_block *b = best_fit(pool, bytes);
    fc_code rc = b ? FC_OK : new_block(pool, bytes, &b, err);
    if (rc == FC_OK && b->used) {
        rc = pool->device->wait(pool->device, stream, b->done, err);
    }
    if (rc != FC_OK) {
        return rc;
    }
    b->asked = bytes;
    pool->now += bytes;
    pool->peak = pool->now > pool->peak ? pool->now : pool->peak;
    *out = b;
    return FC_OK;
}

fc_code fc_pool_give(fc_pool *pool, fc_block **block, fc_stream *stream, fc_error *err) {
    fc_block *b = *block;
    if (!b) {
        return FC_OK;
    }
    fc_code rc = pool->device->record(pool->device, b->done, stream, err);
    if (rc == FC_OK) {
        pool->now -= b->asked;
        b->asked = 0;
        b->used = true;
        *block = NULL;
    }
    return rc;
}

void fc_pool_clear(fc_pool *pool) {
    while (pool->blocks) {
        fc_block *b = pool->blocks;
        pool->blocks = b->next;
        pool->device->event_free(pool->device, b->done);
        pool->device->release(pool->device, b->memory);
        free(b);
    }
    pool->now = 0;
}
