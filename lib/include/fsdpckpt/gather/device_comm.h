/*
 * Communicators for training: those of comm.h for buffers in the memory of a device, and NCCL's between GPUs. Streams
 * order their work. A rank waits with fc_comm_wait, not with the device's synchronize, for streams that have
 * collectives; so an error on one rank never leaves the others waiting forever.
 */
#pragma once

#include "fsdpckpt/comm.h"
#include "fsdpckpt/gather/device.h"
#include "fsdpckpt/mesh.h"

FC_BEGIN_DECLS

/**
 * What a communicator has in place of the functions in fc_comm, for buffers in the memory of fc_comm.device. The work
 * is done in the order of a stream. Functions that are NULL: those of fc_comm do it at once.
 */
typedef struct fc_device_collectives {
    fc_code (*all_gather)(fc_comm *comm, const void *send, void *recv, size_t bytes, fc_stream *stream, fc_error *err);
    fc_code (*all_gather_v)(fc_comm *comm, const void *send, void *recv, const size_t *counts, const size_t *displs,
                            fc_stream *stream, fc_error *err);
    fc_code (*reduce_scatter)(fc_comm *comm, const void *send, void *recv, size_t count, fc_dtype dtype, fc_reduce op,
                              fc_stream *stream, fc_error *err);
    fc_code (*all_reduce)(fc_comm *comm, void *data, size_t count, fc_dtype dtype, fc_reduce op, fc_stream *stream,
                          fc_error *err);
    fc_code (*broadcast)(fc_comm *comm, void *data, size_t bytes, int root, fc_stream *stream, fc_error *err);
    /** Allocates memory of the device for buffers of collectives; `release` frees it after all work that uses it is
     * done and before the communicator. nccl: ncclMemAlloc, registered with ncclCommRegister, so that collectives need
     * no copies where the hardware allows. NULL: the device's own memory is as good. */
    fc_code (*alloc)(fc_comm *comm, size_t bytes, void **out, fc_error *err);
    void (*release)(fc_comm *comm, void *memory);
    /** See fc_comm_group and fc_comm_wait. */
    fc_code (*group)(fc_comm *comm, bool begin, fc_error *err);
    fc_code (*wait)(fc_comm *comm, fc_stream *stream, fc_error *err);
} fc_device_collectives;

/** The collectives of fc_comm, on a stream. */
fc_code fc_all_gather(fc_comm *comm, const void *send, void *recv, size_t bytes, fc_stream *stream, fc_error *err);
fc_code fc_all_gather_v(fc_comm *comm, const void *send, void *recv, const size_t *counts, const size_t *displs,
                        fc_stream *stream, fc_error *err);
fc_code fc_all_reduce(fc_comm *comm, void *data, size_t count, fc_dtype dtype, fc_reduce op, fc_stream *stream,
                      fc_error *err);
fc_code fc_broadcast(fc_comm *comm, void *data, size_t bytes, int root, fc_stream *stream, fc_error *err);

/**
 * Reduces elements [rank × count, (rank + 1) × count) of every rank's `send` (size × count elements) into `recv` (count
 * elements), computed as in all_reduce. `recv` may be send + rank × count elements.
 */
fc_code fc_reduce_scatter(fc_comm *comm, const void *send, void *recv, size_t count, fc_dtype dtype, fc_reduce op,
                          fc_stream *stream, fc_error *err);

/** Begins a group of collectives on one stream, or ends it. NCCL runs them together; no result is there before the end.
 *  A group that has begun must end, also after an error. */
fc_code fc_comm_group(fc_comm *comm, bool begin, fc_error *err);

/** Waits until `stream` has done its work, other ranks have failed, `cancel` is true or `timeout` has passed. After an
 *  error the communicator is aborted. Copies to pageable host memory wait too, so call this before them. */
fc_code fc_comm_wait(fc_comm *comm, fc_stream *stream, fc_error *err);

/** Makes a communicator of the ranks that differ only in their coordinate along mesh dimension `dim`. comm->size must
 * be the number of ranks of the mesh. */
fc_code fc_comm_split_mesh(fc_comm *comm, const fc_mesh *mesh, int dim, fc_comm **out, fc_error *err);

/** fc_comm_run_local, with communicators for the memory of the processor: fc_device_cpu, which lives as long. */
fc_code fc_device_run_local(int size, fc_code (*work)(fc_comm *comm, void *context, fc_error *err), void *context,
                            fc_error *err);

/** fc_comm_mpi for buffers in the memory of `device`, which must be host memory. @return FC_EUNSUPPORTED for a GPU. */
fc_code fc_device_mpi(fc_device *device, fc_comm **out, fc_error *err);

/**
 * Makes an NCCL communicator of the ranks of `bootstrap`, which broadcasts the unique id, on the GPU `device`. Free it
 * before `bootstrap`, which tells it that other ranks have failed.
 * @return FC_EUNSUPPORTED with the reason why NCCL cannot run.
 */
fc_code fc_comm_nccl(fc_comm *bootstrap, fc_device *device, fc_comm **out, fc_error *err);

/**
 * Makes an NCCL communicator of `size` ranks that find each other through a file. Rank 0 makes `path`, which must not
 * exist yet (a file that a killed rank 0 has left is replaced), and removes it when all have joined. The others wait
 * for it, at most `seconds`.
 *
 * The ranks keep the file open, and each holds a lock on a byte of it. A rank that waits for others gets an error that
 * names the rank when another one gives up, or when its process ends in any way. The same holds when a rank frees the
 * communicator before a collective that the others have begun; for communicators that were split, this is noticed only
 * after the timeout. A child that is forked without exec keeps the lock of a rank that dies. On NFS, locks of a machine
 * that is lost are held until the server drops them; without locks, a rank whose process was killed is noticed after
 * the timeout.
 */
fc_code fc_comm_nccl_file(const char *path, int rank, int size, int seconds, fc_device *device, fc_comm **out,
                          fc_error *err);

FC_END_DECLS
