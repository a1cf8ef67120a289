/*
 * The backend `local`: ranks are threads of this process. A collective is: every rank shows its buffers, waits for the
 * others, reads what it needs straight from theirs, and waits again before anyone may touch them.
 *
 * One lock and one condition for all groups of a run, so that a rank that fails or leaves wakes everybody, in whatever
 * group they wait. The copying itself is done outside of the lock.
 */
#include "comm/arith.h"
#include "comm/rank_error.h"

#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { MOST_RANKS = 4096, WATCH_MS = 50 };

/* All ranks of a run. */
typedef struct world {
    pthread_mutex_t lock; /* guards all of it and the groups' counters */
    pthread_cond_t wake;
    int size;
    bool *gone;     /* ranks that have returned */
    bool failed;    /* `error` is the first one; nobody waits any more */
    fc_error error; /* names the rank */
} world;

typedef enum kind { ALL_GATHER, ALL_GATHER_V, REDUCE_SCATTER, ALL_REDUCE, BROADCAST, BARRIER, SPLIT } kind;

static const char *const kind_names[] = {"all_gather", "all_gather_v", "reduce_scatter", "all_reduce",
                                         "broadcast",  "barrier",      "split"};

typedef struct group group;

/* What a rank shows the others while a collective runs. */
typedef struct slot {
    kind kind;
    const void *send;
    size_t count; /* what must be equal on all ranks: bytes or elements; and with `counts` each of them */
    const size_t *counts;
    fc_dtype dtype;
    fc_reduce op;
    int root, color;
    group *made; /* SPLIT: by the lowest rank of a color */
} slot;

/* A communicator: some ranks of the world. */
struct group {
    world *world;
    int size, users;
    int *members; /* their ranks in the world */
    slot *slots;
    int arrived;
    unsigned generation; /* of the barrier */
    bool broken;         /* the run had failed when the last one came */
};

static void group_free(group *g) {
    if (g) {
        free(g->members);
        free(g->slots);
        free(g);
    }
}

static group *group_new(world *w, int size) {
    group *g = calloc(1, sizeof *g);
    if (g) {
        g->world = w;
        g->size = g->users = size;
        g->members = calloc((size_t)size, sizeof *g->members);
        g->slots = calloc((size_t)size, sizeof *g->slots);
    }
    if (g && (!g->members || !g->slots)) {
        group_free(g);
        return NULL;
    }
    return g;
}

/* The first failure is everybody's. The caller has the lock. */
static void world_fail(world *w, int rank, fc_code code, const char *message) {
    if (!w->failed) {
        w->failed = true;
        if (fc_names_a_rank(message)) {
            fc_fail(&w->error, code, "%s", message);
        } else {
            fc_fail(&w->error, code, "rank %d: %s", rank, message);
        }
        pthread_cond_broadcast(&w->wake);
    }
}

/* A rank of the group that will never arrive, or -1. */
static int missing_member(const group *g) {
    for (int i = 0; i < g->size; i++) {
        if (g->world->gone[g->members[i]]) {
            return g->members[i];
        }
    }
    return -1;
}

/* Waits for news; with a flag to watch, not for long. */
static void wait_for_news(const fc_comm *comm, world *w) {
    struct timespec until;
    if (!comm->cancel) {
        pthread_cond_wait(&w->wake, &w->lock);
        return;
    }
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_nsec += WATCH_MS * 1000000L;
    until.tv_sec += until.tv_nsec / 1000000000;
    until.tv_nsec %= 1000000000;
    pthread_cond_timedwait(&w->wake, &w->lock, &until);
}

/* What can keep the ranks of a group from ever meeting, made the failure of all. The caller has the lock. */
static void notice_failure(fc_comm *comm) {
    group *g = comm->state;
    int missing = missing_member(g);
    if (missing >= 0) {
        char text[64];
        snprintf(text, sizeof text, "returned while others wait for it in %s", kind_names[g->slots[comm->rank].kind]);
        world_fail(g->world, missing, FC_EUSAGE, text);
    } else if (comm->cancel && atomic_load(comm->cancel)) {
        world_fail(g->world, comm->rank, FC_EINTERRUPTED, "interrupted");
    }
}

/*
 * Waits until all ranks of the group are here. A failure ends the wait, unless `surely`: then all are known to come,
 * and nobody may go on (and free its buffers) while another still reads them. What the last one finds is the outcome
 * for all.
 */
static fc_code meet(fc_comm *comm, bool surely, fc_error *err) {
    group *g = comm->state;
    world *w = g->world;
    fc_code rc = FC_OK;
    pthread_mutex_lock(&w->lock);
    unsigned generation = g->generation;
    if ((surely || !w->failed) && ++g->arrived == g->size) {
        g->arrived = 0;
        g->generation++;
        g->broken = w->failed;
        pthread_cond_broadcast(&w->wake);
    }
    while (g->generation == generation && (surely || !w->failed)) {
        if (!surely) {
            notice_failure(comm);
        }
        if (surely || !w->failed) {
            wait_for_news(comm, w);
        }
    }
    if (g->generation == generation || g->broken) {
        rc = fc_fail(err, w->error.code, "%s", w->error.message);
    }
    pthread_mutex_unlock(&w->lock);
    return rc;
}

/* Every rank compares every other with rank 0, so that all find the same. */
static fc_code compare_calls(const group *g, fc_error *err) {
    const slot *first = &g->slots[0];
    for (int i = 1; i < g->size; i++) {
        const slot *s = &g->slots[i];
        if (s->kind != first->kind) {
            return fc_fail(err, FC_EUSAGE, "rank %d: is in %s, rank 0 in %s", i, kind_names[s->kind],
                           kind_names[first->kind]);
        }
        bool same =
            s->count == first->count && s->dtype == first->dtype && s->op == first->op && s->root == first->root;
        for (int r = 0; same && s->counts && r < g->size; r++) {
            same = s->counts[r] == first->counts[r];
        }
        if (!same) {
            return fc_fail(err, FC_EUSAGE, "rank %d: calls %s with another size, type, operation or root than rank 0",
                           i, kind_names[s->kind]);
        }
    }
    return FC_OK;
}

/* Shows `mine` and waits for the others. After FC_OK the slots may be read until `leave`. When the calls do not agree,
   everybody has left. */
static fc_code enter(fc_comm *comm, const slot *mine, fc_error *err) {
    group *g = comm->state;
    g->slots[comm->rank] = *mine;
    fc_code rc = meet(comm, false, err);
    if (rc != FC_OK) {
        return rc;
    }
    rc = compare_calls(g, err);
    if (rc == FC_OK && (mine->kind == REDUCE_SCATTER || mine->kind == ALL_REDUCE)) {
        rc = fc_arith_check(mine->dtype, mine->op, err);
    }
    if (rc == FC_OK && (mine->root < 0 || mine->root >= g->size)) {
        rc = fc_fail(err, FC_EUSAGE, "%s: there is no rank %d among %d", kind_names[mine->kind], mine->root, g->size);
    }
    if (rc != FC_OK) { /* the same on all ranks */
        fc_code met = meet(comm, true, NULL);
        rc = met != FC_OK ? met : rc;
    }
    return rc;
}

static fc_code leave(fc_comm *comm, fc_error *err) {
    return meet(comm, true, err);
}

/* In place, the bytes lie there already. */
static void copy_apart(void *dst, const void *src, size_t bytes) {
    if (bytes > 0 && dst != src) {
        memmove(dst, src, bytes);
    }
}

static fc_code local_all_gather(fc_comm *comm, const void *send, void *recv, size_t bytes, fc_stream *stream,
                                fc_error *err) {
    (void)stream;
    group *g = comm->state;
    slot mine = {.kind = ALL_GATHER, .send = send, .count = bytes};
    fc_code rc = enter(comm, &mine, err);
    if (rc != FC_OK) {
        return rc;
    }
    for (int r = 0; r < g->size; r++) {
        copy_apart((char *)recv + bytes * (size_t)r, g->slots[r].send, bytes);
    }
    return leave(comm, err);
}

static fc_code local_all_gather_v(fc_comm *comm, const void *send, void *recv, const size_t *counts,
                                  const size_t *displs, fc_stream *stream, fc_error *err) {
    (void)stream;
    group *g = comm->state;
    slot mine = {.kind = ALL_GATHER_V, .send = send, .counts = counts};
    fc_code rc = enter(comm, &mine, err);
    if (rc != FC_OK) {
        return rc;
    }
    for (int r = 0; r < g->size; r++) {
        copy_apart((char *)recv + displs[r], g->slots[r].send, counts[r]);
    }
    return leave(comm, err);
}

/* Reduces elements [first, first + count) of what all ranks show into `out`. */
static fc_code reduce_slots(const group *g, fc_dtype dtype, fc_reduce op, size_t first, size_t count, void *out,
                            fc_error *err) {
    const void **inputs = calloc((size_t)g->size, sizeof *inputs);
    if (!inputs) {
        return fc_fail(err, FC_ENOMEM, "out of memory");
    }
    for (int r = 0; r < g->size; r++) {
        inputs[r] = (const char *)g->slots[r].send + first * fc_dtype_size(dtype);
    }
    fc_arith_reduce(dtype, op, inputs, g->size, out, count);
    free(inputs);
    return FC_OK;
}

/* A rank that could not do its part says so, and all return its error. */
static fc_code leave_with(fc_comm *comm, fc_code rc, fc_error *err) {
    group *g = comm->state;
    if (rc != FC_OK) {
        pthread_mutex_lock(&g->world->lock);
        world_fail(g->world, g->members[comm->rank], rc, err ? err->message : "failed");
        pthread_mutex_unlock(&g->world->lock);
    }
    return leave(comm, err);
}

static fc_code local_reduce_scatter(fc_comm *comm, const void *send, void *recv, size_t count, fc_dtype dtype,
                                    fc_reduce op, fc_stream *stream, fc_error *err) {
    (void)stream;
    slot mine = {.kind = REDUCE_SCATTER, .send = send, .count = count, .dtype = dtype, .op = op};
    fc_code rc = enter(comm, &mine, err);
    if (rc != FC_OK) {
        return rc;
    }
    rc = reduce_slots(comm->state, dtype, op, count * (size_t)comm->rank, count, recv, err);
    return leave_with(comm, rc, err);
}

/* Each rank reduces its share in place, where nobody else reads; then everybody fetches the other shares. */
static fc_code local_all_reduce(fc_comm *comm, void *data, size_t count, fc_dtype dtype, fc_reduce op,
                                fc_stream *stream, fc_error *err) {
    (void)stream;
    group *g = comm->state;
    slot mine = {.kind = ALL_REDUCE, .send = data, .count = count, .dtype = dtype, .op = op};
    fc_code rc = enter(comm, &mine, err);
    if (rc != FC_OK) {
        return rc;
    }
    size_t size = fc_dtype_size(dtype), share = count / (size_t)g->size + 1;
    size_t first = share * (size_t)comm->rank < count ? share * (size_t)comm->rank : count;
    size_t some = count - first < share ? count - first : share;
    rc = reduce_slots(g, dtype, op, first, some, (char *)data + first * size, err);
    rc = leave_with(comm, rc, err);
    if (rc != FC_OK) {
        return rc;
    }
    for (int r = 0; r < g->size; r++) {
        size_t at = share * (size_t)r < count ? share * (size_t)r : count;
        size_t n = count - at < share ? count - at : share;
        copy_apart((char *)data + at * size, (const char *)g->slots[r].send + at * size, n * size);
    }
    return leave(comm, err);
}

static fc_code local_broadcast(fc_comm *comm, void *data, size_t bytes, int root, fc_stream *stream, fc_error *err) {
    (void)stream;
    group *g = comm->state;
    slot mine = {.kind = BROADCAST, .send = data, .count = bytes, .root = root};
    fc_code rc = enter(comm, &mine, err);
    if (rc != FC_OK) {
        return rc;
    }
    copy_apart(data, g->slots[root].send, bytes);
    return leave(comm, err);
}

static fc_code local_barrier(fc_comm *comm, fc_error *err) {
    slot mine = {.kind = BARRIER};
    fc_code rc = enter(comm, &mine, err);
    return rc == FC_OK ? leave(comm, err) : rc;
}

static fc_comm *comm_new(const fc_comm *like, group *g, int rank);

static void group_drop(group *g) {
    pthread_mutex_lock(&g->world->lock);
    bool last = --g->users == 0;
    pthread_mutex_unlock(&g->world->lock);
    if (last) {
        group_free(g);
    }
}

static void local_free(fc_comm *comm) {
    group_drop(comm->state);
    free(comm);
}

/* The ranks of one color: made by the lowest of them. */
static group *make_color(const group *parent, int color) {
    int size = 0;
    for (int r = 0; r < parent->size; r++) {
        size += parent->slots[r].color == color;
    }
    group *g = group_new(parent->world, size);
    for (int r = 0, at = 0; g && r < parent->size; r++) {
        if (parent->slots[r].color == color) {
            g->members[at++] = parent->members[r];
        }
    }
    return g;
}

static fc_code local_split(fc_comm *comm, int color, fc_comm **out, fc_error *err) {
    group *g = comm->state;
    slot mine = {.kind = SPLIT, .color = color};
    *out = NULL;
    fc_code rc = enter(comm, &mine, err);
    if (rc != FC_OK) {
        return rc;
    }
    int lowest = 0, rank = 0;
    while (g->slots[lowest].color != color) {
        lowest++;
    }
    for (int r = lowest; r < comm->rank; r++) {
        rank += g->slots[r].color == color;
    }
    if (lowest == comm->rank) {
        g->slots[comm->rank].made = make_color(g, color);
        rc = g->slots[comm->rank].made ? FC_OK : fc_fail(err, FC_ENOMEM, "split: out of memory");
    }
    rc = leave_with(comm, rc, err);
    if (rc != FC_OK) {
        return rc;
    }
    group *made = g->slots[lowest].made;
    *out = comm_new(comm, made, rank);
    rc = *out ? FC_OK : fc_fail(err, FC_ENOMEM, "split: out of memory");
    rc = leave_with(comm, rc, err);
    if (rc != FC_OK) {
        free(*out);
        *out = NULL;
        group_drop(made);
    }
    return rc;
}

static fc_comm *comm_new(const fc_comm *like, group *g, int rank) {
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
    .all_gather = local_all_gather,
    .all_gather_v = local_all_gather_v,
    .reduce_scatter = local_reduce_scatter,
    .all_reduce = local_all_reduce,
    .broadcast = local_broadcast,
    .barrier = local_barrier,
    .split = local_split,
    .free = local_free,
};

/* One rank's thread. */
typedef struct runner {
    pthread_t thread;
    fc_comm comm;
    fc_code (*work)(fc_comm *comm, void *context, fc_error *err);
    void *context;
    fc_code code;
    fc_error error;
    bool own; /* the error is this rank's, not one that it was told */
} runner;

static void *run_rank(void *argument) {
    runner *r = argument;
    group *g = r->comm.state;
    world *w = g->world;
    r->code = r->work(&r->comm, r->context, &r->error);
    pthread_mutex_lock(&w->lock);
    r->own = r->code != FC_OK && !(w->failed && strstr(r->error.message, w->error.message));
    w->gone[r->comm.rank] = true;
    if (r->own) {
        world_fail(w, r->comm.rank, r->code, r->error.message);
    }
    pthread_cond_broadcast(&w->wake); /* who waits for this rank learns that it is gone */
    pthread_mutex_unlock(&w->lock);
    return NULL;
}

/* Starts the ranks and waits for them. Where not all can be started, those that were are told so. */
static fc_code run_all(world *w, runner *runners, fc_error *err) {
    int started = 0, failed = 0;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are the caller's: the ranks inherit the mask */
    while (started < w->size && failed == 0) {
        failed = pthread_create(&runners[started].thread, NULL, run_rank, &runners[started]);
        started += failed == 0;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (failed) {
        fc_error none;
        fc_fail_errno(&none, failed, "the thread cannot be started");
        pthread_mutex_lock(&w->lock);
        world_fail(w, started, none.code, none.message);
        pthread_mutex_unlock(&w->lock);
    }
    for (int r = 0; r < started; r++) {
        pthread_join(runners[r].thread, NULL);
    }
    for (int r = 0; r < started; r++) {
        if (runners[r].own) {
            w->failed = false;
            world_fail(w, r, runners[r].code, runners[r].error.message); /* the lowest rank that failed */
            break;
        }
    }
    return w->failed ? fc_fail(err, w->error.code, "%s", w->error.message) : FC_OK;
}

fc_code fc_comm_run_local(int size, fc_code (*work)(fc_comm *comm, void *context, fc_error *err), void *context,
                          fc_error *err) {
    if (size < 1 || size > MOST_RANKS) {
        return fc_fail(err, FC_EUSAGE, "%d ranks: between 1 and %d can run as threads", size, (int)MOST_RANKS);
    }
    world w = {.size = size};
    fc_device *device = NULL;
    fc_code rc = fc_device_cpu(&device, err);
    group *g = group_new(&w, size);
    runner *runners = calloc((size_t)size, sizeof *runners);
    w.gone = calloc((size_t)size, sizeof *w.gone);
    if (rc == FC_OK && (!g || !runners || !w.gone)) {
        rc = fc_fail(err, FC_ENOMEM, "out of memory for %d ranks", size);
    }
    if (rc == FC_OK) {
        pthread_mutex_init(&w.lock, NULL);
        pthread_cond_init(&w.wake, NULL);
        for (int r = 0; r < size; r++) {
            g->members[r] = r;
            runners[r] = (runner){.comm = functions, .work = work, .context = context};
            runners[r].comm.rank = r;
            runners[r].comm.size = size;
            runners[r].comm.device = device;
            runners[r].comm.state = g;
        }
        rc = run_all(&w, runners, err);
        pthread_cond_destroy(&w.wake);
        pthread_mutex_destroy(&w.lock);
    }
    free(w.gone);
    free(runners);
    group_free(g);
    if (device) {
        device->destroy(device);
    }
    return rc;
}
