/*
 * Divides the memory of a compression among workers' buffers, slots for compressed chunks, and decoded chunks of the
 * source.
 */
#pragma once

#include "fsdpckpt/select.h"

/** The largest chunk, and how the memory is divided. */
typedef struct fc_compress_sizes {
    size_t chunk;    /**< bytes, in the target's dtype */
    size_t source;   /**< bytes, in the source's dtype */
    bool casts;      /**< some item changes its dtype */
    bool decodes;    /**< some item's source is itself compressed */
    uint64_t chunks; /**< at least this many */
    int threads;
    int slots;
    int run;          /**< chunks that a worker takes at once, at most */
    uint64_t decoded; /**< bytes for decoded chunks of the source */
} fc_compress_sizes;

/** The bytes of the buffer that holds a chunk before the cast, or the result when nothing is cast. */
static inline size_t fc_compress_read_size(const fc_compress_sizes *s) {
    return s->source > s->chunk ? s->source : s->chunk;
}

/** Finds the largest chunk of the file, and whether anything must be cast or decoded. */
void fc_compress_survey(const fc_target *target, const fc_target_file *file, fc_compress_sizes *s);

/**
 * Divides `memory`: workers' buffers, slots, and at least a quarter for decoded chunks.
 * @param parts  bytes that the parts of a file in a bucket take in addition to `memory`. Workers wait while they send
 * parts, so there are more workers.
 * @param threads 0: as many as are useful.
 */
fc_code fc_compress_divide(uint64_t memory, uint64_t parts, int threads, fc_compress_sizes *s, fc_error *err);
