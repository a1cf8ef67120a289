/*
 * What the parts of averaging share.
 */
#ifndef FSDPCKPT_DERIVED_AVERAGE_H
#define FSDPCKPT_DERIVED_AVERAGE_H

#ifndef FSDPCKPT_PRIVATE
#error "this header is private to fsdpckpt: include <fsdpckpt/...> instead"
#endif

#include "engine/source_crc.h"
#include "fsdpckpt/checkpoint.h"
#include "plan/names.h"

#include <stdatomic.h>

/** What a tensor is the average of: its `detail`. */
typedef struct fc_averaged {
    const fc_tensor **inputs; /**< one a source */
    atomic_bool *read;        /**< of each piece: it was read, and what was read of the sources is in their sums */
} fc_averaged;

/** fc_checkpoint.state of an average. */
typedef struct fc_average {
    fc_checkpoint **sources;
    fc_source_crc **crcs; /**< what was read of each source */
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
