/*
 * What the files that apply a recipe share: the groups of its rules, and the values that come out. apply.c gives each
 * value to a rule, results.c makes the values of the result, states.c lets optimizer state follow its parameter.
 */
#pragma once

#include "base/name_table.h"
#include "derived/optim_name.h"
#include "recipe/derived.h"
#include "recipe/group.h"

/** A value of the optimizer that belongs to one parameter: "state.<parameter>.<key>", "param_groups.<parameter>.<key>".
 */
typedef struct fc_recipe_state {
    const fc_target_tensor *value;
    fc_optim_name name;
    size_t kind;          /**< equal for values of one optimizer with one key */
    fc_group_input input; /**< its tensor, at the place of its parameter in the group */
} fc_recipe_state;

/** One application of a rule, with the optimizer state of its tensors. */
typedef struct fc_recipe_group {
    fc_group group;
    fc_recipe_state *states; /**< from malloc */
    size_t nstates, state_capacity;
    const char **names;  /**< of the tensors that it makes; in the scratch arena */
    size_t nnames;       /**< 0: not known yet */
    size_t list, listed; /**< used by state_lists.c: the last list that has its tensors, and how many of them */
} fc_recipe_group;

typedef struct fc_recipe_builder {
    const fc_recipe *recipe;
    const fc_target *target;
    fc_checkpoint *source, *out;
    fc_arena *scratch;
    bool *applies; /**< per rule: its "when" holds */
    fc_recipe_group *groups;
    size_t ngroups, group_capacity;
    fc_name_table *group_names;
    fc_tensor *tensors;
    size_t count, capacity;
    struct fc_recipe_states *states;
    fc_list_budget lists; /**< of everything that is made */
    fc_error *err;
} fc_recipe_builder;

/** Fails for lack of memory. */
fc_code fc_recipe_no_memory(const fc_recipe_builder *b);

/* ---- apply.c ---- */

/** Finds the first rule that takes `name`. @return its number, or SIZE_MAX. */
size_t fc_recipe_find_rule(const fc_recipe_builder *b, const char *name, size_t *pattern, fc_recipe_bindings *bindings);

/**
 * Finds or adds the group of a rule with these bindings, from which it removes the variables that only `from` has.
 * @param numbers receives their values, as in fc_group_input.
 */
fc_code fc_recipe_find_group(fc_recipe_builder *b, size_t rule, fc_recipe_bindings *bindings, uint64_t *numbers,
                             size_t *group);

/** Fails because no rule takes `name`. */
fc_code fc_recipe_no_rule(const fc_recipe_builder *b, const char *name);

/* ---- results.c ---- */

/** Returns the name of output `o` of a group, which `scratch` owns. NULL: out of memory. */
const char *fc_recipe_output_name(const fc_recipe_builder *b, const fc_group *g, const fc_group_output *o);

/** Makes a value of the parts of others. */
fc_code fc_recipe_made_tensor(fc_recipe_builder *b, const fc_parted *parted, fc_tensor *t);

/** Makes a copy of a value of the source, which keeps its chunks. */
fc_code fc_recipe_same_tensor(const fc_recipe_builder *b, const fc_tensor *source, fc_tensor *t);

/** Makes a copy of a value of the source that is not tied to it: a program may change one of them. */
fc_code fc_recipe_second_tensor(fc_recipe_builder *b, const fc_tensor *source, fc_tensor *t);

/** Makes an object whose value is `json`, which `out->arena` owns. */
fc_code fc_recipe_object(fc_recipe_builder *b, const char *json, fc_tensor *t);

/** Sets a name without nesting. */
fc_code fc_recipe_set_name(const fc_recipe_builder *b, const char *name, fc_tensor *t);

/** Sets the path to a copy of `count` elements, and the name that they spell. */
fc_code fc_recipe_set_path(const fc_recipe_builder *b, const fc_path_element *elements, size_t count, fc_tensor *t);

/** Adds a value to the result. */
fc_code fc_recipe_add(fc_recipe_builder *b, const fc_tensor *t);

/** Adds a value of the source unchanged, with the name and path that the target gives it. */
fc_code fc_recipe_keep(fc_recipe_builder *b, const fc_target_tensor *w);

/* ---- states.c ---- */

/** Prepares b->states: finds out which parameters the numbers of optimizer state stand for. */
fc_code fc_recipe_begin_states(fc_recipe_builder *b);

/** Gives a value that no rule takes to the group of its parameter. Sets `*given` to false if it is not a value of an
 * optimizer that depends on its parameters' names. */
fc_code fc_recipe_give_state(fc_recipe_builder *b, const fc_target_tensor *w, bool *given);

/** Adds the states of all groups, after the names of their tensors are known, and the lists of parameters. */
fc_code fc_recipe_add_states(fc_recipe_builder *b);

/* ---- dtypes.c ---- */

/** Replaces the result of a recipe by one whose tensors have the dtypes of the recipe. The caller closes `*made`, also
 * after a failure. */
fc_code fc_recipe_cast(const fc_recipe *recipe, fc_checkpoint **made, fc_error *err);
