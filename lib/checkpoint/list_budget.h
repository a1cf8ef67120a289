/*
 * Limits the memory of lists that are made from a checkpoint, such as the tensors and chunks of a derived one. A few
 * bytes of a header, or of a recipe, can ask for millions of them. Every list whose length is a number from a file, and
 * not the length of another list, takes its memory from a budget.
 */
#pragma once

#include "fsdpckpt/checkpoint.h"

typedef struct fc_list_budget {
    fc_checkpoint *const *sources;
    size_t count;
    uint64_t used, most; /**< bytes */
    bool measured;       /**< `most` has the sizes of the sources' files */
} fc_list_budget;

/**
 * Begins a budget: as many bytes as the files of the sources have, and as much more as a schema of a very large model
 * needs.
 * @param sources borrowed as long as the budget is used.
 */
void fc_list_budget_begin(fc_list_budget *budget, fc_checkpoint *const *sources, size_t count);

/**
 * Takes memory for `count` entries of `size` bytes.
 * @param budget NULL: nothing is counted.
 * @return FC_EUNSUPPORTED if there is too little left.
 */
fc_code fc_list_budget_take(fc_list_budget *budget, uint64_t count, size_t size, fc_error *err);

/** Gives back memory that was taken. */
void fc_list_budget_give(fc_list_budget *budget, uint64_t count, size_t size);
