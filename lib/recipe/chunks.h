/*
 * Turns a tensor of parts into chunks: boxes of the tensor that are strided boxes of one chunk of a source tensor.
 */
#pragma once

#include "recipe/parts.h"

/** The dimension of the source that each dimension of a chunk follows, and the step along it. */
typedef struct fc_recipe_steps {
    int sdim[FC_PART_DIMS];      /**< -1: the chunk has size 1 */
    int64_t sstep[FC_PART_DIMS]; /**< in elements of that dimension */
} fc_recipe_steps;

/** Where a chunk of a tensor of parts is in its source. */
typedef struct fc_recipe_place {
    const fc_tensor *source; /**< NULL: zeros */
    const fc_recipe_steps *steps;
    const int64_t *at; /**< the element of the source that is the chunk's first */
    size_t chunk;      /**< of the source */
} fc_recipe_place;

/**
 * Sets the chunks of `out`, whose dtype, ndim and shape are set.
 * @param places receives one per chunk.
 * @return FC_ECORRUPT if chunks of a source do not cover it; FC_EUNSUPPORTED if there would be too many.
 */
fc_code fc_recipe_chunks(const fc_checkpoint *source, const fc_parted *parted, fc_arena *arena, fc_tensor *out,
                         const fc_recipe_place **places, fc_error *err);
