/*
 * Checkpoints in memory: what a running program holds, as a source for fc_convert. So a training program writes every
 * format and layout that the command does, and a rank needs to hold no more than its own part.
 */
#ifndef FSDPCKPT_MEMORY_H
#define FSDPCKPT_MEMORY_H

#include "fsdpckpt/checkpoint.h"

#ifdef __cplusplus
extern "C" {
#endif

/** A box of a tensor in host memory. */
typedef struct fc_memory_chunk {
    const int64_t *offsets, *sizes; /**< in the global tensor */
    const int64_t *strides;         /**< elements; NULL: row-major */
    const void *data;               /**< its first element; NULL: another rank has it (fc_convert_options.own_parts) */
} fc_memory_chunk;

/** A tensor whose chunks together are the whole of it. */
typedef struct fc_memory_tensor {
    const char *name; /**< FQN, unique */
    fc_path path;     /**< of the nested state dict; no elements: the name alone */
    fc_dtype dtype;
    int ndim;
    const int64_t *shape;
    const fc_memory_chunk *chunks; /**< empty ones may be among them */
    size_t nchunks;
} fc_memory_tensor;

/**
 * Makes a checkpoint of `count` tensors.
 * @param label in messages, in the place of a path: "step 100 of the training".
 * @param out   receives the checkpoint, for fc_checkpoint_close. It copies descriptions and borrows the data.
 * @return FC_EUSAGE naming the tensor: a name twice, a chunk outside of its tensor.
 */
fc_code fc_checkpoint_in_memory(const char *label, const fc_memory_tensor *tensors, size_t count, fc_checkpoint **out,
                                fc_error *err);

#ifdef __cplusplus
}
#endif
#endif
