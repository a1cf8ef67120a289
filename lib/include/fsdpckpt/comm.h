/*
 * Collectives between ranks. One interface, two backends for host memory: `local` (ranks are threads of one process)
 * and `mpi` (Open MPI), a module that is loaded on demand and reports why it cannot run. gather/device_comm.h has the
 * third, `nccl`, for the memory of GPUs, and what training needs of a communicator.
 *
 * Every function is collective: all ranks of the communicator call it in the same order, with sizes that agree. All
 * ranks get the same error if the backend allows it. An error on one rank never leaves the others waiting forever.
 */
#pragma once

#include "fsdpckpt/atomic.h"
#include "fsdpckpt/dtype.h"
#include "fsdpckpt/error.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

FC_BEGIN_DECLS

/** XOR works on integers and booleans, AVG on floating-point and complex numbers, MIN and MAX on all but complex. */
typedef enum fc_reduce { FC_REDUCE_SUM, FC_REDUCE_AVG, FC_REDUCE_MIN, FC_REDUCE_MAX, FC_REDUCE_XOR } fc_reduce;

typedef struct fc_comm fc_comm;

struct fc_comm {
    const char *backend; /**< "local", "mpi", "nccl" */
    int rank, size;      /**< this rank, and the number of ranks */
    void *state;         /**< private to the backend */
    /**
     * When it becomes true, a rank that waits for others returns FC_EINTERRUPTED; after that the communicator can only
     * be freed. The caller may set the pointer between any two calls. NULL: waiting cannot be cancelled. Communicators
     * made by `split` inherit it.
     */
    const atomic_bool *cancel;
    /** Set by a collective that fails, and by a caller that gives up without the agreement of the others. Then `free`
     *  does not wait for them. With mpi the process must exit soon, so that mpirun ends the other ranks. */
    bool broken;
    /** Seconds after which waiting for a stream, and making a communicator, fail because other ranks do not answer.
     * nccl: 600 unless the caller changes it; `split` inherits it. 0: never, as with the other backends, whose ranks
     * notice failures of others. */
    int timeout;
    /** Whether two threads may use two communicators of this backend at the same time. `split` inherits it. */
    bool concurrent;

    /** What only training uses, see gather/device_comm.h; NULL in a conversion. Borrowed; `split` inherits both. */
    struct fc_device *device;
    const struct fc_device_collectives *on_device;

    /** Puts the `bytes` bytes of every rank into `recv` (size × bytes), in rank order. `send` may be recv + rank ×
     * bytes.
     */
    fc_code (*all_gather)(fc_comm *comm, const void *send, void *recv, size_t bytes, fc_error *err);
    /** Like all_gather, with counts[r] bytes from rank r, which go to recv + displs[r]. A count may be 0. */
    fc_code (*all_gather_v)(fc_comm *comm, const void *send, void *recv, const size_t *counts, const size_t *displs,
                            fc_error *err);
    /** Replaces the `count` elements of `data` by their reduction over all ranks, in rank order; types narrower than
     *  float32 are summed in float32 and rounded once. AVG divides the sum by size. */
    fc_code (*all_reduce)(fc_comm *comm, void *data, size_t count, fc_dtype dtype, fc_reduce op, fc_error *err);
    /** Copies the `bytes` bytes of `data` on rank `root` to all ranks. */
    fc_code (*broadcast)(fc_comm *comm, void *data, size_t bytes, int root, fc_error *err);
    /** Waits until all ranks have called it. */
    fc_code (*barrier)(fc_comm *comm, fc_error *err);
    /** Makes a communicator of the ranks that pass the same `color`, in the order of their ranks. Free it before
     * `comm`.
     */
    fc_code (*split)(fc_comm *comm, int color, fc_comm **out, fc_error *err);
    /** See fc_comm_abort and fc_comm_has_failed, which callers use; NULL if there is nothing to do. */
    void (*abort)(fc_comm *comm);
    bool (*has_failed)(fc_comm *comm);
    void (*free)(fc_comm *comm);
};

/**
 * Gives up without the others. It ends what still runs on streams, also that of communicators that were split from this
 * one or from which it was split; all of them are then broken. With nccl they are aborted together, because each abort
 * waits for all work of the GPU; so all communicators of a GPU must be split from one. Ranks that wait for this one get
 * an error: at once if they are threads, with mpi when this process ends, with nccl like those of the bootstrap, or at
 * once if they met at a file.
 */
void fc_comm_abort(fc_comm *comm);

/** Returns whether another rank has given up. It never waits. */
bool fc_comm_has_failed(fc_comm *comm);

/**
 * Agrees on an outcome. Every rank passes its own code and error. All get FC_OK if every rank passed it, else the code
 * and the message of the lowest rank that failed ("rank 3: …", without the rank if all messages are equal).
 */
fc_code fc_comm_agree(fc_comm *comm, fc_code mine, fc_error *err);

/** Runs `work` on `size` ranks that are threads of this process. @return the outcome as fc_comm_agree gives it. */
fc_code fc_comm_run_local(int size, fc_code (*work)(fc_comm *comm, void *context, fc_error *err), void *context,
                          fc_error *err);

/**
 * Makes a communicator of all ranks of the MPI job, or of one rank without mpirun. If the program has not called
 * MPI_Init, this function does, once per process, and the communicator's `free` ends MPI.
 * @return FC_EUNSUPPORTED with the reason: no module, or no MPI library on this machine.
 */
fc_code fc_comm_mpi(fc_comm **out, fc_error *err);

FC_END_DECLS
