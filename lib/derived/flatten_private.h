/*
 * What flatten.c and flatten_state.c share. flatten.c builds the model's flat parameters and computes all of them;
 * flatten_state.c builds those of an optimizer's state.
 */
#pragma once

#include "derived/derived.h"
#include "fsdpckpt/flatten.h"

/** Where a value comes from. fc_tensor.detail points to it. */
typedef struct fc_flat_value {
    fc_origin from;
    fc_flat_layout layout;    /**< of a flat parameter, which is computed */
    const fc_tensor **params; /**< one source tensor per parameter of the layout; NULL: zeros */
} fc_flat_value;

/** A flattened checkpoint under construction. */
typedef struct fc_flattener {
    fc_checkpoint *out;
    const fc_checkpoint *source;
    const fc_target *target;
    const fc_module_tree *tree;
    const fc_units *units;
    const fc_flat_layout *layouts; /**< one per unit; unset for units without parameters */
    int64_t ranks;
    fc_tensor *tensors;
    size_t count, capacity;
    fc_error *err;
} fc_flattener;

/** Adds a tensor with its own detail, a computed one. Returns NULL when out of memory. */
fc_tensor *fc_flatten_add(fc_flattener *f, fc_flat_value **value);

/** Adds a source value unchanged, under its target name. */
fc_code fc_flatten_keep(fc_flattener *f, const fc_target_tensor *w);

/**
 * Sets the shape of a flat tensor of `numel` elements and divides it into chunks. No chunk crosses the boundary between
 * two ranks.
 */
fc_code fc_flatten_into_chunks(fc_flattener *f, fc_tensor *t, fc_flat_value *value, int64_t numel);

/** Checks that the chunks of a source tensor cover it, so that holes are found before anything is written. */
fc_code fc_flatten_check_whole(const fc_flattener *f, const fc_tensor *t);

/** Marks the target values that belong to an optimizer, because their numbers change. @param is one per target value */
void fc_flatten_find_state(const fc_flattener *f, bool *is);

/**
 * Adds the optimizers' values as optimizer.state_dict() has them for flat parameters: numbered in the order of the
 * wrapped model's parameters, each rank's shard padded.
 */
fc_code fc_flatten_state(fc_flattener *f, fc_arena *scratch);
