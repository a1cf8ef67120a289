/*
 * One application of a rule: the tensors that it takes for one value of each variable, and what it makes of them.
 */
#pragma once

#include "recipe/parts.h"

/** A tensor that a rule takes. */
typedef struct fc_group_input {
    const fc_tensor *tensor;
    size_t pattern;                        /**< which of rule->from it matches */
    uint64_t numbers[FC_RECIPE_VARIABLES]; /**< the values of the variables that only `from` has, in their order */
} fc_group_input;

/** A tensor that a rule makes. */
typedef struct fc_group_output {
    fc_parted tensor;
    size_t pattern;                        /**< which of rule->to names it */
    uint64_t numbers[FC_RECIPE_VARIABLES]; /**< the values of the variables that only `to` has, in their order */
} fc_group_output;

typedef struct fc_group {
    const fc_recipe_rule *rule;
    fc_recipe_bindings bindings; /**< of the variables that both sides have */
    fc_group_input *inputs;      /**< in an arena */
    size_t ninputs, capacity;
    fc_list_budget *budget; /**< of the tensors that it makes; NULL: they are not counted */
} fc_group;

/** A variable of one side of a rule that the other side lacks. The name is borrowed. */
typedef struct fc_recipe_variable {
    const char *name;
    size_t len;
} fc_recipe_variable;

/** Finds the variables that the first pattern of `has` has and all of `lacks` lack. @return their number. */
size_t fc_recipe_only(const char *const *has, size_t nhas, const char *const *lacks, size_t nlacks,
                      fc_recipe_variable out[FC_RECIPE_VARIABLES]);

/** Compares two fc_group_input for qsort: by pattern, then by numbers. */
int fc_group_by_place(const void *a, const void *b);

/** Returns whether the rule gives each tensor a new name and changes nothing else. */
bool fc_recipe_renames(const fc_recipe_rule *rule);

/**
 * Applies the operations of the rule.
 * @param out   receives an array from malloc; fc_group_free_outputs frees it.
 * @return FC_EUSAGE if tensors are missing, or if shapes do not fit.
 */
fc_code fc_group_run(const fc_recipe *recipe, fc_group *group, fc_group_output **out, size_t *count, fc_error *err);

void fc_group_free_outputs(fc_group_output *outputs, size_t count);
