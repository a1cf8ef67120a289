/*
 * Applies deltas tensor by tensor, with several threads. See round.h.
 */
#include "delta/round.h"

#include "base/crc.h"
#include "delta/decode.h"
#include "delta/record.h"
#include "fsdpckpt/order.h"
#include "fsdpckpt/read.h"
#include "fsdpckpt/try.h"
#include "io/file.h"
#include "read/threads.h"
#include "read/tuning.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { LEAST_PER_THREAD = 1 << 20 };

/* A tensor that at least one delta changes. */
typedef struct item {
    const fc_sync_tensor *tensor;
    const fc_delta_tensor **deltas; /* one for each version of the round; NULL: it does not change the tensor */
    uint64_t crc;
} item;

typedef struct round_job {
    const fc_delta_round *round;
    item *items; /* the largest first */
    size_t nitems;
    size_t memory; /* of one worker */
    pthread_mutex_t lock;
    size_t next;
    fc_code code;
    fc_error error;
} round_job;

typedef struct round_worker {
    const round_job *job;
    fc_delta_decoder **decoders; /* one for each version, NULL until it is needed */
    unsigned char old[FC_JOURNAL_BLOCK], made[FC_JOURNAL_BLOCK];
} round_worker;

/* ---- what changes ---- */

fc_code fc_delta_fits(fc_sync_model *model, const fc_delta_version *v, size_t *window, fc_error *err) {
    *window = 0;
    FC_TRY(fc_delta_checksum_check(v->checksum, v->path, err));
    for (size_t i = 0; i < v->ntensors; i++) {
        const fc_delta_tensor *d = &v->tensors[i];
        fc_sync_tensor *t = fc_sync_model_find(model, d->name);
        uint64_t content;
        size_t one;
        if (!t) {
            return fc_fail(err, FC_ECORRUPT, "%s: tensor %.256s: the model %s has no tensor of this name", d->path,
                           d->name, model->path);
        }
        t->changes = true;
        FC_TRY(fc_delta_window(d, &one, &content, err));
        *window = one > *window ? one : *window;
        if (v->encoding == FC_DELTA_XOR && content != UINT64_MAX && content != t->size) {
            return fc_fail(err, FC_ECORRUPT,
                           "%s: tensor %.256s: the frame has %" PRIu64 " bytes, but the tensor of the model %" PRIu64,
                           d->path, d->name, content, t->size);
        }
    }
    return FC_OK;
}

static int order_items(const void *a, const void *b) {
    const item *x = a, *y = b;
    FC_ORDER_BY(y->tensor->size, x->tensor->size);
    return strcmp(x->tensor->name, y->tensor->name);
}

/* Lists the tensors that change. @return false when out of memory. */
static bool list_items(const fc_delta_round *r, fc_arena *arena, round_job *job) {
    const fc_delta_tensor **deltas = fc_arena_calloc(arena, r->model->ntensors + 1, r->count * sizeof *deltas);
    job->items = fc_arena_calloc(arena, r->model->ntensors + 1, sizeof *job->items);
    if (!deltas || !job->items) {
        return false;
    }
    bool *changes = fc_arena_calloc(arena, r->model->ntensors + 1, sizeof *changes);
    if (!changes) {
        return false;
    }
    for (size_t k = 0; k < r->count; k++) {
        for (size_t i = 0; i < r->versions[k]->ntensors; i++) {
            const fc_delta_tensor *d = &r->versions[k]->tensors[i];
            const size_t at = (size_t)(fc_sync_model_find(r->model, d->name) - r->model->tensors);
            deltas[at * r->count + k] = d;
            changes[at] = true;
        }
    }
    for (size_t i = 0; i < r->model->ntensors; i++) {
        if (changes[i]) {
            job->items[job->nitems++] = (item){&r->model->tensors[i], deltas + i * r->count, 0};
        }
    }
    fc_sort_items(job->items, job->nitems, sizeof *job->items, order_items);
    return true;
}

/* ---- workers ---- */

static fc_code begin_decoders(round_worker *w, const item *it, fc_error *err) {
    const fc_delta_round *r = w->job->round;
    for (size_t k = 0; k < r->count; k++) {
        if (it->deltas[k]) {
            FC_TRY(w->decoders[k] ? FC_OK : fc_delta_decoder_new(&w->decoders[k], err));
            FC_TRY(fc_delta_decoder_begin(w->decoders[k], r->versions[k], it->deltas[k], it->tensor->size, err));
        }
    }
    return FC_OK;
}

static fc_code end_decoders(const round_worker *w, const item *it, fc_error *err) {
    for (size_t k = 0; k < w->job->round->count; k++) {
        FC_TRY(it->deltas[k] ? fc_delta_decoder_end(w->decoders[k], true, err) : FC_OK);
    }
    return FC_OK;
}

static fc_code apply_block(round_worker *w, item *it, uint64_t at, size_t size, fc_error *err) {
    const fc_delta_round *r = w->job->round;
    const fc_sync_file *file = it->tensor->file;
    const uint64_t offset = it->tensor->offset + at;
    FC_TRY(fc_pread_full(file->fd, w->old, size, offset, file->path, err));
    const unsigned char *from = w->old;
    for (size_t k = 0; k < r->count; k++) {
        if (it->deltas[k]) { /* for one of them at least */
            FC_TRY(fc_delta_decode(w->decoders[k], from, w->made, NULL, size, err));
            from = w->made;
        }
    }
    if (file->has_digests) {
        it->crc = fc_crc64(it->crc, w->made, size);
    }
    if (r->journal) {
        return fc_journal_changes(r->journal, file->number, offset, w->old, w->made, size, err);
    }
    return memcmp(w->old, w->made, size) == 0 ? FC_OK
                                              : fc_pwrite_full(file->fd, w->made, size, offset, file->path, err);
}

static fc_code apply_item(round_worker *w, item *it, fc_error *err) {
    FC_TRY(begin_decoders(w, it, err));
    for (uint64_t at = 0; at < it->tensor->size;) {
        const uint64_t left = it->tensor->size - at;
        const size_t some = left < FC_JOURNAL_BLOCK ? (size_t)left : FC_JOURNAL_BLOCK;
        FC_TRY(apply_block(w, it, at, some, err));
        FC_TRY(fc_progress_count(w->job->round->work.progress, some, err));
        at += some;
    }
    return end_decoders(w, it, err);
}

/* Takes the next item. @return NULL if there is none, or after an error. */
static item *next_item(round_job *job) {
    pthread_mutex_lock(&job->lock);
    item *found = job->code == FC_OK && job->next < job->nitems ? &job->items[job->next++] : NULL;
    pthread_mutex_unlock(&job->lock);
    return found;
}

static void note_failure(round_job *job, fc_code code, const fc_error *err) {
    pthread_mutex_lock(&job->lock);
    if (job->code == FC_OK) {
        job->code = code;
        job->error = *err;
    }
    pthread_mutex_unlock(&job->lock);
}

static void *apply_items(void *context) {
    round_job *job = context;
    const size_t count = job->round->count;
    round_worker *w = calloc(1, sizeof *w);
    fc_error err = {FC_OK};
    fc_code rc = FC_OK;
    if (w) {
        w->job = job;
        w->decoders = calloc(count, sizeof *w->decoders);
    }
    if (!w || !w->decoders) {
        rc = fc_no_memory(&err, job->round->model->path);
    }
    for (item *it; rc == FC_OK && (it = next_item(job)) != NULL;) {
        rc = apply_item(w, it, &err);
    }
    if (rc != FC_OK) {
        note_failure(job, rc, &err);
    }
    for (size_t k = 0; w && w->decoders && k < count; k++) {
        fc_delta_decoder_free(w->decoders[k]);
    }
    free(w ? w->decoders : NULL);
    free(w);
    return NULL;
}

/* ---- the round ---- */

static fc_code open_changed_files(const fc_delta_round *r, round_job *job, fc_error *err) {
    for (size_t i = 0; i < r->model->nfiles; i++) {
        r->model->files[i].changes = false; /* by this round */
    }
    for (size_t i = 0; i < job->nitems; i++) {
        job->items[i].tensor->file->changes = true;
    }
    for (size_t i = 0; i < r->model->nfiles; i++) {
        fc_sync_file *f = &r->model->files[i];
        if (!f->changes) {
            continue;
        }
        f->fd = open(f->path, (r->journal ? O_RDONLY : O_RDWR) | O_CLOEXEC | O_NOFOLLOW);
        if (f->fd < 0) {
            return fc_fail_errno(err, errno, "%s: the file cannot be opened", f->path);
        }
        FC_TRY(r->journal ? fc_journal_file(r->journal, f->name, &f->number, err) : FC_OK);
    }
    return FC_OK;
}

static fc_code close_changed_files(const fc_delta_round *r, fc_code rc, fc_error *err) {
    for (size_t i = 0; i < r->model->nfiles; i++) {
        fc_sync_file *f = &r->model->files[i];
        if (f->fd >= 0) {
            rc = fc_close_written(f->fd, rc, f->path, err);
        }
        f->fd = -1;
    }
    return rc;
}

static fc_code put_header(const fc_delta_round *r, const fc_sync_file *f, const unsigned char *old,
                          const unsigned char *made, fc_error *err) {
    for (uint64_t at = 0; r->journal && at < f->data;) {
        const size_t some = f->data - at < FC_JOURNAL_BLOCK ? (size_t)(f->data - at) : FC_JOURNAL_BLOCK;
        FC_TRY(fc_journal_changes(r->journal, f->number, at, old + at, made + at, some, err));
        at += some;
    }
    return r->journal ? FC_OK : fc_pwrite_full(f->fd, made, (size_t)f->data, 0, f->path, err);
}

/* The header of a file that fsdpckpt wrote has digests of its tensors, which must be those of the new bytes. */
static fc_code change_digests(const fc_delta_round *r, const round_job *job, const fc_sync_file *f, fc_error *err) {
    uint64_t *crcs = calloc(f->ntensors + 1, sizeof *crcs);
    bool *known = calloc(f->ntensors + 1, sizeof *known);
    unsigned char *old = NULL, *made = NULL;
    fc_code rc = crcs && known ? FC_OK : fc_no_memory(err, f->path);
    for (size_t i = 0; rc == FC_OK && i < job->nitems; i++) {
        const item *it = &job->items[i];
        if (it->tensor->file == f) {
            crcs[it->tensor->place] = it->crc;
            known[it->tensor->place] = true;
        }
    }
    rc = rc == FC_OK ? fc_sync_digests(f, crcs, known, &old, &made, err) : rc;
    rc = rc == FC_OK ? put_header(r, f, old, made, err) : rc;
    free(crcs);
    free(known);
    free(old);
    free(made);
    return rc;
}

size_t fc_delta_round_memory(fc_delta_version *const *versions, size_t count) {
    /* the worker, and the stack of fc_journal_changes and fc_find_changes */
    size_t memory = sizeof(round_worker) + JOURNAL_MOST + 2 * FC_MOST_CHANGES * sizeof(fc_change);
    for (size_t k = 0; k < count; k++) {
        memory += fc_delta_decoder_memory(versions[k]->encoding, versions[k]->window);
    }
    return memory;
}

static void run_workers(const fc_delta_round *r, round_job *job, uint64_t bytes) {
    const uint64_t budget = r->work.memory ? r->work.memory : FC_DEFAULT_MEMORY,
                   fit = budget / fc_delta_round_memory(r->versions, r->count);
    int threads = fc_useful_threads(r->work.threads ? r->work.threads : fc_processors(), bytes, LEAST_PER_THREAD);
    threads = fit < 1 ? 1 : fit < (uint64_t)threads ? (int)fit : threads;
    pthread_mutex_init(&job->lock, NULL);
    fc_threads_run(threads, apply_items, job);
    pthread_mutex_destroy(&job->lock);
}

fc_code fc_delta_apply_round(const fc_delta_round *r, fc_error *err) {
    fc_arena *arena = fc_arena_new();
    round_job job = {.round = r};
    uint64_t bytes = 0;
    fc_code rc;
    FC_TRY_GOTO(arena && list_items(r, arena, &job) ? FC_OK : fc_no_memory(err, r->model->path), rc, out);
    for (size_t i = 0; i < job.nitems; i++) {
        bytes += job.items[i].tensor->size; /* within files that are there */
    }
    FC_TRY_GOTO(open_changed_files(r, &job, err), rc, out);
    fc_progress_begin(r->work.progress, FC_PHASE_VERIFYING, FC_COUNTED_BYTES, bytes);
    run_workers(r, &job, bytes);
    if (job.code != FC_OK && err) {
        *err = job.error;
    }
    FC_TRY_GOTO(job.code, rc, out);
    for (size_t i = 0; i < r->model->nfiles; i++) {
        const fc_sync_file *f = &r->model->files[i];
        FC_TRY_GOTO(f->changes && f->has_digests ? change_digests(r, &job, f, err) : FC_OK, rc, out);
    }
out:
    rc = close_changed_files(r, rc, err);
    fc_arena_free(arena);
    return rc;
}
