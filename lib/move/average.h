/*
 * What the parts of averaging share.
 */
#ifndef FSDPCKPT_MOVE_AVERAGE_H
#define FSDPCKPT_MOVE_AVERAGE_H

#include "fsdpckpt/checkpoint.h"
#include "plan/names.h"

/** fc_checkpoint.state of an average. A tensor's `detail` is its array of the sources' tensors. */
typedef struct fc_average {
    fc_checkpoint **sources;
    size_t count;
    const double *weights; /**< their sum is 1; NULL: all equal */
} fc_average;

/** Whether values of the tensor's type can be averaged; else they must be equal. */
bool fc_is_averaged(const fc_tensor *tensor);

/**
 * Whether the sources can be averaged, reading what must be equal. FC_EUSAGE names what differs.
 * @param names one list a source.
 */
fc_code fc_average_compare(const fc_average *a, const fc_names *names, bool take_first, fc_error *err);

#endif
