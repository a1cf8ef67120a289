/*
 * The order of the chunks of one file that several ranks compress. The ranks go in rounds: in each, every rank
 * compresses a band of consecutive chunks, the ranks exchange the sizes, rank 0's writer places all chunks of the round
 * in their order, and every rank writes its own. So the file is the same as with one rank. With one process there are
 * no rounds, and `comm` is NULL.
 */
#pragma once

#include "fsdpckpt/comm.h"
#include "fsdpckpt/format.h"
#include "move/chunks.h"

typedef struct fc_rounds {
    fc_comm *comm;        /**< borrowed; NULL: one process */
    uint64_t band;        /**< chunks of each rank in a round, but for the last */
    uint64_t total;       /**< chunks of the file */
    uint64_t count, done; /**< rounds */
    uint64_t stored;      /**< bytes of all chunks that have a place */
    uint64_t end;         /**< where the last of them ends in the file */
    fc_chunk_walk walk;   /**< on rank 0: the next chunk to place */
    uint64_t *sizes;      /**< of all chunks of the round, see fc_round_size; comm->size * band */
    uint64_t *offsets;    /**< out: where they are in the file */
} fc_rounds;

/** One number of fc_rounds.sizes. @param raw the bytes are the elements unchanged. */
static inline uint64_t fc_round_size(uint64_t size, bool raw) {
    return size << 1 | raw;
}

/**
 * Agrees on the outcome so far and on the band. Collective.
 * @param most chunks that this rank can hold at a time.
 */
fc_code fc_rounds_init(fc_rounds *rounds, fc_comm *comm, fc_code mine, const fc_target *target,
                       const fc_target_file *file, uint64_t most, fc_error *err);
void fc_rounds_free(fc_rounds *rounds);

/** Returns how many chunks this rank has in the round that comes next. */
uint64_t fc_rounds_own(const fc_rounds *rounds);

/** Returns the index of this rank's first chunk in `sizes` and `offsets`. */
static inline uint64_t fc_rounds_first(const fc_rounds *rounds) {
    return rounds->band * (uint64_t)rounds->comm->rank;
}

/**
 * Agrees on the outcome so far, and exchanges this rank's sizes for offsets. Collective.
 * @param writer used on rank 0.
 */
fc_code fc_rounds_exchange(fc_rounds *rounds, fc_code mine, fc_writer *writer, fc_error *err);
