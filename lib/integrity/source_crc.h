/*
 * Compares what was read of a source with the CRCs that the source records: per chunk (fc_extent.crc32 for records of
 * torch's zip archives, fc_extent.crc64 for safetensors written by fsdpckpt), and per tensor (fc_checkpoint_digest).
 *
 * CRCs are linear, so the CRC of a chunk or tensor is the sum of what workers and ranks read of it, in any order. If
 * only some of a record was read, or several chunks share a record (flat parameters, DeepSpeed's partitions, views),
 * record_crc.h reads the rest at the end.
 */
#pragma once

#include "base/crc.h"
#include "codec/strided.h"
#include "fsdpckpt/checkpoint.h"
#include "fsdpckpt/comm.h"

#include <stdatomic.h>

/** The sums of some of a checkpoint's tensors and of their chunks. All workers share it. */
typedef struct fc_source_crc fc_source_crc;

/** @param tensors the tensors that will be read: `count` consecutive elements of checkpoint->tensors. */
fc_code fc_source_crc_new(const fc_checkpoint *checkpoint, const fc_tensor *tensors, size_t count, fc_source_crc **out,
                          fc_error *err);
void fc_source_crc_free(fc_source_crc *crc);

/** Adds up what the ranks have read. Collective, unless `comm` is NULL. */
fc_code fc_source_crc_join(fc_source_crc *crc, fc_comm *comm, fc_error *err);

/** Reads a box of a tensor again. @param crc64 receives the CRC-64 of its elements in row-major order. */
typedef fc_code fc_read_again(const fc_checkpoint *checkpoint, const fc_tensor *tensor, const fc_box *box,
                              uint64_t *crc64, fc_error *err);

/**
 * Compares all sums with the recorded CRCs. A sum that is incomplete, or to which some bytes were added twice, is
 * computed again from the files, tensors by `again` (fc_read_crc64); the ranks of `comm` (may be NULL) divide that
 * work.
 * @return FC_ECORRUPT when a record or a completely read tensor does not match.
 */
fc_code fc_source_crc_check(const fc_source_crc *crc, const fc_comm *comm, fc_read_again *again, fc_error *err);

/** What else must be known of what was read, so that another process can go on with it: flags or numbers. */
typedef struct fc_read_state {
    atomic_bool *flags; /**< which chunks of a value that is computed were read, so that their bytes are in the sums,
                           and are not added again; or NULL */
    uint64_t *numbers;  /**< such as how far a checksum is; or NULL */
    size_t count;
} fc_read_state;

/** The sum of one chunk or tensor, as numbers that another process can add its own to. */
typedef struct fc_saved_sum {
    uint64_t bytes, sum, recorded, layout; /**< bytes 0: nothing was read */
} fc_saved_sum;

/** Returns how many sums there are: one per chunk, then one per tensor. */
size_t fc_source_crc_count(const fc_source_crc *crc);

/** Returns sum number `index`. No worker may be reading. */
fc_saved_sum fc_source_crc_save(const fc_source_crc *crc, size_t index);

/** Adds a saved sum to sum number `index`. @return false if it cannot be one of this source. */
bool fc_source_crc_load(fc_source_crc *crc, size_t index, const fc_saved_sum *saved);

/** @param found the CRC-64 of all elements of `tensor`. @return FC_ECORRUPT when the source records another one. */
fc_code fc_source_check_digest(const fc_checkpoint *checkpoint, const fc_tensor *tensor, uint64_t found, fc_error *err);

/**
 * Sets `*wants` to whether the source records a CRC-64 of the whole tensor, so that its elements must be added.
 * Thread-safe.
 */
fc_code fc_source_crc_wants(fc_source_crc *crc, const fc_tensor *tensor, bool *wants, fc_error *err);

/**
 * Adds the elements of a box of the tensor, which are at `bytes` in row-major order; if it `repeats` one element, that
 * one. Thread-safe.
 */
fc_code fc_source_crc_add(fc_source_crc *crc, const fc_tensor *tensor, const fc_box *box, bool repeats,
                          const unsigned char *bytes, fc_error *err);

/** How the elements of a chunk are laid out in their record. */
typedef enum fc_crc_layout {
    FC_CRC_NONE,      /**< the chunk has no CRC that could be compared */
    FC_CRC_WHOLE,     /**< the record holds each element exactly once, in any order of the axes, and nothing else */
    FC_CRC_RUN,       /**< the elements are a contiguous part of the record */
    FC_CRC_SCATTERED, /**< the elements are strided, so they are not summed up */
    FC_CRC_WIDE       /**< like FC_CRC_WHOLE, with a CRC-64 */
} fc_crc_layout;

enum { FC_CRC_DISTANCES = 8 };

/** Collects the CRC of some bytes of one chunk, in ascending order. One per worker, reusable; starts zeroed. */
typedef struct fc_crc_walk {
    uint64_t at;    /**< where the last run ended, in bytes from the start of the stored ones */
    uint64_t bytes; /**< added so far */
    uint64_t sum;   /**< bare CRC of the bytes before `at` */
    fc_crc_layout layout;
    bool wanted; /**< whether runs are to be added */
    struct {
        uint64_t distance;
        union {
            fc_crc32_factor of32;
            fc_crc64_factor of64; /**< for FC_CRC_WIDE */
        } factor;
    } known[FC_CRC_DISTANCES]; /**< a cache: the same few distances occur again and again */
} fc_crc_walk;

/** Begins a new overlap with a chunk. Afterwards `layout` says whether there is a CRC to compare with. */
void fc_crc_walk_begin(fc_crc_walk *walk, const fc_tensor *tensor, size_t chunk, const fc_extent *extent);

/** Adds `size` bytes that are `at` bytes after the start of the stored ones. */
void fc_crc_walk_add(fc_crc_walk *walk, uint64_t at, const unsigned char *bytes, size_t size);

/**
 * Adds the source bytes of a copy, the first of which is `at` bytes after the start of the chunk. Runs that are
 * contiguous in the source may be longer than those of the copy.
 */
void fc_crc_walk_add_strided(fc_crc_walk *walk, uint64_t at, const fc_strided *step, const unsigned char *bytes);

/** Adds the collected bytes to the chunk's sum. Thread-safe. */
void fc_crc_walk_end(const fc_crc_walk *walk, fc_source_crc *crc, const fc_tensor *tensor, size_t chunk,
                     const fc_extent *extent);
