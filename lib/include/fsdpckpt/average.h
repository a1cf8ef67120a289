/*
 * Averages of checkpoints: model soups, the mean of the last checkpoints of a run, moving averages.
 */
#ifndef FSDPCKPT_AVERAGE_H
#define FSDPCKPT_AVERAGE_H

#include "fsdpckpt/select.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct fc_average_options {
    const double *weights;         /**< one a source, divided by their sum; NULL: all equal */
    const fc_selection *selection; /**< include and exclude: what else a source has does not matter; NULL: everything */
    bool take_first; /**< what differs and cannot be averaged is the first source's, instead of an error */
} fc_average_options;

/**
 * A checkpoint whose tensors are the averages of those of `count` checkpoints of equal names and shapes, in any formats
 * and layouts. Nothing is computed before it is read, a piece at a time; so it costs no memory, and fc_convert writes
 * it as any other.
 *
 * Floating-point and complex tensors: (x0 + x1 + …) / count, or with weights w0·x0 + w1·x1 + …, in this order, in
 * float32 (float64 where the first source's type is that), rounded to the first source's type. So the bits are those of
 * the same formula in PyTorch on the processor. All else (integers, booleans, packed types, objects) must be equal, and
 * is compared here; objects also count as equal when they decode to the same.
 *
 * @param sources are the average's on success and closed with it; on failure they stay the caller's.
 * @return FC_EUSAGE with the names when sources differ in names, shapes, kinds of types or in what must be equal, or
 * when the weights make no sense.
 */
fc_code fc_average_open(fc_checkpoint *const *sources, size_t count, const fc_average_options *options,
                        fc_checkpoint **out, fc_error *err);

#ifdef __cplusplus
}
#endif
#endif
