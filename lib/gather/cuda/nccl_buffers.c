/*
 * Memory that NCCL allocates for buffers and that is registered with a communicator. Network cards, NVLink's switches
 * and other GPUs then access the buffers themselves, where the hardware allows; elsewhere it is memory like any other.
 */
#include "fsdpckpt/try.h"
#include "gather/cuda/nccl_state.h"

#include <stdlib.h>

#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 19, 0)

struct nccl_buffer {
    nccl_buffer *next;
    void *memory;
    void *handle; /* of the registration; NULL: NCCL had no use for one */
};

/* The GPU is that of the communicator. Too little memory is no reason to give up the communicator. */
static fc_code allocate_buffer(fc_comm *comm, nccl_buffer *b, size_t bytes, fc_error *err) {
    const nccl_state *s = comm->state;
    ncclResult_t result = ncclMemAlloc(&b->memory, bytes);
    if (result != ncclSuccess) {
        cudaGetLastError(); /* it is reported here */
        return fc_fail(err, FC_EIO, "rank %d: nccl: allocating memory: %s", comm->rank, ncclGetErrorString(result));
    }
    fc_code rc =
        fc_nccl_check(comm, ncclCommRegister(s->nccl, b->memory, bytes, &b->handle), "registering memory", err);
    if (rc != FC_OK) {
        ncclMemFree(b->memory);
    }
    return rc;
}

fc_code fc_nccl_alloc(fc_comm *comm, size_t bytes, void **out, fc_error *err) {
    nccl_state *s = comm->state;
    nccl_buffer *b = calloc(1, sizeof *b);
    int before;
    fc_code rc;
    FC_TRY_GOTO(b ? FC_OK : fc_no_memory(err, "nccl"), rc, fail);
    FC_TRY_GOTO(fc_nccl_begin(comm, &before, err), rc, fail);
    rc = fc_nccl_end(comm, before, allocate_buffer(comm, b, bytes > 0 ? bytes : 1, err));
    FC_TRY_GOTO(rc, rc, fail);
    b->next = s->buffers;
    s->buffers = b;
    *out = b->memory;
    return FC_OK;
fail:
    free(b);
    return rc;
}

/* An aborted communicator has forgotten its registrations. */
void fc_nccl_release(fc_comm *comm, void *memory) {
    nccl_state *s = comm->state;
    nccl_buffer **p = &s->buffers;
    int before;
    while (*p && (*p)->memory != memory) {
        p = &(*p)->next;
    }
    nccl_buffer *b = *p;
    if (!b) {
        return;
    }
    *p = b->next;
    bool entered = fc_cuda_enter(comm->device, &before) == cudaSuccess;
    if (s->nccl && b->handle) {
        fc_nccl_check(comm, ncclCommDeregister(s->nccl, b->handle), "ending the registration of memory", NULL);
    }
    ncclMemFree(b->memory);
    if (entered) {
        fc_cuda_leave(comm->device, before);
    }
    free(b);
}

#endif
