/*
 * The internals of a recipe: rules with patterns and operations, and the sizes that they mention.
 */
#pragma once

#include "fsdpckpt/recipe.h"

/* ---- rules ---- */

typedef enum fc_recipe_op_kind {
    FC_OP_CONCATENATE, /**< joins tensors along `dim` */
    FC_OP_SPLIT,       /**< the inverse; equal parts without `sizes` */
    FC_OP_STACK,       /**< joins tensors along a new dimension `dim` */
    FC_OP_UNSTACK,     /**< the inverse */
    FC_OP_TRANSPOSE,   /**< exchanges `dim` and `other` */
    FC_OP_REARRANGE,   /**< einops' rearrange: `left` becomes `right` */
    FC_OP_RESIZE       /**< trims `dim` to the size `right`, or pads it with zeros; `left` is the size before */
} fc_recipe_op_kind;

typedef struct fc_recipe_op {
    fc_recipe_op_kind kind;
    int dim, other;
    const char *const *sizes; /**< expressions, NULL-terminated; NULL: equal parts */
    const char *left, *right; /**< NULL: not given */
} fc_recipe_op;

typedef enum fc_recipe_rule_kind {
    FC_RULE_MAP,  /**< tensors called `from` become tensors called `to` */
    FC_RULE_DROP, /**< tensors called `from` are left out */
    FC_RULE_ADD   /**< the tensor to[0] of the result appears a second time, as to[1] */
} fc_recipe_rule_kind;

typedef struct fc_recipe_rule {
    fc_recipe_rule_kind kind;
    const char *const *from, *const *to; /**< patterns */
    size_t nfrom, nto;
    const fc_recipe_op *ops;
    size_t nops;
    const char *when; /**< an expression: the rule applies if it is known and not 0; NULL: always */
} fc_recipe_rule;

/** A size with a name: the first of the expressions whose names are all known. */
typedef struct fc_recipe_size {
    const char *name;
    const char *const *expressions; /**< NULL-terminated */
} fc_recipe_size;

/** Tensors of the result whose names match a glob have this dtype; the last one that matches decides. */
typedef struct fc_recipe_dtype {
    const char *glob;
    fc_dtype dtype;
} fc_recipe_dtype;

struct fc_recipe {
    const char *label, *description;
    const char *const *models; /**< the model_type of the models that it is for, NULL-terminated; NULL: any */
    const fc_recipe_size *sizes;
    size_t nsizes;
    fc_recipe_rule *rules;
    size_t nrules;
    const fc_recipe_dtype *dtypes;
    size_t ndtypes;
    const char *lost;  /**< what the reversed recipe cannot restore, for people; NULL: nothing, or it is not reversed */
    bool keeps_others; /**< tensors that no rule takes stay as they are */
    bool keeps_mesh;   /**< it has no rules, so the mesh and the placements of the source stay */
    bool headers_only; /**< as in fc_recipe_options */
    bool borrows;      /**< the source of the result stays the caller's */
    const struct fc_recipe_config *config;
    const char *config_path; /**< NULL: none was given */
};

/* ---- expressions ---- */

/** A number of the model's config.json, with its path, such as "text_config.hidden_size". */
typedef struct fc_recipe_number {
    const char *name;
    int64_t value;
} fc_recipe_number;

typedef struct fc_recipe_config {
    const fc_recipe_number *numbers;
    size_t count;
    const char *model;     /**< its model_type, or the class in its architectures; NULL: it has neither */
    const char *model_key; /**< the key that has it, such as "text_config.model_type"; NULL like `model` */
} fc_recipe_config;

/** Reads the numbers of the model's config.json. `path` is that file, or its folder. */
fc_code fc_recipe_load_config(fc_recipe *recipe, const char *path, fc_arena *arena, fc_error *err);

/**
 * Computes an expression: integers, names of recipe->sizes and of the config, + - * / == != ! and parentheses.
 * @param unknown receives the first name that has no value, or NULL; then the result is FC_EUSAGE.
 */
fc_code fc_recipe_evaluate(const fc_recipe *recipe, const char *expression, int64_t *out, const char **unknown,
                           fc_error *err);

/** The same, but a name without a value is no error. Sets `*known` to whether all names have one. */
fc_code fc_recipe_evaluate_known(const fc_recipe *recipe, const char *expression, int64_t *out, bool *known,
                                 fc_error *err);

/** Sets `*out`, in the arena, to whether the "when" of each rule holds. One with an unknown name does not. */
fc_code fc_recipe_conditions(const fc_recipe *recipe, fc_arena *arena, bool **out, fc_error *err);

/** Finds the size `name` (len bytes) of recipe->sizes. @return false when there is none; err stays unset. */
bool fc_recipe_has_size(const fc_recipe *recipe, const char *name, size_t len);

/* ---- patterns ---- */

enum { FC_RECIPE_VARIABLES = 4 };

/** A variable of a pattern, such as {n}, and the digits that it stands for. Both are borrowed. */
typedef struct fc_recipe_binding {
    const char *name, *digits;
    uint32_t name_len, ndigits;
    uint64_t offset; /**< the variable is the digits minus this: 61 in {n+61} */
} fc_recipe_binding;

typedef struct fc_recipe_bindings {
    fc_recipe_binding all[FC_RECIPE_VARIABLES];
    size_t count;
} fc_recipe_bindings;

/** @return the number that digits stand for; one too large for 64 bits is the largest. */
uint64_t fc_recipe_number_of(const fc_recipe_binding *binding);

/** @return whether `name` is the pattern with digits for each variable, which `out` receives. */
bool fc_recipe_match(const char *pattern, const char *name, fc_recipe_bindings *out);

/** @return whether the pattern has the variable. */
bool fc_recipe_mentions(const char *pattern, const char *variable, size_t len);

/** @return the binding of a variable, or NULL. */
const fc_recipe_binding *fc_recipe_bound(const fc_recipe_bindings *b, const char *variable, size_t len);

/** @return the pattern with the digits of its variables; variables without binding stay. NULL: out of memory. */
const char *fc_recipe_spell(const char *pattern, const fc_recipe_bindings *b, fc_arena *arena);

/**
 * Replaces expressions after a '+' by their values: {n+num_hidden_layers} by {n+61}, and {0+num_hidden_layers} by 61.
 * A rule in which one has an unknown name will not apply.
 */
fc_code fc_recipe_place_offsets(fc_recipe *recipe, fc_arena *arena, fc_error *err);

/** Finds the next variable of a pattern from `*at` on. @return its name, with its length, or NULL. */
const char *fc_recipe_next_variable(const char **at, size_t *len);

/** @return FC_EUSAGE for a pattern with unbalanced braces, or too many or adjacent variables. */
fc_code fc_recipe_check_pattern(const char *label, const char *pattern, fc_error *err);

/** The same for the text of a recipe. @param label names it in messages. */
fc_code fc_recipe_parse(const char *label, const char *text, size_t len, const fc_recipe_options *options,
                        fc_arena *arena, const fc_recipe **out, fc_error *err);

/**
 * Sets `*untaken` to the first tensor of `target` that no rule of the recipe takes; NULL: rules take all of them.
 * @return FC_EUSAGE for a condition that cannot be computed; FC_ENOMEM.
 */
fc_code fc_recipe_takes_all(const fc_recipe *recipe, const fc_target *target, const fc_target_tensor **untaken,
                            fc_error *err);

/**
 * Finds the shipped recipes with rules for all tensors of `target` in this direction only: where both sides have the
 * same names, these do not tell which side it is. If several fit, those for the model of options->config.
 * @param arena owns the result.
 */
fc_code fc_recipe_find(const fc_target *target, const fc_recipe_options *options, fc_arena *arena,
                       fc_recipe_matches *out, fc_error *err);

/** @return whether the recipe is for a model, by its model_type or the class in its architectures. */
bool fc_recipe_is_for(const fc_recipe *recipe, const char *model);

/** Fails because several recipes fit. */
fc_code fc_recipe_several(const fc_target *target, const fc_recipe_options *options, const fc_recipe_matches *found,
                          fc_error *err);
