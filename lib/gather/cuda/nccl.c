/*
 * The collectives of the backend `nccl`, with one rank per GPU. They are enqueued on a stream; the host waits only in
 * barrier, and while communicators are made and split. NCCL chooses the order of reductions, so the rounding of a sum
 * depends on the machine.
 */
#include "comm/arith.h"
#include "fsdpckpt/try.h"
#include "gather/cuda/nccl_state.h"
#include "gather/gather_host.h"

static fc_code nccl_all_gather(fc_comm *comm, const void *send, void *recv, size_t bytes, fc_stream *stream,
                               fc_error *err) {
    nccl_state *s = comm->state;
    int before;
    FC_TRY(fc_nccl_begin_collective(comm, &before, err));
    ncclResult_t result =
        bytes > 0 ? ncclAllGather(send, recv, bytes, ncclUint8, s->nccl, fc_cuda_stream(stream)) : ncclSuccess;
    return fc_nccl_end(comm, before, fc_nccl_check(comm, result, "all_gather", err));
}

/* Returns whether the ranks' bytes are equally many and adjacent, as in NCCL's all-gather. */
static bool is_even(const fc_comm *comm, const size_t *counts, const size_t *displs) {
    for (int r = 0; r < comm->size; r++) {
        if (counts[r] != counts[0] || displs[r] != counts[0] * (size_t)r) {
            return false;
        }
    }
    return true;
}

/* Each rank sends its bytes to all others, in one group. */
static ncclResult_t exchange(fc_comm *comm, const void *send, char *recv, const size_t *counts, const size_t *displs,
                             cudaStream_t stream) {
    const nccl_state *s = comm->state;
    ncclResult_t result = ncclGroupStart();
    if (result != ncclSuccess) {
        return result;
    }
    for (int i = 1; i < comm->size && result == ncclSuccess; i++) {
        int to = (comm->rank + i) % comm->size, from = (comm->rank - i + comm->size) % comm->size;
        if (counts[comm->rank] > 0) {
            result = ncclSend(send, counts[comm->rank], ncclUint8, to, s->nccl, stream);
        }
        if (counts[from] > 0 && result == ncclSuccess) {
            result = ncclRecv(recv + displs[from], counts[from], ncclUint8, from, s->nccl, stream);
        }
    }
    ncclResult_t end = ncclGroupEnd();
    return result == ncclSuccess || result == ncclInProgress ? end : result;
}

static fc_code nccl_all_gather_v(fc_comm *comm, const void *send, void *recv, const size_t *counts,
                                 const size_t *displs, fc_stream *stream, fc_error *err) {
    if (is_even(comm, counts, displs)) {
        return nccl_all_gather(comm, send, recv, counts[0], stream, err);
    }
    int before;
    char *own = (char *)recv + displs[comm->rank];
    size_t bytes = counts[comm->rank];
    cudaStream_t cuda = fc_cuda_stream(stream);
    fc_code rc = FC_OK;
    FC_TRY(fc_nccl_begin_collective(comm, &before, err));
    if (bytes > 0 && own != send) {
        rc = fc_nccl_check_cuda(comm, cudaMemcpyAsync(own, send, bytes, cudaMemcpyDeviceToDevice, cuda), "all_gather_v",
                                err);
    }
    if (rc == FC_OK) {
        rc = fc_nccl_check(comm, exchange(comm, send, recv, counts, displs, cuda), "all_gather_v", err);
    }
    return fc_nccl_end(comm, before, rc);
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
    int before;
    FC_TRY(reduction_of(dtype, op, &r, err));
    FC_TRY(fc_nccl_begin_collective(comm, &before, err));
    ncclResult_t result =
        count > 0 ? ncclReduceScatter(send, recv, count * r.components, r.type, r.op, s->nccl, fc_cuda_stream(stream))
                  : ncclSuccess;
    return fc_nccl_end(comm, before, fc_nccl_check(comm, result, "reduce_scatter", err));
}

static fc_code nccl_all_reduce(fc_comm *comm, void *data, size_t count, fc_dtype dtype, fc_reduce op, fc_stream *stream,
                               fc_error *err) {
    nccl_state *s = comm->state;
    reduction r;
    int before;
    FC_TRY(reduction_of(dtype, op, &r, err));
    FC_TRY(fc_nccl_begin_collective(comm, &before, err));
    ncclResult_t result =
        count > 0 ? ncclAllReduce(data, data, count * r.components, r.type, r.op, s->nccl, fc_cuda_stream(stream))
                  : ncclSuccess;
    return fc_nccl_end(comm, before, fc_nccl_check(comm, result, "all_reduce", err));
}

static fc_code nccl_broadcast(fc_comm *comm, void *data, size_t bytes, int root, fc_stream *stream, fc_error *err) {
    nccl_state *s = comm->state;
    int before;
    if (root < 0 || root >= comm->size) {
        return fc_fail(err, FC_EUSAGE, "broadcast: rank %d does not exist among %d ranks", root, comm->size);
    }
    FC_TRY(fc_nccl_begin_collective(comm, &before, err));
    ncclResult_t result =
        bytes > 0 ? ncclBroadcast(data, data, bytes, ncclUint8, root, s->nccl, fc_cuda_stream(stream)) : ncclSuccess;
    return fc_nccl_end(comm, before, fc_nccl_check(comm, result, "broadcast", err));
}

static fc_code nccl_barrier(fc_comm *comm, fc_error *err) {
    nccl_state *s = comm->state;
    int before;
    FC_TRY(fc_nccl_begin_collective(comm, &before, err));
    ncclResult_t result = ncclAllReduce(s->scratch, s->scratch, 1, ncclInt32, ncclMax, s->nccl, NULL);
    fc_code rc = fc_nccl_check(comm, result, "barrier", err);
    return fc_nccl_end(comm, before, rc == FC_OK ? fc_nccl_wait_for(comm, NULL, "barrier", err) : rc);
}

static fc_code nccl_group(fc_comm *comm, bool begin, fc_error *err) {
    nccl_state *s = comm->state;
    int before;
    if (!begin && !s->grouped) { /* an error has ended it */
        return FC_OK;
    }
    FC_TRY(fc_nccl_begin(comm, &before, err));
    ncclResult_t result = begin ? ncclGroupStart() : ncclGroupEnd();
    s->grouped = begin && result == ncclSuccess;
    return fc_nccl_end(comm, before, fc_nccl_check(comm, result, "group", err));
}

static const fc_device_collectives collectives = {
    .all_gather = nccl_all_gather,
    .all_gather_v = nccl_all_gather_v,
    .reduce_scatter = nccl_reduce_scatter,
    .all_reduce = nccl_all_reduce,
    .broadcast = nccl_broadcast,
    .group = nccl_group,
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 19, 0)
    .alloc = fc_nccl_alloc,
    .release = fc_nccl_release,
#endif
    .wait = fc_nccl_wait,
};

const fc_comm fc_nccl_functions = {
    .backend = "nccl",
    .timeout = 600,
    .on_device = &collectives,
    .all_gather = fc_comm_gather_host,
    .barrier = nccl_barrier,
    .split = fc_nccl_split,
    .abort = fc_nccl_abort,
    .has_failed = fc_nccl_has_failed,
    .free = fc_nccl_free,
};
