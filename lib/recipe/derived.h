/*
 * The checkpoint that a recipe makes: values whose chunks are boxes of the source's.
 */
#pragma once

#include "derived/derived.h"
#include "recipe/chunks.h"
#include "recipe/gather.h"

/** fc_tensor.detail of a value. */
typedef struct fc_recipe_origin {
    fc_origin from;                /**< a computed value has `gathered` */
    const fc_recipe_place *places; /**< one per chunk of a placed value */
    fc_gathered *gathered;         /**< of a value whose boxes are gathered in memory */
} fc_recipe_origin;

/** Makes an empty checkpoint from `source`: see fc_derived_new. */
fc_code fc_recipe_derived_new(fc_checkpoint *source, fc_checkpoint **out, fc_error *err);

/** Lets fc_checkpoint_close of `derived`, which is complete, close the source. @return FC_ENOMEM. */
fc_code fc_recipe_derived_own(fc_checkpoint *derived, fc_error *err);
