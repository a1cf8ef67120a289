/*
 * The types that the parts of averaging share.
 */
#pragma once

#include "derived/derived.h"
#include "plan/names.h"

/** The tensors that a tensor is the average of. fc_tensor.detail points to it. */
typedef struct fc_average_inputs {
    fc_origin from;
    const fc_tensor **inputs; /**< one per source */
} fc_average_inputs;

/** fc_checkpoint.state of an average. */
typedef struct fc_average {
    fc_derived base;
    const double *weights; /**< one per source, their sum is 1; NULL: all equal */
} fc_average;

/** Returns whether values of the tensor's dtype can be averaged. All others must be equal in all sources. */
bool fc_is_averaged(const fc_tensor *tensor);

/**
 * Checks that the sources can be averaged, and reads the values that must be equal. Fails with FC_EUSAGE and names what
 * differs.
 * @param names one list per source.
 */
fc_code fc_average_compare(const fc_average *a, const fc_names *names, bool take_first, fc_arena *arena, fc_error *err);
