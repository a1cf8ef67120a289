/*
 * Gradients before and after their reduction. An unsharded gradient is computed and, without synchronisation, summed
 * over several backwards. A sharded gradient is set aside before a backward, added to, and given to the optimizer.
 */
#include "fsdpckpt/try.h"
#include "train/state.h"

#include <string.h>

static fc_stream *stream_of(const fc_fsdp *fsdp, const fc_array *array, fc_fsdp_stream stream) {
    return array->device == fsdp->device ? fsdp->streams[stream] : NULL;
}

static fc_array view_of(const fc_array *array) {
    fc_array view = *array;
    view.memory = NULL;
    return view;
}

/* The padding is zeroed too, so the block can be reduced without a copy. */
static fc_code take_fresh(fc_fsdp_handle *h, fc_error *err) {
    fc_fsdp *fsdp = h->unit->fsdp;
    fc_stream *compute = fsdp->streams[FC_STREAM_COMPUTE];
    size_t bytes = (size_t)fc_fsdp_padded(h) * fc_dtype_size(h->compute_dtype);
    FC_TRY(fc_pool_take(&fsdp->pool, bytes, compute, &h->fresh, err));
    return fsdp->device->zero(fsdp->device, h->fresh->memory, bytes, compute, err);
}

static fc_code unsharded_grad(fc_fsdp_handle *h, size_t param, fc_array *out, fc_error *err) {
    if (h->state != FC_HANDLE_BACKWARD_PRE && h->state != FC_HANDLE_BACKWARD_POST) {
        return fc_fail(err, FC_EUSAGE,
                       "unit '%s': a gradient can only be written after pre-backward, but the state is %s",
                       h->unit->name, fc_handle_state_name(h->state));
    }
    if (param >= h->layout.nparams || !h->layout.params[param].requires_grad) {
        return fc_fail(err, FC_EUSAGE, "unit '%s': has no parameter %zu that requires a gradient", h->unit->name,
                       param);
    }
    if (!h->fresh) {
        FC_TRY(take_fresh(h, err));
    }
    fc_array flat = fc_fsdp_over(h->unit->fsdp, h->fresh, h->compute_dtype, h->layout.numel);
    return fc_flat_view(&h->layout, &flat, param, out, err);
}

fc_code fc_fsdp_grad(fc_fsdp_handle *h, size_t param, fc_array *out, fc_error *err) {
    return fc_fsdp_note(h->unit->fsdp, unsharded_grad(h, param, out, err));
}

/* _check_grad_to_accumulate: the caller may have changed the gradient, and an offloaded one is on the host. */
static fc_code check_to_accumulate(const fc_array *fresh, const fc_array *saved, fc_error *err) {
    if (saved->ndim != 1 || saved->sizes[0] != fresh->sizes[0] || saved->dtype != fresh->dtype) {
        return fc_fail(err, FC_EUSAGE,
                       "shape mismatch when accumulating gradients: existing gradient shape=[%lld] of %s, new gradient "
                       "shape=[%lld] of %s",
                       (long long)saved->sizes[0], fc_dtype_get(saved->dtype)->torch_name, (long long)fresh->sizes[0],
                       fc_dtype_get(fresh->dtype)->torch_name);
    }
    if (saved->device != fresh->device) {
        return fc_fail(err, FC_EUSAGE,
                       "device mismatch when accumulating gradients: existing gradient device=%s new gradient "
                       "device=%s: if parameters are offloaded, accumulate without synchronisation",
                       saved->device->name, fresh->device->name);
    }
    return FC_OK;
}

/* Replaces a block by another one with its elements cast to `to`. */
static fc_code cast_block(fc_fsdp_handle *h, fc_block **block, fc_dtype from, fc_dtype to, fc_error *err) {
    fc_fsdp *fsdp = h->unit->fsdp;
    fc_stream *compute = fsdp->streams[FC_STREAM_COMPUTE];
    fc_block *cast = NULL;
    size_t count = (size_t)fc_fsdp_padded(h);
    if (from == to) {
        return FC_OK;
    }
    FC_TRY(fc_pool_take(&fsdp->pool, count * fc_dtype_size(to), compute, &cast, err));
    FC_TRY(fsdp->device->cast(fsdp->device, from, (*block)->memory, to, cast->memory, count, compute, err));
    FC_TRY(fc_pool_give(&fsdp->pool, block, compute, err));
    *block = cast;
    return FC_OK;
}

/* Returns the dtype in which torch adds the two (promote_types). */
static fc_dtype promoted(fc_dtype a, fc_dtype b) {
    if (a == b || fc_dtype_size(a) > fc_dtype_size(b)) {
        return a;
    }
    return fc_dtype_size(a) < fc_dtype_size(b) ? b : FC_F32;
}

/* NO_SHARD adds to the gradient that it reduced before, and reduces the sum again. */
static fc_code start_from_reduced(fc_fsdp_handle *h, fc_error *err) {
    fc_fsdp *fsdp = h->unit->fsdp;
    fc_stream *compute = fsdp->streams[FC_STREAM_COMPUTE];
    const fc_array *reduced = &h->sharded_grad;
    fc_array fresh = fc_fsdp_over(fsdp, h->fresh, reduced->dtype, h->layout.numel);
    size_t bytes = fc_array_bytes(&fresh);
    fc_code rc;
    FC_TRY_GOTO(check_to_accumulate(&fresh, reduced, err), rc, out);
    FC_TRY_GOTO(fc_pool_take(&fsdp->pool, bytes, compute, &h->grad, err), rc, out);
    rc = fsdp->device->copy(fsdp->device, h->grad->memory, reduced->data, bytes, compute, err);
out:
    h->grad_dtype = reduced->dtype;
    h->has_sharded_grad = false;
    return rc;
}

fc_code fc_fsdp_add_fresh(fc_fsdp_handle *h, fc_error *err) {
    fc_fsdp *fsdp = h->unit->fsdp;
    fc_stream *compute = fsdp->streams[FC_STREAM_COMPUTE];
    if (!h->fresh) {
        return FC_OK;
    }
    if (!h->grad && !h->has_sharded_grad) {
        h->grad = h->fresh;
        h->grad_dtype = h->compute_dtype;
        h->fresh = NULL;
        return FC_OK;
    }
    if (!h->grad) {
        FC_TRY(start_from_reduced(h, err));
    }
    fc_dtype wide = promoted(h->grad_dtype, h->compute_dtype);
    size_t count = (size_t)h->layout.numel;
    FC_TRY(cast_block(h, &h->fresh, h->compute_dtype, wide, err));
    FC_TRY(cast_block(h, &h->grad, h->grad_dtype, wide, err));
    FC_TRY(fsdp->device->add(fsdp->device, wide, h->grad->memory, h->fresh->memory, count, compute, err));
    FC_TRY(cast_block(h, &h->grad, wide, h->grad_dtype, err));
    return fc_pool_give(&fsdp->pool, &h->fresh, compute, err);
}

fc_code fc_fsdp_prepare_for_backward(fc_fsdp_handle *h, fc_error *err) {
    const fc_fsdp_unit_options *o = &h->unit->options;
    if (!h->has_sharded_grad || !fc_fsdp_is_sharded(h->unit)) {
        return FC_OK;
    }
    h->saved = view_of(&h->sharded_grad);
    h->has_saved = true;
    h->has_sharded_grad = false;
    if (h->saved.dtype == h->layout.dtype) {
        return FC_OK;
    }
    /* Gradients are summed in full precision, even if the optimizer gets them in low precision. */
    fc_array low = h->saved;
    h->saved = view_of(o->offload_params ? &h->host_grad : &h->grad_shard);
    return low.device->cast(low.device, low.dtype, low.data, h->saved.dtype, h->saved.data, (size_t)low.sizes[0],
                            stream_of(h->unit->fsdp, &low, FC_STREAM_COMPUTE), err);
}

fc_code fc_fsdp_prepare_for_optim(fc_fsdp_handle *h, fc_error *err) {
    fc_fsdp *fsdp = h->unit->fsdp;
    fc_code rc = FC_OK;
    if (!h->has_saved) {
        return FC_OK;
    }
    h->sharded_grad = h->saved;
    if (h->unit->options.offload_params && h->post_backward_called) {
        h->sharded_grad = view_of(&h->host_grad);
    }
    if (h->low_dtype != h->layout.dtype) {
        fc_array full = h->sharded_grad;
        h->sharded_grad = view_of(&h->low_grad);
        rc = full.device->cast(full.device, full.dtype, full.data, h->low_dtype, h->low_grad.data,
                               (size_t)full.sizes[0], stream_of(fsdp, &full, FC_STREAM_COMPUTE), err);
    }
    h->has_saved = false;
    h->has_sharded_grad = rc == FC_OK;
    return rc;
}

/* Copies or casts the reduced gradient to `into`. */
static fc_code to_full_precision(const fc_fsdp *fsdp, const fc_array *reduced, const fc_array *into, fc_stream *stream,
                                 fc_error *err) {
    if (reduced->dtype == into->dtype) {
        return fc_array_copy(into, reduced, stream, err);
    }
    return fsdp->device->cast(fsdp->device, reduced->dtype, reduced->data, into->dtype, into->data,
                              (size_t)reduced->sizes[0], stream, err);
}

static fc_code add_to_saved(fc_fsdp_handle *h, const fc_array *reduced, fc_fsdp_stream stream, fc_error *err) {
    fc_fsdp *fsdp = h->unit->fsdp;
    fc_stream *s = fsdp->streams[stream];
    fc_array fresh = *reduced;
    fc_block *block = NULL;
    size_t count = (size_t)reduced->sizes[0];
    if (reduced->dtype != h->layout.dtype) {
        FC_TRY(fc_pool_take(&fsdp->pool, count * fc_dtype_size(h->layout.dtype), s, &block, err));
        fresh = fc_fsdp_over(fsdp, block, h->layout.dtype, reduced->sizes[0]);
        FC_TRY(to_full_precision(fsdp, reduced, &fresh, s, err));
    }
    FC_TRY(check_to_accumulate(&fresh, &h->saved, err));
    FC_TRY(fsdp->device->add(fsdp->device, fresh.dtype, h->saved.data, fresh.data, count, s, err));
    fc_fsdp_trace(h, FC_ACTION_ACCUMULATE, stream);
    return fc_pool_give(&fsdp->pool, &block, s, err);
}

fc_code fc_fsdp_accumulate(fc_fsdp_handle *h, const fc_array *reduced, fc_fsdp_stream stream, fc_error *err) {
    fc_fsdp *fsdp = h->unit->fsdp;
    fc_stream *s = fsdp->streams[stream];
    memset(h->is_grad_none, 0, h->layout.nparams * sizeof *h->is_grad_none); /* _reset_is_grad_none */
    if (h->has_saved) {
        FC_TRY(add_to_saved(h, reduced, stream, err));
    } else {
        FC_TRY(to_full_precision(fsdp, reduced, &h->grad_shard, s, err));
        h->saved = view_of(&h->grad_shard);
        h->has_saved = true;
    }
    if (h->unit->options.offload_params && h->saved.data != h->host_grad.data) {
        FC_TRY(fc_array_copy(&h->host_grad, &h->saved, s, err));
        fc_fsdp_trace(h, FC_ACTION_OFFLOAD, stream);
    }
    return FC_OK;
}

fc_array *fc_fsdp_sharded_grad(fc_fsdp_handle *handle) {
    return handle->has_sharded_grad ? &handle->sharded_grad : NULL;
}

static fc_code zero_grad(fc_fsdp *fsdp, fc_error *err) {
    for (fc_fsdp_unit *u = fsdp->units; u; u = u->next) {
        for (fc_fsdp_handle *h = u->handles; h; h = h->next) {
            h->has_sharded_grad = h->has_saved = false;
            FC_TRY(fc_pool_give(&fsdp->pool, &h->grad, fsdp->streams[FC_STREAM_COMPUTE], err));
        }
    }
    return FC_OK;
}

fc_code fc_fsdp_zero_grad(fc_fsdp *fsdp, fc_error *err) {
    return fc_fsdp_note(fsdp, zero_grad(fsdp, err));
}
