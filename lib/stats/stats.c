/*
 * The statistics of tensors: each tile is tallied where it was read, and the results are joined. See
 * fsdpckpt/stats.h.
 */
#include "fsdpckpt/stats.h"

#include "base/pages.h"
#include "fsdpckpt/try.h"
#include "read/box.h"
#include "read/scan.h"
#include "read/stored_chunk.h"
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
    const fc_checkpoint *checkpoint;
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

/* Returns free counts, or NULL when out of memory. */
static counts *take_counts(job *j) {
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

static fc_code stats_begin_tensor(void *context, fc_scan_item *item, fc_error *err) {
    static const int64_t origin[FC_MAX_DIMS];
    job *j = context;
    const fc_tensor *t = j->tensors[item->index];
    counts **c = item->state;
    item->tensors[0] = t;
    item->box = (fc_box){t->ndim, origin, t->shape};
    item->large_tiles = fc_gains_from_large_tiles(j->checkpoint, t);
    *c = take_counts(j);
    return *c ? FC_OK : fc_no_memory(err, t->name);
}

/* Statistics of values, each of which occurs `times` times. */
static void multiply_stats(fc_stats *stats, uint64_t times) {
    stats->values *= times;
    stats->zeros *= times;
    stats->nans *= times;
    stats->infinities *= times;
    stats->finite *= times;
    stats->squares *= (long double)times;
}

static fc_code stats_tally_tile(void *context, const fc_scan_tile *tile, fc_error *err) {
    const job *j = context;
    fc_tally *tally = tile->scratch;
    const fc_dtype dtype = tile->item->tensors[0]->dtype;
    (void)err;
    tally->binned = j->histograms && fc_dtype_get(dtype)->cls != FC_CLASS_COMPLEX;
    tally->times = tile->times;
    fc_tally_elements(tally, dtype, tile->bytes[0], tile->count);
    multiply_stats(&tally->stats, tile->times);
    return FC_OK;
}

static bool stats_add_tile(void *context, const fc_scan_tile *tile) {
    (void)context;
    counts *c = *(counts **)tile->item->state;
    fc_tally *tally = tile->scratch;
    fc_stats_add(&c->stats, &tally->stats);
    for (size_t i = 0; i < FC_TALLY_BINS && tally->binned; i++) {
        c->bins[i] += ((uint64_t)tally->bins[0][i] + tally->bins[1][i]) * tally->times;
        tally->bins[0][i] = tally->bins[1][i] = 0;
    }
    return true;
}

static void stats_end_tensor(void *context, const fc_scan_item *item, bool complete) {
    job *j = context;
    counts *c = *(counts **)item->state;
    j->out[item->index] = c->stats;
    const bool fits = fmaxl(fabsl(c->stats.min), fabsl(c->stats.max)) <= FLT_MAX;
    if (complete && j->histograms && c->stats.ordered && fits) {
        fc_histogram *h = fc_arena_alloc(j->arena, sizeof *h);
        if (h) {
            fc_tally_histogram(c->bins, &c->stats, h);
        }
        j->no_memory = j->no_memory || !h;
        j->out[item->index].histogram = h;
    }
    for (size_t i = 0; i < FC_TALLY_BINS && j->histograms; i++) {
        c->bins[i] = 0;
    }
    c->used = false;
}

/* Reads all tensors, and compares what was read with the recorded digests and CRCs. */
static fc_code stats_scan(job *j, fc_scan *scan, const fc_work_options *work, fc_error *err) {
    const fc_checkpoint *c = j->checkpoint;
    fc_code rc;
    FC_TRY(fc_source_crc_new(c, c->tensors, c->ntensors, &scan->crcs[0], err));
    FC_TRY_GOTO(fc_scan_run(scan, work, err), rc, out);
    rc = fc_source_crc_check(scan->crcs[0], NULL, fc_read_crc64, err);
out:
    fc_source_crc_free(scan->crcs[0]);
    return rc;
}

fc_code fc_stats_read(const fc_checkpoint *checkpoint, const fc_tensor *const *tensors, size_t count,
                      const fc_stats_options *options, fc_arena *arena, fc_stats *out, fc_error *err) {
    job j = {
        .checkpoint = checkpoint, .tensors = tensors, .histograms = options->histograms, .arena = arena, .out = out};
    fc_scan scan = {.count = count,
                    .sides = 1,
                    .checkpoints = {checkpoint},
                    .phase = FC_PHASE_READING,
                    .state = sizeof(counts *),
                    .scratch = sizeof(fc_tally),
                    .context = &j,
                    .begin = stats_begin_tensor,
                    .look = stats_tally_tile,
                    .add = stats_add_tile,
                    .end = stats_end_tensor};
    for (size_t i = 0; i < count; i++) {
        out[i] = (fc_stats){0};
        fc_scan_add_bytes(&scan.total, tensors[i]);
    }
    fc_code rc = stats_scan(&j, &scan, &options->work, err);
    for (counts *c = j.pool, *next; c; c = next) {
        next = c->next;
        fc_pages_free(c, sizeof *c);
    }
    FC_TRY(rc);
    return j.no_memory ? fc_no_memory(err, checkpoint->path) : fc_checkpoint_unchanged(checkpoint, err);
}
