/*
 * The reduction of gradients in the post-backward: cast, pad, divide, reduce-scatter (or all-reduce, or the caller's
 * hook), divide. From the unsharded gradient of one flat parameter to a chunk that grad.c adds to the shard so far.
 */
#include "train/state.h"

static fc_code divide(const fc_fsdp *fsdp, const fc_array *array, double divisor, fc_stream *stream, fc_error *err) {
    if (divisor <= 1) {
        return FC_OK;
    }
    return fsdp->device->divide(fsdp->device, array->dtype, array->data, divisor, (size_t)array->sizes[0], stream, err);
}

/* What is communicated: the gradient in the wanted dtype, padded with zeros to world size × chunk. Takes h->grad. */
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
    fc_code rc = fc_pool_take(&fsdp->pool, (size_t)padded * element, stream, block, err);
    if (rc == FC_OK) {
        *out = fc_fsdp_over(fsdp, *block, dtype, padded);
        rc = device->cast(device, h->grad_dtype, grad->memory, dtype, out->data, (size_t)numel, stream, err);
    }
    if (rc == FC_OK && padded > numel) {
        rc = device->zero(device, (char *)out->data + (size_t)numel * element, (size_t)(padded - numel) * element,
                          stream, err);
    }
    if (rc == FC_OK) {
        fc_fsdp_tell(h, FC_ACTION_CAST_GRAD, FC_STREAM_POST_BACKWARD);
    }
    fc_code given = fc_pool_give(&fsdp->pool, &grad, stream, err);
    return rc == FC_OK ? given : rc;
}

/* Reduces over replicas on a stream of its own: reduce-scatters of other units need not wait for it. */
static fc_code all_reduce_replicas(fc_fsdp_handle *h, fc_array *shard, fc_error *err) {
    fc_fsdp *fsdp = h->unit->fsdp;
    fc_code rc = fc_fsdp_wait(fsdp, FC_STREAM_ALL_REDUCE, FC_STREAM_POST_BACKWARD, err);
    if (rc == FC_OK) {
        rc = fsdp->replicate->all_reduce(fsdp->replicate, shard->data, (size_t)shard->sizes[0], shard->dtype,
                                         FC_REDUCE_SUM, fsdp->streams[FC_STREAM_ALL_REDUCE], err);
    }
    if (rc == FC_OK) {
        fc_fsdp_tell(h, FC_ACTION_ALL_REDUCE, FC_STREAM_ALL_REDUCE);
    }
    return rc;
}

/* `shard` is NULL for NO_SHARD. `*last` is the stream on which the result is complete. */
static fc_code communicate(fc_fsdp_handle *h, fc_array *grad, fc_array *shard, fc_fsdp_stream *last, fc_error *err) {
    fc_fsdp *fsdp = h->unit->fsdp;
    fc_stream *stream = fsdp->streams[FC_STREAM_POST_BACKWARD];
    fc_array *result = shard ? shard : grad;
    fc_code rc = divide(fsdp, grad, fsdp->predivide, stream, err);
    fc_fsdp_tell(h, FC_ACTION_PRE_DIVIDE, FC_STREAM_POST_BACKWARD);
    *last = FC_STREAM_POST_BACKWARD;
    if (rc == FC_OK && shard) {
        rc = fsdp->shard->reduce_scatter(fsdp->shard, grad->data, shard->data, (size_t)shard->sizes[0], grad->dtype,
                                         FC_REDUCE_SUM, stream, err);
        fc_fsdp_tell(h, FC_ACTION_REDUCE_SCATTER, FC_STREAM_POST_BACKWARD);
    } else if (rc == FC_OK) {
        rc = fsdp->shard->all_reduce(fsdp->shard, grad->data, (size_t)grad->sizes[0], grad->dtype, FC_REDUCE_SUM,
                                     stream, err);
        fc_fsdp_tell(h, FC_ACTION_ALL_REDUCE, FC_STREAM_POST_BACKWARD);
    }
    if (rc == FC_OK && fsdp->replicate) {
        rc = all_reduce_replicas(h, result, err);
        *last = FC_STREAM_ALL_REDUCE;
    }
    if (rc == FC_OK) {
        rc = divide(fsdp, result, fsdp->postdivide, fsdp->streams[*last], err);
        fc_fsdp_tell(h, FC_ACTION_POST_DIVIDE, *last);
    }
    return rc;
}

static fc_code run_hook(fc_fsdp_handle *h, fc_array *grad, fc_array *shard, fc_error *err) {
    fc_fsdp *fsdp = h->unit->fsdp;
    fc_code rc = fsdp->hook.run(&fsdp->hook, fsdp->shard, grad, shard, fsdp->streams[FC_STREAM_POST_BACKWARD], err);
    if (rc == FC_OK) {
        fc_fsdp_tell(h, FC_ACTION_COMM_HOOK, FC_STREAM_POST_BACKWARD);
    }
    return rc;
}

fc_code fc_fsdp_reduce_grad(fc_fsdp_handle *h, fc_error *err) {
    fc_fsdp *fsdp = h->unit->fsdp;
    fc_stream *stream = fsdp->streams[FC_STREAM_POST_BACKWARD];
    bool sharded = fc_fsdp_is_sharded(h->unit);
    fc_dtype dtype = fsdp->has_hook && fsdp->hook.low_precision ? fsdp->hook.dtype : h->reduce_dtype;
    fc_block *padded = NULL, *reduced = NULL;
    fc_array grad, shard;
    fc_fsdp_stream last = FC_STREAM_POST_BACKWARD;
    fc_code rc = take_padded(h, dtype, &padded, &grad, err);
    if (rc == FC_OK && sharded) {
        rc = fc_pool_take(&fsdp->pool, (size_t)h->layout.shard_numel * fc_dtype_size(dtype), stream, &reduced, err);
    }
    if (rc == FC_OK && sharded) {
        shard = fc_fsdp_over(fsdp, reduced, dtype, h->layout.shard_numel);
    }
    if (rc == FC_OK) {
        rc = fsdp->has_hook ? run_hook(h, &grad, sharded ? &shard : NULL, err)
                            : communicate(h, &grad, sharded ? &shard : NULL, &last, err);
    }
    if (rc == FC_OK) {
        rc = fc_fsdp_accumulate(h, sharded ? &shard : &grad, last, err);
    }
    if (rc == FC_OK) {
        rc = fc_pool_give(&fsdp->pool, &padded, stream, err);
    }
    return rc == FC_OK ? fc_pool_give(&fsdp->pool, &reduced, fsdp->streams[last], err) : rc;
}

static fc_code default_hook(const fc_comm_hook *hook, fc_comm *comm, fc_array *grad, fc_array *shard, fc_stream *stream,
                            fc_error *err) {
    fc_device *device = comm->device;
    fc_array *result = shard ? shard : grad;
    fc_code rc = FC_OK;
    if (hook->predivide > 1) {
        rc = device->divide(device, grad->dtype, grad->data, hook->predivide, (size_t)grad->sizes[0], stream, err);
    }
    if (rc == FC_OK && shard) {
        rc = comm->reduce_scatter(comm, grad->data, shard->data, (size_t)shard->sizes[0], grad->dtype, FC_REDUCE_SUM,
                                  stream, err);
    } else if (rc == FC_OK) {
        rc = comm->all_reduce(comm, grad->data, (size_t)grad->sizes[0], grad->dtype, FC_REDUCE_SUM, stream, err);
    }
    if (rc == FC_OK && hook->postdivide > 1) {
        rc = device->divide(device, result->dtype, result->data, hook->postdivide, (size_t)result->sizes[0], stream,
                            err);
    }
    return rc;
}

fc_comm_hook fc_reduce_scatter_hook(void) {
    return (fc_comm_hook){.run = default_hook};
}

fc_comm_hook fc_compress_hook(fc_dtype dtype) {
    return (fc_comm_hook){.run = default_hook, .low_precision = true, .dtype = dtype};
}
