/*
 * The FSDP instance: its streams and options, and helpers for the other files. unit.c makes units and flat parameters;
 * forward.c and backward.c run the step.
 */
#include "fsdpckpt/try.h"
#include "train/state.h"

#include <stdlib.h>
#include <string.h>

const char *fc_fsdp_stream_name(fc_fsdp_stream stream) {
    static const char *const names[] = {"COMPUTE", "UNSHARD", "PRE_UNSHARD", "POST_BACKWARD", "ALL_REDUCE"};
    return names[stream];
}

const char *fc_fsdp_action_name(fc_fsdp_action action) {
    static const char *const names[] = {
        "WAIT",       "PRE_UNSHARD",           "ALL_GATHER", "PREFETCH",    "FREE",      "CAST_GRAD",
        "PRE_DIVIDE", "REDUCE_SCATTER",        "ALL_REDUCE", "POST_DIVIDE", "COMM_HOOK", "ACCUMULATE",
        "OFFLOAD",    "REGISTER_POST_BACKWARD"};
    return names[action];
}

const char *fc_handle_state_name(fc_handle_state state) {
    static const char *const names[] = {"IDLE", "FORWARD", "BACKWARD_PRE", "BACKWARD_POST", "SUMMON_FULL_PARAMS"};
    return names[state];
}

static const char *unit_state_name(fc_training_state state) {
    static const char *const names[] = {"IDLE", "FORWARD_BACKWARD", "SUMMON_FULL_PARAMS"};
    return names[state];
}

/* Splits the division like torch, so that gradients neither overflow nor underflow in half precision. */
double fc_gradient_predivide_factor(int64_t world_size) {
    int64_t factor = 1;
    while (world_size % factor == 0 && world_size / factor > factor) {
        factor *= 2;
    }
    return (double)factor;
}

void fc_fsdp_trace(const fc_fsdp_handle *handle, fc_fsdp_action action, fc_fsdp_stream stream) {
    const fc_fsdp_options *o = &handle->unit->fsdp->options;
    if (o->trace) {
        fc_fsdp_event event = {action, handle, stream, stream};
        o->trace(o->context, &event);
    }
}

fc_code fc_fsdp_wait(fc_fsdp *fsdp, fc_fsdp_stream stream, fc_fsdp_stream other, fc_error *err) {
    fc_device *device = fsdp->device;
    FC_TRY(device->record(device, fsdp->marks[other], fsdp->streams[other], err));
    FC_TRY(device->wait(device, fsdp->streams[stream], fsdp->marks[other], err));
    if (fsdp->options.trace) {
        fc_fsdp_event event = {FC_ACTION_WAIT, NULL, stream, other};
        fsdp->options.trace(fsdp->options.context, &event);
    }
    return FC_OK;
}

fc_code fc_fsdp_expect_state(const fc_fsdp_unit *unit, fc_training_state wanted, fc_error *err) {
    return unit->state == wanted
               ? FC_OK
               : fc_fail(err, FC_EUSAGE, "unit '%s': expected to be in states [%s] but current state is %s", unit->name,
                         unit_state_name(wanted), unit_state_name(unit->state));
}

fc_array fc_fsdp_over(const fc_fsdp *fsdp, const fc_block *block, fc_dtype dtype, int64_t count) {
    fc_array array = {.device = fsdp->device, .dtype = dtype, .ndim = 1, .sizes = {count}, .strides = {1}};
    array.data = block->memory;
    return array;
}

static fc_code new_streams(fc_fsdp *fsdp, fc_stream *compute, fc_error *err) {
    fc_device *device = fsdp->device;
    for (int s = 0; s < FC_STREAM_COUNT; s++) {
        FC_TRY(device->event_new(device, &fsdp->marks[s], err));
        if (s == FC_STREAM_COMPUTE || s == FC_STREAM_ALL_REDUCE) { /* the first hybrid unit makes another one */
            fsdp->streams[s] = compute;
            continue;
        }
        FC_TRY(device->stream_new(device, &fsdp->streams[s], err));
        fsdp->owns_stream[s] = true;
    }
    return FC_OK;
}

static fc_code open_host(fc_fsdp *fsdp, fc_error *err) {
    fsdp->host = fsdp->device;
    if (fsdp->device->is_host) {
        return FC_OK;
    }
    fsdp->owns_host = true;
    return fc_device_cpu(&fsdp->host, err);
}

fc_code fc_fsdp_new(fc_comm *shard, fc_comm *replicate, fc_stream *compute, const fc_fsdp_options *options,
                    fc_fsdp **out, fc_error *err) {
    *out = NULL;
    if (options->check_order && !options->warn) {
        return fc_fail(err, FC_EUSAGE, "check_order needs the function `warn`");
    }
    if (options->backward_prefetch_limit < 0 || options->forward_prefetch_limit < 0 || options->limit_all_gathers < 0) {
        return fc_fail(err, FC_EUSAGE, "a limit of prefetches or all-gathers is negative");
    }
    fc_fsdp *fsdp = calloc(1, sizeof *fsdp);
    fc_arena *arena = fc_arena_new();
    if (!fsdp || !arena) {
        free(fsdp);
        fc_arena_free(arena);
        return fc_no_memory(err, NULL);
    }
    fsdp->shard = shard;
    fsdp->replicate = replicate;
    fsdp->device = fsdp->pool.device = shard->device;
    fsdp->pool.comm = options->register_buffers && shard->on_device && shard->on_device->alloc ? shard : NULL;
    fsdp->pool.spare = options->limit_all_gathers ? options->limit_all_gathers : 2;
    fsdp->options = *options;
    fsdp->arena = arena;
    fsdp->last_unit = &fsdp->units;
    fsdp->sync_gradients = fsdp->grad_enabled = true;
    fc_code rc;
    FC_TRY_GOTO(open_host(fsdp, err), rc, fail);
    FC_TRY_GOTO(new_streams(fsdp, compute, err), rc, fail);
    *out = fsdp;
    return FC_OK;
fail:
    fc_fsdp_free(fsdp);
    return rc;
}

static void free_handle(fc_fsdp_handle *h) {
    fc_fsdp *fsdp = h->unit->fsdp;
    fc_array_free(&h->local_shard);
    fc_array_free(&h->grad_shard);
    fc_array_free(&h->host_grad);
    fc_array_free(&h->low_grad);
    for (size_t i = 0; i < sizeof h->staging / sizeof *h->staging; i++) {
        if (h->staging[i]) {
            fsdp->device->release_staging(fsdp->device, h->staging[i]);
        }
    }
    if (h->unsharded) {
        fsdp->device->event_free(fsdp->device, h->unsharded);
    }
}

fc_code fc_fsdp_note(fc_fsdp *fsdp, fc_code rc) {
    fsdp->failed = fsdp->failed || (rc != FC_OK && rc != FC_EUSAGE);
    return rc;
}

/* Waits for all streams. If that is hopeless, because this rank has failed or another one, ends their work: a
 * collective on one of them would never end, nor would the release of memory, which waits for the device. */
void fc_fsdp_end_work(fc_fsdp *fsdp) {
    fc_device *device = fsdp->device;
    bool hopeless = fsdp->failed;
    for (int s = 0; s < FC_STREAM_COUNT && !hopeless; s++) {
        hopeless = fc_comm_wait(fsdp->shard, fsdp->streams[s], NULL) != FC_OK;
    }
    if (fsdp->copies && !hopeless) {
        hopeless = fc_comm_wait(fsdp->shard, fsdp->copies, NULL) != FC_OK;
    }
    if (!hopeless) {
        return;
    }
    fc_comm_abort(fsdp->shard);
    if (fsdp->replicate) {
        fc_comm_abort(fsdp->replicate);
    }
    for (const fc_fsdp_unit *u = fsdp->units; u; u = u->next) {
        fc_comm_abort(u->options.shard);
        if (u->options.replicate) {
            fc_comm_abort(u->options.replicate);
        }
    }
    for (int s = 0; s < FC_STREAM_COUNT; s++) {
        device->synchronize(device, fsdp->streams[s], NULL);
    }
    if (fsdp->copies) {
        device->synchronize(device, fsdp->copies, NULL);
    }
}

void fc_fsdp_free(fc_fsdp *fsdp) {
    if (!fsdp) {
        return;
    }
    fc_device *device = fsdp->device;
    fc_fsdp_end_work(fsdp);
    for (fc_fsdp_unit *u = fsdp->units; u; u = u->next) {
        for (fc_fsdp_handle *h = u->handles; h; h = h->next) {
            free_handle(h);
        }
        for (fc_fsdp_buffer *b = u->buffers; b; b = b->next) {
            fc_array_free(&b->array);
        }
    }
    fc_pool_clear(&fsdp->pool);
    for (int s = 0; s < FC_STREAM_COUNT; s++) {
        if (fsdp->marks[s]) {
            device->event_free(device, fsdp->marks[s]);
        }
        if (fsdp->owns_stream[s]) {
            device->stream_free(device, fsdp->streams[s]);
        }
    }
    if (fsdp->copied) {
        device->event_free(device, fsdp->copied);
    }
    if (fsdp->copies) {
        device->stream_free(device, fsdp->copies);
    }
    if (fsdp->owns_host && fsdp->host) {
        fsdp->host->destroy(fsdp->host);
    }
    fc_order_free(fsdp);
    fc_arena_free(fsdp->arena);
    free(fsdp);
}

fc_code fc_fsdp_register_comm_hook(fc_fsdp *fsdp, const fc_comm_hook *hook, fc_error *err) {
    if (!hook || !hook->run) {
        return fc_fail(err, FC_EUSAGE, "the communication hook should not be NULL");
    }
    for (fc_fsdp_unit *u = fsdp->units; u; u = u->next) {
        if (fc_fsdp_is_hybrid(&u->options)) {
            return fc_fail(err, FC_EUSAGE, "unit '%s': a communication hook is not supported for hybrid strategies",
                           u->name);
        }
    }
    fsdp->hook = *hook;
    fsdp->has_hook = true;
    return FC_OK;
}

void fc_fsdp_set_sync_gradients(fc_fsdp *fsdp, bool sync) {
    fsdp->sync_gradients = sync;
}

void fc_fsdp_set_grad_enabled(fc_fsdp *fsdp, bool enabled) {
    fsdp->grad_enabled = enabled;
}

size_t fc_fsdp_memory(const fc_fsdp *fsdp, size_t *peak) {
    if (peak) {
        *peak = fsdp->pool.peak;
    }
    return fsdp->pool.in_use;
}
