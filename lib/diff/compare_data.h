/*
 * The threads of diff: reads the data of pairs of tensors tile by tile and compares them. From fc_compared items that
 * must be read to their deviations.
 */
#ifndef FSDPCKPT_DIFF_COMPARE_DATA_H
#define FSDPCKPT_DIFF_COMPARE_DATA_H

#ifndef FSDPCKPT_PRIVATE
#error "this header is private to fsdpckpt: include <fsdpckpt/...> instead"
#endif

#include "fsdpckpt/compare.h"

/**
 * Compares the data of the `count` items of `items` (indexes into report->items, of the same shape on both sides).
 * With options->quick it stops at the first tensor that differs (`*stopped`), and not all was read.
 */
fc_code fc_compare_data(const fc_checkpoint *a, const fc_checkpoint *b, const fc_compare_options *options,
                        fc_compare_report *report, const size_t *items, size_t count, bool *stopped, fc_error *err);

#endif
