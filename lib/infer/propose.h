/*
 * What the files share that propose a recipe from names alone.
 */
#pragma once

#include "recipe/recipe.h"

/** How a name is that of a pattern; better ones first. */
typedef enum fc_lift_kind {
    FC_LIFT_SAME,
    FC_LIFT_FRONT,  /**< with something before it */
    FC_LIFT_LAYERS, /**< from the number of the layer on */
    FC_LIFT_NONE
} fc_lift_kind;

typedef struct fc_lift {
    fc_lift_kind kind;
    size_t front; /**< bytes of the name that replace … */
    size_t cut;   /**< … these bytes of the pattern */
} fc_lift;

/** Compares a name with a pattern. */
fc_lift fc_lift_name(const char *pattern, const char *name);

/** Makes a rule of the recipe one for such names. @return false: out of memory. */
bool fc_lift_rule(const fc_recipe_rule *rule, const fc_lift *lift, const char *name, fc_recipe_rule *out,
                  fc_arena *arena);
