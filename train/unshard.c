/*
 * Unshard and reshard: from a rank's shard to the whole flat parameter and back. The all-gather runs on a stream of its
 * own, the cast or copy before it on another; events say when the next may start.
 */
#include "base/try.h"
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

/* pre_unshard: what is gathered must be on the device and in the dtype of the computation. */
static fc_code prepare_shard(fc_fsdp_handle *h, bool *ran, fc_error *err) {
    fc_fsdp *fsdp = h->unit->fsdp;
    fc_stream *stream = fsdp->streams[FC_STREAM_PRE_UNSHARD];
    bool remote = h->local_shard.device != fsdp->device, cast = h->compute_dtype != h->layout.dtype;
    fc_block *fetched = NULL;
    *ran = false;
    if ((!remote && !cast) || h->ready_shard) {
        return FC_OK;
    }
    fc_code rc = remote ? fetch(h, &fetched, err) : FC_OK;
    if (rc == FC_OK && cast) {
        const void *from = fetched ? fetched->memory : h->local_shard.data;
        rc = fc_pool_take(&fsdp->pool, bytes_of(h->compute_dtype, h->layout.shard_numel), stream, &h->ready_shard, err);
        if (rc == FC_OK) {
            rc = fsdp->device->cast(fsdp->device, h->layout.dtype, from, h->compute_dtype, h->ready_shard->memory,
                                    (size_t)h->layout.shard_numel, stream, err);
        }
        rc = rc == FC_OK ? fc_pool_give(&fsdp->pool, &fetched, stream, err) : rc;
    } else if (rc == FC_OK) {
        h->ready_shard = fetched;
    }
    if (rc == FC_OK) {
        *ran = true;
        fc_fsdp_tell(h, FC_ACTION_PRE_UNSHARD, FC_STREAM_PRE_UNSHARD);
    }
    return rc;
}

static fc_code gather(fc_fsdp_handle *h, fc_error *err) {
    fc_fsdp *fsdp = h->unit->fsdp;
    fc_stream *stream = fsdp->streams[FC_STREAM_UNSHARD];
    size_t bytes = bytes_of(h->compute_dtype, h->layout.shard_numel);
    const void *send = h->ready_shard ? h->ready_shard->memory : h->local_shard.data;
    FC_TRY(fc_pool_take(&fsdp->pool, bytes * (size_t)h->layout.world_size, stream, &h->full, err));
    FC_TRY(fsdp->shard->all_gather(fsdp->shard, send, h->full->memory, bytes, stream, err));
    fc_fsdp_tell(h, FC_ACTION_ALL_GATHER, FC_STREAM_UNSHARD);
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
    for (fc_fsdp_handle *h = unit->handles; h && rc == FC_OK; h = h->next) {
        rc = unshard(h, err);
    }
    return rc == FC_OK ? FC_OK : fc_context(err, rc, "unit '%s': unshard", unit->name);
}

static fc_code wait_unsharded(fc_fsdp_handle *h, fc_error *err) {
    fc_fsdp *fsdp = h->unit->fsdp;
    return fsdp->device->wait(fsdp->device, fsdp->streams[FC_STREAM_COMPUTE], h->unsharded, err);
}

/* Not for the whole stream, as torch does: what was prefetched behind it need not be there yet. */
fc_code fc_fsdp_wait_unsharded(fc_fsdp_unit *unit, fc_error *err) {
    fc_code rc = FC_OK;
    for (fc_fsdp_handle *h = unit->handles; h && rc == FC_OK; h = h->next) {
        rc = wait_unsharded(h, err);
        if (rc == FC_OK && unit->fsdp->options.trace) {
            fc_fsdp_event event = {FC_ACTION_WAIT, h, FC_STREAM_COMPUTE, FC_STREAM_UNSHARD};
            unit->fsdp->options.trace(unit->fsdp->options.context, &event);
        }
    }
    return rc;
}

fc_code fc_fsdp_reshard(fc_fsdp_handle *h, bool free_unsharded, fc_error *err) {
    fc_fsdp *fsdp = h->unit->fsdp;
    fc_block **freed = fc_fsdp_is_sharded(h->unit) ? (free_unsharded ? &h->full : NULL) : &h->ready_shard;
    h->use_unsharded = false;
    h->unit->prefetched = false;
    if (!freed || !*freed) {
        return FC_OK;
    }
    /* Computation may never have used it: a unit that was prefetched and did not run. */
    fc_code rc = wait_unsharded(h, err);
    if (rc == FC_OK) {
        rc = fc_pool_give(&fsdp->pool, freed, fsdp->streams[FC_STREAM_COMPUTE], err);
    }
    if (rc == FC_OK) {
        fc_fsdp_tell(h, FC_ACTION_FREE, FC_STREAM_COMPUTE);
    }
    return rc;
}

bool fc_fsdp_should_free_in_backward(const fc_fsdp_handle *h) {
    return fc_fsdp_is_sharded(h->unit) && (h->unit->fsdp->sync_gradients || fc_fsdp_reshards_after_forward(h->unit));
}

/* The unsharded flat parameter, where there is one. */
static fc_code unsharded_array(fc_fsdp_handle *h, fc_array *out, fc_error *err) {
    fc_fsdp *fsdp = h->unit->fsdp;
    if (!h->use_unsharded) {
        return fc_fail(err, FC_EUSAGE,
                       "unit '%s': its parameters are sharded now: they are whole between pre- and post-forward, and "
                       "pre- and post-backward",
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

fc_code fc_fsdp_param(fc_fsdp_handle *h, size_t param, fc_fsdp_tensor *out, fc_error *err) {
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

fc_code fc_fsdp_summon_full_params(fc_fsdp_handle *h, fc_array *out, fc_error *err) {
    fc_fsdp *fsdp = h->unit->fsdp;
    fc_stream *stream = fsdp->streams[FC_STREAM_COMPUTE];
    fc_array full = {0}, shard = {0};
    int64_t padded = fc_fsdp_padded(h);
    FC_TRY(fc_fsdp_expect_state(h->unit, FC_STATE_IDLE, err));
    h->unit->state = FC_STATE_SUMMON_FULL_PARAMS;
    h->state = FC_HANDLE_SUMMON_FULL_PARAMS;
    fc_code rc = fc_array_new(fsdp->device, h->layout.dtype, 1, &padded, &full, err);
    rc = rc == FC_OK ? fc_array_new(fsdp->device, h->layout.dtype, 1, &h->layout.shard_numel, &shard, err) : rc;
    rc = rc == FC_OK ? fc_array_copy(&shard, &h->local_shard, stream, err) : rc;
    if (rc == FC_OK && fc_fsdp_is_sharded(h->unit)) {
        rc = fsdp->shard->all_gather(fsdp->shard, shard.data, full.data, fc_array_bytes(&shard), stream, err);
    } else if (rc == FC_OK) {
        rc = fc_array_copy(&full, &shard, stream, err);
    }
    rc = rc == FC_OK ? fsdp->device->synchronize(fsdp->device, stream, err) : rc;
    fc_array_free(&shard);
    h->unit->state = FC_STATE_IDLE;
    h->state = FC_HANDLE_IDLE;
    if (rc != FC_OK) {
        fc_array_free(&full);
        return rc;
    }
    full.sizes[0] = h->layout.numel;
    *out = full;
    return FC_OK;
}
