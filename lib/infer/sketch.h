/*
 * A way to make tensors of one, which is tried.
 */
#pragma once

#include "infer/search.h"

enum { FC_SKETCH_OPS = 8 };

/** Operations in the direction from the one tensor of a match to the others. */
typedef struct fc_sketch {
    fc_recipe_op ops[FC_SKETCH_OPS];
    int count;
} fc_sketch;

/** Tries a sketch, with the parts of the match in an order. If it is right, the puzzle is solved. */
fc_code fc_sketch_try(fc_search *s, fc_puzzle *puzzle, const int *order, const fc_sketch *k, fc_error *err);

/** Finds the operations by the places of the elements, whatever they are, if they are in the language. */
fc_code fc_search_derive(fc_search *s, fc_puzzle *puzzle, fc_error *err);
