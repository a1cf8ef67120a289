/*
 * Reads whole tensors once, with several threads and in constant memory, and shows each tile to the caller.
 */
#ifndef FSDPCKPT_READ_SCAN_H
#define FSDPCKPT_READ_SCAN_H

#include "fsdpckpt/plan.h"
#include "fsdpckpt/read.h"

/** What the caller does with the tiles of tensors[index]. Each tensor is begun before its first tile and ended once. */
typedef struct fc_scan_visitor {
    void *context;
    size_t scratch; /**< bytes of memory, zeroed at the start, for each worker */
    /** Returns the state of a tensor, or NULL when out of memory. Only one thread at a time. */
    void *(*begin)(void *context, size_t index);
    /**
     * Looks at `count` elements, each of which stands for `times` equal ones, in the tensor's dtype and native byte
     * order. Several threads at a time.
     */
    void (*tile)(void *context, size_t index, void *scratch, const unsigned char *elements, size_t count,
                 uint64_t times);
    /** Adds what `tile` left in `scratch` to the state. Only one thread at a time. */
    void (*add)(void *context, size_t index, void *state, void *scratch);
    /** Only one thread at a time. @param complete false after an error: some tiles were not added. */
    void (*end)(void *context, size_t index, void *state, bool complete);
} fc_scan_visitor;

/**
 * Reads `count` tensors. Those without elements are not shown. What is read is compared with the recorded digests and
 * CRCs.
 */
fc_code fc_scan(const fc_checkpoint *checkpoint, const fc_tensor *const *tensors, size_t count,
                const fc_work_options *options, const fc_scan_visitor *visitor, fc_error *err);

#endif
