/*
 * What states.c and state_lists.c share: the optimizers of a checkpoint whose parameters a recipe renames.
 */
#pragma once

#include "recipe/builder.h"

typedef struct fc_recipe_states {
    fc_name_table *kinds; /**< from an optimizer and a key to fc_recipe_state.kind */
    size_t nkinds;
    fc_name_table *numbers; /**< from an optimizer and a number to an index into `parameters`; NULL: none is numbered */
    const char **parameters;
    size_t nparameters;
    const fc_target_tensor **lists; /**< the lists of the parameters of groups, and of their names */
    size_t nlists;
} fc_recipe_states;

/** Returns the text that names of one optimizer have in common, or NULL when out of memory. */
const char *fc_recipe_optimizer(const fc_recipe_builder *b, const fc_target_tensor *w, const fc_optim_name *n);

/** Finds out which parameters the numbers in all optimizers stand for: from param_names, or from the model's order. */
fc_code fc_recipe_number_parameters(fc_recipe_builder *b);

/** Finds the name of the parameter that a number stands for. @return FC_EUSAGE if it is unknown. */
fc_code fc_recipe_numbered(const fc_recipe_builder *b, const fc_target_tensor *w, const fc_optim_name *n,
                           const char **out);

/** Finds the names of the tensors that a group makes, if they do not depend on its tensors. */
fc_code fc_recipe_group_names(const fc_recipe_builder *b, fc_recipe_group *g);

/** Returns whether a value is all groups of an optimizer in one object. */
bool fc_recipe_is_whole_list(const fc_target_tensor *w);

/** Adds the lists, with the names of the result. */
fc_code fc_recipe_add_lists(fc_recipe_builder *b);

/** Fails about optimizer state, with the advice to leave it out. */
fc_code fc_recipe_refuse_state(const fc_recipe_builder *b, const fc_target_tensor *w, const char *why);
