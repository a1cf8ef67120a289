/*
 * The state of the backend `mpi`, and the functions that its files share.
 */
#pragma once

#include "fsdpckpt/comm.h"

#include <mpi.h>

enum { FC_MPI_TAG = 7 };

/** fc_comm.state of this backend. */
typedef struct mpi_state {
    MPI_Comm mpi;      /**< owned */
    size_t call_bytes; /**< most bytes that one MPI call transfers */
    bool ends_mpi;     /**< whether `free` calls MPI_Finalize */
} mpi_state;

static inline size_t fc_mpi_min(size_t a, size_t b) {
    return a < b ? a : b;
}

/** Reports that an MPI call failed with `code`, and marks the communicator as broken. */
fc_code fc_mpi_fail(fc_comm *comm, const char *call, int code, fc_error *err);

/** Fails a call on a broken communicator: the other ranks would not join it. */
fc_code fc_mpi_refuse_broken(const fc_comm *comm, fc_error *err);

/** Waits for `count` requests. Fails when an MPI call fails or comm->cancel becomes true. */
fc_code fc_mpi_wait_all(fc_comm *comm, const char *call, int count, MPI_Request *requests, fc_error *err);

/** fc_comm.all_gather and fc_comm.all_gather_v, in mpi.c. */
fc_code fc_mpi_all_gather(fc_comm *comm, const void *send, void *recv, size_t bytes, fc_error *err);
fc_code fc_mpi_all_gather_v(fc_comm *comm, const void *send, void *recv, const size_t *counts, const size_t *displs,
                            fc_error *err);

/** fc_comm.all_reduce, in mpi_reduce.c. */
fc_code fc_mpi_all_reduce(fc_comm *comm, void *data, size_t count, fc_dtype dtype, fc_reduce op, fc_error *err);

/** The segments of the data of a reduction, one per rank. */
typedef struct fc_mpi_segments {
    size_t *first, *count; /**< the first element and the number of elements of each; `first` owns both */
    size_t most;           /**< the largest count */
} fc_mpi_segments;

/** Allocates segments without elements; free(of->first) releases them. @return false when out of memory. */
bool fc_mpi_segments_new(fc_mpi_segments *of, int size);

/** Reduces this rank's segment into `out`, which may be the segment itself: no other rank reads it. */
fc_code fc_mpi_reduce_segments(fc_comm *comm, const char *send, const fc_mpi_segments *of, char *out, fc_dtype dtype,
                               fc_reduce op, fc_error *err);

/** Checks that the ranks can reduce this at all. */
fc_code fc_mpi_check_reduction(const fc_comm *comm, fc_dtype dtype, fc_reduce op, fc_error *err);

/** Fails a reduction for lack of memory, and marks the communicator as broken. */
fc_code fc_mpi_break_for_memory(fc_comm *comm, fc_error *err);

/** What the module has for training, in lib/gather/mpi_scatter.c. */
extern const struct fc_device_module fc_mpi_devices;
