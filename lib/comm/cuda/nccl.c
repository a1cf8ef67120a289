/*
 * The backend `nccl`: one rank a GPU; a module of its own (see comm/module.h). Collectives are given to a stream and
 * run when it comes to them; the host waits only in barrier and in making and splitting communicators. Reductions are
 * NCCL's: their order, and so the last places of a sum, depend on the machine.
 *
 * NCCL's unique id reaches the ranks through another communicator of theirs, or through a file.
 */
#include "comm/arith.h"
#include "comm/cuda/device.h"
#include "comm/module.h"

#include <nccl.h>

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { POLL_NS = 200000 };

typedef struct state {
    ncclComm_t nccl;
    void *scratch; /* of the GPU: an int a rank, and one more */
} state;

static fc_code check(fc_comm *comm, ncclResult_t result, const char *what, fc_error *err) {
    if (result == ncclSuccess || result == ncclInProgress) {
        return FC_OK;
    }
    const state *s = comm->state;
    comm->broken = true;
    const char *more = s && s->nccl ? ncclGetLastError(s->nccl) : "";
    return fc_fail(err, FC_EIO, "rank %d: nccl: %s: %s%s%s", comm->rank, what, ncclGetErrorString(result),
                   *more ? ": " : "", more);
}

static fc_code check_cuda(fc_comm *comm, cudaError_t result, const char *what, fc_error *err) {
    if (result == cudaSuccess) {
        return FC_OK;
    }
    comm->broken = true;
    return fc_fail(err, FC_EIO, "rank %d: nccl: %s: %s", comm->rank, what, cudaGetErrorString(result));
}

/* Before every collective. */
static fc_code begin(fc_comm *comm, fc_error *err) {
    if (comm->broken) {
        return fc_fail(err, FC_EIO, "rank %d: nccl: gave up before", comm->rank);
    }
    return check_cuda(comm, fc_cuda_use(comm->device), "choosing the GPU", err);
}

/* Waits for the stream, for an error of another rank, or for the flag. */
static fc_code wait_for(fc_comm *comm, cudaStream_t stream, const char *what, fc_error *err) {
    state *s = comm->state;
    const struct timespec pause = {0, POLL_NS};
    for (;;) {
        ncclResult_t async = ncclSuccess;
        cudaError_t done = cudaStreamQuery(stream);
        if (done != cudaErrorNotReady) {
            return check_cuda(comm, done, what, err);
        }
        ncclResult_t asked = ncclCommGetAsyncError(s->nccl, &async);
        fc_code rc = check(comm, asked != ncclSuccess ? asked : async, what, err);
        if (rc != FC_OK) {
            return rc;
        }
        if (comm->cancel && atomic_load(comm->cancel)) {
            comm->broken = true;
            return fc_fail(err, FC_EINTERRUPTED, "interrupted: the job was stopped, or another rank has died");
        }
        nanosleep(&pause, NULL);
    }
}

static fc_code nccl_all_gather(fc_comm *comm, const void *send, void *recv, size_t bytes, fc_stream *stream,
                               fc_error *err) {
    state *s = comm->state;
    fc_code rc = begin(comm, err);
    if (rc != FC_OK || bytes == 0) {
        return rc;
    }
    return check(comm, ncclAllGather(send, recv, bytes, ncclUint8, s->nccl, fc_cuda_stream(stream)), "all_gather", err);
}

/* A broadcast from each rank that has something; NCCL runs those of a group as one. */
static fc_code nccl_all_gather_v(fc_comm *comm, const void *send, void *recv, const size_t *counts,
                                 const size_t *displs, fc_stream *stream, fc_error *err) {
    state *s = comm->state;
    fc_code rc = begin(comm, err);
    if (rc != FC_OK) {
        return rc;
    }
    ncclResult_t result = ncclGroupStart();
    for (int r = 0; r < comm->size && result == ncclSuccess; r++) {
        if (counts[r] > 0) {
            char *place = (char *)recv + displs[r];
            result = ncclBroadcast(r == comm->rank ? send : place, place, counts[r], ncclUint8, r, s->nccl,
                                   fc_cuda_stream(stream));
        }
    }
    ncclResult_t end = ncclGroupEnd();
    return check(comm, result != ncclSuccess ? result : end, "all_gather_v", err);
}

/* How NCCL calls a type's components. */
static bool type_of(fc_dtype dtype, ncclDataType_t *out) {
    switch (dtype) {
    case FC_F64:
        *out = ncclFloat64;
        return true;
    case FC_F32:
        *out = ncclFloat32;
        return true;
    case FC_F16:
        *out = ncclFloat16;
        return true;
    case FC_BF16:
        *out = ncclBfloat16;
        return true;
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 24, 0)
    case FC_F8_E4M3FN:
        *out = ncclFloat8e4m3;
        return true;
    case FC_F8_E5M2:
        *out = ncclFloat8e5m2;
        return true;
#endif
    case FC_I64:
        *out = ncclInt64;
        return true;
    case FC_I32:
        *out = ncclInt32;
        return true;
    case FC_I8:
        *out = ncclInt8;
        return true;
    case FC_U64:
        *out = ncclUint64;
        return true;
    case FC_U32:
        *out = ncclUint32;
        return true;
    case FC_U8:
    case FC_BOOL:
        *out = ncclUint8;
        return true;
    default:
        return false;
    }
}

/* A reduction as NCCL takes it. The sum of booleans is "or": their maximum. */
typedef struct reduction {
    ncclDataType_t type;
    ncclRedOp_t op;
    size_t components;
} reduction;

static fc_code reduction_of(fc_dtype dtype, fc_reduce op, reduction *out, fc_error *err) {
    static const ncclRedOp_t ops[] = {ncclSum, ncclAvg, ncclMin, ncclMax};
    fc_code rc = fc_arith_check(dtype, op, err);
    if (rc != FC_OK) {
        return rc;
    }
    if (op == FC_REDUCE_XOR || !type_of(fc_arith_component(dtype, &out->components), &out->type)) {
        return fc_fail(err, FC_EUNSUPPORTED, "nccl: cannot reduce %s%s: the host backends can",
                       fc_dtype_get(dtype)->torch_name, op == FC_REDUCE_XOR ? " by xor" : "");
    }
    out->op = dtype == FC_BOOL && op == FC_REDUCE_SUM ? ncclMax : ops[op];
    return FC_OK;
}

static fc_code nccl_reduce_scatter(fc_comm *comm, const void *send, void *recv, size_t count, fc_dtype dtype,
                                   fc_reduce op, fc_stream *stream, fc_error *err) {
    state *s = comm->state;
    reduction r;
    fc_code rc = reduction_of(dtype, op, &r, err);
    rc = rc == FC_OK ? begin(comm, err) : rc;
    if (rc != FC_OK || count == 0) {
        return rc;
    }
    return check(comm,
                 ncclReduceScatter(send, recv, count * r.components, r.type, r.op, s->nccl, fc_cuda_stream(stream)),
                 "reduce_scatter", err);
}

static fc_code nccl_all_reduce(fc_comm *comm, void *data, size_t count, fc_dtype dtype, fc_reduce op, fc_stream *stream,
                               fc_error *err) {
    state *s = comm->state;
    reduction r;
    fc_code rc = reduction_of(dtype, op, &r, err);
    rc = rc == FC_OK ? begin(comm, err) : rc;
    if (rc != FC_OK || count == 0) {
        return rc;
    }
    return check(comm, ncclAllReduce(data, data, count * r.components, r.type, r.op, s->nccl, fc_cuda_stream(stream)),
                 "all_reduce", err);
}

static fc_code nccl_broadcast(fc_comm *comm, void *data, size_t bytes, int root, fc_stream *stream, fc_error *err) {
    state *s = comm->state;
    if (root < 0 || root >= comm->size) {
        return fc_fail(err, FC_EUSAGE, "broadcast: there is no rank %d among %d", root, comm->size);
    }
    fc_code rc = begin(comm, err);
    if (rc != FC_OK || bytes == 0) {
        return rc;
    }
    return check(comm, ncclBroadcast(data, data, bytes, ncclUint8, root, s->nccl, fc_cuda_stream(stream)), "broadcast",
                 err);
}

static fc_code nccl_barrier(fc_comm *comm, fc_error *err) {
    state *s = comm->state;
    fc_code rc = begin(comm, err);
    if (rc == FC_OK) {
        rc = check(comm, ncclAllReduce(s->scratch, s->scratch, 1, ncclInt32, ncclMax, s->nccl, NULL), "barrier", err);
    }
    return rc == FC_OK ? wait_for(comm, NULL, "barrier", err) : rc;
}

static void nccl_free(fc_comm *comm) {
    state *s = comm->state;
    if (fc_cuda_use(comm->device) == cudaSuccess) {
        if (s->nccl && comm->broken) {
            ncclCommAbort(s->nccl); /* what still runs on the GPU ends, too */
        } else if (s->nccl) {
            ncclCommDestroy(s->nccl);
        }
        cudaFree(s->scratch);
    }
    free(s);
    free(comm);
}

static const fc_comm functions;

/* A communicator that lacks only its NCCL one. */
static fc_code comm_new(fc_device *device, int rank, int size, fc_comm **out, fc_error *err) {
    fc_comm *comm = malloc(sizeof *comm);
    state *s = calloc(1, sizeof *s);
    *out = NULL;
    if (!comm || !s) {
        free(comm);
        free(s);
        return fc_fail(err, FC_ENOMEM, "nccl: out of memory");
    }
    *comm = functions;
    comm->rank = rank;
    comm->size = size;
    comm->device = device;
    comm->state = s;
    cudaError_t result = fc_cuda_use(device);
    size_t bytes = ((size_t)size + 1) * sizeof(int);
    result = result == cudaSuccess ? cudaMalloc(&s->scratch, bytes) : result;
    result = result == cudaSuccess ? cudaMemset(s->scratch, 0, bytes) : result;
    if (result != cudaSuccess) {
        fc_code rc = check_cuda(comm, result, "allocating memory", err);
        nccl_free(comm);
        return rc;
    }
    *out = comm;
    return FC_OK;
}

/* All ranks' colors, by way of the GPU. */
static fc_code gather_colors(fc_comm *comm, int color, int *colors, fc_error *err) {
    state *s = comm->state;
    int *scratch = s->scratch;
    size_t all = (size_t)comm->size * sizeof color;
    fc_code rc = begin(comm, err);
    if (rc == FC_OK) {
        rc = check_cuda(comm, cudaMemcpy(scratch + comm->size, &color, sizeof color, cudaMemcpyHostToDevice), "split",
                        err);
    }
    if (rc == FC_OK) {
        rc = nccl_all_gather(comm, scratch + comm->size, scratch, sizeof color, NULL, err);
    }
    rc = rc == FC_OK ? wait_for(comm, NULL, "split", err) : rc;
    return rc == FC_OK ? check_cuda(comm, cudaMemcpy(colors, scratch, all, cudaMemcpyDeviceToHost), "split", err) : rc;
}

/* The first rank of a color stands for it: NCCL takes no negative ones. */
static fc_code nccl_split(fc_comm *comm, int color, fc_comm **out, fc_error *err) {
    state *s = comm->state;
    int *colors = malloc((size_t)comm->size * sizeof *colors);
    *out = NULL;
    if (!colors) {
        comm->broken = true;
        return fc_fail(err, FC_ENOMEM, "split: out of memory");
    }
    fc_code rc = gather_colors(comm, color, colors, err);
    int first = 0, rank = 0, size = 0;
    for (int r = comm->size - 1; rc == FC_OK && r >= 0; r--) {
        if (colors[r] == color) {
            first = r;
            rank += r < comm->rank;
            size++;
        }
    }
    free(colors);
    rc = rc == FC_OK ? comm_new(comm->device, rank, size, out, err) : rc;
    if (rc != FC_OK) {
        comm->broken = true;
        return rc;
    }
    (*out)->cancel = comm->cancel;
    state *made = (*out)->state;
    rc = check(comm, ncclCommSplit(s->nccl, first, comm->rank, &made->nccl, NULL), "split", err);
    if (rc != FC_OK) {
        nccl_free(*out);
        *out = NULL;
    }
    return rc;
}

static const fc_comm functions = {
    .backend = "nccl",
    .all_gather = nccl_all_gather,
    .all_gather_v = nccl_all_gather_v,
    .reduce_scatter = nccl_reduce_scatter,
    .all_reduce = nccl_all_reduce,
    .broadcast = nccl_broadcast,
    .barrier = nccl_barrier,
    .split = nccl_split,
    .free = nccl_free,
};

static fc_code check_device(const fc_device *device, fc_error *err) {
    if (!fc_is_cuda(device)) {
        return fc_fail(err, FC_EUNSUPPORTED, "nccl: moves the memory of GPUs, not that of %s", device->name);
    }
    return FC_OK;
}

static fc_code join(const ncclUniqueId *id, int rank, int size, fc_device *device, fc_comm **out, fc_error *err) {
    fc_code rc = comm_new(device, rank, size, out, err);
    if (rc != FC_OK) {
        return rc;
    }
    state *s = (*out)->state;
    rc = check(*out, ncclCommInitRank(&s->nccl, size, *id, rank), "joining the other ranks", err);
    if (rc != FC_OK) {
        nccl_free(*out);
        *out = NULL;
    }
    return rc;
}

static fc_code make_id(ncclUniqueId *id, fc_error *err) {
    ncclResult_t result = ncclGetUniqueId(id);
    return result == ncclSuccess ? FC_OK : fc_fail(err, FC_EIO, "nccl: %s", ncclGetErrorString(result));
}

/* bootstrap->broadcast of host memory, by way of its device where that is another. */
static fc_code broadcast_id(fc_comm *bootstrap, ncclUniqueId *id, fc_error *err) {
    fc_device *device = bootstrap->device;
    if (device->is_host) {
        return bootstrap->broadcast(bootstrap, id, sizeof *id, 0, NULL, err);
    }
    void *memory;
    fc_code rc = device->alloc(device, sizeof *id, &memory, err);
    if (rc != FC_OK) {
        bootstrap->broken = true;
        return rc;
    }
    rc = device->copy(device, memory, id, sizeof *id, NULL, err);
    rc = rc == FC_OK ? bootstrap->broadcast(bootstrap, memory, sizeof *id, 0, NULL, err) : rc;
    rc = rc == FC_OK ? device->copy(device, id, memory, sizeof *id, NULL, err) : rc;
    rc = rc == FC_OK ? device->synchronize(device, NULL, err) : rc;
    device->release(device, memory);
    return rc;
}

static fc_code new_nccl(fc_comm *bootstrap, fc_device *device, fc_comm **out, fc_error *err) {
    ncclUniqueId id;
    *out = NULL;
    fc_code rc = check_device(device, err);
    if (rc == FC_OK && bootstrap->rank == 0) {
        rc = make_id(&id, err);
    }
    rc = fc_comm_agree(bootstrap, rc, err);
    rc = rc == FC_OK ? broadcast_id(bootstrap, &id, err) : rc;
    return rc == FC_OK ? join(&id, bootstrap->rank, bootstrap->size, device, out, err) : rc;
}

/* Writes the id under another name and renames it: who reads it finds all of it. */
static fc_code write_id(const char *path, const ncclUniqueId *id, fc_error *err) {
    char temporary[4096];
    int n = snprintf(temporary, sizeof temporary, "%s.%ld", path, (long)getpid());
    if (n < 0 || (size_t)n >= sizeof temporary) {
        return fc_fail(err, FC_EUSAGE, "%s: the name is too long", path);
    }
    int fd = open(temporary, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (fd < 0) {
        return fc_fail_errno(err, errno, "%s: cannot be made", temporary);
    }
    ssize_t written = write(fd, id, sizeof *id);
    int errnum = written < 0 ? errno : written < (ssize_t)sizeof *id ? ENOSPC : 0;
    if (close(fd) != 0 && errnum == 0) {
        errnum = errno;
    }
    if (errnum == 0 && rename(temporary, path) != 0) {
        errnum = errno;
    }
    if (errnum != 0) {
        unlink(temporary);
        return fc_fail_errno(err, errnum, "%s: writing", path);
    }
    return FC_OK;
}

/* Waits until rank 0 has written the file. */
static fc_code read_id(const char *path, int seconds, ncclUniqueId *id, fc_error *err) {
    const struct timespec pause = {0, 10 * 1000 * 1000};
    struct timespec start, now;
    clock_gettime(CLOCK_MONOTONIC, &start);
    for (;;) {
        int fd = open(path, O_RDONLY | O_CLOEXEC);
        if (fd >= 0) {
            ssize_t got = read(fd, id, sizeof *id);
            close(fd);
            return got == (ssize_t)sizeof *id
                       ? FC_OK
                       : fc_fail(err, FC_ECORRUPT, "%s: is not what rank 0 of nccl writes", path);
        }
        if (errno != ENOENT) {
            return fc_fail_errno(err, errno, "%s: cannot be read", path);
        }
        clock_gettime(CLOCK_MONOTONIC, &now);
        if (now.tv_sec - start.tv_sec >= seconds) {
            return fc_fail(err, FC_EIO, "%s: rank 0 has not made it in %d seconds", path, seconds);
        }
        nanosleep(&pause, NULL);
    }
}

static fc_code new_nccl_file(const char *path, int rank, int size, int seconds, fc_device *device, fc_comm **out,
                             fc_error *err) {
    ncclUniqueId id;
    *out = NULL;
    fc_code rc = check_device(device, err);
    if (rc == FC_OK && (size < 1 || rank < 0 || rank >= size)) {
        rc = fc_fail(err, FC_EUSAGE, "nccl: there is no rank %d among %d", rank, size);
    }
    if (rc == FC_OK && rank == 0) {
        rc = make_id(&id, err);
        rc = rc == FC_OK ? write_id(path, &id, err) : rc;
    } else if (rc == FC_OK) {
        rc = read_id(path, seconds, &id, err);
    }
    rc = rc == FC_OK ? join(&id, rank, size, device, out, err) : rc;
    if (rank == 0) {
        unlink(path); /* all have read it, or never will: the next job makes its own */
    }
    return rc;
}

FC_MODULE_EXPORT extern const fc_module FC_MODULE_SYMBOL;
const fc_module FC_MODULE_SYMBOL = {FC_MODULE_HEAD, .nccl = new_nccl, .nccl_file = new_nccl_file};
