/*
 * Computes statistics of elements in memory.
 */
#pragma once

#include "fsdpckpt/stats.h"

enum {
    FC_TALLY_CODES = 1 << 16,
    FC_TALLY_BINS = 1 << 14, /* sign, exponent and five bits of the mantissa of a float32 */
    FC_TALLY_SHIFT = 18
};

/** One worker's counters. Zero it before its first use. */
typedef struct fc_tally {
    fc_stats stats;                  /**< out: of the last tile */
    uint64_t times;                  /**< how often each of its elements occurs; set by the caller */
    bool binned;                     /**< whether to count `bins`, too */
    uint32_t bins[2][FC_TALLY_BINS]; /**< out: values by the upper bits of their float32, in any of both */
    bool ready;                      /**< whether `values` are those of `dtype` */
    fc_dtype dtype;                  /**< one or two bytes wide */
    float values[FC_TALLY_CODES];    /**< the value of each code of `dtype` */
    uint32_t codes[FC_TALLY_CODES];  /**< how often each code occurs; zero between tiles */
} fc_tally;

/** Computes the statistics of `count` elements. Adds to `bins`, and sets `stats` without a histogram. */
void fc_tally_elements(fc_tally *tally, fc_dtype dtype, const unsigned char *elements, size_t count);

/** Divides the counts of `bins` among the bins of a histogram. @param stats of the same values, at least one finite. */
void fc_tally_histogram(const uint64_t bins[FC_TALLY_BINS], const fc_stats *stats, fc_histogram *out);
