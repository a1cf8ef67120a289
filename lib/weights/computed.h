/*
 * A checkpoint in which some tensors are computed from those of others while they are read, block by block. All other
 * values are those of its first source, unchanged.
 */
#pragma once

#include "fsdpckpt/checkpoint.h"
#include "integrity/source_crc.h"

enum {
    FC_COMPUTED_BLOCK = 512 << 10, /**< bytes of a computed block. A worker holds one and its inputs */
    FC_COMPUTED_EDGE = 480         /**< rows and columns of a block of a matrix that is transposed */
};

enum { FC_WORK_BUFFERS = 5 };

/** Buffers that are kept from block to block, so that their pages are mapped once. One worker uses them at a time. */
typedef struct fc_work {
    void *bytes[FC_WORK_BUFFERS];
    size_t sizes[FC_WORK_BUFFERS];
    const void *holds; /**< what the buffers hold for later blocks, at `from` and of `extent`; NULL: nothing */
    int64_t from[FC_MAX_DIMS], extent[FC_MAX_DIMS];
    struct fc_work *next; /**< in the list of unused ones */
} fc_work;

/** @return buffer number `which`, with room for `size` bytes, or NULL when out of memory. Its content is undefined. */
void *fc_work_buffer(fc_work *work, int which, size_t size);

/** A block to compute, in row-major order. */
typedef struct fc_computed_block {
    const fc_tensor *tensor; /**< of the computed checkpoint */
    const void *what;        /**< as passed to fc_computed_add */
    fc_box box;              /**< of the tensor */
    fc_checkpoint *const *sources;
    /** One per source: receives the CRCs of what this block alone reads. The members are NULL if it was computed
     *  before. What several blocks read is not added, but named to fc_computed_shares. */
    fc_source_crc *const *crcs;
    fc_work *work;
    void *out;
} fc_computed_block;

/** Computes a block. Thread-safe. */
typedef fc_code fc_compute(const fc_computed_block *block, fc_error *err);

/**
 * Makes a checkpoint without values.
 * @param sources their values are used; the first one names the checkpoint.
 * @param most    the most values that will be added.
 */
fc_code fc_computed_new(fc_checkpoint *const *sources, size_t count, size_t most, fc_checkpoint **out, fc_error *err);

/** Adds a value of the first source, unchanged. */
fc_code fc_computed_keep(fc_checkpoint *computed, const fc_tensor *tensor, fc_error *err);

/** Adds a value of the first source under another name, which is copied. */
fc_code fc_computed_keep_as(fc_checkpoint *computed, const fc_tensor *tensor, const char *name, fc_error *err);

/** Adds an object of the first source with another value: `text`, which must live as long as the checkpoint. */
fc_code fc_computed_text(fc_checkpoint *computed, const fc_tensor *object, const char *text, fc_error *err);

/**
 * Adds a tensor that is computed.
 * @param like    its name (copied unless `name` is given), path, dtype, ndim and shape; the rest is ignored.
 * @param name    another name, or NULL.
 * @param block   the sizes of a block; blocks at the edges have less.
 * @param compute with `what`, which must live as long as the checkpoint.
 */
fc_code fc_computed_add(fc_checkpoint *computed, const fc_tensor *like, const char *name, const int64_t *block,
                        fc_compute *compute, const void *what, fc_error *err);

/** Says about how many bytes of the sources are read for each byte of the value that was added last. */
void fc_computed_reads(fc_checkpoint *computed, uint32_t reads);

/** Computes the sizes of blocks of about FC_COMPUTED_BLOCK bytes that are contiguous in the tensor. */
void fc_computed_run(const fc_tensor *like, int64_t *block);

/** Says that several blocks read the same of `tensor`, of source `source`: it is compared with its digests at the end.
 */
fc_code fc_computed_shares(fc_checkpoint *computed, size_t source, const fc_tensor *tensor, fc_error *err);

/**
 * Completes the checkpoint: fc_checkpoint_close of it now closes the sources.
 * @return FC_EUSAGE if two values have the same name.
 */
fc_code fc_computed_own(fc_checkpoint *computed, fc_error *err);
