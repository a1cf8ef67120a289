/*
 * Reads two checkpoints in parallel. See compare_data.h. Workers take portions of a tensor, fill a
 * buffer from each side, however its chunks are stored, and compare the buffers. Memory does not depend on the
 * checkpoints.
 */
#include "diff/compare_data.h"

#include "base/checked.h"
#include "base/pages.h"
#include "diff/values.h"
#include "fsdpckpt/plan.h"
#include "fsdpckpt/try.h"
#include "read/box.h"
#include "read/portions.h"
#include "read/source.h"
#include "read/stored_chunk.h"
#include "read/threads.h"
#include "read/tuning.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdlib.h>

/* A pair of tensors whose tiles are being compared. The last user frees it. */
typedef struct pair {
    fc_compared *item;
    fc_coverage *a, *b;
    unsigned users;
} pair;

/* How the memory is divided. */
typedef struct budget {
    int threads, files;
    size_t tile, large_tile, scratch;
    uint64_t decoded; /* for each side */
} budget;

typedef struct job {
    const fc_checkpoint *a, *b;
    const fc_compare_options *options;
    fc_compare_report *report;
    const size_t *items;
    size_t count;
    budget budget;
    fc_decoded *decoded_a, *decoded_b;
    fc_source_crc *crc_a, *crc_b;
    atomic_bool stop;
    pthread_mutex_t lock; /* guards the fields below, and the items' deviations */
    size_t next;
    pair *current;
    fc_portions portions; /* of the current pair */
    uint64_t bytes;
    fc_code code;
    fc_error error;
} job;

typedef struct worker {
    job *job;
    fc_source *a, *b;
    unsigned char *buffer_a, *buffer_b;
} worker;

static void fail(job *j, fc_code code, const fc_error *err) {
    pthread_mutex_lock(&j->lock);
    if (j->code == FC_OK) {
        j->code = code;
        j->error = *err;
    }
    pthread_mutex_unlock(&j->lock);
    atomic_store(&j->stop, true);
}

/* Called with the lock held. */
static void drop(pair *p) {
    if (--p->users == 0) {
        fc_coverage_free(p->a);
        fc_coverage_free(p->b);
        free(p);
    }
}

static uint32_t larger_element(const fc_compared *item) {
    uint32_t a = fc_dtype_size(item->a->dtype), b = fc_dtype_size(item->b->dtype);
    return a > b ? a : b;
}

static fc_code cover_both(const job *j, const fc_compared *item, pair *p, fc_error *err) {
    FC_TRY_CONTEXT(fc_coverage_within(j->a, item->a, NULL, &p->a, err), err, "%s", j->a->path);
    FC_TRY_CONTEXT(fc_coverage_within(j->b, item->b, NULL, &p->b, err), err, "%s", j->b->path);
    return FC_OK;
}

/* Proves that both sides cover the tensor exactly once before any of it is compared. Called with the lock held. */
static fc_code open_pair(job *j, fc_compared *item, fc_error *err) {
    pair *p = calloc(1, sizeof *p);
    if (!p) {
        return fc_no_memory(err, item->name);
    }
    p->item = item;
    p->users = 1;
    static const int64_t origin[FC_MAX_DIMS];
    fc_box whole = {item->a->ndim, origin, item->a->shape};
    bool large = fc_gains_from_large_tiles(j->a, item->a) || fc_gains_from_large_tiles(j->b, item->b);
    size_t bytes = large ? j->budget.large_tile : j->budget.tile;
    fc_code rc = cover_both(j, item, p, err);
    if (rc == FC_OK) {
        const fc_portions_side sides[2] = {{j->a, item->a, p->a}, {j->b, item->b, p->b}};
        rc = fc_portions_begin(&j->portions, sides, 2, &whole, (int64_t)(bytes / larger_element(item)), err);
    }
    if (rc != FC_OK) {
        drop(p);
        return rc;
    }
    item->read = true;
    j->current = p;
    return FC_OK;
}

/* Takes the next portion; `*out` is NULL when none is left. Called with the lock held. */
static fc_code take_portion(job *j, pair **out, fc_portion *portion, fc_error *err) {
    *out = NULL;
    for (;;) {
        bool any = false;
        if (j->current) {
            FC_TRY(fc_portions_next(&j->portions, portion, &any, err));
        }
        if (any) {
            j->current->users++;
            *out = j->current;
            return FC_OK;
        }
        if (j->current) {
            drop(j->current);
            j->current = NULL;
        }
        if (j->next == j->count) {
            return FC_OK;
        }
        FC_TRY(open_pair(j, &j->report->items[j->items[j->next++]], err));
    }
}

/* Reads the elements of a portion on both sides, or one for all of them. */
static fc_code read_both(worker *w, const pair *p, const fc_portion *portion, const fc_box *box, fc_error *err) {
    if (portion->repeats) {
        FC_TRY(fc_source_fill_one(w->a, p->a, p->item->a, box, w->buffer_a, err));
        return fc_source_fill_one(w->b, p->b, p->item->b, box, w->buffer_b, err);
    }
    FC_TRY(fc_source_fill(w->a, p->a, p->item->a, box, w->buffer_a, err));
    return fc_source_fill(w->b, p->b, p->item->b, box, w->buffer_b, err);
}

static fc_code compare_portion(worker *w, const pair *p, const fc_portion *portion, fc_deviation *found,
                               fc_error *err) {
    const fc_compare_options *o = w->job->options;
    const fc_box box = fc_portion_box(portion, p->item->a->ndim);
    fc_value_rule rule = {.a = p->item->a->dtype,
                          .b = p->item->b->dtype,
                          .tolerant = o->tolerant,
                          .equal_nan = o->equal_nan,
                          .rtol = o->rtol,
                          .atol = o->atol};
    FC_TRY(read_both(w, p, portion, &box, err));
    const uint64_t times = portion->repeats ? (uint64_t)portion->count : 1;
    fc_values_compare(&rule, w->buffer_a, w->buffer_b, (size_t)((uint64_t)portion->count / times), found);
    fc_deviation_place(found, times, &box, p->item->a->shape);
    return FC_OK;
}

/* The next portion, under the lock; `*p` is NULL after the last one. */
static fc_code take_locked(job *j, pair **p, fc_portion *portion, fc_error *err) {
    pthread_mutex_lock(&j->lock);
    fc_code rc = take_portion(j, p, portion, err);
    pthread_mutex_unlock(&j->lock);
    return rc;
}

/* Compares a portion, adds what it found to the item, and gives the pair back. */
static fc_code compare_taken(worker *w, pair *p, const fc_portion *portion, fc_error *err) {
    job *j = w->job;
    fc_deviation found = {0};
    const uint64_t bytes =
        (uint64_t)portion->count * (fc_dtype_size(p->item->a->dtype) + fc_dtype_size(p->item->b->dtype));
    fc_code rc = compare_portion(w, p, portion, &found, err);
    pthread_mutex_lock(&j->lock);
    fc_deviation_add(&p->item->deviation, &found);
    j->bytes += portion->repeats ? 0 : bytes;
    const bool object = p->item->a->object != NULL; /* objects with different bytes may have equal values */
    drop(p);
    pthread_mutex_unlock(&j->lock);
    FC_TRY(rc);
    if (found.different > 0 && j->options->quick && !object) {
        atomic_store(&j->stop, true);
    }
    if (j->options->work.progress) {
        atomic_fetch_add_explicit(&j->options->work.progress->done, bytes, memory_order_relaxed);
    }
    return FC_OK;
}

static fc_code compare_portions(worker *w, fc_error *err) {
    job *j = w->job;
    fc_progress *progress = j->options->work.progress;
    while (!atomic_load_explicit(&j->stop, memory_order_relaxed)) {
        pair *p;
        fc_portion portion;
        FC_TRY(fc_progress_count(progress, 0, err));
        FC_TRY(take_locked(j, &p, &portion, err));
        if (!p) {
            return FC_OK;
        }
        FC_TRY(compare_taken(w, p, &portion, err));
    }
    return FC_OK;
}

static void *compare_tiles(void *context) {
    job *j = context;
    worker w = {.job = j};
    fc_error err;
    size_t size = j->budget.large_tile;
    unsigned char *buffers = fc_pages_new(2 * size);
    fc_code rc;
    if (!buffers) {
        rc = fc_fail(&err, FC_ENOMEM, "out of memory for two buffers of %zu bytes", size);
        goto out;
    }
    w.buffer_a = buffers;
    w.buffer_b = buffers + size;
    FC_TRY_GOTO(fc_source_new(j->a, j->decoded_a, j->budget.scratch, j->budget.files, &w.a, &err), rc, out);
    FC_TRY_GOTO(fc_source_new(j->b, j->decoded_b, j->budget.scratch, j->budget.files, &w.b, &err), rc, out);
    fc_source_check_objects(w.a);
    fc_source_check_objects(w.b);
    fc_source_watch(w.a, j->crc_a, true);
    fc_source_watch(w.b, j->crc_b, true);
    rc = compare_portions(&w, &err);
out:
    if (rc != FC_OK) {
        fail(j, rc, &err);
    }
    fc_source_free(w.a);
    fc_source_free(w.b);
    fc_pages_free(buffers, 2 * size);
    return NULL;
}

static size_t clamp(uint64_t value, uint64_t low, uint64_t high) {
    return (size_t)(value < low ? low : value > high ? high : value);
}

/*
 * Divides `memory`: at most half of it (or the minimum) for the workers' buffers and windows, the rest for decoded
 * chunks, half for each side.
 */
static void divide_memory(uint64_t memory, int threads, budget *b) {
    uint64_t overhead = 2 * fc_source_overhead();
    uint64_t fit = memory / 2 / (overhead + 4 * (uint64_t)FC_LEAST_TILE_BYTES);
    b->threads = (uint64_t)threads > fit ? (fit < 1 ? 1 : (int)fit) : threads;
    uint64_t each = (memory / 2 / (uint64_t)b->threads - overhead) / 4;
    b->tile = clamp(each, FC_LEAST_TILE_BYTES, FC_TILE_BYTES);
    b->scratch = clamp(each, FC_LEAST_TILE_BYTES, FC_SCRATCH_BYTES);
    b->large_tile = clamp(each, b->tile, FC_LARGE_TILE_BYTES);
    uint64_t whole = overhead + 2 * (b->scratch + b->large_tile);
    b->decoded = (memory - (uint64_t)b->threads * whole) / 2;
    b->files = fc_files_per_worker(2 * b->threads);
}

/* Returns the bytes to read from both sides. */
static uint64_t total_bytes(const fc_compare_report *report, const size_t *items, size_t count) {
    uint64_t total = 0;
    for (size_t i = 0; i < count; i++) {
        const fc_compared *item = &report->items[items[i]];
        uint64_t bytes, element = fc_dtype_size(item->a->dtype) + fc_dtype_size(item->b->dtype);
        if (!fc_mul_u64(item->elements, element, &bytes) || !fc_add_u64(total, bytes, &total)) {
            return UINT64_MAX;
        }
    }
    return total;
}

/* Compares what was read with the recorded CRCs. Damage is a result, not a failure. */
static void check_sums(job *j) {
    fc_compare_report *r = j->report;
    r->damage = fc_source_crc_check(j->crc_a, NULL, fc_read_crc64, &r->damaged);
    if (r->damage == FC_OK) {
        r->damage = fc_source_crc_check(j->crc_b, NULL, fc_read_crc64, &r->damaged);
    }
    if (r->damage != FC_OK && r->damage != FC_ECORRUPT) {
        j->code = r->damage;
        j->error = r->damaged;
    }
}

static void compare_all(job *j) {
    atomic_init(&j->stop, false);
    pthread_mutex_init(&j->lock, NULL);
    fc_threads_run(j->budget.threads, compare_tiles, j);
    if (j->current) {
        drop(j->current);
    }
    fc_portions_free(&j->portions);
    pthread_mutex_destroy(&j->lock);
    if (j->code == FC_OK) {
        check_sums(j);
    }
}

fc_code fc_compare_data(const fc_checkpoint *a, const fc_checkpoint *b, const fc_compare_options *options,
                        fc_compare_report *report, const size_t *items, size_t count, bool *stopped, fc_error *err) {
    uint64_t memory = options->work.memory ? options->work.memory : FC_DEFAULT_MEMORY;
    uint64_t total = total_bytes(report, items, count);
    job j = {.a = a, .b = b, .options = options, .report = report, .items = items, .count = count};
    if (memory < FC_LEAST_MEMORY) {
        return fc_advise(
            err, fc_fail(err, FC_EUSAGE, "%" PRIu64 " bytes of memory are too few: at least 1 MiB is needed", memory),
            FC_HINT_MEMORY, NULL);
    }
    divide_memory(memory, fc_useful_threads(options->work.threads, total, FC_TILE_BYTES / 2), &j.budget);
    fc_progress_begin(options->work.progress, FC_PHASE_COMPARING, FC_COUNTED_BYTES, total);
    j.decoded_a = fc_decoded_new(j.budget.decoded);
    j.decoded_b = fc_decoded_new(j.budget.decoded);
    j.code = j.decoded_a && j.decoded_b ? FC_OK : fc_no_memory(&j.error, a->path);
    j.code = j.code == FC_OK ? fc_source_crc_new(a, a->tensors, a->ntensors, &j.crc_a, &j.error) : j.code;
    j.code = j.code == FC_OK ? fc_source_crc_new(b, b->tensors, b->ntensors, &j.crc_b, &j.error) : j.code;
    if (j.code == FC_OK) {
        compare_all(&j);
        *stopped = atomic_load(&j.stop);
    }
    fc_source_crc_free(j.crc_a);
    fc_source_crc_free(j.crc_b);
    fc_decoded_free(j.decoded_a);
    fc_decoded_free(j.decoded_b);
    report->bytes += j.bytes;
    if (j.code != FC_OK && err) {
        *err = j.error;
    }
    return j.code;
}
