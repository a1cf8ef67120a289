/*
 * Reductions of the backend `mpi`. Each rank reduces one segment of the data: MPI brings the contributions of all ranks
 * to it in rounds, and they are folded in rank order.
 */
#include "comm/arith.h"
#include "comm/mpi_state.h"
#include "fsdpckpt/try.h"

#include <stdlib.h>

enum {
    SMALL_BYTES = 64 << 10,     /* up to this total, every rank gathers and reduces everything */
    EXCHANGE_BYTES = 64 << 20,  /* memory for the contributions of all ranks to one round */
    MIN_ROUND_BYTES = 64 << 10, /* bounds of one rank's contribution to a round */
    MAX_ROUND_BYTES = 4 << 20,
};

bool fc_mpi_segments_new(fc_mpi_segments *of, int size) {
    of->first = calloc((size_t)size * 2, sizeof *of->first);
    of->count = of->first + size;
    of->most = 0;
    return of->first != NULL;
}

/* The buffers of the rounds. */
typedef struct exchange {
    unsigned char *memory; /* a round's contributions from each rank */
    MPI_Request *requests; /* a receive and a send per rank */
    const void **inputs;   /* the contribution of each rank, for fc_arith_reduce */
    size_t round;          /* elements of a segment per round */
} exchange;

static void exchange_free(exchange *x) {
    free(x->memory);
    free(x->requests);
    free(x->inputs);
}

static fc_code exchange_new(exchange *x, const fc_comm *comm, size_t most, size_t element, fc_error *err) {
    const mpi_state *s = comm->state;
    size_t n = (size_t)comm->size, bytes = EXCHANGE_BYTES / n;
    bytes = bytes < MIN_ROUND_BYTES ? MIN_ROUND_BYTES : bytes > MAX_ROUND_BYTES ? MAX_ROUND_BYTES : bytes;
    bytes = fc_mpi_min(bytes, s->call_bytes);
    x->round = bytes / element < 1 ? 1 : bytes / element;
    x->round = fc_mpi_min(x->round, most < 1 ? 1 : most);
    x->memory = malloc(n * x->round * element);
    x->requests = malloc(2 * n * sizeof(MPI_Request));
    x->inputs = calloc(n, sizeof *x->inputs);
    if (!x->memory || !x->requests || !x->inputs) {
        exchange_free(x);
        return fc_fail(err, FC_ENOMEM, "a reduction over %d ranks: out of memory", comm->size);
    }
    return FC_OK;
}

/* Returns how many elements of a segment belong to the round that starts at its element `at`. */
static size_t elements_in_round(size_t count, size_t at, size_t round) {
    return at < count ? fc_mpi_min(count - at, round) : 0;
}

static fc_code exchange_round(fc_comm *comm, exchange *x, const char *send, const fc_mpi_segments *of, size_t at,
                              size_t element, fc_error *err) {
    mpi_state *s = comm->state;
    size_t own = elements_in_round(of->count[comm->rank], at, x->round) * element;
    int code = MPI_SUCCESS, n = comm->size;
    for (int i = 0; i < 2 * n; i++) {
        x->requests[i] = MPI_REQUEST_NULL;
    }
    for (int r = 0; r < n; r++) {
        x->inputs[r] = x->memory + (size_t)r * x->round * element;
        if (r == comm->rank) {
            x->inputs[r] = send + (of->first[r] + at) * element;
        } else if (own > 0 && code == MPI_SUCCESS) {
            code = MPI_Irecv(x->memory + (size_t)r * x->round * element, (int)own, MPI_BYTE, r, FC_MPI_TAG, s->mpi,
                             &x->requests[r]);
        }
    }
    for (int r = 0; r < n && code == MPI_SUCCESS; r++) {
        size_t theirs = elements_in_round(of->count[r], at, x->round) * element;
        if (r != comm->rank && theirs > 0) {
            code = MPI_Isend(send + (of->first[r] + at) * element, (int)theirs, MPI_BYTE, r, FC_MPI_TAG, s->mpi,
                             &x->requests[n + r]);
        }
    }
    return code == MPI_SUCCESS ? fc_mpi_wait_all(comm, "a reduction", 2 * n, x->requests, err)
                               : fc_mpi_fail(comm, "a reduction", code, err);
}

fc_code fc_mpi_reduce_segments(fc_comm *comm, const char *send, const fc_mpi_segments *of, char *out, fc_dtype dtype,
                               fc_reduce op, fc_error *err) {
    size_t element = fc_dtype_size(dtype);
    exchange x;
    fc_code rc = exchange_new(&x, comm, of->most, element, err);
    if (rc != FC_OK) {
        comm->broken = true; /* the other ranks wait for this rank's contribution */
        return rc;
    }
    for (size_t at = 0; at < of->most; at += x.round) {
        FC_TRY_GOTO(exchange_round(comm, &x, send, of, at, element, err), rc, out);
        size_t count = elements_in_round(of->count[comm->rank], at, x.round);
        if (count > 0) {
            fc_arith_reduce(dtype, op, x.inputs, comm->size, out + at * element, count);
        }
    }
out:
    exchange_free(&x); /* safe after a failure: MPI writes to it only during calls, and there are no more */
    return rc;
}

fc_code fc_mpi_break_for_memory(fc_comm *comm, fc_error *err) {
    comm->broken = true;
    return fc_fail(err, FC_ENOMEM, "a reduction over %d ranks: out of memory", comm->size);
}

fc_code fc_mpi_check_reduction(const fc_comm *comm, fc_dtype dtype, fc_reduce op, fc_error *err) {
    return comm->broken ? fc_mpi_refuse_broken(comm, err) : fc_arith_check(dtype, op, err);
}

/* Small data: every rank gathers everything and computes the same. */
static fc_code all_reduce_small(fc_comm *comm, void *data, size_t count, fc_dtype dtype, fc_reduce op, fc_error *err) {
    size_t bytes = count * fc_dtype_size(dtype), n = (size_t)comm->size;
    char *all = malloc(bytes * n + 1);
    const void **inputs = calloc(n, sizeof *inputs);
    if (!all || !inputs) {
        free(all);
        free(inputs);
        return fc_mpi_break_for_memory(comm, err);
    }
    fc_code rc;
    FC_TRY_GOTO(fc_mpi_all_gather(comm, data, all, bytes, err), rc, out);
    for (size_t r = 0; r < n; r++) {
        inputs[r] = all + r * bytes;
    }
    fc_arith_reduce(dtype, op, inputs, comm->size, data, count);
out:
    free(all);
    free(inputs);
    return rc;
}

fc_code fc_mpi_all_reduce(fc_comm *comm, void *data, size_t count, fc_dtype dtype, fc_reduce op, fc_error *err) {
    fc_mpi_segments of;
    fc_code rc;
    FC_TRY(fc_mpi_check_reduction(comm, dtype, op, err));
    size_t n = (size_t)comm->size, element = fc_dtype_size(dtype), segment = (count + n - 1) / n;
    if (count <= SMALL_BYTES / element / n) {
        return all_reduce_small(comm, data, count, dtype, op, err);
    }
    if (!fc_mpi_segments_new(&of, comm->size)) {
        return fc_mpi_break_for_memory(comm, err);
    }
    for (size_t r = 0; r < n; r++) {
        of.first[r] = fc_mpi_min(segment * r, count);
        of.count[r] = fc_mpi_min(segment, count - of.first[r]);
    }
    of.most = segment;
    char *own = (char *)data + of.first[comm->rank] * element;
    FC_TRY_GOTO(fc_mpi_reduce_segments(comm, data, &of, own, dtype, op, err), rc, out);
    for (size_t r = 0; r < n; r++) { /* from elements to bytes */
        of.first[r] *= element;
        of.count[r] *= element;
    }
    rc = fc_mpi_all_gather_v(comm, own, data, of.count, of.first, err);
out:
    free(of.first);
    return rc;
}
