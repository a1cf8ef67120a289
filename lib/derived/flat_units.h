/*
 * Maps the flat parameters of a checkpoint to the parameters of a model. flat_units.c and flat_fit.c compute the map;
 * unflatten.c builds a checkpoint from it.
 */
#pragma once

#include "fsdpckpt/flat_param.h"
#include "fsdpckpt/unflatten.h"

/** A parameter or buffer of the model, in the model's order. */
typedef struct fc_flat_member {
    const fc_tensor *tensor; /**< the model's */
    const char *key;         /**< in the state dict */
    const char *fqn;         /**< the key without wrapper components */
    size_t same_as;          /**< the first member with which it is tied; its own index when it is not tied */
    size_t unit;             /**< index into fc_flat_model.units, or SIZE_MAX */
    size_t stored;           /**< the source's own tensor of that name, or SIZE_MAX */
    bool flat;               /**< whether it is stored in the flat parameter of its unit */
} fc_flat_member;

/** A flat parameter. */
typedef struct fc_flat_unit {
    const fc_tensor *tensor; /**< the source's */
    size_t index;            /**< index of `tensor` in the source */
    const char *module;      /**< FQN of its module without wrapper components; "" for the root */
    size_t *below;           /**< members of its module and of submodules that have no flat parameter of their own */
    size_t nbelow;
    size_t *members; /**< those of `below` that are stored in it; tied ones as often as they occur */
    size_t nmembers;
    fc_flat_layout layout; /**< its params are the members that are not tied to earlier ones, in order */
} fc_flat_unit;

typedef struct fc_flat_model {
    fc_flat_member *members;
    size_t nmembers;
    fc_flat_unit *units; /**< in the source's order */
    size_t nunits;
} fc_flat_model;

/**
 * Returns whether a key of a state dict names a flat parameter. `*module` receives the length of its module's name,
 * without the dot.
 */
bool fc_is_flat_key(const char *key, size_t *module);

/** Returns the key of a value in its dict, which is the last element of its path. */
const char *fc_state_key(const fc_tensor *tensor);

/** Returns the name of `len` bytes without wrapper components, allocated from `arena`. NULL when out of memory. */
const char *fc_unwrapped(fc_arena *arena, const char *name, size_t len);

/** Returns whether two values are in the same dict. */
bool fc_same_dict(const fc_tensor *a, const fc_tensor *b);

/**
 * Returns the index of the path element that is a parameter's number, as torch's optimizers number them ("state", 3,
 * "exp_avg"), or 0 when there is none.
 */
size_t fc_state_number(const fc_tensor *t, size_t *number);

/** Returns whether the first `count` elements of two paths are equal. */
bool fc_same_prefix(const fc_tensor *a, const fc_tensor *b, size_t count);

/**
 * Sets `*fit` to whether param_groups.0.params, in the same optimizer as `state`, is the only group and lists one
 * number per flat parameter. Then every parameter is flat, and the numbers follow the order of the module's parameters.
 * @param at index of the number in the path of `state`.
 */
fc_code fc_groups_fit(const fc_checkpoint *source, const fc_tensor *state, size_t at, size_t nunits, fc_arena *scratch,
                      bool *fit, fc_error *err);

/** Returns whether a member is tied to another one in the same flat parameter. */
bool fc_flat_is_tied(const fc_flat_model *model, size_t member);

/** The inputs and output of the search for a layout. */
typedef struct fc_flat_fit {
    const fc_checkpoint *source, *model;
    fc_flat_model *out;
    fc_arena *arena;
    bool views; /**< the source also stores views of parameters next to the flat ones, as use_orig_params leaves them */
    fc_error *err;
} fc_flat_fit;

/**
 * Returns whether the source's tensor of a member's name can be a rank's view of it, flattened.
 * @param whole receives whether it has the member's shape.
 */
bool fc_flat_is_view(const fc_flat_fit *fit, const fc_flat_member *member, bool *whole);

/** Finds the members of a unit's flat parameter and their layout. Sets members, layout and fc_flat_member.flat. */
fc_code fc_flat_lay_out(const fc_flat_fit *fit, fc_flat_unit *unit);

/**
 * Finds the units and layouts of the dict that contains `first`, a flat parameter of `source`. `arena` owns the result;
 * both checkpoints are borrowed and must outlive it.
 */
fc_code fc_flat_model_new(const fc_checkpoint *source, const fc_tensor *first, const fc_checkpoint *model,
                          fc_arena *arena, fc_flat_model *out, fc_error *err);

/** Returns whether a tensor has one dimension and a name that FSDP1 gives to flat parameters. */
bool fc_is_flat_parameter(const fc_tensor *tensor);
