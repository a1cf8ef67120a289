/*
 * The backend `nccl`, with one rank per GPU. It is a module (see comm/module.h). Collectives are enqueued on a stream;
 * the host waits only in barrier, and while communicators are made and split. NCCL chooses the order of reductions, so
 * the rounding of a sum depends on the machine.
 *
 * The ranks get NCCL's unique id through another communicator of the same ranks, or through a file.
 */
#include "comm/arith.h"
#include "comm/cuda/device.h"
#include "comm/module.h"
#include "fsdpckpt/try.h"

#include <nccl.h>

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { POLL_NS = 200000 };

typedef struct nccl_state {
    ncclComm_t nccl; /* owned */
    void *scratch;   /* owned device memory: one int per rank, and one more */
} nccl_state;

static fc_code check(fc_comm *comm, ncclResult_t result, const char *what, fc_error *err) {
    if (result == ncclSuccess || result == ncclInProgress) {
        return FC_OK;
    }
    const nccl_state *s = comm->state;
    comm->broken = true;
    const char *detail = s && s->nccl ? ncclGetLastError(s->nccl) : "";
    return fc_fail(err, FC_EIO, "rank %d: nccl: %s: %s%s%s", comm->rank, what, ncclGetErrorString(result),
                   *detail ? ": " : "", detail);
}

static fc_code check_cuda(fc_comm *comm, cudaError_t result, const char *what, fc_error *err) {
    if (result == cudaSuccess) {
        return FC_OK;
    }
    comm->broken = true;
    return fc_fail(err, FC_EIO, "rank %d: nccl: %s: %s", comm->rank, what, cudaGetErrorString(result));
}

/* Every collective starts with this. */
static fc_code begin(fc_comm *comm, fc_error *err) {
    if (comm->broken) {
        return fc_fail(err, FC_EIO, "rank %d: nccl: the communicator was given up after an earlier error", comm->rank);
    }
    return check_cuda(comm, fc_cuda_use(comm->device), "choosing the GPU", err);
}

/* Waits until the stream is done, NCCL reports an error, or comm->cancel becomes true. */
static fc_code wait_for(fc_comm *comm, cudaStream_t stream, const char *what, fc_error *err) {
    nccl_state *s = comm->state;
    const struct timespec pause = {0, POLL_NS};
    for (;;) {
        ncclResult_t async = ncclSuccess;
        cudaError_t done = cudaStreamQuery(stream);
        if (done != cudaErrorNotReady) {
            return check_cuda(comm, done, what, err);
        }
        ncclResult_t query = ncclCommGetAsyncError(s->nccl, &async);
        FC_TRY(check(comm, query != ncclSuccess ? query : async, what, err));
        if (comm->cancel && atomic_load(comm->cancel)) {
            comm->broken = true;
            return fc_fail(err, FC_EINTERRUPTED, "interrupted: the job was stopped, or another rank has died");
        }
        nanosleep(&pause, NULL);
    }
}

static fc_code nccl_all_gather(fc_comm *comm, const void *send, void *recv, size_t bytes, fc_stream *stream,
                               fc_error *err) {
    nccl_state *s = comm->state;
    FC_TRY(begin(comm, err));
    if (bytes == 0) {
        return FC_OK;
    }
    return check(comm, ncclAllGather(send, recv, bytes, ncclUint8, s->nccl, fc_cuda_stream(stream)), "all_gather", err);
}

/* One broadcast per rank that has data. NCCL runs the broadcasts of a group together. */
static fc_code nccl_all_gather_v(fc_comm *comm, const void *send, void *recv, const size_t *counts,
                                 const size_t *displs, fc_stream *stream, fc_error *err) {
    nccl_state *s = comm->state;
    FC_TRY(begin(comm, err));
    ncclResult_t result = ncclGroupStart();
    for (int r = 0; r < comm->size && result == ncclSuccess; r++) {
        if (counts[r] > 0) {
            char *dst = (char *)recv + displs[r];
            result = ncclBroadcast(r == comm->rank ? send : dst, dst, counts[r], ncclUint8, r, s->nccl,
                                   fc_cuda_stream(stream));
        }
    }
    ncclResult_t end = ncclGroupEnd();
    return check(comm, result != ncclSuccess ? result : end, "all_gather_v", err);
}

/* Finds NCCL's type for a dtype. @return false if it has none. */
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

/* The arguments of a reduction in NCCL. The sum of booleans is "or", which is their maximum. */
typedef struct reduction {
    ncclDataType_t type;
    ncclRedOp_t op;
    size_t components; /* per element */
} reduction;

static fc_code reduction_of(fc_dtype dtype, fc_reduce op, reduction *out, fc_error *err) {
    static const ncclRedOp_t ops[] = {ncclSum, ncclAvg, ncclMin, ncclMax};
    FC_TRY(fc_arith_check(dtype, op, err));
    if (op == FC_REDUCE_XOR || !type_of(fc_arith_component(dtype, &out->components), &out->type)) {
        return fc_fail(err, FC_EUNSUPPORTED, "nccl: a reduction of %s%s is not supported: use local or mpi",
                       fc_dtype_get(dtype)->torch_name, op == FC_REDUCE_XOR ? " by xor" : "");
    }
    out->op = dtype == FC_BOOL && op == FC_REDUCE_SUM ? ncclMax : ops[op];
    return FC_OK;
}

static fc_code nccl_reduce_scatter(fc_comm *comm, const void *send, void *recv, size_t count, fc_dtype dtype,
                                   fc_reduce op, fc_stream *stream, fc_error *err) {
    nccl_state *s = comm->state;
    reduction r;
    FC_TRY(reduction_of(dtype, op, &r, err));
    FC_TRY(begin(comm, err));
    if (count == 0) {
        return FC_OK;
    }
    return check(comm,
                 ncclReduceScatter(send, recv, count * r.components, r.type, r.op, s->nccl, fc_cuda_stream(stream)),
                 "reduce_scatter", err);
}

static fc_code nccl_all_reduce(fc_comm *comm, void *data, size_t count, fc_dtype dtype, fc_reduce op, fc_stream *stream,
                               fc_error *err) {
    nccl_state *s = comm->state;
    reduction r;
    FC_TRY(reduction_of(dtype, op, &r, err));
    FC_TRY(begin(comm, err));
    if (count == 0) {
        return FC_OK;
    }
    return check(comm, ncclAllReduce(data, data, count * r.components, r.type, r.op, s->nccl, fc_cuda_stream(stream)),
                 "all_reduce", err);
}

static fc_code nccl_broadcast(fc_comm *comm, void *data, size_t bytes, int root, fc_stream *stream, fc_error *err) {
    nccl_state *s = comm->state;
    if (root < 0 || root >= comm->size) {
        return fc_fail(err, FC_EUSAGE, "broadcast: rank %d does not exist among %d ranks", root, comm->size);
    }
    FC_TRY(begin(comm, err));
    if (bytes == 0) {
        return FC_OK;
    }
    return check(comm, ncclBroadcast(data, data, bytes, ncclUint8, root, s->nccl, fc_cuda_stream(stream)), "broadcast",
                 err);
}

static fc_code nccl_barrier(fc_comm *comm, fc_error *err) {
    nccl_state *s = comm->state;
    FC_TRY(begin(comm, err));
    FC_TRY(check(comm, ncclAllReduce(s->scratch, s->scratch, 1, ncclInt32, ncclMax, s->nccl, NULL), "barrier", err));
    return wait_for(comm, NULL, "barrier", err);
}

static void nccl_free(fc_comm *comm) {
    nccl_state *s = comm->state;
    if (fc_cuda_use(comm->device) == cudaSuccess) {
        if (s->nccl && comm->broken) {
            ncclCommAbort(s->nccl); /* also ends what still runs on the GPU */
        } else if (s->nccl) {
            ncclCommDestroy(s->nccl);
        }
        cudaFree(s->scratch);
    }
    free(s);
    free(comm);
}

static const fc_comm functions;

/* Makes a communicator without its ncclComm_t. */
static fc_code comm_new(fc_device *device, int rank, int size, fc_comm **out, fc_error *err) {
    fc_comm *comm = malloc(sizeof *comm);
    nccl_state *s = calloc(1, sizeof *s);
    *out = NULL;
    if (!comm || !s) {
        free(comm);
        free(s);
        return fc_no_memory(err, "nccl");
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

/* Gathers the colors of all ranks, through device memory. */
static fc_code gather_colors(fc_comm *comm, int color, int *colors, fc_error *err) {
    nccl_state *s = comm->state;
    int *scratch = s->scratch;
    size_t all = (size_t)comm->size * sizeof color;
    int *own = scratch + comm->size;
    FC_TRY(begin(comm, err));
    FC_TRY(check_cuda(comm, cudaMemcpy(own, &color, sizeof color, cudaMemcpyHostToDevice), "split", err));
    FC_TRY(nccl_all_gather(comm, own, scratch, sizeof color, NULL, err));
    FC_TRY(wait_for(comm, NULL, "split", err));
    return check_cuda(comm, cudaMemcpy(colors, scratch, all, cudaMemcpyDeviceToHost), "split", err);
}

/* The group of this rank in a split: the first rank of its color, its rank among those, and their number. */
typedef struct nccl_group {
    int first, rank, size;
} nccl_group;

/* NCCL does not accept negative colors, so the first rank of a color replaces it. */
static fc_code find_group(fc_comm *comm, int color, nccl_group *group, fc_error *err) {
    int *colors = malloc((size_t)comm->size * sizeof *colors);
    if (!colors) {
        return fc_no_memory(err, "split");
    }
    fc_code rc;
    FC_TRY_GOTO(gather_colors(comm, color, colors, err), rc, out);
    for (int r = comm->size - 1; r >= 0; r--) {
        if (colors[r] == color) {
            group->first = r;
            group->rank += r < comm->rank;
            group->size++;
        }
    }
out:
    free(colors);
    return rc;
}

/* NCCL does not accept negative colors, so the first rank of a color replaces it. */
static fc_code nccl_split(fc_comm *comm, int color, fc_comm **out, fc_error *err) {
    nccl_state *s = comm->state, *made;
    nccl_group group = {0, 0, 0};
    fc_code rc;
    *out = NULL;
    FC_TRY_GOTO(find_group(comm, color, &group, err), rc, failed);
    FC_TRY_GOTO(comm_new(comm->device, group.rank, group.size, out, err), rc, failed);
    (*out)->cancel = comm->cancel;
    made = (*out)->state;
    rc = check(comm, ncclCommSplit(s->nccl, group.first, comm->rank, &made->nccl, NULL), "split", err);
    if (rc != FC_OK) {
        nccl_free(*out);
        *out = NULL;
    }
    return rc;
failed:
    comm->broken = true; /* the other ranks wait for this one */
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
        return fc_fail(err, FC_EUNSUPPORTED, "nccl: memory of %s is not supported: use a GPU", device->name);
    }
    return FC_OK;
}

static fc_code join(const ncclUniqueId *id, int rank, int size, fc_device *device, fc_comm **out, fc_error *err) {
    FC_TRY(comm_new(device, rank, size, out, err));
    nccl_state *s = (*out)->state;
    fc_code rc = check(*out, ncclCommInitRank(&s->nccl, size, *id, rank), "joining the other ranks", err);
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

/* Broadcasts the id from rank 0. A bootstrap communicator on a GPU needs a copy in device memory. */
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
    FC_TRY_GOTO(device->copy(device, memory, id, sizeof *id, NULL, err), rc, out);
    FC_TRY_GOTO(bootstrap->broadcast(bootstrap, memory, sizeof *id, 0, NULL, err), rc, out);
    FC_TRY_GOTO(device->copy(device, id, memory, sizeof *id, NULL, err), rc, out);
    rc = device->synchronize(device, NULL, err);
out:
    device->release(device, memory);
    return rc;
}

static fc_code new_nccl(fc_comm *bootstrap, fc_device *device, fc_comm **out, fc_error *err) {
    ncclUniqueId id;
    *out = NULL;
    fc_code usable = check_device(device, err);
    fc_code mine = usable == FC_OK && bootstrap->rank == 0 ? make_id(&id, err) : usable;
    FC_TRY(fc_comm_agree(bootstrap, mine, err));
    FC_TRY(broadcast_id(bootstrap, &id, err));
    return join(&id, bootstrap->rank, bootstrap->size, device, out, err);
}

/* Writes the id to a temporary file and renames it, so that no rank reads half of it. */
static fc_code write_id(const char *path, const ncclUniqueId *id, fc_error *err) {
    char temporary[4096];
    int n = snprintf(temporary, sizeof temporary, "%s.%ld", path, (long)getpid());
    if (n < 0 || (size_t)n >= sizeof temporary) {
        return fc_fail(err, FC_EUSAGE, "%s: the file name is too long", path);
    }
    int fd = open(temporary, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (fd < 0) {
        return fc_fail_errno(err, errno, "%s: cannot be created", temporary);
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
        return fc_fail_errno(err, errnum, "%s: cannot be written", path);
    }
    return FC_OK;
}

/* Reads the id, after waiting up to `seconds` for rank 0 to write the file. */
static fc_code read_id(const char *path, int seconds, ncclUniqueId *id, fc_error *err) {
    const struct timespec pause = {0, 10 * 1000 * 1000};
    struct timespec start, now;
    clock_gettime(CLOCK_MONOTONIC, &start);
    for (;;) {
        int fd = open(path, O_RDONLY | O_CLOEXEC);
        if (fd >= 0) {
            ssize_t got = read(fd, id, sizeof *id);
            close(fd);
            if (got != (ssize_t)sizeof *id) {
                return fc_fail(err, FC_ECORRUPT, "%s: not an NCCL id file of rank 0", path);
            }
            return FC_OK;
        }
        if (errno != ENOENT) {
            return fc_fail_errno(err, errno, "%s: cannot be read", path);
        }
        clock_gettime(CLOCK_MONOTONIC, &now);
        if (now.tv_sec - start.tv_sec >= seconds) {
            return fc_fail(err, FC_EIO, "%s: rank 0 did not write this file within %d seconds", path, seconds);
        }
        nanosleep(&pause, NULL);
    }
}

static fc_code new_nccl_file(const char *path, int rank, int size, int seconds, fc_device *device, fc_comm **out,
                             fc_error *err) {
    ncclUniqueId id;
    *out = NULL;
    FC_TRY(check_device(device, err));
    if (size < 1 || rank < 0 || rank >= size) {
        return fc_fail(err, FC_EUSAGE, "nccl: rank %d does not exist among %d ranks", rank, size);
    }
    if (rank == 0) {
        FC_TRY(make_id(&id, err));
        FC_TRY(write_id(path, &id, err));
    } else {
        FC_TRY(read_id(path, seconds, &id, err));
    }
    fc_code rc = join(&id, rank, size, device, out, err);
    if (rank == 0) {
        unlink(path); /* all ranks have joined, or joining has failed */
    }
    return rc;
}

FC_MODULE_EXPORT extern const fc_module FC_MODULE_SYMBOL;
const fc_module FC_MODULE_SYMBOL = {FC_MODULE_HEAD, .nccl = new_nccl, .nccl_file = new_nccl_file};
