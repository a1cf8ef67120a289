/*
 * A model with deltas applied while it is read (fc_delta_patch): what its two files share.
 */
#pragma once

#include "delta/chain.h"
#include "delta/decode.h"
#include "derived/derived.h"

#include <pthread.h>

typedef struct fc_patch_reader fc_patch_reader;
typedef struct fc_patched_tensor fc_patched_tensor;

/** How far the checksum of a tensor is. Guarded by fc_patched.lock. */
typedef struct fc_patched_state {
    const fc_patched_tensor *of;
    const fc_tensor *tensor;
    bool read;                               /**< some of it was read */
    uint64_t summed;                         /**< bytes, from the start */
    uint64_t progress[FC_DELTA_SUM_NUMBERS]; /**< `sum` as numbers, for a run that goes on */
    fc_delta_sum *sum;                       /**< from malloc; NULL before the first block and after the last */
    struct fc_patched_state *next;           /**< in the list of those that were read */
} fc_patched_state;

/** fc_tensor.detail. */
struct fc_patched_tensor {
    fc_origin from;
    const fc_delta_link *link; /**< NULL: the tensor does not change */
    uint64_t bytes;
    fc_patched_state *state;
};

enum { FC_PATCH_KEPT = 6 };

/** A block that was read before those in front of it. */
typedef struct fc_patch_kept {
    const fc_patched_state *of; /**< NULL: none */
    uint64_t at;
    size_t size, room;
    unsigned char *bytes; /**< from malloc */
} fc_patch_kept;

/** A block that a worker computes. Blocks of one tensor take their turns in order, so that one reader serves them. */
typedef struct fc_patch_turn {
    const fc_patched_tensor *of;
    uint64_t at;
    struct fc_patch_turn *next;
} fc_patch_turn;

/** fc_checkpoint.state. */
typedef struct fc_patched {
    fc_derived base;
    fc_arena *headers; /**< owns the links */
    fc_delta_links links;
    pthread_mutex_t lock; /**< guards all that follows */
    pthread_cond_t given; /**< a turn is over, and its reader is idle */
    fc_patch_turn *turns;
    fc_patch_reader *idle;
    size_t readers, most_readers;
    fc_patched_state *states; /**< of the tensors that were read */
    fc_patch_kept kept[FC_PATCH_KEPT];
    size_t next_kept; /**< the one that is replaced next */
} fc_patched;

/** Computes the position of a block in its tensor, in bytes. */
uint64_t fc_patched_offset(const fc_tensor *tensor, size_t index);

/** Computes a block; an fc_derived_kind.compute. */
fc_code fc_patched_block(fc_derived *derived, const fc_tensor *tensor, size_t index, fc_source_crc *const *crcs,
                         void *buf, fc_error *err);

/** Adds a block to the checksum of its tensor, and compares this after the last one. */
fc_code fc_patched_sum(fc_patched *patched, fc_patched_state *state, uint64_t at, const unsigned char *bytes,
                       size_t size, fc_error *err);

/** Reads what the checksums of tensors that were read lack; an fc_derived_kind.check_inputs. */
fc_code fc_patched_check(const fc_checkpoint *checkpoint, const fc_comm *comm, fc_error *err);

void fc_patched_sums_free(fc_patched *patched);
