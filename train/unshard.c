/*
 * Unshard and reshard: gathers the whole flat parameter from the shards of the ranks, and frees it. The all-gather runs
 * on one side stream, the cast or copy before it on another, and events order them.
 */
#include "fsdpckpt/try.h"
#include "train/state.h"

static size_t bytes_of(fc_dtype dtype, int64_t count) {
    return (size_t)count * fc_dtype_size(dtype);
}

/* Copies the offloaded shard to the device. */
static fc_code fetch(fc_fsdp_handle *h, fc_block **out, fc_error *err) {
    fc_fsdp *fsdp = h->unit->fsdp;
    fc_stream *stream = fsdp->streams[FC_STREAM_PRE_UNSHARD];
    size_t bytes = fc_array_bytes(&h->local_shard);
    FC_TRY(fc_pool_take(&fsdp->pool, bytes, stream, out, err));
    return fsdp->device->copy(fsdp->device, (*out)->memory, h->local_shard.data, bytes, stream, err);
}

/* pre_unshard: the shard must be on the device, in the dtype of the computation, before it is gathered. */
static fc_code prepare_shard(fc_fsdp_handle *h, bool *ran, fc_error *err) {
    fc_fsdp *fsdp = h->unit->fsdp;
    fc_stream *stream = fsdp->streams[FC_STREAM_PRE_UNSHARD];
    bool remote = h->local_shard.device != fsdp->device, cast = h->compute_dtype != h->layout.dtype;
    fc_block *fetched = NULL;
    *ran = false;
    if ((!remote && !cast) || h->ready_shard) {
        return FC_OK;
    }
    if (remote) {
        FC_TRY(fetch(h, &fetched, err));
    }
    if (cast) {
        const void *from = fetched ? fetched->memory : h->local_shard.data;
        size_t count = (size_t)h->layout.shard_numel, bytes = bytes_of(h->compute_dtype, h->layout.shard_numel);
        FC_TRY(fc_pool_take(&fsdp->pool, bytes, stream, &h->ready_shard, err));
        FC_TRY(fsdp->device->cast(fsdp->device, h->layout.dtype, from, h->compute_dtype, h->ready_shard->memory, count,
                                  stream, err));
        FC_TRY(fc_pool_give(&fsdp->pool, &fetched, stream, err));
    } else {
        h->ready_shard = fetched;
    }
    *ran = true;
    fc_fsdp_trace(h, FC_ACTION_PRE_UNSHARD, FC_STREAM_PRE_UNSHARD);
    return FC_OK;
}

static fc_code gather(fc_fsdp_handle *h, fc_error *err) {
    fc_fsdp *fsdp = h->unit->fsdp;
    fc_stream *stream = fsdp->streams[FC_STREAM_UNSHARD];
    size_t bytes = bytes_of(h->compute_dtype, h->layout.shard_numel);
    const void *send = h->ready_shard ? h->ready_shard->memory : h->local_shard.data;
    FC_TRY(fc_pool_take(&fsdp->pool, bytes * (size_t)h->layout.world_size, stream, &h->full, err));
    FC_TRY(fc_all_gather(h->unit->options.shard, send, h->full->memory, bytes, stream, err));
    fc_fsdp_trace(h, FC_ACTION_ALL_GATHER, FC_STREAM_UNSHARD);
    return fc_pool_give(&fsdp->pool, &h->ready_shard, stream, err);
}

static fc_code unshard(fc_fsdp_handle *h, fc_error *err) {
    fc_fsdp *fsdp = h->unit->fsdp;
    bool ran = false, sharded = fc_fsdp_is_sharded(h->unit);
    h->use_unsharded = true;
    if (sharded && h->full) {
        return FC_OK;
    }
    FC_TRY(prepare_shard(h, &ran, err));
    if (ran) {
        FC_TRY(fc_fsdp_wait(fsdp, FC_STREAM_UNSHARD, FC_STREAM_PRE_UNSHARD, err));
    }
    if (sharded) {
        FC_TRY(gather(h, err));
    }
    return fsdp->device->record(fsdp->device, h->unsharded, fsdp->streams[FC_STREAM_UNSHARD], err);
}

fc_code fc_fsdp_unshard(fc_fsdp_unit *unit, fc_error *err) {
    fc_code rc = FC_OK;
    for (fc_fsdp_handle *h = unit->handles; h; h = h->next) {
        FC_TRY_GOTO(unshard(h, err), rc, out);
    }
out:
    return rc == FC_OK ? FC_OK : fc_context(err, rc, "unit '%s': unshard", unit->name);
}

static fc_code wait_unsharded(fc_fsdp_handle *h, fc_error *err) {
    fc_fsdp *fsdp = h->unit->fsdp;
    return fsdp->device->wait(fsdp->device, fsdp->streams[FC_STREAM_COMPUTE], h->unsharded, err);
}

/* Unlike torch, it does not wait for the whole stream: units that were prefetched after this one may still be on it. */
fc_code fc_fsdp_wait_unsharded(fc_fsdp_unit *unit, fc_error *err) {
    for (fc_fsdp_handle *h = unit->handles; h; h = h->next) {
        FC_TRY(wait_unsharded(h, err));
        if (unit->fsdp->options.trace) {
            fc_fsdp_event event = {FC_ACTION_WAIT, h, FC_STREAM_COMPUTE, FC_STREAM_UNSHARD};
            unit->fsdp->options.trace(unit->fsdp->options.context, &event);
        }
    }
    return FC_OK;
}

fc_code fc_fsdp_reshard(fc_fsdp_handle *h, bool free_unsharded, fc_error *err) {
    fc_fsdp *fsdp = h->unit->fsdp;
    bool is_sharded = fc_fsdp_is_sharded(h->unit);
    fc_block **block = is_sharded ? &h->full : &h->ready_shard;
    h->use_unsharded = false;
    h->unit->prefetched = false;
    if (!*block || (is_sharded && !free_unsharded)) {
        return FC_OK;
    }
    /* The compute stream has not waited for it yet if the unit was prefetched and did not run. */
    FC_TRY(wait_unsharded(h, err));
    FC_TRY(fc_pool_give(&fsdp->pool, block, fsdp->streams[FC_STREAM_COMPUTE], err));
    fc_fsdp_trace(h, FC_ACTION_FREE, FC_STREAM_COMPUTE);
    return FC_OK;
}

bool fc_fsdp_should_free_in_backward(const fc_fsdp_handle *h) {
    return fc_fsdp_is_sharded(h->unit) && (h->unit->fsdp->sync_gradients || fc_fsdp_reshards_after_forward(h->unit));
}

/* Returns a view of the unsharded flat parameter. Fails if it is sharded. */
static fc_code unsharded_array(fc_fsdp_handle *h, fc_array *out, fc_error *err) {
    fc_fsdp *fsdp = h->unit->fsdp;
    if (!h->use_unsharded) {
        return fc_fail(err, FC_EUSAGE,
                       "unit '%s': its parameters are sharded now: use them between pre- and post-forward, or pre- and "
                       "post-backward",
                       h->unit->name);
    }
    const fc_block *block = fc_fsdp_is_sharded(h->unit) ? h->full : h->ready_shard;
    if (block) {
        *out = fc_fsdp_over(fsdp, block, h->compute_dtype, h->layout.numel);
    } else {
        *out = h->local_shard;
        out->memory = NULL;
    }
    return FC_OK;
}

static fc_code unsharded_param(fc_fsdp_handle *h, size_t param, fc_fsdp_tensor *out, fc_error *err) {
    fc_array flat, view;
    fc_dtensor_extensions extensions = {.compute_stream = h->unit->fsdp->streams[FC_STREAM_COMPUTE],
                                        .has_compute_stream = true};
    if (param >= h->layout.nparams) {
        return fc_fail(err, FC_EUSAGE, "unit '%s': has no parameter %zu", h->unit->name, param);
    }
    FC_TRY(unsharded_array(h, &flat, err));
    FC_TRY(fc_flat_view(&h->layout, &flat, param, &view, err));
    return fc_post_unflatten_transform(&extensions, &view, &h->extensions[param], h->unsharded, out, err);
}

fc_code fc_fsdp_param(fc_fsdp_handle *h, size_t param, fc_fsdp_tensor *out, fc_error *err) {
    return fc_fsdp_note(h->unit->fsdp, unsharded_param(h, param, out, err));
}

fc_code fc_fsdp_gather_full(fc_fsdp_handle *h, fc_array *out, fc_error *err) {
    fc_fsdp *fsdp = h->unit->fsdp;
    fc_stream *stream = fsdp->streams[FC_STREAM_COMPUTE];
    fc_array full = {0}, shard = {0};
    int64_t padded = fc_fsdp_padded(h);
    FC_TRY(fc_fsdp_expect_state(h->unit, FC_STATE_IDLE, err));
    h->unit->state = FC_STATE_SUMMON_FULL_PARAMS;
    h->state = FC_HANDLE_SUMMON_FULL_PARAMS;
    fc_code rc;
    FC_TRY_GOTO(fc_array_new(fsdp->device, h->layout.dtype, 1, &padded, &full, err), rc, out);
    FC_TRY_GOTO(fc_array_new(fsdp->device, h->layout.dtype, 1, &h->layout.shard_numel, &shard, err), rc, out);
    FC_TRY_GOTO(fc_array_copy(&shard, &h->local_shard, stream, err), rc, out);
    if (fc_fsdp_is_sharded(h->unit)) {
        size_t bytes = fc_array_bytes(&shard);
        FC_TRY_GOTO(fc_all_gather(h->unit->options.shard, shard.data, full.data, bytes, stream, err), rc, out);
    } else {
        FC_TRY_GOTO(fc_array_copy(&full, &shard, stream, err), rc, out);
    }
    FC_TRY_GOTO(fc_comm_wait(fsdp->shard, stream, err), rc, out);
    *out = full;
    out->sizes[0] = h->layout.numel;
    full = (fc_array){0};
out:
    fc_array_free(&shard);
    fc_array_free(&full);
    h->unit->state = FC_STATE_IDLE;
    h->state = FC_HANDLE_IDLE;
    return rc;
}

fc_code fc_fsdp_summon_full_params(fc_fsdp_handle *h, fc_array *out, fc_error *err) {
    return fc_fsdp_note(h->unit->fsdp, fc_fsdp_gather_full(h, out, err));
}
