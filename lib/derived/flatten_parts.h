/*
 * What the two files that make flat parameters share: flatten.c makes those of the model and computes all of them,
 * flatten_state.c those of an optimizer's state.
 */
#ifndef FSDPCKPT_DERIVED_FLATTEN_PARTS_H
#define FSDPCKPT_DERIVED_FLATTEN_PARTS_H

#ifndef FSDPCKPT_PRIVATE
#error "this header is private to fsdpckpt: include <fsdpckpt/...> instead"
#endif

#include "fsdpckpt/flatten.h"

#include <stdatomic.h>

/** Where a value comes from: fc_tensor.detail. */
typedef struct fc_flat_value {
    const fc_tensor *tensor; /**< the source's, which it is; NULL: a flat one, or `text` */
    const char *text;        /**< of an object that is not the source's: its JSON */
    fc_flat_layout layout;
    const fc_tensor **params; /**< the source's, one for each of the layout's; NULL: zeros */
    atomic_bool *read;        /**< of each piece: it was read, and what was read of the source is in its sums */
} fc_flat_value;

/** The checkpoint in progress. */
typedef struct fc_flattener {
    fc_checkpoint *out;
    const fc_checkpoint *source;
    const fc_target *target;
    const fc_module_tree *tree;
    const fc_units *units;
    const fc_flat_layout *layouts; /**< of each unit that has parameters */
    int64_t ranks;
    uint64_t next; /**< where the next piece lies in a file that does not exist: each at a place of its own */
    fc_tensor *tensors;
    size_t count, capacity;
    fc_error *err;
} fc_flattener;

/** A new value, with a detail that it owns; NULL when out of memory. */
fc_tensor *fc_flatten_add(fc_flattener *f, fc_flat_value **value);

/** Adds a value as it is, under its wanted name. */
fc_code fc_flatten_keep(fc_flattener *f, const fc_target_tensor *w);

/** Gives a flat tensor of `numel` elements its shape and its pieces, none of which reaches over a cut between ranks. */
fc_code fc_flatten_cut(fc_flattener *f, fc_tensor *t, fc_flat_value *value, int64_t numel);

/** Whether the elements of a tensor of the source are all there: holes are found before anything is written. */
fc_code fc_flatten_check_whole(const fc_flattener *f, const fc_tensor *t);

/** Marks the target values that are the state of an optimizer, whose numbers change. @param is one a target value */
void fc_flatten_find_state(const fc_flattener *f, bool *is);

/**
 * Adds these, as optimizer.state_dict() has them of flat parameters: numbered in the order of the wrapped model's
 * parameters, each rank's part with its padding.
 */
fc_code fc_flatten_state(fc_flattener *f, fc_arena *scratch);

#endif
