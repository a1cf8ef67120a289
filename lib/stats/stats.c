/*
 * The statistics of tensors: each tile is tallied where it was read, and the results are joined. See
 * fsdpckpt/stats.h.
 */
#include "fsdpckpt/stats.h"

#include "base/pages.h"
#include "fsdpckpt/try.h"
#include "read/scan.h"
#include "stats/tally.h"

#include <float.h>
#include <math.h>

/* The counts of one tensor while it is being read. */
typedef struct counts {
    fc_stats stats;
    bool used; /* belongs to a tensor */
    uint64_t bins[FC_TALLY_BINS];
    struct counts *next;
} counts;

typedef struct job {
    const fc_tensor *const *tensors;
    bool histograms;
    fc_arena *arena;
    fc_stats *out;
    counts *pool; /* reused: a tensor may be small, and its counts are not */
    bool no_memory;
} job;

void fc_stats_add(fc_stats *to, const fc_stats *more) {
    const long double n = (long double)to->finite, m = (long double)more->finite;
    if (more->finite > 0) {
        const long double real = more->mean - to->mean, imaginary = more->mean_imaginary - to->mean_imaginary;
        const long double share = m / (n + m);
        to->squares += more->squares + (real * real + imaginary * imaginary) * n * share;
        to->mean += real * share;
        to->mean_imaginary += imaginary * share;
    }
    if (more->ordered) {
        to->min = to->ordered && to->min < more->min ? to->min : more->min;
        to->max = to->ordered && to->max > more->max ? to->max : more->max;
    }
    to->ordered = to->ordered || more->ordered;
    to->values += more->values;
    to->zeros += more->zeros;
    to->nans += more->nans;
    to->infinities += more->infinities;
    to->finite += more->finite;
    to->histogram = NULL;
}

long double fc_stats_deviation(const fc_stats *stats) {
    return stats->finite > 0 ? sqrtl(stats->squares / (long double)stats->finite) : 0;
}

static void *begin(void *context, size_t index) {
    (void)index;
    job *j = context;
    counts *c = j->pool;
    while (c && c->used) {
        c = c->next;
    }
    if (!c) {
        c = fc_pages_new(sizeof *c);
        if (!c) {
            return NULL;
        }
        c->next = j->pool;
        j->pool = c;
    }
    c->used = true;
    c->stats = (fc_stats){0};
    return c;
}

/* Statistics of values, each of which occurs `times` times. */
static void multiply(fc_stats *stats, uint64_t times) {
    stats->values *= times;
    stats->zeros *= times;
    stats->nans *= times;
    stats->infinities *= times;
    stats->finite *= times;
    stats->squares *= (long double)times;
}

static void tally_tile(void *context, size_t index, void *scratch, const unsigned char *elements, size_t count,
                       uint64_t times) {
    const job *j = context;
    fc_tally *tally = scratch;
    const fc_dtype dtype = j->tensors[index]->dtype;
    tally->binned = j->histograms && fc_dtype_get(dtype)->cls != FC_CLASS_COMPLEX;
    tally->times = times;
    fc_tally_elements(tally, dtype, elements, count);
    multiply(&tally->stats, times);
}

static void add_tile(void *context, size_t index, void *state, void *scratch) {
    (void)context;
    (void)index;
    counts *c = state;
    fc_tally *tally = scratch;
    fc_stats_add(&c->stats, &tally->stats);
    for (size_t i = 0; i < FC_TALLY_BINS && tally->binned; i++) {
        c->bins[i] += ((uint64_t)tally->bins[0][i] + tally->bins[1][i]) * tally->times;
        tally->bins[0][i] = tally->bins[1][i] = 0;
    }
}

static void end(void *context, size_t index, void *state, bool complete) {
    job *j = context;
    counts *c = state;
    j->out[index] = c->stats;
    const bool fits = fmaxl(fabsl(c->stats.min), fabsl(c->stats.max)) <= FLT_MAX;
    if (complete && j->histograms && c->stats.ordered && fits) {
        fc_histogram *h = fc_arena_alloc(j->arena, sizeof *h);
        if (h) {
            fc_tally_histogram(c->bins, &c->stats, h);
        }
        j->no_memory = j->no_memory || !h;
        j->out[index].histogram = h;
    }
    for (size_t i = 0; i < FC_TALLY_BINS && j->histograms; i++) {
        c->bins[i] = 0;
    }
    c->used = false;
}

fc_code fc_stats_read(const fc_checkpoint *checkpoint, const fc_tensor *const *tensors, size_t count,
                      const fc_stats_options *options, fc_arena *arena, fc_stats *out, fc_error *err) {
    job j = {.tensors = tensors, .histograms = options->histograms, .arena = arena, .out = out};
    const fc_scan_visitor visitor = {
        .context = &j, .scratch = sizeof(fc_tally), .begin = begin, .tile = tally_tile, .add = add_tile, .end = end};
    for (size_t i = 0; i < count; i++) {
        out[i] = (fc_stats){0};
    }
    fc_code rc = fc_scan(checkpoint, tensors, count, &options->work, &visitor, err);
    for (counts *c = j.pool, *next; c; c = next) {
        next = c->next;
        fc_pages_free(c, sizeof *c);
    }
    FC_TRY(rc);
    return j.no_memory ? fc_no_memory(err, checkpoint->path) : fc_checkpoint_unchanged(checkpoint, err);
}
