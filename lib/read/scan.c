/*
 * Reads many things for a caller. See scan.h. Workers take tiles of one item after the other, fill a buffer for each
 * side, however the chunks are stored, and pass them on.
 */
#include "read/scan.h"

#include "base/checked.h"
#include "base/pages.h"
#include "fsdpckpt/try.h"
#include "net/shared.h"
#include "read/budget.h"
#include "read/portions.h"
#include "read/source.h"
#include "read/threads.h"
#include "read/tuning.h"

#include <pthread.h>
#include <stddef.h>
#include <stdlib.h>

/* An item that is being read. The last user frees it. */
typedef struct active {
    fc_scan_item item;
    fc_coverage *coverage[FC_SCAN_SIDES];
    unsigned users;
    bool begun;
    max_align_t state[];
} active;

/* Which tiles are next. The workers share one, or each has its own. */
typedef struct cursor {
    active *current;      /* the item that still has tiles to hand out */
    fc_portions portions; /* of the current tensors */
    uint64_t at;          /* in the current stored bytes */
} cursor;

typedef struct scanner {
    const fc_scan *scan;
    fc_progress *progress; /* may be NULL */
    fc_budget budget;
    fc_decoded *decoded[FC_SCAN_SIDES];
    bool remote;          /* files are on servers */
    pthread_mutex_t lock; /* guards the fields below, and the items */
    size_t next;
    cursor shared;
    bool stop;
    fc_code code;
    fc_error error;
} scanner;

typedef struct worker {
    scanner *scanner;
    fc_source *sources[FC_SCAN_SIDES];
    unsigned char *buffers[FC_SCAN_SIDES];
    cursor own, *cursor; /* `own`, or the shared one */
    active *of;          /* the item of the tile */
    fc_portion portion;
    fc_scan_tile tile;
    uint64_t counted; /* bytes of the tile, in the progress */
} worker;

/* Ends the scan. Called with the lock held, like all that follows up to scan_read_tile. */
static void scan_stop(scanner *s, fc_code rc, const fc_error *err) {
    if (rc != FC_OK && s->code == FC_OK) {
        s->code = rc;
        s->error = *err;
    }
    s->stop = true;
}

static void scan_fail_item(scanner *s, active *a, fc_code rc, const fc_error *err) {
    const fc_scan *scan = s->scan;
    if (!scan->fail || scan->fail(scan->context, &a->item, rc, err) != FC_OK) {
        scan_stop(s, rc, err);
    }
    a->item.failed = true;
}

static void scan_drop_item(scanner *s, active *a) {
    if (--a->users > 0) {
        return;
    }
    if (s->scan->end && a->begun) {
        s->scan->end(s->scan->context, &a->item, !a->item.failed && !s->stop);
    }
    fc_coverage_free(a->coverage[0]);
    fc_coverage_free(a->coverage[1]);
    free(a);
}

static void scan_leave_item(scanner *s, cursor *c) {
    active *a = c->current;
    c->current = NULL;
    if (a) {
        scan_drop_item(s, a);
    }
}

/* Proves that the chunks of each side cover the item exactly once. */
static fc_code scan_cover_item(scanner *s, cursor *c, active *a, fc_error *err) {
    const fc_scan *scan = s->scan;
    const fc_scan_item *item = &a->item;
    fc_portions_side sides[FC_SCAN_SIDES];
    uint32_t element = 1;
    for (int i = 0; i < scan->sides; i++) {
        const fc_tensor *t = item->tensors[i];
        fc_code rc = fc_coverage_within(scan->checkpoints[i], t, &item->box, &a->coverage[i], err);
        if (rc != FC_OK) {
            return scan->sides > 1 ? fc_context(err, rc, "%s", scan->checkpoints[i]->path) : rc;
        }
        sides[i] = (fc_portions_side){scan->checkpoints[i], t, a->coverage[i]};
        element = fc_dtype_size(t->dtype) > element ? fc_dtype_size(t->dtype) : element;
    }
    const size_t bytes = item->large_tiles ? s->budget.large_tile : s->budget.tile;
    if (scan->in_order) {
        fc_portions_begin_tiles(&c->portions, &item->box, (int64_t)(bytes / element));
        return FC_OK;
    }
    return fc_portions_begin(&c->portions, sides, scan->sides, &item->box, (int64_t)(bytes / element), err);
}

/* Makes the next item the current one. */
static void scan_open_item(scanner *s, cursor *c) {
    const fc_scan *scan = s->scan;
    active *a = calloc(1, sizeof *a + scan->state);
    fc_error err;
    if (!a) {
        scan_stop(s, fc_no_memory(&err, scan->checkpoints[0]->path), &err);
        return;
    }
    a->item.index = s->next++;
    a->item.state = a->state;
    a->users = 1;
    fc_code rc = scan->begin(scan->context, &a->item, &err);
    a->begun = rc == FC_OK;
    if (rc == FC_OK && a->item.tensors[0]) {
        rc = scan_cover_item(s, c, a, &err);
    }
    if (rc != FC_OK) {
        scan_fail_item(s, a, rc, &err);
        scan_drop_item(s, a);
        return;
    }
    c->at = 0;
    c->current = a;
}

/* Takes the next tile of the current item. Returns false when none is left. */
static bool scan_next_tile(scanner *s, worker *w) {
    cursor *c = w->cursor;
    active *a = c->current;
    fc_scan_item *item = &a->item;
    bool any = false;
    fc_error err;
    w->of = a;
    w->tile =
        (fc_scan_tile){.item = item, .bytes = {w->buffers[0], w->buffers[1]}, .times = 1, .scratch = w->tile.scratch};
    if (!item->tensors[0]) {
        const uint64_t left = item->length - c->at;
        w->tile.at = c->at;
        w->tile.size = left < s->budget.tile ? (size_t)left : s->budget.tile;
        c->at += w->counted = w->tile.size;
        return w->tile.size > 0;
    }
    fc_code rc = fc_portions_next(&c->portions, &w->portion, &any, &err);
    if (rc != FC_OK) {
        scan_fail_item(s, a, rc, &err);
    }
    if (rc != FC_OK || !any) {
        return false;
    }
    w->tile.box = fc_portion_box(&w->portion, item->box.ndim);
    w->tile.times = w->portion.repeats ? (uint64_t)w->portion.count : 1;
    w->tile.count = w->portion.repeats ? 1 : (size_t)w->portion.count;
    w->counted = 0;
    for (int i = 0; i < s->scan->sides; i++) {
        w->counted += (uint64_t)w->portion.count * fc_dtype_size(item->tensors[i]->dtype);
    }
    w->tile.size = w->portion.repeats ? 0 : (size_t)w->counted;
    return true;
}

/* Takes the next tile of any item. Returns false at the end. */
static bool scan_take_tile(scanner *s, worker *w) {
    cursor *c = w->cursor;
    fc_error err;
    fc_code rc = fc_progress_count(s->progress, 0, &err);
    if (rc != FC_OK) {
        scan_stop(s, rc, &err);
    }
    while (!s->stop) {
        if (c->current && scan_next_tile(s, w)) {
            c->current->users++;
            return true;
        }
        if (c->current) {
            scan_leave_item(s, c);
        } else if (s->next == s->scan->count) {
            return false;
        } else {
            scan_open_item(s, c);
        }
    }
    return false;
}

/* Adds what was found in a tile, or records why it could not be read. */
static void scan_give_back(scanner *s, worker *w, fc_code rc, const fc_error *err) {
    const fc_scan_tile *tile = &w->tile;
    if (rc != FC_OK) {
        scan_fail_item(s, w->of, rc, err);
    } else if (!s->scan->add(s->scan->context, tile)) {
        s->stop = true;
    }
    scan_drop_item(s, w->of);
    if (s->scan->read) {
        *s->scan->read += tile->size;
    }
    (void)fc_progress_count(s->progress, s->scan->counts_stored ? tile->size : w->counted,
                            NULL); /* see scan_take_tile */
}

static fc_code scan_read_tile(worker *w, fc_error *err) {
    const fc_scan *scan = w->scanner->scan;
    const fc_scan_tile *tile = &w->tile;
    const fc_scan_item *item = tile->item;
    if (!item->tensors[0]) {
        FC_TRY(fc_source_bytes(w->sources[0], item->file, item->offset + tile->at, w->buffers[0], tile->size, err));
    }
    for (int i = 0; i < scan->sides && item->tensors[i]; i++) {
        FC_TRY((w->portion.repeats ? fc_source_fill_one : fc_source_fill)(
            w->sources[i], w->of->coverage[i], item->tensors[i], &tile->box, w->buffers[i], err));
    }
    return scan->look(scan->context, tile, err);
}

static fc_code scan_prepare_worker(worker *w, fc_error *err) {
    const scanner *s = w->scanner;
    const fc_budget *b = &s->budget;
    w->tile.scratch = fc_pages_new(s->scan->scratch);
    if (!w->tile.scratch) {
        return fc_fail(err, FC_ENOMEM, "out of memory for a buffer of %zu bytes", s->scan->scratch);
    }
    for (int i = 0; i < s->scan->sides; i++) {
        w->buffers[i] = s->remote ? fc_shared_new(b->large_tile) : fc_pages_new(b->large_tile);
        if (!w->buffers[i]) {
            return fc_fail(err, FC_ENOMEM, "out of memory for a buffer of %zu bytes", b->large_tile);
        }
        FC_TRY(fc_source_new(s->scan->checkpoints[i], s->decoded[i], b->window, b->files, &w->sources[i], err));
        fc_source_watch(w->sources[i], s->scan->crcs[i], true);
        if (s->scan->check_objects) {
            fc_source_check_objects(w->sources[i]);
        }
    }
    return FC_OK;
}

/* A worker thread. */
static void *run_scanner(void *context) {
    scanner *s = context;
    worker w = {.scanner = s};
    w.cursor = s->scan->in_order ? &w.own : &s->shared;
    fc_error err;
    fc_code rc = scan_prepare_worker(&w, &err);
    pthread_mutex_lock(&s->lock);
    if (rc != FC_OK) {
        scan_stop(s, rc, &err);
    }
    while (scan_take_tile(s, &w)) {
        pthread_mutex_unlock(&s->lock);
        rc = scan_read_tile(&w, &err);
        pthread_mutex_lock(&s->lock);
        scan_give_back(s, &w, rc, &err);
    }
    scan_leave_item(s, &w.own); /* stopped early */
    pthread_mutex_unlock(&s->lock);
    fc_portions_free(&w.own.portions);
    for (int i = 0; i < s->scan->sides; i++) {
        fc_source_free(w.sources[i]);
        fc_shared_free(w.buffers[i], s->budget.large_tile);
    }
    fc_pages_free(w.tile.scratch, s->scan->scratch);
    return NULL;
}

fc_code fc_scan_run(const fc_scan *scan, const fc_work_options *options, fc_error *err) {
    scanner s = {.scan = scan, .progress = options ? options->progress : NULL};
    fc_code rc;
    for (int i = 0; i < scan->sides; i++) {
        s.remote |= fc_reads_from_servers(scan->checkpoints[i]);
    }
    const fc_worker_needs needs = {
        .sources = scan->sides, .tiles = scan->sides, .extra = scan->scratch + scan->extra, .remote = s.remote};
    const int wanted = fc_wanted_threads(options ? options->threads : 0, s.remote, 1);
    const int threads = fc_useful_threads(wanted, scan->total, FC_TILE_BYTES / 2);
    FC_TRY(fc_budget_divide(options, threads, &needs, &s.budget, err));
    fc_progress_begin(s.progress, scan->phase, FC_COUNTED_BYTES, scan->total);
    for (int i = 0; i < scan->sides; i++) {
        s.decoded[i] = fc_decoded_new(s.budget.decoded);
        FC_TRY_GOTO(s.decoded[i] ? FC_OK : fc_no_memory(err, scan->checkpoints[i]->path), rc, out);
    }
    pthread_mutex_init(&s.lock, NULL);
    fc_threads_run(s.budget.threads, run_scanner, &s);
    scan_leave_item(&s, &s.shared); /* stopped early */
    fc_portions_free(&s.shared.portions);
    pthread_mutex_destroy(&s.lock);
    rc = s.code;
    if (rc != FC_OK && err) {
        *err = s.error;
    }
out:
    fc_decoded_free(s.decoded[0]);
    fc_decoded_free(s.decoded[1]);
    return rc;
}

void fc_scan_add_bytes(uint64_t *total, const fc_tensor *tensor) {
    int64_t elements;
    uint64_t bytes;
    if (!fc_numel(tensor->ndim, tensor->shape, &elements) ||
        !fc_mul_u64((uint64_t)elements, fc_dtype_size(tensor->dtype), &bytes) || !fc_add_u64(*total, bytes, total)) {
        *total = UINT64_MAX;
    }
}
