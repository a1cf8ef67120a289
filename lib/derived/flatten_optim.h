/*
 * The numbering of an optimizer's state for flat parameters. flatten_groups.c computes it; flatten_state.c builds the
 * values.
 */
#pragma once

#include "base/name_table.h"
#include "derived/flatten_private.h"
#include "derived/optim_name.h"

/** A parameter of the wrapped model: a flat one, or one that no unit manages. */
typedef struct fc_optim_slot {
    const fc_unit *unit; /**< NULL for a parameter without a unit */
    uint32_t parameter;  /**< index in the tree, when there is no unit */
    size_t group;        /**< FC_NO_NAME: the optimizer does not have it */
    size_t number;
} fc_optim_slot;

/** An optimizer: all target values whose paths have the same start. */
typedef struct fc_optim {
    const fc_target_tensor *first; /**< any of its values: used in messages and for the start of the paths */
    fc_optim_name prefix;          /**< only levels and extra are used */
    fc_arena *scratch;
    fc_optim_slot *slots; /**< in the order of the wrapped model's parameters() */
    size_t nslots;
    size_t *slot_of;          /**< one slot per parameter of the tree; FC_NO_NAME for buffers */
    fc_name_table *names;     /**< from a parameter's name or number in the state to its index in the tree */
    size_t ngroups;           /**< 1 when the groups are flattened */
    size_t *members;          /**< number of slots per group */
    bool numbered, flattened; /**< whether the state numbers its parameters; whether the groups are flattened */
} fc_optim;

/** Returns whether a value belongs to this optimizer. */
bool fc_optim_has(const fc_optim *o, const fc_target_tensor *w, const fc_optim_name *n);

/** Splits the path of a target value. Returns whether it belongs to a group of this optimizer. */
bool fc_optim_in_group(const fc_optim *o, const fc_target_tensor *w, fc_optim_name *n);

/** Reads the groups of the optimizer and numbers its slots, group by group. */
fc_code fc_optim_number(const fc_flattener *f, fc_optim *o);

/**
 * Returns the tree's index of the named parameter (the first one when it is shared), or FC_NO_NAME. Also returns
 * FC_NO_NAME when out of memory.
 */
size_t fc_optim_parameter(const fc_flattener *f, const fc_optim *o, const fc_optim_name *n);
