/*
 * Averages of checkpoints: model soups, the mean of the last checkpoints of a run, moving averages.
 * An average is a derived checkpoint: it is computed while it is read.
 */
#pragma once

#include "fsdpckpt/select.h"

FC_BEGIN_DECLS

typedef struct fc_average_options {
    const double *weights;         /**< one per source; they are divided by their sum. NULL: all are equal */
    const fc_selection *selection; /**< include and exclude; other values of a source are ignored. NULL: everything */
    bool
        take_first; /**< take values that differ and cannot be averaged from the first source; else they are an error */
} fc_average_options;

/**
 * Makes a checkpoint whose tensors are the averages of those of `count` checkpoints, which have the same names and
 * shapes and any formats and layouts. Averages are computed chunk by chunk when they are read, so they need no memory,
 * and fc_convert writes them like any checkpoint.
 *
 * Floating-point and complex tensors are (x0 + x1 + …) / count, or w0 × x0 + w1 × x1 + … with weights, in this order,
 * in float64 (the sums of float64 values compensated), rounded once to the type of the first source. The bits equal
 * those of NumPy's mean in float64, rounded. All other values (integers, booleans, packed types, objects) must be
 * equal, which is checked here. Objects are also equal if their readable forms are.
 *
 * @param sources belong to the average after success, and are closed with it; after a failure they remain the caller's.
 * @return FC_EUSAGE with the names if sources differ in names, shapes or kinds of types, or in values that must be
 * equal; also for invalid weights.
 */
fc_code fc_average_open(fc_checkpoint *const *sources, size_t count, const fc_average_options *options,
                        fc_checkpoint **out, fc_error *err);

FC_END_DECLS
