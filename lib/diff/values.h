/*
 * Comparing runs of elements in memory: which differ, by how much, where first. From two buffers to an fc_deviation.
 */
#ifndef FSDPCKPT_DIFF_VALUES_H
#define FSDPCKPT_DIFF_VALUES_H

#ifndef FSDPCKPT_PRIVATE
#error "this header is private to fsdpckpt: include <fsdpckpt/...> instead"
#endif

#include "fsdpckpt/compare.h"

/** How two dtypes are compared. */
typedef struct fc_value_rule {
    fc_dtype a, b;
    bool tolerant, equal_nan;
    double rtol, atol;
} fc_value_rule;

/** Whether elements of both dtypes are numbers, so that their difference is one. */
bool fc_values_are_numbers(fc_dtype a, fc_dtype b);

/**
 * Compares `count` elements and adds what is found to `sum`. The first element is number `start` of its tensor.
 */
void fc_values_compare(const fc_value_rule *rule, const unsigned char *a, const unsigned char *b, size_t count,
                       uint64_t start, fc_deviation *sum);

/** Adds what another worker found. The result does not depend on the order. */
void fc_deviation_add(fc_deviation *sum, const fc_deviation *other);

#endif
