/*
 * The checkpoint that a recipe makes: a copy of the source's format whose chunks are boxes of the source's.
 */
#ifndef FSDPCKPT_RECIPE_DERIVED_H
#define FSDPCKPT_RECIPE_DERIVED_H

#ifndef FSDPCKPT_PRIVATE
#error "this header is private to fsdpckpt: include <fsdpckpt/...> instead"
#endif

#include "recipe/chunks.h"
#include "recipe/gather.h"

/** fc_tensor.detail of a value. */
typedef struct fc_recipe_origin {
    const fc_tensor *tensor;       /**< of the source, if the value is unchanged; NULL: it is made of boxes */
    bool copied;                   /**< `tensor` is read for this value, which is not tied to it */
    const char *json;              /**< of an object that is not in the source; NULL: it is no such object */
    const fc_recipe_place *places; /**< one per chunk of a value that is made of boxes; NULL if it is gathered */
    fc_gathered *gathered;         /**< of a value whose boxes are gathered in memory */
} fc_recipe_origin;

/**
 * Makes an empty checkpoint from `source`. It owns the source once fc_recipe_derived_own was called.
 * @return NULL: out of memory.
 */
fc_checkpoint *fc_recipe_derived_new(fc_checkpoint *source);

/** Lets fc_checkpoint_close of `derived`, which is complete, close the source. @return FC_ENOMEM. */
fc_code fc_recipe_derived_own(fc_checkpoint *derived, fc_checkpoint *source, fc_error *err);

#endif
