/*
 * Between the flat parameters of a checkpoint and the parameters of a model: which are where. flat_units.c and
 * flat_fit.c find it, unflatten.c makes a checkpoint of it.
 */
#ifndef FSDPCKPT_DERIVED_FLAT_UNITS_H
#define FSDPCKPT_DERIVED_FLAT_UNITS_H

#ifndef FSDPCKPT_PRIVATE
#error "this header is private to fsdpckpt: include <fsdpckpt/...> instead"
#endif

#include "fsdpckpt/flat_param.h"
#include "fsdpckpt/unflatten.h"

/** A parameter (or buffer) of the model, in its order. */
typedef struct fc_flat_member {
    const fc_tensor *tensor; /**< the model's */
    const char *key;         /**< in the state dict */
    const char *fqn;         /**< the key without what wrappers leave in it */
    size_t same_as;          /**< the first member that it is; itself where it is not tied */
    size_t unit;             /**< index into fc_flat_model.units, or SIZE_MAX */
    size_t stored;           /**< the source's own tensor of that name, or SIZE_MAX */
    bool flat;               /**< lies in the flat parameter of its unit */
} fc_flat_member;

/** A flat parameter. */
typedef struct fc_flat_unit {
    const fc_tensor *tensor; /**< the source's */
    size_t index;            /**< of it */
    const char *module;      /**< FQN of its module without what wrappers leave; "" for the root */
    size_t *below;           /**< members below its module that no deeper unit has */
    size_t nbelow;
    size_t *members; /**< those of them that lie in it, tied ones as often as they occur */
    size_t nmembers;
    fc_flat_layout layout; /**< its params are the members that are not tied to earlier ones, in order */
} fc_flat_unit;

typedef struct fc_flat_model {
    fc_flat_member *members;
    size_t nmembers;
    fc_flat_unit *units; /**< in the order of the source */
    size_t nunits;
} fc_flat_model;

/** Whether a key of a state dict is a flat parameter's; the length of its module's name, without the dot. */
bool fc_is_flat_key(const char *key, size_t *module);

/** The key of a value in the dict it lies in, which is the last of its path. */
const char *fc_state_key(const fc_tensor *tensor);

/** The name of `len` bytes without what wrappers leave in it, in `arena`; NULL when out of memory. */
const char *fc_unwrapped(fc_arena *arena, const char *name, size_t len);

/** Whether two values lie in the same dict. */
bool fc_same_dict(const fc_tensor *a, const fc_tensor *b);

/** Where the path of a value has the number of a parameter, as torch's optimizers number them: "state", 3, "exp_avg".
 * 0: nowhere. */
size_t fc_state_number(const fc_tensor *t, size_t *number);

/** Whether the first `count` elements of two paths are equal. */
bool fc_same_prefix(const fc_tensor *a, const fc_tensor *b, size_t count);

/**
 * Whether the object param_groups.0.params beside the value `state` (a number `at` its path) is the only one, and lists
 * as many numbers as there are flat parameters. Then there are no others, and numbers are in the order of the module's
 * parameters.
 */
fc_code fc_groups_fit(const fc_checkpoint *source, const fc_tensor *state, size_t at, size_t nunits, fc_arena *scratch,
                      bool *fit, fc_error *err);

/** Whether a member is another one that lies in the same flat parameter. */
bool fc_flat_is_tied(const fc_flat_model *model, size_t member);

/** What a layout is found from. */
typedef struct fc_flat_fit {
    const fc_checkpoint *source, *model;
    fc_flat_model *out;
    fc_arena *arena;
    bool views; /**< the source has parts of parameters beside the flat ones, as use_orig_params leaves them */
    fc_error *err;
} fc_flat_fit;

/** Whether what the source has under the name of a member may be a rank's part of it, in one dimension.
 *  @param whole receives whether it has the member's shape. */
bool fc_flat_is_part(const fc_flat_fit *fit, const fc_flat_member *member, bool *whole);

/** Finds which members lie in a unit's flat parameter, and where: members, layout, and which of them are flat. */
fc_code fc_flat_lay_out(const fc_flat_fit *fit, fc_flat_unit *unit);

/**
 * Finds the units in the dict that `first`, a flat parameter of `source`, lies in, and their layouts. All of it in
 * `arena`; the two checkpoints are borrowed.
 */
fc_code fc_flat_model_new(const fc_checkpoint *source, const fc_tensor *first, const fc_checkpoint *model,
                          fc_arena *arena, fc_flat_model *out, fc_error *err);

#endif
