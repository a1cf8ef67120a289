/*
 * FSDP.summon_full_params: parameters that are whole in full precision for a while, and are written back.
 */
#include "fsdpckpt/try.h"
#include "train/state.h"

#include <stdlib.h>
#include <string.h>

/* The whole flat parameter of a handle. */
typedef struct summoned_handle {
    fc_fsdp_handle *handle;
    fc_array full; /* without data on a rank that does not have it; a view of the shard with NO_SHARD */
} summoned_handle;

struct fc_fsdp_summoned {
    fc_fsdp *fsdp;
    fc_fsdp_summon_options options;
    summoned_handle *handles;
    size_t count;
};

/* The root contains all units, another one those whose names begin with its name and a dot. */
static bool is_within(const fc_fsdp_unit *unit, const fc_fsdp_unit *outer, const fc_fsdp_summon_options *o) {
    const size_t length = strlen(outer->name);
    if (unit == outer || o->no_recurse) {
        return unit == outer;
    }
    return outer->options.is_root || (strncmp(unit->name, outer->name, length) == 0 && unit->name[length] == '.');
}

static fc_code check_unit(const fc_fsdp_unit *unit, const fc_fsdp_summon_options *o, fc_error *err) {
    if (unit->state == FC_STATE_FORWARD_BACKWARD) {
        return fc_fail(err, FC_EUSAGE, "unit '%s': cannot manually unshard parameters during forward/backward",
                       unit->name);
    }
    if (unit->state == FC_STATE_SUMMON_FULL_PARAMS) {
        return fc_fail(err, FC_EUSAGE,
                       "unit '%s': cannot manually unshard parameters when already unsharding parameters", unit->name);
    }
    if (o->offload_to_cpu && unit->handles && !fc_fsdp_is_sharded(unit)) {
        return fc_fail(err, FC_EUNSUPPORTED, "unit '%s': offload_to_cpu with NO_SHARD is not supported", unit->name);
    }
    return FC_OK;
}

/* Finds the handles. Nothing is changed before all of them are known to be fine. */
static fc_code list_handles(fc_fsdp_unit *outer, fc_fsdp_summoned *s, fc_error *err) {
    size_t count = 0;
    if (s->options.rank0_only && !s->options.no_writeback) {
        return fc_fail(err, FC_EUNSUPPORTED, "rank0_only with writeback is not supported");
    }
    for (fc_fsdp_unit *u = s->fsdp->units; u; u = u->next) {
        if (is_within(u, outer, &s->options)) {
            FC_TRY(check_unit(u, &s->options, err));
            for (const fc_fsdp_handle *h = u->handles; h; h = h->next) {
                count++;
            }
        }
    }
    s->handles = calloc(count + 1, sizeof *s->handles);
    FC_NEED(s->handles, err, outer->name);
    for (fc_fsdp_unit *u = s->fsdp->units; u; u = u->next) {
        for (fc_fsdp_handle *h = is_within(u, outer, &s->options) ? u->handles : NULL; h; h = h->next) {
            s->handles[s->count++].handle = h;
        }
    }
    return FC_OK;
}

/* Moves the parameter to host memory. */
static fc_code offload(fc_fsdp *fsdp, fc_array *full, fc_error *err) {
    fc_array host = {0};
    fc_stream *stream = fsdp->streams[FC_STREAM_COMPUTE];
    fc_code rc;
    if (fsdp->host == full->device) {
        return FC_OK;
    }
    FC_TRY_GOTO(fc_array_new(fsdp->host, full->dtype, 1, full->sizes, &host, err), rc, out);
    FC_TRY_GOTO(fsdp->device->copy(fsdp->device, host.data, full->data, fc_array_bytes(full), stream, err), rc, out);
    FC_TRY_GOTO(fsdp->device->synchronize(fsdp->device, stream, err), rc, out);
    fc_array_free(full);
    *full = host;
    host = (fc_array){0};
out:
    fc_array_free(&host);
    return rc;
}

static fc_code summon_handle(fc_fsdp_summoned *s, summoned_handle *sh, fc_error *err) {
    fc_fsdp_handle *h = sh->handle;
    if (!fc_fsdp_is_sharded(h->unit)) {
        sh->full = h->local_shard;
        sh->full.memory = NULL;
        return FC_OK;
    }
    FC_TRY(fc_fsdp_gather_full(h, &sh->full, err));
    if (s->options.rank0_only && h->unit->options.shard->rank != 0) {
        fc_array_free(&sh->full);
        return FC_OK;
    }
    return s->options.offload_to_cpu ? offload(s->fsdp, &sh->full, err) : FC_OK;
}

static void set_states(fc_fsdp_summoned *s, bool summoned) {
    for (size_t i = 0; i < s->count; i++) {
        fc_fsdp_handle *h = s->handles[i].handle;
        h->unit->state = summoned ? FC_STATE_SUMMON_FULL_PARAMS : FC_STATE_IDLE;
        h->state = summoned ? FC_HANDLE_SUMMON_FULL_PARAMS : FC_HANDLE_IDLE;
    }
}

static void free_summoned(fc_fsdp_summoned *s) {
    for (size_t i = 0; s && i < s->count; i++) {
        fc_array_free(&s->handles[i].full);
    }
    if (s) {
        free(s->handles);
    }
    free(s);
}

static fc_code summon(fc_fsdp_unit *unit, fc_fsdp_summoned *s, fc_error *err) {
    FC_TRY(list_handles(unit, s, err));
    FC_TRY(fc_fsdp_wait_copies(s->fsdp, err)); /* the program may change what a state dict still copies */
    for (size_t i = 0; i < s->count; i++) {
        FC_TRY(summon_handle(s, &s->handles[i], err));
    }
    set_states(s, true);
    return FC_OK;
}

fc_code fc_fsdp_summon(fc_fsdp_unit *unit, const fc_fsdp_summon_options *options, fc_fsdp_summoned **out,
                       fc_error *err) {
    fc_fsdp_summoned *s = calloc(1, sizeof *s);
    *out = NULL;
    FC_NEED(s, err, unit->name);
    s->fsdp = unit->fsdp;
    s->options = *options;
    fc_code rc = fc_fsdp_note(unit->fsdp, summon(unit, s, err));
    if (rc != FC_OK) {
        free_summoned(s);
        return rc;
    }
    *out = s;
    return FC_OK;
}

fc_code fc_fsdp_summoned_param(fc_fsdp_summoned *s, const fc_fsdp_handle *h, size_t param, fc_fsdp_tensor *out,
                               fc_error *err) {
    fc_dtensor_extensions extensions = {.compute_stream = s->fsdp->streams[FC_STREAM_COMPUTE],
                                        .has_compute_stream = true};
    fc_array view;
    for (size_t i = 0; i < s->count; i++) {
        if (s->handles[i].handle != h || !s->handles[i].full.data || param >= h->layout.nparams) {
            continue;
        }
        FC_TRY(fc_flat_view(&h->layout, &s->handles[i].full, param, &view, err));
        return fc_post_unflatten_transform(&extensions, &view, &h->extensions[param], NULL, out, err);
    }
    return fc_fail(err, FC_EUSAGE, "unit '%s': this rank has not summoned parameter %zu", h->unit->name, param);
}

/* Writes this rank's part of the whole parameter to its shard, without padding. */
static fc_code write_back(const fc_fsdp_summoned *s, const summoned_handle *sh, fc_error *err) {
    fc_fsdp_handle *h = sh->handle;
    const int64_t rank = h->unit->options.shard->rank, count = h->layout.shard_numel;
    const int64_t length = count - fc_flat_shard_padding(&h->layout, rank);
    const size_t element = fc_dtype_size(h->layout.dtype);
    fc_device *device = s->fsdp->device;
    if (!fc_fsdp_is_sharded(h->unit) || length <= 0) {
        return FC_OK;
    }
    const char *from = (const char *)sh->full.data + (size_t)(rank * count) * element;
    return device->copy(device, h->local_shard.data, from, (size_t)length * element,
                        s->fsdp->streams[FC_STREAM_COMPUTE], err);
}

/* Parameters that a strategy kept unsharded are those of before, so they are dropped. */
static fc_code end_summon(fc_fsdp_summoned *s, fc_error *err) {
    for (size_t i = 0; i < s->count && !s->options.no_writeback; i++) {
        FC_TRY(write_back(s, &s->handles[i], err));
        FC_TRY(fc_fsdp_reshard(s->handles[i].handle, true, err));
    }
    return fc_comm_wait(s->fsdp->shard, s->fsdp->streams[FC_STREAM_COMPUTE], err);
}

fc_code fc_fsdp_summon_end(fc_fsdp_summoned *s, fc_error *err) {
    if (!s) {
        return FC_OK;
    }
    set_states(s, false);
    fc_code rc = fc_fsdp_note(s->fsdp, end_summon(s, err));
    free_summoned(s);
    return rc;
}
