/*
 * The backend `local`, whose ranks are threads of this process. In a collective, every rank publishes its buffers,
 * waits for the others (local_meet.c), reads directly from their buffers, and waits again before any rank may change
 * them. Data is copied without holding the lock.
 */
#include "comm/arith.h"
#include "comm/local_meet.h"
#include "fsdpckpt/progress.h"
#include "fsdpckpt/try.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_RANKS = 4096 };

/* Copies bytes unless the collective is in place. */
static void copy_if_apart(void *dst, const void *src, size_t bytes) {
    if (bytes > 0 && dst != src) {
        memmove(dst, src, bytes);
    }
}

static fc_code local_all_gather(fc_comm *comm, const void *send, void *recv, size_t bytes, fc_error *err) {
    local_group *g = comm->state;
    local_slot mine = {.kind = LOCAL_ALL_GATHER, .send = send, .count = bytes};
    FC_TRY(fc_local_enter(comm, &mine, err));
    for (int r = 0; r < g->size; r++) {
        copy_if_apart((char *)recv + bytes * (size_t)r, g->slots[r].send, bytes);
    }
    return fc_local_leave(comm, err);
}

static fc_code local_all_gather_v(fc_comm *comm, const void *send, void *recv, const size_t *counts,
                                  const size_t *displs, fc_error *err) {
    local_group *g = comm->state;
    local_slot mine = {.kind = LOCAL_ALL_GATHER_V, .send = send, .counts = counts};
    FC_TRY(fc_local_enter(comm, &mine, err));
    for (int r = 0; r < g->size; r++) {
        copy_if_apart((char *)recv + displs[r], g->slots[r].send, counts[r]);
    }
    return fc_local_leave(comm, err);
}

fc_code fc_local_reduce(const local_group *g, fc_dtype dtype, fc_reduce op, size_t first, size_t count, void *out,
                        fc_error *err) {
    const void **inputs = calloc((size_t)g->size, sizeof *inputs);
    FC_NEED(inputs, err, NULL);
    for (int r = 0; r < g->size; r++) {
        inputs[r] = (const char *)g->slots[r].send + first * fc_dtype_size(dtype);
    }
    fc_arith_reduce(dtype, op, inputs, g->size, out, count);
    free(inputs);
    return FC_OK;
}

/* Each rank reduces its segment in place, which no other rank reads. Then each copies the segments of the others. */
static fc_code local_all_reduce(fc_comm *comm, void *data, size_t count, fc_dtype dtype, fc_reduce op, fc_error *err) {
    local_group *g = comm->state;
    local_slot mine = {.kind = LOCAL_ALL_REDUCE, .send = data, .count = count, .dtype = dtype, .op = op};
    FC_TRY(fc_local_enter(comm, &mine, err));
    size_t size = fc_dtype_size(dtype), segment = count / (size_t)g->size + 1;
    size_t first = segment * (size_t)comm->rank < count ? segment * (size_t)comm->rank : count;
    size_t some = count - first < segment ? count - first : segment;
    fc_code rc = fc_local_reduce(g, dtype, op, first, some, (char *)data + first * size, err);
    FC_TRY(fc_local_leave_with(comm, rc, err));
    for (int r = 0; r < g->size; r++) {
        size_t at = segment * (size_t)r < count ? segment * (size_t)r : count;
        size_t n = count - at < segment ? count - at : segment;
        copy_if_apart((char *)data + at * size, (const char *)g->slots[r].send + at * size, n * size);
    }
    return fc_local_leave(comm, err);
}

static fc_code local_broadcast(fc_comm *comm, void *data, size_t bytes, int root, fc_error *err) {
    local_group *g = comm->state;
    local_slot mine = {.kind = LOCAL_BROADCAST, .send = data, .count = bytes, .root = root};
    FC_TRY(fc_local_enter(comm, &mine, err));
    copy_if_apart(data, g->slots[root].send, bytes);
    return fc_local_leave(comm, err);
}

static fc_code local_barrier(fc_comm *comm, fc_error *err) {
    local_slot mine = {.kind = LOCAL_BARRIER};
    FC_TRY(fc_local_enter(comm, &mine, err));
    return fc_local_leave(comm, err);
}

static void local_abort(fc_comm *comm) {
    local_group *g = comm->state;
    local_world *w = g->world;
    pthread_mutex_lock(&w->lock);
    fc_local_fail(w, g->members[comm->rank], FC_EIO, "it has given up");
    pthread_cond_broadcast(&w->wake);
    pthread_mutex_unlock(&w->lock);
}

static bool local_has_failed(fc_comm *comm) {
    local_world *w = ((local_group *)comm->state)->world;
    pthread_mutex_lock(&w->lock);
    bool failed = w->failed;
    pthread_mutex_unlock(&w->lock);
    return failed;
}

static fc_comm *comm_new(const fc_comm *like, local_group *g, int rank);

static void local_free(fc_comm *comm) {
    fc_local_group_drop(comm->state);
    free(comm);
}

/* Makes the group of one color. The lowest rank of the color calls it. */
static local_group *new_color_group(const local_group *parent, int color) {
    int size = 0;
    for (int r = 0; r < parent->size; r++) {
        size += parent->slots[r].color == color;
    }
    local_group *g = fc_local_group_new(parent->world, size);
    for (int r = 0, at = 0; g && r < parent->size; r++) {
        if (parent->slots[r].color == color) {
            g->members[at++] = parent->members[r];
        }
    }
    return g;
}

static fc_code local_split(fc_comm *comm, int color, fc_comm **out, fc_error *err) {
    local_group *g = comm->state;
    local_slot mine = {.kind = LOCAL_SPLIT, .color = color};
    *out = NULL;
    FC_TRY(fc_local_enter(comm, &mine, err));
    fc_code rc = FC_OK;
    int lowest = 0, rank = 0;
    while (g->slots[lowest].color != color) {
        lowest++;
    }
    for (int r = lowest; r < comm->rank; r++) {
        rank += g->slots[r].color == color;
    }
    if (lowest == comm->rank) {
        g->slots[comm->rank].made = new_color_group(g, color);
        rc = g->slots[comm->rank].made ? FC_OK : fc_no_memory(err, "split");
    }
    rc = fc_local_leave_with(comm, rc, err);
    local_group *made = rc == FC_OK ? g->slots[lowest].made : NULL;
    if (!made) { /* only after a failure */
        return rc;
    }
    *out = comm_new(comm, made, rank);
    rc = *out ? FC_OK : fc_no_memory(err, "split");
    rc = fc_local_leave_with(comm, rc, err);
    if (rc != FC_OK) {
        free(*out);
        *out = NULL;
        fc_local_group_drop(made);
    }
    return rc;
}

static fc_comm *comm_new(const fc_comm *like, local_group *g, int rank) {
    fc_comm *comm = malloc(sizeof *comm);
    if (comm) {
        *comm = *like;
        comm->rank = rank;
        comm->size = g->size;
        comm->state = g;
    }
    return comm;
}

static const fc_comm functions = {
    .backend = "local",
    .concurrent = true,
    .all_gather = local_all_gather,
    .all_gather_v = local_all_gather_v,
    .all_reduce = local_all_reduce,
    .broadcast = local_broadcast,
    .barrier = local_barrier,
    .split = local_split,
    .abort = local_abort,
    .has_failed = local_has_failed,
    .free = local_free,
};

/* The thread of one rank. */
typedef struct runner {
    pthread_t thread;
    fc_comm comm;
    fc_code (*work)(fc_comm *comm, void *context, fc_error *err);
    void *context;
    const fc_progress *watched;
    fc_code code;
    fc_error error;
    bool failed_first; /* whether the error arose on this rank; else another rank reported it */
} runner;

static void *run_rank(void *argument) {
    runner *r = argument;
    local_group *g = r->comm.state;
    local_world *w = g->world;
    fc_progress_watch(r->watched);
    r->code = r->work(&r->comm, r->context, &r->error);
    pthread_mutex_lock(&w->lock);
    r->failed_first = r->code != FC_OK && !(w->failed && strstr(r->error.message, w->error.message));
    w->gone[r->comm.rank] = true;
    if (r->failed_first) {
        fc_local_fail(w, r->comm.rank, r->code, r->error.message);
    }
    pthread_cond_broadcast(&w->wake); /* ranks that wait for this one notice that it is gone */
    pthread_mutex_unlock(&w->lock);
    return NULL;
}

/* Starts the ranks and waits for them. If a thread cannot be started, the ranks that run fail with that error. */
static fc_code run_all(local_world *w, runner *runners, fc_error *err) {
    int started = 0, failed = 0;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* ranks inherit the mask, so the caller gets all signals */
    while (started < w->size && failed == 0) {
        failed = pthread_create(&runners[started].thread, NULL, run_rank, &runners[started]);
        started += failed == 0;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (failed) {
        fc_error error;
        fc_fail_errno(&error, failed, "its thread cannot be started");
        pthread_mutex_lock(&w->lock);
        fc_local_fail(w, started, error.code, error.message);
        pthread_mutex_unlock(&w->lock);
    }
    for (int r = 0; r < started; r++) {
        pthread_join(runners[r].thread, NULL);
    }
    for (int r = 0; r < started; r++) {
        if (runners[r].failed_first) {
            w->failed = false;
            fc_local_fail(w, r, runners[r].code, runners[r].error.message); /* the lowest rank that failed */
            break;
        }
    }
    return w->failed ? fc_fail(err, w->error.code, "%s", w->error.message) : FC_OK;
}

fc_code fc_comm_run_local(int size, fc_code (*work)(fc_comm *comm, void *context, fc_error *err), void *context,
                          fc_error *err) {
    if (size < 1 || size > MAX_RANKS) {
        return fc_fail(err, FC_EUSAGE, "%d ranks cannot run as threads: the number must be between 1 and %d", size,
                       (int)MAX_RANKS);
    }
    local_world w = {.size = size};
    local_group *g = fc_local_group_new(&w, size);
    runner *runners = calloc((size_t)size, sizeof *runners);
    w.gone = calloc((size_t)size, sizeof *w.gone);
    fc_code rc = FC_OK;
    if (!g || !runners || !w.gone) {
        rc = fc_fail(err, FC_ENOMEM, "out of memory for %d ranks", size);
        goto out;
    }
    pthread_mutex_init(&w.lock, NULL);
    pthread_cond_init(&w.wake, NULL);
    for (int r = 0; r < size; r++) {
        g->members[r] = r;
        runners[r] = (runner){.comm = functions, .work = work, .context = context, .watched = fc_progress_watched()};
        runners[r].comm.rank = r;
        runners[r].comm.size = size;
        runners[r].comm.state = g;
    }
    rc = run_all(&w, runners, err);
    pthread_cond_destroy(&w.wake);
    pthread_mutex_destroy(&w.lock);
out:
    free(w.gone);
    free(runners);
    fc_local_group_free(g);
    return rc;
}
