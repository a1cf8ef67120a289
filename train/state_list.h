/*
 * The tensors of a state dict, and the boxes of them that this rank has.
 */
#pragma once

#include "fsdpckpt/arena.h"
#include "fsdpckpt/train/state_dict.h"

/** A tensor of the state dict. */
typedef struct fc_state_tensor {
    const char *name;
    fc_path path;
    fc_dtype dtype;
    int ndim;
    const int64_t *shape;
    int64_t least; /**< of a flat state: its elements without padding at the end. 0: the shape is exact */
    fc_placement placements[FC_MAX_MESH_DIMS];
} fc_state_tensor;

/** A box of a tensor that this rank has. Its elements are those of a contiguous array. */
typedef struct fc_state_box {
    size_t tensor;
    const int64_t *dims;    /**< 2 × ndim: offsets, then sizes */
    const int64_t *strides; /**< in elements of the array */
    size_t array;           /**< index into fc_state_list.arrays */
    int64_t at;             /**< the first element in the array */
} fc_state_box;

typedef struct fc_state_list {
    fc_fsdp *fsdp;
    fc_arena *arena; /**< owns names, paths and numbers */
    fc_mesh mesh;    /**< the ranks: replicate, dp, tp, without those that there are none of */
    int tp;          /**< the dimension of tensor parallelism; -1: none */
    int64_t tp_rank; /**< the place of this rank in it */
    fc_state_tensor *tensors;
    size_t ntensors, tensor_capacity;
    fc_state_box *boxes;
    size_t nboxes, box_capacity;
    fc_array *arrays; /**< views */
    size_t narrays, array_capacity;
    fc_array *made; /**< buffers in their own dtype */
    size_t nmade, made_capacity;
} fc_state_list;

/** Lists a state, to save or to load it. Free it even after a failure. */
fc_code fc_state_list_new(const fc_fsdp_state *state, fc_state_dict_type type, bool for_load, fc_state_list *out,
                          fc_error *err);
void fc_state_list_free(fc_state_list *list);

/** The data of a box on the host: `memory` has a copy of each array. */
static inline void *fc_state_box_data(const fc_state_list *list, const fc_state_box *box, void *const *memory) {
    return (char *)memory[box->array] + (size_t)box->at * fc_dtype_size(list->tensors[box->tensor].dtype);
}

/**
 * Makes a checkpoint in memory that describes the boxes of all ranks, and has the data of those of this rank.
 * Collective.
 * @param memory a copy of each of list->arrays on the host; borrowed.
 */
fc_code fc_state_gather(const fc_state_list *list, void *const *memory, fc_comm *ranks, fc_checkpoint **out,
                        fc_error *err);
