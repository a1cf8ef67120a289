/*
 * Gives up all communicators of a family at once.
 *
 * ncclCommAbort tells the kernels of a communicator to end, and then waits for them and frees device memory, also if
 * the communicator is non-blocking. A kernel may be queued behind one of another communicator that waits for a lost
 * rank, and cudaFree waits for all work of the GPU. So the first abort would never return if the communicators were
 * aborted one after another. From NCCL 2.22 on, ncclCommAbort in a group tells, and the end of the group waits. Older
 * versions wait within a group, too, so each communicator is aborted by a thread of its own. The version is that of the
 * library that was loaded.
 */
#include "gather/cuda/nccl_state.h"

#include <stdio.h>

static nccl_state *next_of(const nccl_state *s) {
    return s->next ? s->next->state : NULL;
}

/* Aborts within the group of the caller. */
static void abort_each(nccl_state *first) {
    for (nccl_state *s = first; s; s = next_of(s)) {
        if (s->nccl) {
            ncclCommAbort(s->nccl); /* also ends what still runs on the GPU */
            s->nccl = NULL;
        }
    }
}

static void *abort_one(void *nccl) {
    ncclCommAbort(nccl);
    return NULL;
}

/* Aborts each communicator in a thread of its own. Those for which no thread can be started follow in this thread. */
static void abort_in_threads(nccl_state *first) {
    for (nccl_state *s = first; s; s = next_of(s)) {
        s->has_aborter = s->nccl && pthread_create(&s->aborter, NULL, abort_one, s->nccl) == 0;
        s->nccl = s->has_aborter ? NULL : s->nccl;
    }
    abort_each(first);
    for (nccl_state *s = first; s; s = next_of(s)) {
        if (s->has_aborter) {
            pthread_join(s->aborter, NULL);
            s->has_aborter = false;
        }
    }
}

static void abort_all(nccl_state *first) {
    int version = 0;
    if (ncclGetVersion(&version) == ncclSuccess && version >= NCCL_VERSION(2, 22, 0) &&
        ncclGroupStart() == ncclSuccess) {
        abort_each(first);
        ncclGroupEnd();
    } else {
        abort_in_threads(first);
    }
}

/* A communicator cannot be aborted within a group, and a group is one of the thread, not of its communicator. */
static void end_groups(nccl_state *first) {
    for (nccl_state *s = first; s; s = next_of(s)) {
        if (s->grouped) {
            s->grouped = false;
            ncclGroupEnd();
        }
    }
}

void fc_nccl_abort_family(fc_comm *comm, const char *why) {
    nccl_family *family = ((nccl_state *)comm->state)->family;
    nccl_state *first = family->first ? family->first->state : NULL;
    comm->broken = true;
    if (family->aborted) {
        return;
    }
    family->aborted = true;
    snprintf(family->why, sizeof family->why, "%s", why);
    for (fc_comm *c = family->first; c; c = ((nccl_state *)c->state)->next) {
        c->broken = true;
    }
    end_groups(first);
    abort_all(first);
    if (family->bootstrap && !family->bootstrap->broken) {
        fc_comm_abort(family->bootstrap);
    }
    if (family->meeting) {
        fc_meeting_fail(family->meeting, why);
    }
}

void fc_nccl_abort_family_because(fc_comm *comm, const char *what) {
    char why[64];
    snprintf(why, sizeof why, "rank %d %s", ((nccl_state *)comm->state)->family->rank, what);
    fc_nccl_abort_family(comm, why);
}

void fc_nccl_abort(fc_comm *comm) {
    int before;
    bool entered = fc_cuda_enter(comm->device, &before) == cudaSuccess;
    fc_nccl_abort_family_because(comm, "has given up");
    if (entered) {
        fc_cuda_leave(comm->device, before);
    }
}
