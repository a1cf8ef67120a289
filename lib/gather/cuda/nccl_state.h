/*
 * The state of an NCCL communicator. nccl.c has the collectives, nccl_wait.c waits, nccl_abort.c gives up, nccl_join.c
 * makes communicators.
 */
#pragma once

#include "fsdpckpt/gather/device_comm.h"
#include "gather/cuda/device.h"
#include "gather/file_meet.h"

#include <nccl.h>
#include <pthread.h>

/** The communicators of this rank that were split from one. If one is aborted, all are, at the same time (see
 * nccl_abort.c). One thread uses them at a time (fc_comm.concurrent). */
typedef struct nccl_family {
    fc_comm *first;
    fc_comm *bootstrap;  /**< tells whether other ranks have failed; borrowed; NULL if a file was used */
    fc_meeting *meeting; /**< the same of ranks that met at a file; owned; else NULL */
    fc_comm *root;       /**< the communicator of all ranks */
    int rank;            /**< this rank in it */
    uint64_t calls;      /**< collectives of it that this rank has begun */
    bool aborted;        /**< all of them are broken and aborted */
    char why[256];       /**< the reason, if aborted */
} nccl_family;

/** Memory for collectives. */
typedef struct nccl_buffer nccl_buffer;

typedef struct nccl_state {
    ncclComm_t nccl; /**< owned; NULL before it is made, and after it was aborted */
    nccl_family *family;
    fc_comm *next;     /**< in the family */
    pthread_t aborter; /**< the thread that aborts `nccl`, if has_aborter */
    bool has_aborter;
    bool grouped;         /**< between the two calls of `group` */
    nccl_buffer *buffers; /**< those of fc_nccl_alloc; their users release them */
    void *scratch;        /**< owned device memory for nccl_barrier and nccl_split */
} nccl_state;

/** What the ranks exchange before a split; the scratch memory has one per rank, and one more for this rank. */
typedef struct nccl_split_request {
    int color, failed;
} nccl_split_request;

/** The functions of the backend. */
extern const fc_comm fc_nccl_functions;

/** Begin and end a call on the GPU of the communicator. Between the two, every call of NCCL goes through fc_nccl_check.
 */
fc_code fc_nccl_begin(fc_comm *comm, int *before, fc_error *err);
/** The same for a collective, which is counted: other ranks wait for it. */
fc_code fc_nccl_begin_collective(fc_comm *comm, int *before, fc_error *err);
fc_code fc_nccl_end(fc_comm *comm, int before, fc_code rc);

/** Reports a failed call, and waits until NCCL has taken the call: with a non-blocking communicator, it returns before.
 */
fc_code fc_nccl_check(fc_comm *comm, ncclResult_t result, const char *what, fc_error *err);
fc_code fc_nccl_check_cuda(fc_comm *comm, cudaError_t result, const char *what, fc_error *err);

/** Waits until the stream has done its work. The GPU is that of the communicator. */
fc_code fc_nccl_wait_for(fc_comm *comm, cudaStream_t stream, const char *what, fc_error *err);

/** See fc_device_collectives. They need NCCL 2.19. */
fc_code fc_nccl_alloc(fc_comm *comm, size_t bytes, void **out, fc_error *err);
void fc_nccl_release(fc_comm *comm, void *memory);

/** Marks all communicators of the family as broken, aborts them, and sends the other ranks the reason. A second call
 * only marks `comm`. The communicator's GPU must be the current one. */
void fc_nccl_abort_family(fc_comm *comm, const char *why);
/** Like fc_nccl_abort_family, with the reason "rank N <what>". */
void fc_nccl_abort_family_because(fc_comm *comm, const char *what);

fc_code fc_nccl_wait(fc_comm *comm, fc_stream *stream, fc_error *err);
void fc_nccl_abort(fc_comm *comm);
bool fc_nccl_has_failed(fc_comm *comm);
void fc_nccl_free(fc_comm *comm);
fc_code fc_nccl_split(fc_comm *comm, int color, fc_comm **out, fc_error *err);
