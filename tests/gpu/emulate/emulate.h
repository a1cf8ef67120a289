/*
 * Emulated GPUs and an emulated NCCL, whose ranks are threads of this process. They execute what lib/gather/cuda does
 * on machines without a GPU: its kernels (kernels.cpp), the CUDA runtime (runtime.c) and the collectives
 * (collectives.c).
 *
 * - Streams do their work later, when a host thread waits or asks: in the order of the calls, or in any order that
 * streams and events allow, which a seed chooses. Collectives run when all ranks have reached them.
 * - Device memory has addresses that the processor cannot access. Kernels and copies see it at another address, which
 *   becomes inaccessible when it is freed. So a wrong access ends the program.
 * - Sums round after each rank, as in NCCL's ring.
 * - Any call can be made to fail.
 *
 * FSDPCKPT_EMULATED_GPUS is the number of GPUs (1), FSDPCKPT_EMULATED_ORDER the seed (0: the order of the calls),
 * FSDPCKPT_EMULATED_NCCL the version that ncclGetVersion gives (that of nccl.h). With an odd seed, calls of
 * non-blocking communicators also return before their work is on the stream, until the caller asks twice.
 */
#pragma once

#include <cuda_runtime_api.h>

#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

/** Work on a stream. Its functions run while the machine is locked. */
typedef struct emulated_work {
    bool (*is_ready)(void *argument); /**< NULL: it is */
    void (*run)(void *argument);
    void (*drop)(void *argument); /**< releases `argument` when the work is done */
    void *argument;
} emulated_work;

/** Gives work to a stream. NULL stands for the default stream of the current GPU. */
void emulated_enqueue(cudaStream_t stream, emulated_work work);
void emulated_enqueue_locked(cudaStream_t stream, emulated_work work);

/** Returns where the running work sees an address. Device memory must be that of its GPU and within one allocation. */
void *emulated_local(const void *address);
/** The same for the memory of another GPU, which only collectives access. */
void *emulated_remote(const void *address);

/** Locks the machine; waits, doing work, until is_true(argument); lets waiting threads look again. */
void emulated_lock(void);
void emulated_unlock(void);
void emulated_wait(bool (*is_true)(void *argument), void *argument);
void emulated_changed(void);
/** Does all work that can be done now. */
void emulated_work_on(void);

/** Returns whether calls return before their work is on the stream. */
bool emulated_is_lazy(void);

/** Makes call number `call` (from 1) on GPU `gpu` fail, once; counting starts anew. 0: none. */
void emulated_fail(int gpu, long call);
/** Returns the name of the call that failed, or NULL if none has. */
const char *emulated_failed(void);
/** Counts a call on the current GPU. @return whether it fails. */
bool emulated_fails(const char *name);

/** Returns how many collectives, or groups of them, have run. */
long emulated_collectives(void);

/** Returns how many all-gathers were called with a result in memory that is registered with their communicator. */
long emulated_registered_gathers(void);

/** Ends the program with a message, for what a GPU would punish with a crash or a deadlock. */
void emulated_die(const char *format, ...) __attribute__((format(printf, 1, 2), noreturn));

#ifdef __cplusplus
}
#endif
