/*
 * Reads whole tensors for a visitor. See scan.h. Workers take portions of one tensor after the other, fill a buffer,
 * however the chunks are stored, and pass it on.
 */
#include "read/scan.h"
#include "read/box.h"

#include "base/checked.h"
#include "base/pages.h"
#include "fsdpckpt/try.h"
#include "read/portions.h"
#include "read/source.h"
#include "read/stored_chunk.h"
#include "read/threads.h"
#include "read/tuning.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdlib.h>

/* A tensor whose tiles are being read. The last user frees it. */
typedef struct active {
    const fc_tensor *tensor;
    size_t index;
    fc_coverage *coverage;
    void *state;
    unsigned users;
} active;

/* How the memory is divided. */
typedef struct budget {
    int threads, files;
    size_t tile, large_tile, scratch;
    uint64_t decoded;
} budget;

typedef struct scan {
    const fc_checkpoint *checkpoint;
    const fc_tensor *const *tensors;
    size_t count;
    const fc_scan_visitor *visitor;
    fc_progress *progress; /* may be NULL */
    budget budget;
    fc_decoded *decoded;
    fc_source_crc *crc;
    atomic_bool stop;
    pthread_mutex_t lock; /* guards the fields below, and the visitor's states */
    size_t next;
    active *current;
    fc_portions portions; /* of the current tensor */
    fc_code code;
    fc_error error;
} scan;

typedef struct worker {
    scan *scan;
    fc_source *source;
    unsigned char *buffer;
    void *scratch;
} worker;

static void fail(scan *s, fc_code code, const fc_error *err) {
    pthread_mutex_lock(&s->lock);
    if (s->code == FC_OK) {
        s->code = code;
        s->error = *err;
    }
    pthread_mutex_unlock(&s->lock);
    atomic_store(&s->stop, true);
}

/* Called with the lock held. */
static void drop(scan *s, active *a) {
    if (--a->users > 0) {
        return;
    }
    if (a->state) {
        s->visitor->end(s->visitor->context, a->index, a->state, !atomic_load(&s->stop));
    }
    fc_coverage_free(a->coverage);
    free(a);
}

/* Proves that the chunks cover the next tensor exactly once, and begins it. Called with the lock held. */
static fc_code open_next(scan *s, fc_error *err) {
    static const int64_t origin[FC_MAX_DIMS];
    const fc_tensor *t = s->tensors[s->next];
    const fc_box whole = {t->ndim, origin, t->shape};
    const size_t index = s->next++;
    const size_t bytes = fc_gains_from_large_tiles(s->checkpoint, t) ? s->budget.large_tile : s->budget.tile;
    if (fc_box_volume(&whole) == 0) {
        return FC_OK;
    }
    active *a = calloc(1, sizeof *a);
    if (!a) {
        return fc_no_memory(err, t->name);
    }
    *a = (active){.tensor = t, .index = index, .users = 1};
    fc_code rc = fc_coverage_within(s->checkpoint, t, NULL, &a->coverage, err);
    if (rc == FC_OK) {
        a->state = s->visitor->begin(s->visitor->context, index);
        rc = a->state ? FC_OK : fc_no_memory(err, t->name);
    }
    if (rc == FC_OK) {
        const fc_portions_side side = {s->checkpoint, t, a->coverage};
        rc = fc_portions_begin(&s->portions, &side, 1, &whole, (int64_t)(bytes / fc_dtype_size(t->dtype)), err);
    }
    if (rc != FC_OK) {
        drop(s, a);
        return rc;
    }
    s->current = a;
    return FC_OK;
}

/* Takes the next portion; `*out` is NULL when none is left. Called with the lock held. */
static fc_code take_portion(scan *s, active **out, fc_portion *portion, fc_error *err) {
    *out = NULL;
    for (;;) {
        bool any = false;
        if (s->current) {
            FC_TRY(fc_portions_next(&s->portions, portion, &any, err));
        }
        if (any) {
            s->current->users++;
            *out = s->current;
            return FC_OK;
        }
        if (s->current) {
            drop(s, s->current);
            s->current = NULL;
        }
        if (s->next == s->count) {
            return FC_OK;
        }
        FC_TRY(open_next(s, err));
    }
}

/* Reads a portion and shows it. */
static fc_code show(worker *w, const active *a, const fc_portion *portion, fc_error *err) {
    const fc_scan_visitor *v = w->scan->visitor;
    const fc_box box = fc_portion_box(portion, a->tensor->ndim);
    if (portion->repeats) {
        FC_TRY(fc_source_fill_one(w->source, a->coverage, a->tensor, &box, w->buffer, err));
        v->tile(v->context, a->index, w->scratch, w->buffer, 1, (uint64_t)portion->count);
    } else {
        FC_TRY(fc_source_fill(w->source, a->coverage, a->tensor, &box, w->buffer, err));
        v->tile(v->context, a->index, w->scratch, w->buffer, (size_t)portion->count, 1);
    }
    return FC_OK;
}

/* Reads a portion, shows it, and gives the tensor back. */
static fc_code read_portion(worker *w, active *a, const fc_portion *portion, fc_error *err) {
    scan *s = w->scan;
    const fc_scan_visitor *v = s->visitor;
    fc_code rc = show(w, a, portion, err);
    if (rc != FC_OK) {
        fail(s, rc, err);
    }
    const uint64_t bytes = (uint64_t)portion->count * fc_dtype_size(a->tensor->dtype);
    pthread_mutex_lock(&s->lock);
    if (rc == FC_OK) {
        v->add(v->context, a->index, a->state, w->scratch);
    }
    drop(s, a);
    pthread_mutex_unlock(&s->lock);
    return rc == FC_OK ? fc_progress_count(s->progress, bytes, err) : rc;
}

static fc_code read_portions(worker *w, fc_error *err) {
    scan *s = w->scan;
    while (!atomic_load_explicit(&s->stop, memory_order_relaxed)) {
        active *a;
        fc_portion portion;
        pthread_mutex_lock(&s->lock);
        fc_code rc = take_portion(s, &a, &portion, err);
        pthread_mutex_unlock(&s->lock);
        FC_TRY(rc);
        if (!a) {
            return FC_OK;
        }
        FC_TRY(read_portion(w, a, &portion, err));
    }
    return FC_OK;
}

static void *scan_portions(void *context) {
    scan *s = context;
    worker w = {.scan = s};
    fc_error err;
    fc_code rc;
    w.buffer = fc_pages_new(s->budget.large_tile);
    w.scratch = fc_pages_new(s->visitor->scratch);
    if (!w.buffer || !w.scratch) {
        rc = fc_fail(&err, FC_ENOMEM, "out of memory for a buffer of %zu bytes", s->budget.large_tile);
        goto out;
    }
    FC_TRY_GOTO(fc_source_new(s->checkpoint, s->decoded, s->budget.scratch, s->budget.files, &w.source, &err), rc, out);
    fc_source_watch(w.source, s->crc, true);
    rc = read_portions(&w, &err);
out:
    if (rc != FC_OK) {
        fail(s, rc, &err);
    }
    fc_source_free(w.source);
    fc_pages_free(w.buffer, s->budget.large_tile);
    fc_pages_free(w.scratch, s->visitor->scratch);
    return NULL;
}

static size_t clamp(uint64_t value, uint64_t low, uint64_t high) {
    return (size_t)(value < low ? low : value > high ? high : value);
}

/* Divides `memory`: half of it (or the minimum) for the workers, the rest for decoded chunks. */
static void divide_memory(uint64_t memory, int threads, size_t scratch, budget *b) {
    const uint64_t overhead = fc_source_overhead() + scratch;
    const uint64_t fit = memory / 2 / (overhead + 2 * (uint64_t)FC_LEAST_TILE_BYTES);
    b->threads = (uint64_t)threads > fit ? (fit < 1 ? 1 : (int)fit) : threads;
    const uint64_t share = memory / 2 / (uint64_t)b->threads;
    const uint64_t each = share > overhead ? (share - overhead) / 2 : 0;
    b->tile = clamp(each, FC_LEAST_TILE_BYTES, FC_TILE_BYTES);
    b->scratch = clamp(each, FC_LEAST_TILE_BYTES, FC_SCRATCH_BYTES);
    b->large_tile = clamp(each, b->tile, FC_LARGE_TILE_BYTES);
    b->decoded = memory / 2;
    b->files = fc_files_per_worker(b->threads);
}

static uint64_t total_bytes(const scan *s) {
    uint64_t total = 0;
    for (size_t i = 0; i < s->count; i++) {
        int64_t elements;
        uint64_t bytes;
        if (!fc_numel(s->tensors[i]->ndim, s->tensors[i]->shape, &elements) ||
            !fc_mul_u64((uint64_t)elements, fc_dtype_size(s->tensors[i]->dtype), &bytes) ||
            !fc_add_u64(total, bytes, &total)) {
            return UINT64_MAX;
        }
    }
    return total;
}

static void scan_all(scan *s) {
    atomic_init(&s->stop, false);
    pthread_mutex_init(&s->lock, NULL);
    fc_threads_run(s->budget.threads, scan_portions, s);
    if (s->current) { /* stopped early */
        drop(s, s->current);
    }
    fc_portions_free(&s->portions);
    pthread_mutex_destroy(&s->lock);
}

fc_code fc_scan(const fc_checkpoint *checkpoint, const fc_tensor *const *tensors, size_t count,
                const fc_work_options *options, const fc_scan_visitor *visitor, fc_error *err) {
    const uint64_t memory = options->memory ? options->memory : FC_DEFAULT_MEMORY;
    scan s = {.checkpoint = checkpoint, .tensors = tensors, .count = count, .visitor = visitor};
    s.progress = options->progress;
    if (memory < FC_LEAST_MEMORY) {
        return fc_advise(
            err, fc_fail(err, FC_EUSAGE, "%" PRIu64 " bytes of memory are too few: at least 1 MiB is needed", memory),
            FC_HINT_MEMORY, NULL);
    }
    const uint64_t total = total_bytes(&s);
    divide_memory(memory, fc_useful_threads(options->threads, total, FC_TILE_BYTES / 2), visitor->scratch, &s.budget);
    fc_progress_begin(s.progress, FC_PHASE_READING, FC_COUNTED_BYTES, total);
    fc_code rc;
    s.decoded = fc_decoded_new(s.budget.decoded);
    FC_TRY_GOTO(s.decoded ? FC_OK : fc_no_memory(err, checkpoint->path), rc, out);
    FC_TRY_GOTO(fc_source_crc_new(checkpoint, checkpoint->tensors, checkpoint->ntensors, &s.crc, err), rc, out);
    scan_all(&s);
    rc = s.code;
    if (rc != FC_OK && err) {
        *err = s.error;
    }
    FC_TRY_GOTO(rc, rc, out);
    rc = fc_source_crc_check(s.crc, NULL, fc_read_crc64, err);
out:
    fc_source_crc_free(s.crc);
    fc_decoded_free(s.decoded);
    return rc;
}
