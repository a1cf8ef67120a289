/*
 * Reduces the unsharded gradient of a flat parameter in the post-backward: cast, pad, divide, reduce-scatter (or
 * all-reduce, or the caller's hook), divide. grad.c adds the result to the gradient of the shard.
 */
#include "fsdpckpt/try.h"
#include "train/state.h"

static fc_code divide(const fc_fsdp *fsdp, const fc_array *array, double divisor, fc_stream *stream, fc_error *err) {
    if (divisor <= 1) {
        return FC_OK;
    }
    return fsdp->device->divide(fsdp->device, array->dtype, array->data, divisor, (size_t)array->sizes[0], stream, err);
}

/* Takes h->grad and makes the array to communicate: cast to `dtype`, padded with zeros to world size × chunk. */
static fc_code take_padded(fc_fsdp_handle *h, fc_dtype dtype, fc_block **block, fc_array *out, fc_error *err) {
    fc_fsdp *fsdp = h->unit->fsdp;
    fc_device *device = fsdp->device;
    fc_stream *stream = fsdp->streams[FC_STREAM_POST_BACKWARD];
    int64_t padded = fc_fsdp_padded(h), numel = h->layout.numel;
    size_t element = fc_dtype_size(dtype);
    fc_block *grad = h->grad;
    h->grad = NULL;
    if (dtype == h->grad_dtype) {
        *block = grad;
        *out = fc_fsdp_over(fsdp, grad, dtype, padded);
        return FC_OK;
    }
    char *padding;
    fc_code rc;
    FC_TRY_GOTO(fc_pool_take(&fsdp->pool, (size_t)padded * element, stream, block, err), rc, give);
    *out = fc_fsdp_over(fsdp, *block, dtype, padded);
    FC_TRY_GOTO(device->cast(device, h->grad_dtype, grad->memory, dtype, out->data, (size_t)numel, stream, err), rc,
                give);
    padding = (char *)out->data + (size_t)numel * element;
    if (padded > numel) {
        FC_TRY_GOTO(device->zero(device, padding, (size_t)(padded - numel) * element, stream, err), rc, give);
    }
    fc_fsdp_trace(h, FC_ACTION_CAST_GRAD, FC_STREAM_POST_BACKWARD);
give:;
    fc_code given = fc_pool_give(&fsdp->pool, &grad, stream, err);
    return rc == FC_OK ? given : rc;
}

/* Reduces over replicas on a separate stream, so that reduce-scatters of other units need not wait. */
static fc_code all_reduce_replicas(fc_fsdp_handle *h, fc_array *shard, fc_error *err) {
    fc_fsdp *fsdp = h->unit->fsdp;
    fc_comm *replicate = h->unit->options.replicate;
    FC_TRY(fc_fsdp_wait(fsdp, FC_STREAM_ALL_REDUCE, FC_STREAM_POST_BACKWARD, err));
    FC_TRY(fc_all_reduce(replicate, shard->data, (size_t)shard->sizes[0], shard->dtype, FC_REDUCE_SUM,
                         fsdp->streams[FC_STREAM_ALL_REDUCE], err));
    fc_fsdp_trace(h, FC_ACTION_ALL_REDUCE, FC_STREAM_ALL_REDUCE);
    return FC_OK;
}

/* Reduces `grad` into `shard`, or in place if `shard` is NULL (NO_SHARD). The result is complete on stream `*last`. */
static fc_code communicate(fc_fsdp_handle *h, fc_array *grad, fc_array *shard, fc_fsdp_stream *last, fc_error *err) {
    fc_fsdp *fsdp = h->unit->fsdp;
    fc_comm *comm = h->unit->options.shard;
    fc_stream *stream = fsdp->streams[FC_STREAM_POST_BACKWARD];
    fc_array *result = shard ? shard : grad;
    *last = FC_STREAM_POST_BACKWARD;
    FC_TRY(divide(fsdp, grad, h->unit->predivide, stream, err));
    fc_fsdp_trace(h, FC_ACTION_PRE_DIVIDE, FC_STREAM_POST_BACKWARD);
    if (shard) {
        FC_TRY(fc_reduce_scatter(comm, grad->data, shard->data, (size_t)shard->sizes[0], grad->dtype, FC_REDUCE_SUM,
                                 stream, err));
        fc_fsdp_trace(h, FC_ACTION_REDUCE_SCATTER, FC_STREAM_POST_BACKWARD);
    } else {
        FC_TRY(fc_all_reduce(comm, grad->data, (size_t)grad->sizes[0], grad->dtype, FC_REDUCE_SUM, stream, err));
        fc_fsdp_trace(h, FC_ACTION_ALL_REDUCE, FC_STREAM_POST_BACKWARD);
    }
    if (h->unit->options.replicate) {
        FC_TRY(all_reduce_replicas(h, result, err));
        *last = FC_STREAM_ALL_REDUCE;
    }
    FC_TRY(divide(fsdp, result, h->unit->postdivide, fsdp->streams[*last], err));
    fc_fsdp_trace(h, FC_ACTION_POST_DIVIDE, *last);
    return FC_OK;
}

static fc_code run_hook(fc_fsdp_handle *h, fc_array *grad, fc_array *shard, fc_error *err) {
    fc_fsdp *fsdp = h->unit->fsdp;
    fc_comm_hook hook = fsdp->hook;
    hook.predivide = h->unit->predivide;
    hook.postdivide = h->unit->postdivide;
    FC_TRY(hook.run(&hook, h->unit->options.shard, grad, shard, fsdp->streams[FC_STREAM_POST_BACKWARD], err));
    fc_fsdp_trace(h, FC_ACTION_COMM_HOOK, FC_STREAM_POST_BACKWARD);
    return FC_OK;
}

fc_code fc_fsdp_reduce_grad(fc_fsdp_handle *h, fc_error *err) {
    fc_fsdp *fsdp = h->unit->fsdp;
    fc_stream *stream = fsdp->streams[FC_STREAM_POST_BACKWARD];
    bool sharded = fc_fsdp_is_sharded(h->unit);
    fc_dtype dtype = fsdp->has_hook && fsdp->hook.low_precision ? fsdp->hook.dtype : h->reduce_dtype;
    fc_block *padded = NULL, *reduced = NULL;
    fc_array grad, memory, *shard = NULL;
    fc_fsdp_stream last = FC_STREAM_POST_BACKWARD;
    FC_TRY(take_padded(h, dtype, &padded, &grad, err));
    if (sharded) {
        size_t bytes = (size_t)h->layout.shard_numel * fc_dtype_size(dtype);
        FC_TRY(fc_pool_take(&fsdp->pool, bytes, stream, &reduced, err));
        memory = fc_fsdp_over(fsdp, reduced, dtype, h->layout.shard_numel);
        shard = &memory;
    }
    if (fsdp->has_hook) {
        FC_TRY(run_hook(h, &grad, shard, err));
    } else {
        FC_TRY(communicate(h, &grad, shard, &last, err));
    }
    FC_TRY(fc_fsdp_accumulate(h, shard ? shard : &grad, last, err));
    FC_TRY(fc_pool_give(&fsdp->pool, &padded, stream, err));
    return fc_pool_give(&fsdp->pool, &reduced, fsdp->streams[last], err);
}

static fc_code default_hook(const fc_comm_hook *hook, fc_comm *comm, fc_array *grad, fc_array *shard, fc_stream *stream,
                            fc_error *err) {
    fc_device *device = comm->device;
    fc_array *result = shard ? shard : grad;
    size_t padded = (size_t)grad->sizes[0], count = (size_t)result->sizes[0];
    if (hook->predivide > 1) {
        FC_TRY(device->divide(device, grad->dtype, grad->data, hook->predivide, padded, stream, err));
    }
    if (shard) {
        FC_TRY(fc_reduce_scatter(comm, grad->data, shard->data, count, grad->dtype, FC_REDUCE_SUM, stream, err));
    } else {
        FC_TRY(fc_all_reduce(comm, grad->data, padded, grad->dtype, FC_REDUCE_SUM, stream, err));
    }
    if (hook->postdivide > 1) {
        FC_TRY(device->divide(device, result->dtype, result->data, hook->postdivide, count, stream, err));
    }
    return FC_OK;
}

fc_comm_hook fc_reduce_scatter_hook(void) {
    return (fc_comm_hook){.run = default_hook};
}

fc_comm_hook fc_compress_hook(fc_dtype dtype) {
    return (fc_comm_hook){.run = default_hook, .low_precision = true, .dtype = dtype};
}
