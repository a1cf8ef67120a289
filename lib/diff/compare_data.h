/*
 * Compares the data of pairs of tensors with several threads, tile by tile.
 */
#pragma once

#include "fsdpckpt/compare.h"

/**
 * Compares the data of `count` pairs (indexes into report->items; both sides have the same shape) and stores the
 * deviations. With options->quick it stops at the first tensor that differs and sets `*stopped`; some data is then
 * unread.
 */
fc_code fc_compare_data(const fc_checkpoint *a, const fc_checkpoint *b, const fc_compare_options *options,
                        fc_compare_report *report, const size_t *items, size_t count, bool *stopped, fc_error *err);
