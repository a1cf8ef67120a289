/*
 * Checkpoints in memory: the arrays of a running program as a source for fc_convert. A training program can write every
 * format and layout that the command can, and each rank needs to hold only its own shard.
 */
#pragma once

#include "fsdpckpt/checkpoint.h"

FC_BEGIN_DECLS

/** A box of a tensor in host memory. */
typedef struct fc_memory_chunk {
    const int64_t *offsets, *sizes; /**< the box in the global tensor, in elements */
    const int64_t *strides;         /**< in elements; NULL: row-major */
    const void *data; /**< the first element; NULL: another rank holds the box (fc_convert_options.own_shards) */
} fc_memory_chunk;

/** A tensor, or an object. Its chunks together cover it. */
typedef struct fc_memory_tensor {
    const char *name; /**< FQN, unique */
    fc_path path;     /**< place in the nested state dict; without elements, the name is used */
    fc_dtype dtype;
    int ndim;
    const int64_t *shape;
    const fc_memory_chunk *chunks; /**< may include empty ones */
    size_t nchunks;
    const uint32_t *ranks; /**< for each chunk, the rank that holds it; NULL: unknown */
    /** Of an object, which has the dtype FC_OPAQUE, one dimension and one chunk: a name that fc_object_encoding_find
     *  knows. NULL for a tensor. */
    const char *encoding;
    const char *tied_to; /**< an earlier tensor that is the same memory, for fc_find_ties; NULL: none */
} fc_memory_tensor;

/**
 * Makes a checkpoint of `count` tensors and objects.
 * @param label stands for the path in messages, e.g. "step 100 of the training".
 * @param out   receives the checkpoint, which the caller closes. It copies the descriptions and borrows the data.
 * @return FC_EUSAGE with the name of the tensor: a name that occurs twice, a chunk outside of its tensor, or an object
 * of an unknown encoding or with another dtype or shape.
 */
fc_code fc_checkpoint_in_memory(const char *label, const fc_memory_tensor *tensors, size_t count, fc_checkpoint **out,
                                fc_error *err);

/** Sets the data of chunk `chunk` of value `index`, which another rank had so far. Not while the chunk is being read.
 */
void fc_memory_set_data(const fc_checkpoint *checkpoint, size_t index, size_t chunk, const void *data);

/**
 * Records a layout in a checkpoint in memory, so that fc_selection.keep_layout gives it to a target.
 * @param placements mesh->ndim entries for each value; copied.
 */
fc_code fc_memory_set_layout(fc_checkpoint *checkpoint, const fc_mesh *mesh, const fc_placement *placements,
                             fc_error *err);

FC_END_DECLS
