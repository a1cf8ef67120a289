/*
 * Statistics of the values of tensors: mean, standard deviation, extremes, zeros, NaN, infinities and a histogram, from
 * one pass over the data in constant memory.
 */
#pragma once

#include "fsdpckpt/arena.h"
#include "fsdpckpt/checkpoint.h"
#include "fsdpckpt/read.h"

FC_BEGIN_DECLS

enum { FC_HISTOGRAM_BINS = 64 };

/**
 * How many finite values are where. The bins have equal widths between `from` and `to`, which are the extremes, but at
 * most six standard deviations from the mean. Bounds of bins are exact to a 32nd of a value.
 */
typedef struct fc_histogram {
    double from, to;
    uint64_t below, above; /**< finite values outside */
    uint64_t bins[FC_HISTOGRAM_BINS];
} fc_histogram;

/**
 * The statistics of a tensor, or of several (fc_stats_add). Mean, deviation and extremes are those of the finite
 * values, and meaningless if there are none. A complex value is NaN if one of its parts is, otherwise infinite if one
 * of its parts is; such tensors have no extremes and no histogram. Values of type long double, which holds each int64
 * and uint64 exactly.
 */
typedef struct fc_stats {
    uint64_t values; /**< number of values: the elements, or twice as many if an element packs two */
    uint64_t zeros, nans, infinities;
    uint64_t finite;
    long double mean, mean_imaginary;
    long double squares; /**< sum of the squared distances from the mean */
    long double min, max;
    bool ordered;                  /**< whether there are extremes: real values, at least one of them finite */
    const fc_histogram *histogram; /**< NULL: not requested, no finite values, or values beyond the range of float32 */
} fc_stats;

/** Adds the statistics of other values. The sum has no histogram. */
void fc_stats_add(fc_stats *to, const fc_stats *more);

/** @return the standard deviation: the root of the mean squared distance, as numpy.std (torch: correction=0). */
long double fc_stats_deviation(const fc_stats *stats);

typedef struct fc_stats_options {
    bool histograms;
    fc_work_options work;
} fc_stats_options;

/**
 * Reads `count` tensors (not objects) of an open checkpoint once, with several threads, and stores the statistics of
 * tensors[i] in out[i].
 * @param arena owns the histograms.
 * @return FC_ECORRUPT also if the data does not match the recorded digests and CRCs.
 */
fc_code fc_stats_read(const fc_checkpoint *checkpoint, const fc_tensor *const *tensors, size_t count,
                      const fc_stats_options *options, fc_arena *arena, fc_stats *out, fc_error *err);

FC_END_DECLS
