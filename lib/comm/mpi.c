/*
 * The backend `mpi`, whose ranks are processes started by mpirun. It is a module (see module.h) and uses host memory.
 *
 * MPI only moves bytes. Reductions are computed in rank order (mpi_reduce.c), so their results equal those of the
 * backend `local` bit for bit on any number of machines. A waiting rank polls with sleeps: this leaves the processors
 * to the threads that move data, and lets it read the flag `cancel`. Transfers of more than INT_MAX bytes take several
 * calls.
 */
#include "comm/module.h"
#include "comm/mpi_state.h"
#include "fsdpckpt/try.h"

#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum {
    CALL_BYTES = 1 << 30,   /* most bytes that one MPI call transfers */
    SPINS = 2000,           /* polls before the first sleep */
    MIN_SLEEP_NS = 20000,   /* the first sleep; each one doubles */
    MAX_SLEEP_NS = 1000000, /* the longest sleep */
};

fc_code fc_mpi_fail(fc_comm *comm, const char *call, int code, fc_error *err) {
    char text[MPI_MAX_ERROR_STRING] = "";
    int length = 0;
    MPI_Error_string(code, text, &length);
    comm->broken = true;
    return fc_fail(err, FC_EIO, "rank %d: %s: %s", comm->rank, call, text);
}

fc_code fc_mpi_wait_all(fc_comm *comm, const char *call, int count, MPI_Request *requests, fc_error *err) {
    struct timespec pause = {0, MIN_SLEEP_NS};
    for (long spins = 0;; spins++) {
        int done = 0, code = MPI_Testall(count, requests, &done, MPI_STATUSES_IGNORE);
        if (code != MPI_SUCCESS) {
            return fc_mpi_fail(comm, call, code, err);
        }
        if (done) {
            return FC_OK;
        }
        if (comm->cancel && atomic_load(comm->cancel)) {
            comm->broken = true;
            return fc_fail(err, FC_EINTERRUPTED, "interrupted: the job was stopped, or another rank has died");
        }
        if (spins < SPINS) {
            sched_yield();
        } else {
            nanosleep(&pause, NULL);
            pause.tv_nsec = pause.tv_nsec * 2 > MAX_SLEEP_NS ? MAX_SLEEP_NS : pause.tv_nsec * 2;
        }
    }
}

fc_code fc_mpi_refuse_broken(const fc_comm *comm, fc_error *err) {
    return fc_fail(err, FC_EIO, "rank %d: the communicator was aborted after an earlier error", comm->rank);
}

/* Starts a nonblocking call that sets `request`, and waits for it. */
#define AND_WAIT(comm, name, call, err)                                                                                \
    do {                                                                                                               \
        MPI_Request request = MPI_REQUEST_NULL;                                                                        \
        int code_ = call;                                                                                              \
        if (code_ != MPI_SUCCESS) {                                                                                    \
            return fc_mpi_fail(comm, name, code_, err);                                                                \
        }                                                                                                              \
        fc_code rc_ = fc_mpi_wait_all(comm, name, 1, &request, err);                                                   \
        if (rc_ != FC_OK) {                                                                                            \
            return rc_;                                                                                                \
        }                                                                                                              \
    } while (0)

static fc_code mpi_barrier(fc_comm *comm, fc_error *err) {
    mpi_state *s = comm->state;
    if (comm->broken) {
        return fc_mpi_refuse_broken(comm, err);
    }
    AND_WAIT(comm, "barrier", MPI_Ibarrier(s->mpi, &request), err);
    return FC_OK;
}

static fc_code mpi_broadcast(fc_comm *comm, void *data, size_t bytes, int root, fc_error *err) {
    mpi_state *s = comm->state;
    if (comm->broken) {
        return fc_mpi_refuse_broken(comm, err);
    }
    if (root < 0 || root >= comm->size) {
        return fc_fail(err, FC_EUSAGE, "broadcast: rank %d does not exist among %d ranks", root, comm->size);
    }
    for (size_t at = 0; at < bytes; at += s->call_bytes) {
        int some = (int)fc_mpi_min(bytes - at, s->call_bytes);
        AND_WAIT(comm, "broadcast", MPI_Ibcast((char *)data + at, some, MPI_BYTE, root, s->mpi, &request), err);
    }
    return FC_OK;
}

/* ---- gathering ---- */

/* Sends a block to rank `to` and receives one from rank `from`. */
static fc_code exchange_bytes(fc_comm *comm, const char *send, size_t send_bytes, int to, char *recv, size_t recv_bytes,
                              int from, fc_error *err) {
    mpi_state *s = comm->state;
    size_t most = send_bytes > recv_bytes ? send_bytes : recv_bytes;
    for (size_t at = 0; at < most; at += s->call_bytes) {
        MPI_Request requests[2] = {MPI_REQUEST_NULL, MPI_REQUEST_NULL};
        int code = MPI_SUCCESS;
        if (at < recv_bytes) {
            code = MPI_Irecv(recv + at, (int)fc_mpi_min(recv_bytes - at, s->call_bytes), MPI_BYTE, from, FC_MPI_TAG,
                             s->mpi, &requests[0]);
        }
        if (code == MPI_SUCCESS && at < send_bytes) {
            code = MPI_Isend(send + at, (int)fc_mpi_min(send_bytes - at, s->call_bytes), MPI_BYTE, to, FC_MPI_TAG,
                             s->mpi, &requests[1]);
        }
        if (code != MPI_SUCCESS) {
            return fc_mpi_fail(comm, "all_gather", code, err);
        }
        FC_TRY(fc_mpi_wait_all(comm, "all_gather", 2, requests, err));
    }
    return FC_OK;
}

/* A ring: in each step, every rank passes the block that it received last to its right neighbour. */
static fc_code gather_in_ring(fc_comm *comm, char *recv, const size_t *counts, const size_t *displs, fc_error *err) {
    int n = comm->size, right = (comm->rank + 1) % n, left = (comm->rank + n - 1) % n;
    for (int step = 0; step < n - 1; step++) {
        int out = (comm->rank + n - step) % n, in = (comm->rank + n - step - 1) % n;
        FC_TRY(exchange_bytes(comm, recv + displs[out], counts[out], right, recv + displs[in], counts[in], left, err));
    }
    return FC_OK;
}

/* Gathers with one MPI call. All counts and offsets must fit in an int. */
static fc_code gather_in_one_call(fc_comm *comm, char *recv, const size_t *counts, const size_t *displs,
                                  fc_error *err) {
    mpi_state *s = comm->state;
    int *ints = calloc((size_t)comm->size * 2, sizeof *ints);
    if (!ints) {
        comm->broken = true; /* the other ranks wait in the call */
        return fc_no_memory(err, "all_gather");
    }
    for (int r = 0; r < comm->size; r++) {
        ints[r] = (int)counts[r];
        ints[comm->size + r] = (int)displs[r];
    }
    MPI_Request request = MPI_REQUEST_NULL;
    int code = MPI_Iallgatherv(MPI_IN_PLACE, 0, MPI_BYTE, recv, ints, ints + comm->size, MPI_BYTE, s->mpi, &request);
    fc_code rc = code == MPI_SUCCESS ? fc_mpi_wait_all(comm, "all_gather", 1, &request, err)
                                     : fc_mpi_fail(comm, "all_gather", code, err);
    free(ints);
    return rc;
}

fc_code fc_mpi_all_gather_v(fc_comm *comm, const void *send, void *recv, const size_t *counts, const size_t *displs,
                            fc_error *err) {
    mpi_state *s = comm->state;
    char *own = (char *)recv + displs[comm->rank];
    size_t end = 0;
    if (comm->broken) {
        return fc_mpi_refuse_broken(comm, err);
    }
    if (counts[comm->rank] > 0 && own != send) {
        memmove(own, send, counts[comm->rank]);
    }
    for (int r = 0; r < comm->size; r++) {
        end = displs[r] + counts[r] > end ? displs[r] + counts[r] : end;
    }
    return end <= s->call_bytes ? gather_in_one_call(comm, recv, counts, displs, err)
                                : gather_in_ring(comm, recv, counts, displs, err);
}

fc_code fc_mpi_all_gather(fc_comm *comm, const void *send, void *recv, size_t bytes, fc_error *err) {
    mpi_state *s = comm->state;
    char *own = (char *)recv + bytes * (size_t)comm->rank;
    if (comm->broken) {
        return fc_mpi_refuse_broken(comm, err);
    }
    if (bytes > 0 && own != send) {
        memmove(own, send, bytes);
    }
    if (bytes <= s->call_bytes) {
        AND_WAIT(comm, "all_gather",
                 MPI_Iallgather(MPI_IN_PLACE, 0, MPI_BYTE, recv, (int)bytes, MPI_BYTE, s->mpi, &request), err);
        return FC_OK;
    }
    size_t *ints = calloc((size_t)comm->size * 2, sizeof *ints);
    if (!ints) {
        comm->broken = true;
        return fc_no_memory(err, "all_gather");
    }
    for (int r = 0; r < comm->size; r++) {
        ints[r] = bytes;
        ints[comm->size + r] = bytes * (size_t)r;
    }
    fc_code rc = gather_in_ring(comm, recv, ints, ints + comm->size, err);
    free(ints);
    return rc;
}

/* ---- communicators ---- */

static const fc_comm functions;

static fc_code comm_new(MPI_Comm mpi, bool ends_mpi, size_t call_bytes, fc_comm **out, fc_error *err) {
    fc_comm *comm = malloc(sizeof *comm);
    mpi_state *s = malloc(sizeof *s);
    if (!comm || !s) {
        free(comm);
        free(s);
        return fc_no_memory(err, "mpi");
    }
    *comm = functions;
    *s = (mpi_state){.mpi = mpi, .ends_mpi = ends_mpi, .call_bytes = call_bytes};
    comm->state = s;
    MPI_Comm_set_errhandler(mpi, MPI_ERRORS_RETURN);
    int level = MPI_THREAD_SINGLE;
    MPI_Query_thread(&level);
    comm->concurrent = level == MPI_THREAD_MULTIPLE;
    MPI_Comm_rank(mpi, &comm->rank);
    MPI_Comm_size(mpi, &comm->size);
    *out = comm;
    return FC_OK;
}

static void mpi_free(fc_comm *comm) {
    mpi_state *s = comm->state;
    if (!comm->broken) { /* both calls wait for all ranks */
        MPI_Comm_free(&s->mpi);
        if (s->ends_mpi) {
            MPI_Finalize();
        }
    }
    free(s);
    free(comm);
}

/* MPI does not accept negative colors: `*first` is the first rank of this rank's color, and stands for it. */
static fc_code first_of_color(fc_comm *comm, int color, int *first, fc_error *err) {
    int *colors = malloc((size_t)comm->size * sizeof *colors);
    if (!colors) {
        comm->broken = true;
        return fc_no_memory(err, "split");
    }
    fc_code rc;
    FC_TRY_GOTO(fc_mpi_all_gather(comm, &color, colors, sizeof color, err), rc, out);
    for (*first = 0; colors[*first] != color;) {
        ++*first;
    }
out:
    free(colors);
    return rc;
}

/* MPI does not accept negative colors, so the first rank of a color replaces it. */
static fc_code mpi_split(fc_comm *comm, int color, fc_comm **out, fc_error *err) {
    mpi_state *s = comm->state;
    int first = 0;
    *out = NULL;
    FC_TRY(first_of_color(comm, color, &first, err));
    MPI_Comm group = MPI_COMM_NULL;
    int code = MPI_Comm_split(s->mpi, first, comm->rank, &group);
    if (code != MPI_SUCCESS) {
        return fc_mpi_fail(comm, "split", code, err);
    }
    FC_TRY(comm_new(group, false, s->call_bytes, out, err));
    (*out)->cancel = comm->cancel;
    (*out)->device = comm->device;
    (*out)->on_device = comm->on_device;
    return FC_OK;
}

static const fc_comm functions = {
    .backend = "mpi",
    .all_gather = fc_mpi_all_gather,
    .all_gather_v = fc_mpi_all_gather_v,
    .all_reduce = fc_mpi_all_reduce,
    .broadcast = mpi_broadcast,
    .barrier = mpi_barrier,
    .split = mpi_split,
    .free = mpi_free,
};

/* Starts MPI unless the program has. */
static fc_code start_mpi(bool *started, fc_error *err) {
    int initialized = 0, finalized = 0, provided = MPI_THREAD_SINGLE;
    MPI_Initialized(&initialized);
    MPI_Finalized(&finalized);
    if (finalized) {
        return fc_fail(err, FC_EUSAGE, "mpi: MPI has ended in this process and cannot be started again");
    }
    *started = !initialized;
    if (initialized) {
        return FC_OK;
    }
    int code = MPI_Init_thread(NULL, NULL, MPI_THREAD_MULTIPLE, &provided);
    if (code != MPI_SUCCESS) {
        return fc_fail(err, FC_EIO, "mpi: MPI_Init_thread failed with %d", code);
    }
    if (provided < MPI_THREAD_FUNNELED) {
        MPI_Finalize();
        return fc_fail(err, FC_EUNSUPPORTED, "mpi: this MPI library does not support threads");
    }
    return FC_OK;
}

/* The tests set FSDPCKPT_MPI_CALL_BYTES to a few bytes, so that small transfers take several calls. */
static size_t chosen_call_bytes(void) {
    const char *given = getenv("FSDPCKPT_MPI_CALL_BYTES");
    long long bytes = given ? atoll(given) : 0;
    return bytes > 0 && bytes < CALL_BYTES ? (size_t)bytes : CALL_BYTES;
}

static fc_code new_mpi(fc_comm **out, fc_error *err) {
    bool started = false;
    MPI_Comm mpi;
    *out = NULL;
    FC_TRY(start_mpi(&started, err));
    int code = MPI_Comm_dup(MPI_COMM_WORLD, &mpi);
    if (code != MPI_SUCCESS) {
        return fc_fail(err, FC_EIO, "mpi: MPI_Comm_dup failed with %d", code);
    }
    return comm_new(mpi, started, chosen_call_bytes(), out, err);
}

FC_MODULE_EXPORT extern const fc_module FC_MODULE_SYMBOL;
const fc_module FC_MODULE_SYMBOL = {FC_MODULE_HEAD, .mpi = new_mpi, .devices = &fc_mpi_devices};
