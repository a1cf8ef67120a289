/*
 * What the files of the backend `mpi` share: its state, waiting for requests, gathering.
 */
#ifndef FSDPCKPT_COMM_MPI_STATE_H
#define FSDPCKPT_COMM_MPI_STATE_H

#ifndef FSDPCKPT_PRIVATE
#error "this header is private to fsdpckpt: include <fsdpckpt/...> instead"
#endif

#include "fsdpckpt/comm.h"

#include <mpi.h>

enum { FC_MPI_TAG = 7 };

/** fc_comm.state of this backend. */
typedef struct mpi_state {
    MPI_Comm mpi;
    size_t piece; /**< bytes of one call at most */
    bool ends_mpi;
} mpi_state;

static inline size_t fc_mpi_least(size_t a, size_t b) {
    return a < b ? a : b;
}

/** The error `code` of a call of MPI. What the ranks do together has ended with it. */
fc_code fc_mpi_fail(fc_comm *comm, const char *call, int code, fc_error *err);

/** A rank that has failed alone must not start anything that the others do not join. */
fc_code fc_mpi_gave_up(const fc_comm *comm, fc_error *err);

/** Waits for `count` requests; the array is in use until then. */
fc_code fc_mpi_wait_all(fc_comm *comm, const char *call, int count, MPI_Request *requests, fc_error *err);

/** fc_comm.all_gather and the like. (mpi.c) */
fc_code fc_mpi_all_gather(fc_comm *comm, const void *send, void *recv, size_t bytes, fc_stream *stream, fc_error *err);
fc_code fc_mpi_all_gather_v(fc_comm *comm, const void *send, void *recv, const size_t *counts, const size_t *displs,
                            fc_stream *stream, fc_error *err);

/** fc_comm.reduce_scatter and fc_comm.all_reduce. (mpi_reduce.c) */
fc_code fc_mpi_reduce_scatter(fc_comm *comm, const void *send, void *recv, size_t count, fc_dtype dtype, fc_reduce op,
                              fc_stream *stream, fc_error *err);
fc_code fc_mpi_all_reduce(fc_comm *comm, void *data, size_t count, fc_dtype dtype, fc_reduce op, fc_stream *stream,
                          fc_error *err);

#endif
