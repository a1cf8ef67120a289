/*
 * Reductions of the backend `mpi`: MPI brings the ranks' contributions together, and they are summed here, in rank
 * order, piece by piece.
 */
#include "comm/arith.h"
#include "comm/mpi_state.h"

#include <stdlib.h>

enum {
    SMALL_BYTES = 64 << 10,    /* below, all ranks' contributions are gathered everywhere */
    EXCHANGE_BYTES = 64 << 20, /* for others' contributions to a reduction, of all ranks together */
    EXCHANGE_LEAST = 64 << 10, /* of one rank */
    EXCHANGE_MOST = 4 << 20,
};

/* Every rank gets the reduction of a segment of all ranks' data: who gets which. */
typedef struct shares {
    size_t *first, *count; /* elements, one a rank */
    size_t most;           /* of count */
} shares;

static bool shares_new(shares *of, int size) {
    of->first = calloc((size_t)size * 2, sizeof *of->first);
    of->count = of->first + size;
    of->most = 0;
    return of->first != NULL;
}

/* Others' contributions to a piece of this rank's segment, and this rank's to theirs. */
typedef struct exchange {
    unsigned char *memory; /* size × piece */
    MPI_Request *requests; /* 2 × size */
    const void **inputs;   /* size */
    size_t piece;          /* elements */
} exchange;

static void exchange_free(exchange *x) {
    free(x->memory);
    free(x->requests);
    free(x->inputs);
}

static fc_code exchange_new(exchange *x, const fc_comm *comm, size_t most, size_t element, fc_error *err) {
    const mpi_state *s = comm->state;
    size_t n = (size_t)comm->size, bytes = EXCHANGE_BYTES / n;
    bytes = bytes < EXCHANGE_LEAST ? EXCHANGE_LEAST : bytes > EXCHANGE_MOST ? EXCHANGE_MOST : bytes;
    bytes = fc_mpi_least(bytes, s->piece);
    x->piece = bytes / element < 1 ? 1 : bytes / element;
    x->piece = fc_mpi_least(x->piece, most < 1 ? 1 : most);
    x->memory = malloc(n * x->piece * element);
    x->requests = malloc(2 * n * sizeof(MPI_Request));
    x->inputs = calloc(n, sizeof *x->inputs);
    if (!x->memory || !x->requests || !x->inputs) {
        exchange_free(x);
        return fc_fail(err, FC_ENOMEM, "a reduction over %d ranks: out of memory", comm->size);
    }
    return FC_OK;
}

/* Elements of a segment in the piece that starts at its element `at`. */
static size_t part_of(size_t count, size_t at, size_t piece) {
    return at < count ? fc_mpi_least(count - at, piece) : 0;
}

static fc_code exchange_piece(fc_comm *comm, exchange *x, const char *send, const shares *of, size_t at, size_t element,
                              fc_error *err) {
    mpi_state *s = comm->state;
    size_t own = part_of(of->count[comm->rank], at, x->piece) * element;
    int code = MPI_SUCCESS, n = comm->size;
    for (int i = 0; i < 2 * n; i++) {
        x->requests[i] = MPI_REQUEST_NULL;
    }
    for (int r = 0; r < n; r++) {
        x->inputs[r] = x->memory + (size_t)r * x->piece * element;
        if (r == comm->rank) {
            x->inputs[r] = send + (of->first[r] + at) * element;
        } else if (own > 0 && code == MPI_SUCCESS) {
            code = MPI_Irecv(x->memory + (size_t)r * x->piece * element, (int)own, MPI_BYTE, r, FC_MPI_TAG, s->mpi,
                             &x->requests[r]);
        }
    }
    for (int r = 0; r < n && code == MPI_SUCCESS; r++) {
        size_t theirs = part_of(of->count[r], at, x->piece) * element;
        if (r != comm->rank && theirs > 0) {
            code = MPI_Isend(send + (of->first[r] + at) * element, (int)theirs, MPI_BYTE, r, FC_MPI_TAG, s->mpi,
                             &x->requests[n + r]);
        }
    }
    return code == MPI_SUCCESS ? fc_mpi_wait_all(comm, "a reduction", 2 * n, x->requests, err)
                               : fc_mpi_fail(comm, "a reduction", code, err);
}

/* This rank's segment, reduced, into `out`. `out` may be the segment itself: others do not read it. */
static fc_code reduce_shares(fc_comm *comm, const char *send, const shares *of, char *out, fc_dtype dtype, fc_reduce op,
                             fc_error *err) {
    size_t element = fc_dtype_size(dtype);
    exchange x;
    fc_code rc = exchange_new(&x, comm, of->most, element, err);
    if (rc != FC_OK) {
        comm->broken = true; /* the others wait for this rank's contribution */
        return rc;
    }
    for (size_t at = 0; rc == FC_OK && at < of->most; at += x.piece) {
        rc = exchange_piece(comm, &x, send, of, at, element, err);
        size_t some = part_of(of->count[comm->rank], at, x.piece);
        if (rc == FC_OK && some > 0) {
            fc_arith_reduce(dtype, op, x.inputs, comm->size, out + at * element, some);
        }
    }
    exchange_free(&x); /* also after a failure: MPI only writes there when it is called, and it is not any more */
    return rc;
}

static fc_code no_shares(fc_comm *comm, fc_error *err) {
    comm->broken = true;
    return fc_fail(err, FC_ENOMEM, "a reduction over %d ranks: out of memory", comm->size);
}

fc_code fc_mpi_reduce_scatter(fc_comm *comm, const void *send, void *recv, size_t count, fc_dtype dtype, fc_reduce op,
                              fc_stream *stream, fc_error *err) {
    (void)stream;
    shares of;
    fc_code rc = comm->broken ? fc_mpi_gave_up(comm, err) : fc_arith_check(dtype, op, err);
    if (rc != FC_OK) {
        return rc;
    }
    if (!shares_new(&of, comm->size)) {
        return no_shares(comm, err);
    }
    for (int r = 0; r < comm->size; r++) {
        of.first[r] = count * (size_t)r;
        of.count[r] = count;
    }
    of.most = count;
    rc = reduce_shares(comm, send, &of, recv, dtype, op, err);
    free(of.first);
    return rc;
}

/* Little data: everything goes everywhere, and every rank computes the same. */
static fc_code all_reduce_small(fc_comm *comm, void *data, size_t count, fc_dtype dtype, fc_reduce op, fc_error *err) {
    size_t bytes = count * fc_dtype_size(dtype), n = (size_t)comm->size;
    char *all = malloc(bytes * n + 1);
    const void **inputs = calloc(n, sizeof *inputs);
    if (!all || !inputs) {
        free(all);
        free(inputs);
        return no_shares(comm, err);
    }
    fc_code rc = fc_mpi_all_gather(comm, data, all, bytes, NULL, err);
    for (size_t r = 0; r < n; r++) {
        inputs[r] = all + r * bytes;
    }
    if (rc == FC_OK) {
        fc_arith_reduce(dtype, op, inputs, comm->size, data, count);
    }
    free(all);
    free(inputs);
    return rc;
}

fc_code fc_mpi_all_reduce(fc_comm *comm, void *data, size_t count, fc_dtype dtype, fc_reduce op, fc_stream *stream,
                          fc_error *err) {
    shares of;
    fc_code rc = comm->broken ? fc_mpi_gave_up(comm, err) : fc_arith_check(dtype, op, err);
    if (rc != FC_OK) {
        return rc;
    }
    size_t n = (size_t)comm->size, element = fc_dtype_size(dtype), share = (count + n - 1) / n;
    if (count <= SMALL_BYTES / element / n) {
        return all_reduce_small(comm, data, count, dtype, op, err);
    }
    if (!shares_new(&of, comm->size)) {
        return no_shares(comm, err);
    }
    for (size_t r = 0; r < n; r++) {
        of.first[r] = fc_mpi_least(share * r, count);
        of.count[r] = fc_mpi_least(share, count - of.first[r]);
    }
    of.most = share;
    char *own = (char *)data + of.first[comm->rank] * element;
    rc = reduce_shares(comm, data, &of, own, dtype, op, err);
    for (size_t r = 0; r < n; r++) { /* now in bytes */
        of.first[r] *= element;
        of.count[r] *= element;
    }
    if (rc == FC_OK) {
        rc = fc_mpi_all_gather_v(comm, own, data, of.count, of.first, stream, err);
    }
    free(of.first);
    return rc;
}
