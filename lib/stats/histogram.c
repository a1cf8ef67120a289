/*
 * Turns counts of values by the upper bits of their float32 into a histogram with bins of equal widths.
 */
#include "stats/tally.h"

#include <float.h>
#include <math.h>
#include <string.h>

enum { DEVIATIONS = 6, HALF = FC_TALLY_BINS / 2 };

/* The values of a bin are in [low, high]. */
typedef struct interval {
    double low, high;
} interval;

static double lowest_of(uint32_t bin) {
    const uint32_t bits = bin << FC_TALLY_SHIFT;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* The bin of the n-th smallest values: the negative ones by falling magnitude, then the positive ones. */
static uint32_t nth_bin(uint32_t n) {
    return n < HALF ? FC_TALLY_BINS - 1 - n : n - HALF;
}

/* The values of a bin that exist, given the extremes. The bins of zero hold zeros, but for subnormal numbers. */
static interval values_of(uint32_t bin, const fc_stats *stats) {
    const uint32_t magnitude = bin % HALF;
    const double least = lowest_of(magnitude), most = magnitude > 0 ? lowest_of(magnitude + 1) : 0;
    interval v = bin < HALF ? (interval){least, most} : (interval){-most, -least};
    v.low = v.low < (double)stats->min ? (double)stats->min : v.low;
    v.high = v.high > (double)stats->max ? (double)stats->max : v.high;
    v.high = v.high < v.low ? v.low : v.high;
    return v;
}

static bool is_finite_bin(uint32_t bin) {
    return isfinite(lowest_of(bin % HALF));
}

/* Where the values up to `x` end, in bins of the histogram: below 0 and above FC_HISTOGRAM_BINS outside. */
static double position(const fc_histogram *h, double x) {
    return h->to > h->from ? (x - h->from) / (h->to - h->from) * FC_HISTOGRAM_BINS
           : x < h->from   ? -1
           : x > h->to     ? FC_HISTOGRAM_BINS + 1
                           : 0;
}

/* Adds `count` values, evenly distributed over an interval, to shares[0] (below), the bins, and the last (above). */
static void share_out(const fc_histogram *h, interval values, double count, double *shares) {
    const double from = position(h, values.low), to = position(h, values.high);
    if (to - from < 1e-9) { /* one value: the last bin includes its upper bound */
        const double at = from < 0 ? -1 : from > FC_HISTOGRAM_BINS ? FC_HISTOGRAM_BINS : floor(from);
        const bool last = at >= FC_HISTOGRAM_BINS && from <= FC_HISTOGRAM_BINS;
        shares[(int)(last ? FC_HISTOGRAM_BINS - 1 : at) + 1] += count;
        return;
    }
    for (int i = 0; i < FC_HISTOGRAM_BINS + 2; i++) {
        const double low = i == 0 ? from : fmax(from, i - 1);
        const double high = i == FC_HISTOGRAM_BINS + 1 ? to : fmin(to, i);
        shares[i] += high > low ? count * (high - low) / (to - from) : 0;
    }
}

/* Rounds the shares so that their sum stays the number of values. */
static void round_shares(const double *shares, uint64_t total, fc_histogram *out) {
    double sum = 0;
    uint64_t given = 0;
    for (int i = 0; i < FC_HISTOGRAM_BINS + 2; i++) {
        sum += shares[i];
        uint64_t up_to = sum >= (double)total ? total : (uint64_t)(sum + .5);
        up_to = i == FC_HISTOGRAM_BINS + 1 || up_to > total ? total : up_to < given ? given : up_to;
        *(i == 0 ? &out->below : i == FC_HISTOGRAM_BINS + 1 ? &out->above : &out->bins[i - 1]) = up_to - given;
        given = up_to;
    }
}

void fc_tally_histogram(const uint64_t bins[FC_TALLY_BINS], const fc_stats *stats, fc_histogram *out) {
    const long double far = DEVIATIONS * fc_stats_deviation(stats);
    double shares[FC_HISTOGRAM_BINS + 2] = {0};
    uint64_t total = 0;
    *out = (fc_histogram){.from = (double)fmaxl(stats->min, stats->mean - far),
                          .to = (double)fminl(stats->max, stats->mean + far)};
    for (uint32_t n = 0; n < FC_TALLY_BINS; n++) {
        const uint32_t bin = nth_bin(n);
        if (bins[bin] > 0 && is_finite_bin(bin)) {
            share_out(out, values_of(bin, stats), (double)bins[bin], shares);
            total += bins[bin];
        }
    }
    round_shares(shares, total, out);
}
