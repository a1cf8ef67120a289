/*
 * Compares runs of elements in memory: how many differ, by how much, and where the first difference is.
 */
#pragma once

#include "fsdpckpt/compare.h"

/** How two dtypes are compared. */
typedef struct fc_value_rule {
    fc_dtype a, b;
    bool tolerant, equal_nan;
    double rtol, atol;
} fc_value_rule;

/** Returns whether elements of both dtypes are numbers, which can be subtracted. */
bool fc_values_are_numbers(fc_dtype a, fc_dtype b);

/** Compares `count` elements and adds the result to `sum`. Indices count from the first of them. */
void fc_values_compare(const fc_value_rule *rule, const unsigned char *a, const unsigned char *b, size_t count,
                       fc_deviation *sum);

/**
 * Turns the result for a box into that for its tensor: every element stands for `times` equal ones, and indices are
 * those in the row-major order of a tensor of `shape`.
 */
void fc_deviation_place(fc_deviation *found, uint64_t times, const fc_box *box, const int64_t *shape);

/** Adds another worker's result. The order does not matter. */
void fc_deviation_add(fc_deviation *sum, const fc_deviation *other);
