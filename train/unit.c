/*
 * Makes units and their flat parameters, before training starts. A flat parameter takes the parameters of a module and
 * keeps this rank's shard of them.
 */
#include "fsdpckpt/try.h"
#include "train/state.h"

#include <string.h>

static fc_code check_unit(const fc_fsdp *fsdp, const char *name, const fc_fsdp_unit_options *o, fc_error *err) {
    if (o->is_root != (fsdp->units == NULL)) {
        return fc_fail(err, FC_EUSAGE, "unit '%s': the first unit must be the root, and no other unit may be", name);
    }
    bool hybrid = fc_fsdp_is_hybrid(o);
    if (hybrid && !o->replicate) {
        return fc_fail(err, FC_EUSAGE, "unit '%s': a hybrid strategy needs a communicator over replicas", name);
    }
    if (!hybrid && o->replicate) {
        return fc_fail(err, FC_EUSAGE,
                       "unit '%s': a communicator over replicas needs a hybrid strategy; a unit without one among "
                       "hybrid units needs a communicator of its own",
                       name);
    }
    if (o->shard->device != fsdp->device || (hybrid && o->replicate->device != fsdp->device)) {
        return fc_fail(err, FC_EUSAGE, "unit '%s': its communicators are on another device than those of the instance",
                       name);
    }
    if (hybrid && fsdp->has_hook) {
        return fc_fail(err, FC_EUSAGE, "unit '%s': a communication hook is not supported for hybrid strategies", name);
    }
    if ((o->has_param_dtype && fc_dtype_get(o->param_dtype)->cls != FC_CLASS_FLOAT) ||
        (o->has_reduce_dtype && fc_dtype_get(o->reduce_dtype)->cls != FC_CLASS_FLOAT) ||
        (o->has_buffer_dtype && fc_dtype_get(o->buffer_dtype)->cls != FC_CLASS_FLOAT)) {
        return fc_fail(err, FC_EUSAGE, "unit '%s': the dtypes of mixed precision must be floating-point", name);
    }
    return FC_OK;
}

/* Returns the options with the communicators and the prefetching of the instance where the unit has none. */
static fc_fsdp_unit_options complete(const fc_fsdp *fsdp, const fc_fsdp_unit_options *options) {
    fc_fsdp_unit_options o = *options;
    if (!o.shard) {
        o.shard = fsdp->shard;
        o.replicate = o.replicate ? o.replicate : fsdp->replicate;
    }
    if (!o.has_prefetch) {
        o.backward_prefetch = fsdp->options.backward_prefetch;
        o.forward_prefetch = fsdp->options.forward_prefetch;
    }
    return o;
}

/* The all-reduces over replicas have a stream of their own; without hybrid units there are none. */
static fc_code need_all_reduce_stream(fc_fsdp *fsdp, fc_error *err) {
    fc_stream *stream;
    if (fsdp->owns_stream[FC_STREAM_ALL_REDUCE]) {
        return FC_OK;
    }
    FC_TRY(fsdp->device->stream_new(fsdp->device, &stream, err));
    fsdp->streams[FC_STREAM_ALL_REDUCE] = stream;
    fsdp->owns_stream[FC_STREAM_ALL_REDUCE] = true;
    return FC_OK;
}

fc_code fc_fsdp_add_unit(fc_fsdp *fsdp, const char *name, const fc_fsdp_unit_options *options, fc_fsdp_unit **out,
                         fc_error *err) {
    fc_fsdp_unit_options all = complete(fsdp, options);
    FC_TRY(check_unit(fsdp, name, &all, err));
    if (all.replicate) {
        FC_TRY(need_all_reduce_stream(fsdp, err));
    }
    fc_fsdp_unit *unit = fc_arena_calloc(fsdp->arena, 1, sizeof *unit);
    char *copy = fc_arena_strndup(fsdp->arena, name, strlen(name));
    FC_NEED(unit && copy, err, name);
    unit->fsdp = fsdp;
    unit->name = copy;
    unit->options = all;
    int64_t ranks = (int64_t)all.shard->size * (all.replicate ? all.replicate->size : 1);
    unit->predivide = fc_gradient_predivide_factor(ranks);
    unit->postdivide = (double)ranks / unit->predivide;
    unit->last_handle = &unit->handles;
    unit->index = fsdp->nunits++;
    unit->pre_forward_index = unit->post_forward_index = NOT_IN_ORDER;
    *fsdp->last_unit = unit;
    fsdp->last_unit = &unit->next;
    *out = unit;
    return FC_OK;
}

/* _init_param_reduce_dtypes: gradients are reduced in the dtype of the parameters unless another one is given. */
static void choose_dtypes(fc_fsdp_handle *h, fc_dtype own) {
    const fc_fsdp_unit_options *o = &h->unit->options;
    h->compute_dtype = o->has_param_dtype ? o->param_dtype : own;
    h->reduce_dtype = o->has_reduce_dtype ? o->reduce_dtype : h->compute_dtype;
    h->low_dtype = own;
    if (o->keep_low_precision_grads) {
        h->low_dtype = fc_fsdp_is_sharded(h->unit) ? h->compute_dtype : h->reduce_dtype;
    }
}

/* Collects the local tensors to flatten, and describes them for fc_flat_layout_new. Names are copied. */
static fc_code describe(fc_fsdp_handle *h, const fc_fsdp_param_init *params, size_t count, fc_flat_desc *descs,
                        fc_array *locals, fc_error *err) {
    fc_fsdp *fsdp = h->unit->fsdp;
    size_t n = 0;
    for (size_t i = 0; i < count; i++) {
        const fc_fsdp_param_init *p = &params[i];
        fc_param_extension extension;
        fc_array local;
        if (p->tensor->fsdp_flattened) {
            return fc_fail(err, FC_EUSAGE, "%s: cannot flatten a view into a flat parameter again", p->fqn);
        }
        fc_pre_flatten_transform(p->tensor, &local, &extension);
        const char *fqn = fc_arena_strndup(fsdp->arena, p->fqn, strlen(p->fqn));
        FC_NEED(fqn, err, p->fqn);
        descs[i] = (fc_flat_desc){fqn,         local.ndim,       p->tensor->local.sizes, p->tensor->local.strides,
                                  local.dtype, p->requires_grad, p->shared_with};
        if (p->shared_with < 0) {
            h->extensions[n] = extension;
            locals[n++] = local;
        }
    }
    return FC_OK;
}

/* Makes an array for a shard. An offloaded shard is in page-locked host memory, from which copies are fast. */
static fc_code new_shard(fc_fsdp_handle *h, fc_dtype dtype, int staging, fc_array *out, fc_error *err) {
    fc_fsdp *fsdp = h->unit->fsdp;
    fc_device *device = fsdp->device;
    if (!h->unit->options.offload_params || fsdp->host == device) {
        return fc_array_new(device, dtype, 1, &h->layout.shard_numel, out, err);
    }
    size_t bytes = (size_t)h->layout.shard_numel * fc_dtype_size(dtype);
    FC_TRY(device->alloc_staging(device, bytes, &h->staging[staging], err));
    return fc_array_over(fsdp->host, dtype, 1, &h->layout.shard_numel, h->staging[staging], out, err);
}

/* Flattens the parameters on the device and keeps this rank's shard. */
static fc_code cut_shard(fc_fsdp_handle *h, const fc_array *locals, fc_error *err) {
    fc_fsdp *fsdp = h->unit->fsdp;
    fc_stream *compute = fsdp->streams[FC_STREAM_COMPUTE];
    int64_t rank = fc_fsdp_is_sharded(h->unit) ? h->unit->options.shard->rank : 0;
    fc_array flat = {0}, shard = {0};
    fc_code rc;
    FC_TRY_GOTO(fc_array_new(fsdp->device, h->layout.dtype, 1, &h->layout.numel, &flat, err), rc, out);
    FC_TRY_GOTO(fc_array_new(fsdp->device, h->layout.dtype, 1, &h->layout.shard_numel, &shard, err), rc, out);
    FC_TRY_GOTO(new_shard(h, h->layout.dtype, 0, &h->local_shard, err), rc, out);
    FC_TRY_GOTO(fc_flat_flatten(&h->layout, locals, &flat, compute, err), rc, out);
    FC_TRY_GOTO(fc_flat_shard(&h->layout, &flat, rank, &shard, compute, err), rc, out);
    FC_TRY_GOTO(fc_array_copy(&h->local_shard, &shard, compute, err), rc, out);
    rc = fsdp->device->synchronize(fsdp->device, compute, err);
out:
    fc_array_free(&flat);
    fc_array_free(&shard);
    return rc;
}

static fc_code new_gradients(fc_fsdp_handle *h, fc_error *err) {
    fc_fsdp *fsdp = h->unit->fsdp;
    const fc_flat_layout *l = &h->layout;
    const fc_fsdp_unit_options *o = &h->unit->options;
    FC_TRY(fsdp->device->event_new(fsdp->device, &h->unsharded, err));
    if (l->requires_grad) {
        FC_TRY(fc_array_new(fsdp->device, l->dtype, 1, &l->shard_numel, &h->grad_shard, err));
    }
    if (l->requires_grad && o->offload_params) {
        FC_TRY(new_shard(h, l->dtype, 1, &h->host_grad, err));
    }
    if (l->requires_grad && h->low_dtype != l->dtype) {
        FC_TRY(new_shard(h, h->low_dtype, 2, &h->low_grad, err));
    }
    return FC_OK;
}

/* Lays out the flat parameter of a new handle. */
static fc_code lay_out(fc_fsdp_handle *h, const fc_fsdp_param_init *params, size_t count, fc_flat_desc *descs,
                       fc_array *locals, fc_error *err) {
    const fc_fsdp *fsdp = h->unit->fsdp;
    FC_TRY(describe(h, params, count, descs, locals, err));
    if (count > 0) {
        choose_dtypes(h, descs[0].dtype);
    }
    return fc_flat_layout_new(descs, count, h->unit->options.shard->size, fsdp->options.use_orig_params,
                              h->compute_dtype, fsdp->arena, &h->layout, err);
}

static fc_code add_handle(fc_fsdp_unit *unit, const fc_fsdp_param_init *params, size_t count, fc_fsdp_handle **out,
                          fc_error *err) {
    fc_arena *arena = unit->fsdp->arena;
    fc_fsdp_handle *h = fc_arena_calloc(arena, 1, sizeof *h);
    fc_flat_desc *descs = fc_arena_calloc(arena, count, sizeof *descs);
    fc_array *locals = fc_arena_calloc(arena, count, sizeof *locals);
    if (h) {
        h->unit = unit;
        h->extensions = fc_arena_calloc(arena, count, sizeof *h->extensions);
        h->is_grad_none = fc_arena_calloc(arena, count, sizeof *h->is_grad_none);
    }
    FC_NEED(h && descs && locals && h->extensions && h->is_grad_none, err, unit->name);
    FC_TRY_CONTEXT(lay_out(h, params, count, descs, locals, err), err, "unit '%s'", unit->name);
    if (!fc_fsdp_is_sharded(unit)) {
        h->layout.world_size = 1;
        h->layout.shard_numel = h->layout.numel;
    }
    *unit->last_handle = h; /* from here on, fc_fsdp_free frees it */
    unit->last_handle = &h->next;
    FC_TRY(cut_shard(h, locals, err));
    FC_TRY(new_gradients(h, err));
    *out = h;
    return FC_OK;
}

fc_code fc_fsdp_add_handle(fc_fsdp_unit *unit, const fc_fsdp_param_init *params, size_t count, fc_fsdp_handle **out,
                           fc_error *err) {
    return fc_fsdp_note(unit->fsdp, add_handle(unit, params, count, out, err));
}

const fc_flat_layout *fc_fsdp_layout(const fc_fsdp_handle *handle) {
    return &handle->layout;
}

const char *fc_fsdp_unit_name(const fc_fsdp_handle *handle) {
    return handle->unit->name;
}

fc_array *fc_fsdp_local_shard(fc_fsdp_handle *handle) {
    return &handle->local_shard;
}

static int64_t shard_rank(const fc_fsdp_handle *h) {
    return h->layout.world_size > 1 ? h->unit->options.shard->rank : 0;
}

fc_code fc_fsdp_param_shard(fc_fsdp_handle *h, size_t param, fc_array *out, fc_error *err) {
    if (param >= h->layout.nparams) {
        return fc_fail(err, FC_EUSAGE, "unit '%s': has no parameter %zu", h->unit->name, param);
    }
    return fc_flat_shard_view(&h->layout, &h->local_shard, shard_rank(h), param, out, err);
}

fc_code fc_fsdp_param_grad(fc_fsdp_handle *h, size_t param, fc_array *out, bool *has, fc_error *err) {
    *has = false;
    if (param >= h->layout.nparams) {
        return fc_fail(err, FC_EUSAGE, "unit '%s': has no parameter %zu", h->unit->name, param);
    }
    if (!h->has_sharded_grad || !h->layout.params[param].requires_grad || h->is_grad_none[param] ||
        !fc_flat_shard_of(&h->layout, param, shard_rank(h)).in_shard) {
        return FC_OK;
    }
    *has = true;
    return fc_flat_shard_view(&h->layout, &h->sharded_grad, shard_rank(h), param, out, err);
}

fc_code fc_fsdp_set_grad_none(fc_fsdp_handle *h, size_t param, fc_error *err) {
    fc_array view;
    bool has;
    FC_TRY(fc_fsdp_param_grad(h, param, &view, &has, err));
    if (!has) {
        return FC_OK;
    }
    h->is_grad_none[param] = true;
    return view.device->zero(view.device, view.data, fc_array_bytes(&view),
                             view.device == h->unit->fsdp->device ? h->unit->fsdp->streams[FC_STREAM_COMPUTE] : NULL,
                             err);
}

fc_training_state fc_fsdp_unit_state(const fc_fsdp_unit *unit) {
    return unit->state;
}

fc_code fc_fsdp_handles_state(const fc_fsdp_unit *unit, fc_handle_state *out, fc_error *err) {
    if (!unit->handles) {
        return fc_fail(err, FC_EUSAGE, "unit '%s': expects a non-empty handles key", unit->name);
    }
    *out = unit->handles->state;
    for (const fc_fsdp_handle *h = unit->handles; h; h = h->next) {
        if (h->state != *out) {
            return fc_fail(err, FC_EUSAGE, "unit '%s': expects uniform training state but got {%s, %s}", unit->name,
                           fc_handle_state_name(*out), fc_handle_state_name(h->state));
        }
    }
    return FC_OK;
}
