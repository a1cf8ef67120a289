/*
 * The forward of a step: pre- and post-forward of the root and of each unit.
 */
#include "fsdpckpt/try.h"
#include "train/state.h"

static fc_code cast_input(const fc_fsdp *fsdp, fc_array *input, fc_dtype dtype, fc_error *err) {
    fc_stream *compute = fsdp->streams[FC_STREAM_COMPUTE];
    fc_array cast = {0}, dense = {0};
    if (fc_dtype_get(input->dtype)->cls != FC_CLASS_FLOAT || input->dtype == dtype) {
        return FC_OK;
    }
    fc_device *device = input->device;
    bool contiguous = fc_array_is_contiguous(input);
    const void *from = input->data;
    size_t count = (size_t)fc_array_numel(input);
    fc_code rc;
    FC_TRY_GOTO(fc_array_new(device, dtype, input->ndim, input->sizes, &cast, err), rc, out);
    if (!contiguous) {
        FC_TRY_GOTO(fc_array_clone(input, compute, &dense, err), rc, out);
        from = dense.data;
    }
    FC_TRY_GOTO(device->cast(device, input->dtype, from, dtype, cast.data, count, compute, err), rc, out);
    if (!contiguous) {
        FC_TRY_GOTO(device->synchronize(device, compute, err), rc, out);
    }
    cast.requires_grad = input->requires_grad;
    *input = cast;
    cast = (fc_array){0};
out:
    fc_array_free(&dense);
    fc_array_free(&cast);
    return rc;
}

static fc_code cast_all(const fc_fsdp *fsdp, fc_array *arrays, size_t count, fc_dtype dtype, fc_error *err) {
    for (size_t i = 0; i < count; i++) {
        FC_TRY(cast_input(fsdp, &arrays[i], dtype, err));
    }
    return FC_OK;
}

static fc_code cast_inputs(const fc_fsdp_unit *unit, fc_array *inputs, size_t count, fc_error *err) {
    return unit->options.has_param_dtype ? cast_all(unit->fsdp, inputs, count, unit->options.param_dtype, err) : FC_OK;
}

/* The pre-forward hook of _override_module_mixed_precision. Its _MODULE_TO_INP_DTYPE is unit->input_dtype. */
static fc_code to_fp32(fc_fsdp_unit *unit, fc_array *inputs, size_t count, fc_error *err) {
    unit->has_input_dtype = false;
    for (size_t i = 0; i < count; i++) {
        fc_dtype dtype = inputs[i].dtype;
        if (dtype != FC_F32 && fc_dtype_get(dtype)->cls == FC_CLASS_FLOAT) {
            unit->has_input_dtype = true;
            unit->input_dtype = dtype;
        }
    }
    return cast_all(unit->fsdp, inputs, count, FC_F32, err);
}

fc_code fc_fsdp_cast_outputs(fc_fsdp_unit *unit, fc_array *outputs, size_t noutputs, fc_error *err) {
    if (!unit->options.fp32_inputs || !unit->has_input_dtype) {
        return FC_OK;
    }
    return fc_fsdp_note(unit->fsdp, cast_all(unit->fsdp, outputs, noutputs, unit->input_dtype, err));
}

static fc_code root_pre_forward(fc_fsdp *fsdp, fc_array *inputs, size_t ninputs, fc_error *err) {
    if (!fsdp->units) {
        return fc_fail(err, FC_EUSAGE, "the FSDP instance has no units: add the root first");
    }
    for (fc_fsdp_unit *u = fsdp->units; u && fsdp->units->options.forward_prefetch; u = u->next) {
        u->needs_pre_forward_unshard = true;
        u->prefetched = false;
    }
    FC_TRY(fc_fsdp_wait(fsdp, FC_STREAM_UNSHARD, FC_STREAM_COMPUTE, err));
    FC_TRY(fc_fsdp_wait(fsdp, FC_STREAM_PRE_UNSHARD, FC_STREAM_COMPUTE, err));
    if (!fsdp->units->options.no_cast_root_forward_inputs) {
        FC_TRY(cast_inputs(fsdp->units, inputs, ninputs, err));
    }
    return FC_OK;
}

fc_code fc_fsdp_root_pre_forward(fc_fsdp *fsdp, fc_array *inputs, size_t ninputs, fc_error *err) {
    return fc_fsdp_note(fsdp, root_pre_forward(fsdp, inputs, ninputs, err));
}

/* Several forwards register once: the sum of their gradients is reduced once. */
static void register_post_backward(fc_fsdp_unit *unit) {
    for (fc_fsdp_handle *h = unit->handles; h && unit->fsdp->grad_enabled; h = h->next) {
        if (!h->registered) {
            h->registered = true;
            fc_fsdp_trace(h, FC_ACTION_REGISTER_POST_BACKWARD, FC_STREAM_COMPUTE);
        }
    }
}

static fc_code pre_forward_unshard(fc_fsdp_unit *unit, fc_error *err) {
    unit->needs_pre_forward_unshard = false;
    if (!unit->prefetched) {
        FC_TRY(fc_fsdp_unshard(unit, err));
    }
    FC_TRY(fc_fsdp_wait_unsharded(unit, err));
    return fc_fsdp_prefetch(unit, err);
}

/* Returns whether activation checkpointing runs the forward again, in the backward. The parameters are unsharded then.
 */
static bool is_recomputed(const fc_fsdp_unit *unit) {
    return unit->handles && unit->handles->state == FC_HANDLE_BACKWARD_PRE;
}

static fc_code pre_forward(fc_fsdp_unit *unit, bool training, fc_array *inputs, size_t ninputs, fc_error *err) {
    if (is_recomputed(unit)) {
        return FC_OK;
    }
    unit->state = FC_STATE_FORWARD_BACKWARD;
    FC_TRY(fc_order_pre_forward(unit, training, err));
    for (fc_fsdp_handle *h = unit->handles; h; h = h->next) {
        h->state = FC_HANDLE_FORWARD;
    }
    FC_TRY(pre_forward_unshard(unit, err));
    register_post_backward(unit);
    if (unit->options.cast_forward_inputs && unit->handles) {
        FC_TRY(cast_inputs(unit, inputs, ninputs, err));
    }
    return unit->options.fp32_inputs ? to_fp32(unit, inputs, ninputs, err) : FC_OK;
}

fc_code fc_fsdp_pre_forward(fc_fsdp_unit *unit, bool training, fc_array *inputs, size_t ninputs, fc_error *err) {
    return fc_fsdp_note(unit->fsdp, pre_forward(unit, training, inputs, ninputs, err));
}

static fc_code post_forward(fc_fsdp_unit *unit, fc_error *err) {
    fc_fsdp *fsdp = unit->fsdp;
    fc_code rc = FC_OK;
    if (is_recomputed(unit)) {
        return FC_OK;
    }
    if (unit->state != FC_STATE_FORWARD_BACKWARD || (unit->handles && unit->handles->state != FC_HANDLE_FORWARD)) {
        return fc_fail(err, FC_EUSAGE, "unit '%s': post-forward without pre-forward", unit->name);
    }
    /* The backward needs the root's parameters first, so they stay unsharded. */
    bool free_unsharded = !unit->options.is_root && fc_fsdp_reshards_after_forward(unit);
    if (fsdp->grad_enabled) {
        rc = fc_order_post_forward(unit, err);
    }
    for (fc_fsdp_handle *h = unit->handles; h && rc == FC_OK; h = h->next) {
        rc = fc_fsdp_reshard(h, free_unsharded, err);
        h->state = FC_HANDLE_IDLE;
    }
    if (fsdp->grad_enabled) {
        unit->ran_pre_backward = false;
        unit->needs_pre_backward_unshard = unit->handles != NULL;
    }
    unit->state = FC_STATE_IDLE;
    return rc;
}

fc_code fc_fsdp_post_forward(fc_fsdp_unit *unit, fc_error *err) {
    return fc_fsdp_note(unit->fsdp, post_forward(unit, err));
}
