/*
 * Waiting for NCCL without hanging. Communicators are non-blocking, and the host only waits in a loop that asks whether
 * NCCL reports an error, another rank has failed, the caller cancels or the time is over. Each of these aborts all
 * communicators of the rank (nccl_abort.c), which ends their work on the GPU.
 */
#include "fsdpckpt/try.h"
#include "gather/cuda/nccl_state.h"

#include <stdlib.h>
#include <time.h>

enum { SPINS = 200, POLL_NS = 100000 };

static fc_code fail_wait(fc_comm *comm, const char *what, const char *why, const char *detail, fc_error *err) {
    const nccl_state *s = comm->state;
    fc_error own;
    fc_code rc =
        fc_fail(&own, FC_EIO, "rank %d: nccl: %s: %s%s%s", s->family->rank, what, why, *detail ? ": " : "", detail);
    fc_nccl_abort_family(comm, own.message);
    if (err) {
        *err = own;
    }
    return rc;
}

fc_code fc_nccl_check_cuda(fc_comm *comm, cudaError_t result, const char *what, fc_error *err) {
    if (result == cudaSuccess) {
        return FC_OK;
    }
    cudaGetLastError(); /* it is reported here */
    return fail_wait(comm, what, cudaGetErrorString(result), "", err);
}

static fc_code check_result(fc_comm *comm, ncclResult_t result, const char *what, fc_error *err) {
    const nccl_state *s = comm->state;
    return result == ncclSuccess || result == ncclInProgress
               ? FC_OK
               : fail_wait(comm, what, ncclGetErrorString(result), s->nccl ? ncclGetLastError(s->nccl) : "", err);
}

bool fc_nccl_has_failed(fc_comm *comm) {
    const nccl_family *family = ((nccl_state *)comm->state)->family;
    return (family->bootstrap && fc_comm_has_failed(family->bootstrap)) ||
           (family->meeting && fc_meeting_check(family->meeting, family->calls, NULL) != FC_OK);
}

/* Another rank has failed. The file, or the bootstrap communicator, in which nobody waits then, says which. */
static fc_code fail_like_others(fc_comm *comm, const char *what, fc_error *err) {
    const nccl_family *family = ((nccl_state *)comm->state)->family;
    fc_comm *bootstrap = family->bootstrap;
    fc_error own = {FC_OK, ""};
    fc_code rc = bootstrap ? bootstrap->barrier(bootstrap, &own) : fc_meeting_check(family->meeting, 0, &own);
    if (rc == FC_OK) {
        return fail_wait(comm, what, "another rank has failed", "", err);
    }
    fc_nccl_abort_family(comm, own.message);
    if (err) {
        *err = own;
    }
    return rc;
}

/* A wait in progress. */
typedef struct vigil {
    struct timespec start;
    int spins;
} vigil;

/* Returns an error if the wait is hopeless; else pauses. */
static fc_code keep_waiting(fc_comm *comm, vigil *v, const char *what, fc_error *err) {
    const struct timespec pause = {0, POLL_NS};
    struct timespec now;
    if (comm->cancel && atomic_load(comm->cancel)) {
        fc_nccl_abort_family_because(comm, "was interrupted");
        return fc_fail(err, FC_EINTERRUPTED, "interrupted: the job was stopped, or another rank has died");
    }
    if (fc_nccl_has_failed(comm)) {
        return fail_like_others(comm, what, err);
    }
    clock_gettime(CLOCK_MONOTONIC, &now);
    if (v->spins == 0) {
        v->start = now;
    }
    if (comm->timeout > 0 && now.tv_sec - v->start.tv_sec > comm->timeout) {
        return fail_wait(comm, what, "the other ranks did not answer in time", "", err);
    }
    if (v->spins < SPINS) { /* most waits are short */
        v->spins++;
    } else {
        nanosleep(&pause, NULL);
    }
    return FC_OK;
}

/* Asks NCCL about errors of calls that returned earlier. */
static fc_code ask(fc_comm *comm, ncclResult_t *state, const char *what, fc_error *err) {
    const nccl_state *s = comm->state;
    *state = ncclSuccess;
    ncclResult_t asked = ncclCommGetAsyncError(s->nccl, state);
    return check_result(comm, asked != ncclSuccess ? asked : *state, what, err);
}

fc_code fc_nccl_check(fc_comm *comm, ncclResult_t result, const char *what, fc_error *err) {
    vigil v = {.spins = 0};
    FC_TRY(check_result(comm, result, what, err));
    if (((nccl_state *)comm->state)->grouped) { /* nothing has happened yet */
        return FC_OK;
    }
    while (result == ncclInProgress) {
        FC_TRY(ask(comm, &result, what, err));
        if (result == ncclInProgress) {
            FC_TRY(keep_waiting(comm, &v, what, err));
        }
    }
    return FC_OK;
}

fc_code fc_nccl_wait_for(fc_comm *comm, cudaStream_t stream, const char *what, fc_error *err) {
    vigil v = {.spins = 0};
    for (;;) {
        ncclResult_t state;
        cudaError_t done = cudaStreamQuery(stream);
        if (done != cudaErrorNotReady) {
            return fc_nccl_check_cuda(comm, done, what, err);
        }
        cudaGetLastError(); /* not being ready is none */
        FC_TRY(ask(comm, &state, what, err));
        FC_TRY(keep_waiting(comm, &v, what, err));
    }
}

/* Every call starts with this. */
fc_code fc_nccl_begin(fc_comm *comm, int *before, fc_error *err) {
    if (comm->broken) {
        const nccl_family *family = ((nccl_state *)comm->state)->family;
        return fc_fail(err, FC_EIO, "rank %d: nccl: the communicator was aborted after an earlier error%s%s",
                       family->rank, family->aborted ? ": " : "", family->why);
    }
    cudaError_t result = fc_cuda_enter(comm->device, before);
    if (result != cudaSuccess) {
        fc_cuda_leave(comm->device, *before);
    }
    return fc_nccl_check_cuda(comm, result, "choosing the GPU", err);
}

fc_code fc_nccl_begin_collective(fc_comm *comm, int *before, fc_error *err) {
    nccl_family *family = ((nccl_state *)comm->state)->family;
    family->calls += comm == family->root;
    return fc_nccl_begin(comm, before, err);
}

fc_code fc_nccl_end(fc_comm *comm, int before, fc_code rc) {
    fc_cuda_leave(comm->device, before);
    return rc;
}

fc_code fc_nccl_wait(fc_comm *comm, fc_stream *stream, fc_error *err) {
    int before;
    FC_TRY(fc_nccl_begin(comm, &before, err));
    return fc_nccl_end(comm, before, fc_nccl_wait_for(comm, fc_cuda_stream(stream), "waiting for a stream", err));
}

/* Ends a communicator whose ranks all free it. */
static void finish_comm(fc_comm *comm) {
    nccl_state *s = comm->state;
    if (!comm->broken && s->nccl && fc_nccl_check(comm, ncclCommFinalize(s->nccl), "closing", NULL) == FC_OK) {
        ncclCommDestroy(s->nccl);
        s->nccl = NULL;
    }
}

static void leave_family(fc_comm *comm) {
    nccl_state *s = comm->state;
    fc_comm **p = &s->family->first;
    while (*p && *p != comm) {
        p = &((nccl_state *)(*p)->state)->next;
    }
    if (*p) {
        *p = s->next;
    }
    if (!s->family->first) {
        if (s->family->meeting) {
            fc_meeting_leave(s->family->meeting, s->family->calls);
        }
        free(s->family);
    }
}

void fc_nccl_free(fc_comm *comm) {
    nccl_state *s = comm->state;
    int before;
    bool entered = fc_cuda_enter(comm->device, &before) == cudaSuccess;
    finish_comm(comm);
    if (comm->broken) {
        fc_nccl_abort_family_because(comm, "has given up"); /* the caller may have marked this one only */
    }
    if (s->scratch) {
        cudaFree(s->scratch);
    }
    if (entered) {
        fc_cuda_leave(comm->device, before);
    }
    leave_family(comm);
    free(s);
    free(comm);
}
