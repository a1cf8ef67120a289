/*
 * The meeting point of the backend `local`. Every rank publishes its call and its buffers, and waits for the others.
 *
 * All groups of a run share one lock and one condition variable. A rank that fails or returns therefore wakes the
 * waiting ranks of every group.
 */
#include "comm/local_meet.h"

#include "comm/arith.h"
#include "comm/rank_error.h"
#include "fsdpckpt/try.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { POLL_MS = 50 }; /* how often a waiting rank reads fc_comm.cancel */

static const char *const kind_names[] = {"all_gather", "all_gather_v", "reduce_scatter", "all_reduce",
                                         "broadcast",  "barrier",      "split"};

void fc_local_group_free(local_group *g) {
    if (g) {
        free(g->members);
        free(g->slots);
        free(g);
    }
}

local_group *fc_local_group_new(local_world *w, int size) {
    local_group *g = calloc(1, sizeof *g);
    if (g) {
        g->world = w;
        g->size = g->users = size;
        g->members = calloc((size_t)size, sizeof *g->members);
        g->slots = calloc((size_t)size, sizeof *g->slots);
    }
    if (g && (!g->members || !g->slots)) {
        fc_local_group_free(g);
        return NULL;
    }
    return g;
}

void fc_local_group_drop(local_group *g) {
    pthread_mutex_lock(&g->world->lock);
    bool last = --g->users == 0;
    pthread_mutex_unlock(&g->world->lock);
    if (last) {
        fc_local_group_free(g);
    }
}

void fc_local_fail(local_world *w, int rank, fc_code code, const char *message) {
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

/* Returns a rank of the group that has returned and will never arrive, or -1. */
static int missing_member(const local_group *g) {
    for (int i = 0; i < g->size; i++) {
        if (g->world->gone[g->members[i]]) {
            return g->members[i];
        }
    }
    return -1;
}

/* Waits for a signal, but no longer than POLL_MS if there is a flag to read. */
static void wait_for_signal(const fc_comm *comm, local_world *w) {
    struct timespec until;
    if (!comm->cancel) {
        pthread_cond_wait(&w->wake, &w->lock);
        return;
    }
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_nsec += POLL_MS * 1000000L;
    until.tv_sec += until.tv_nsec / 1000000000;
    until.tv_nsec %= 1000000000;
    pthread_cond_timedwait(&w->wake, &w->lock, &until);
}

/* Fails the run if the ranks of the group can no longer meet. The caller holds the lock. */
static void notice_failure(fc_comm *comm) {
    local_group *g = comm->state;
    int missing = missing_member(g);
    if (missing >= 0) {
        char text[64];
        snprintf(text, sizeof text, "returned while other ranks wait for it in %s",
                 kind_names[g->slots[comm->rank].kind]);
        fc_local_fail(g->world, missing, FC_EUSAGE, text);
    } else if (comm->cancel && atomic_load(comm->cancel)) {
        fc_local_fail(g->world, comm->rank, FC_EINTERRUPTED, "interrupted");
    }
}

/*
 * Waits until all ranks of the group are here. A failure ends the wait, unless `must_wait`: then all ranks are known to
 * arrive, and none may go on (and free its buffers) while another still reads them. The last rank that arrives
 * determines the outcome for all.
 */
static fc_code meet(fc_comm *comm, bool must_wait, fc_error *err) {
    local_group *g = comm->state;
    local_world *w = g->world;
    fc_code rc = FC_OK;
    pthread_mutex_lock(&w->lock);
    unsigned generation = g->generation;
    if ((must_wait || !w->failed) && ++g->arrived == g->size) {
        g->arrived = 0;
        g->generation++;
        g->broken = w->failed;
        pthread_cond_broadcast(&w->wake);
    }
    while (g->generation == generation && (must_wait || !w->failed)) {
        if (!must_wait) {
            notice_failure(comm);
        }
        if (must_wait || !w->failed) {
            wait_for_signal(comm, w);
        }
    }
    if (g->generation == generation || g->broken) {
        rc = fc_fail(err, w->error.code, "%s", w->error.message);
    }
    pthread_mutex_unlock(&w->lock);
    return rc;
}

/* Every rank compares all calls with that of rank 0, so all ranks get the same result. */
static fc_code compare_calls(const local_group *g, fc_error *err) {
    const local_slot *first = &g->slots[0];
    for (int i = 1; i < g->size; i++) {
        const local_slot *s = &g->slots[i];
        if (s->kind != first->kind) {
            return fc_fail(err, FC_EUSAGE, "rank %d: called %s, but rank 0 called %s", i, kind_names[s->kind],
                           kind_names[first->kind]);
        }
        bool same =
            s->count == first->count && s->dtype == first->dtype && s->op == first->op && s->root == first->root;
        for (int r = 0; same && s->counts && r < g->size; r++) {
            same = s->counts[r] == first->counts[r];
        }
        if (!same) {
            return fc_fail(err, FC_EUSAGE, "rank %d: called %s with another size, dtype, operation or root than rank 0",
                           i, kind_names[s->kind]);
        }
    }
    return FC_OK;
}

fc_code fc_local_enter(fc_comm *comm, const local_slot *mine, fc_error *err) {
    local_group *g = comm->state;
    g->slots[comm->rank] = *mine;
    FC_TRY(meet(comm, false, err));
    fc_code rc;
    FC_TRY_GOTO(compare_calls(g, err), rc, out);
    if (mine->kind == LOCAL_REDUCE_SCATTER || mine->kind == LOCAL_ALL_REDUCE) {
        FC_TRY_GOTO(fc_arith_check(mine->dtype, mine->op, err), rc, out);
    }
    if (mine->root < 0 || mine->root >= g->size) {
        rc = fc_fail(err, FC_EUSAGE, "%s: rank %d does not exist among %d ranks", kind_names[mine->kind], mine->root,
                     g->size);
    }
out:
    if (rc != FC_OK) { /* the same on all ranks */
        fc_code met = meet(comm, true, NULL);
        rc = met != FC_OK ? met : rc;
    }
    return rc;
}

fc_code fc_local_leave(fc_comm *comm, fc_error *err) {
    return meet(comm, true, err);
}

fc_code fc_local_leave_with(fc_comm *comm, fc_code rc, fc_error *err) {
    local_group *g = comm->state;
    if (rc != FC_OK) {
        pthread_mutex_lock(&g->world->lock);
        fc_local_fail(g->world, g->members[comm->rank], rc, err ? err->message : "failed");
        pthread_mutex_unlock(&g->world->lock);
    }
    return fc_local_leave(comm, err);
}
