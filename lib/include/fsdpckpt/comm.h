/*
 * Collectives between ranks. One interface, three backends: `local` (ranks are threads of one process), `mpi`
 * (Open MPI) and `nccl` (GPUs); the last two are modules, loaded when asked for, and say why when they cannot run.
 *
 * Every function is collective: all ranks of the communicator call it, in the same order, with sizes that agree.
 * Buffers lie in the memory of the communicator's device. Errors are the same on all ranks wherever the backend can
 * make it so; an error of one rank never leaves the others waiting for ever.
 */
#ifndef FSDPCKPT_COMM_H
#define FSDPCKPT_COMM_H

#include "fsdpckpt/device.h"
#include "fsdpckpt/mesh.h"

#include <stdatomic.h>

#ifdef __cplusplus
extern "C" {
#endif

/** XOR is for integers and booleans, AVG for floating and complex numbers, MIN and MAX for all but complex ones. */
typedef enum fc_reduce { FC_REDUCE_SUM, FC_REDUCE_AVG, FC_REDUCE_MIN, FC_REDUCE_MAX, FC_REDUCE_XOR } fc_reduce;

typedef struct fc_comm fc_comm;

struct fc_comm {
    const char *backend; /**< "local", "mpi", "nccl" */
    int rank, size;
    fc_device *device; /**< borrowed: where the buffers lie */
    void *state;       /**< private */
    /** May be NULL, and may be set by the caller at any time between calls; a split inherits it. When it becomes true,
     *  a rank that waits for others gives up with FC_EINTERRUPTED; the communicator can then only be freed. */
    const atomic_bool *cancel;
    /** Set by a collective that failed, and by a caller that gives up without the others having agreed to it: `free`
     *  then does not wait for them. With mpi the process must exit soon: mpirun then ends the other ranks. */
    bool broken;

    /** recv (size × bytes) = the `bytes` bytes of every rank, in rank order. send may be recv + rank · bytes. */
    fc_code (*all_gather)(fc_comm *comm, const void *send, void *recv, size_t bytes, fc_stream *stream, fc_error *err);
    /** Like all_gather with `counts[r]` bytes from rank r, to recv + displs[r]; counts may be 0. */
    fc_code (*all_gather_v)(fc_comm *comm, const void *send, void *recv, const size_t *counts, const size_t *displs,
                            fc_stream *stream, fc_error *err);
    /** recv (count elements) = the reduction over ranks of elements [rank · count, (rank + 1) · count) of send
     *  (size × count elements), in rank order on the host backends: types narrower than float32 in float32, rounded
     *  once. AVG divides the sum by size. recv may be send + rank · count elements. */
    fc_code (*reduce_scatter)(fc_comm *comm, const void *send, void *recv, size_t count, fc_dtype dtype, fc_reduce op,
                              fc_stream *stream, fc_error *err);
    fc_code (*all_reduce)(fc_comm *comm, void *data, size_t count, fc_dtype dtype, fc_reduce op, fc_stream *stream,
                          fc_error *err);
    fc_code (*broadcast)(fc_comm *comm, void *data, size_t bytes, int root, fc_stream *stream, fc_error *err);
    fc_code (*barrier)(fc_comm *comm, fc_error *err);
    /** A communicator of the ranks with equal `color`, ordered by rank. It must be freed before `comm`. */
    fc_code (*split)(fc_comm *comm, int color, fc_comm **out, fc_error *err);
    void (*free)(fc_comm *comm);
};

/** Splits by mesh dimension `dim`: the ranks that differ only in their coordinate along it. comm->size is the mesh's.
 */
fc_code fc_comm_split_mesh(fc_comm *comm, const fc_mesh *mesh, int dim, fc_comm **out, fc_error *err);

/**
 * Agrees on an outcome: every rank gives its own code and error, all get FC_OK if all gave it, else the code and the
 * message of the lowest rank that failed ("rank 3: …"; without the rank if all say the same).
 */
fc_code fc_comm_agree(fc_comm *comm, fc_code mine, fc_error *err);

/** Runs `work` on `size` ranks that are threads of this process; returns as fc_comm_agree over what they return. */
fc_code fc_comm_run_local(int size, fc_code (*work)(fc_comm *comm, void *context, fc_error *err), void *context,
                          fc_error *err);

/**
 * All ranks of the MPI job (one when started without mpirun), from the MPI module. Where the program has not called
 * MPI_Init, this does, once in a process, and the communicator's `free` ends MPI.
 * @param device memory of the host.
 * @return FC_EUNSUPPORTED with the reason: no module, no MPI library on this machine, a GPU.
 */
fc_code fc_comm_mpi(fc_device *device, fc_comm **out, fc_error *err);

/**
 * NCCL among the ranks of `bootstrap` (its unique id is broadcast through it), on `device`, a GPU.
 * @return FC_EUNSUPPORTED with the reason when it cannot run.
 */
fc_code fc_comm_nccl(fc_comm *bootstrap, fc_device *device, fc_comm **out, fc_error *err);

/**
 * NCCL among `size` ranks that know each other by a file alone: rank 0 makes `path`, which must not be left from
 * before, and removes it when all have joined; the others wait for it, at most `seconds`.
 */
fc_code fc_comm_nccl_file(const char *path, int rank, int size, int seconds, fc_device *device, fc_comm **out,
                          fc_error *err);

#ifdef __cplusplus
}
#endif
#endif
