/*
 * State dicts: copies of the shards of this rank on the host. Shards on a GPU are copied on a stream of their own,
 * which only events order with the computation.
 */
#include "train/state_dict.h"

#include "fsdpckpt/try.h"
#include "train/state.h"

#include <stdlib.h>

static fc_code open_copy_stream(fc_fsdp *fsdp, fc_error *err) {
    fc_device *device = fsdp->device;
    if (!fsdp->copied) {
        FC_TRY(device->event_new(device, &fsdp->copied, err));
    }
    return fsdp->copies ? FC_OK : device->stream_new(device, &fsdp->copies, err);
}

/* Makes the stream of the copies wait for the computation so far. */
static fc_code begin_copies(fc_fsdp *fsdp, fc_error *err) {
    fc_device *device = fsdp->device;
    FC_TRY(open_copy_stream(fsdp, err));
    FC_TRY(device->record(device, fsdp->marks[FC_STREAM_COMPUTE], fsdp->streams[FC_STREAM_COMPUTE], err));
    return device->wait(device, fsdp->copies, fsdp->marks[FC_STREAM_COMPUTE], err);
}

static fc_code end_copies(fc_fsdp *fsdp, fc_error *err) {
    FC_TRY(fsdp->device->record(fsdp->device, fsdp->copied, fsdp->copies, err));
    fsdp->copying = true;
    return FC_OK;
}

fc_code fc_fsdp_wait_copies(fc_fsdp *fsdp, fc_error *err) {
    if (!fsdp->copying) {
        return FC_OK;
    }
    fsdp->copying = false;
    return fsdp->device->wait(fsdp->device, fsdp->streams[FC_STREAM_COMPUTE], fsdp->copied, err);
}

void fc_staging_free(fc_staging *staging) {
    if (staging->memory) {
        fc_fsdp_end_work(staging->fsdp);
    }
    for (size_t i = 0; staging->memory && i < staging->count; i++) {
        if (staging->memory[i]) {
            staging->devices[i]->release_staging(staging->devices[i], staging->memory[i]);
        }
    }
    free(staging->memory);
    free(staging->bytes);
    free(staging->devices);
    *staging = (fc_staging){0};
}

static bool staging_fits(const fc_staging *staging, const fc_fsdp_state_dict *dict) {
    bool same = staging->fsdp == dict->fsdp && staging->count == dict->list.narrays;
    for (size_t i = 0; same && i < staging->count; i++) {
        const fc_array *array = &dict->list.arrays[i];
        same = staging->devices[i] == array->device && staging->bytes[i] == fc_array_bytes(array);
    }
    return same;
}

static fc_code allocate_dict(fc_fsdp_state_dict *dict, fc_error *err) {
    fc_staging *s = &dict->staging;
    const size_t count = dict->list.narrays;
    *s = (fc_staging){.fsdp = dict->fsdp,
                      .memory = calloc(count + 1, sizeof *s->memory),
                      .bytes = calloc(count + 1, sizeof *s->bytes),
                      .devices = calloc(count + 1, sizeof *s->devices)};
    FC_NEED(s->memory && s->bytes && s->devices, err, NULL);
    for (; s->count < count; s->count++) {
        const fc_array *array = &dict->list.arrays[s->count];
        const size_t bytes = fc_array_bytes(array);
        fc_device *device = array->device;
        if (device != dict->fsdp->device && !device->is_host) {
            return fc_fail(err, FC_EUSAGE, "an array of the state is on %s, but FSDP computes on %s", device->name,
                           dict->fsdp->device->name);
        }
        s->devices[s->count] = device;
        s->bytes[s->count] = bytes;
        FC_TRY(device->alloc_staging(device, bytes, &s->memory[s->count], err));
    }
    return FC_OK;
}

/* Takes the memory of an earlier state dict if it fits. */
static fc_code take_memory(fc_fsdp_state_dict *dict, fc_staging *spare, fc_error *err) {
    if (spare && spare->memory && staging_fits(spare, dict)) {
        dict->staging = *spare;
        *spare = (fc_staging){0};
    } else {
        FC_TRY(allocate_dict(dict, err));
    }
    dict->memory = dict->staging.memory;
    return FC_OK;
}

/* Copies from host memory are complete when this returns. */
static fc_code copy_arrays(fc_fsdp_state_dict *dict, fc_staging *spare, fc_error *err) {
    FC_TRY(take_memory(dict, spare, err));
    FC_TRY(begin_copies(dict->fsdp, err));
    for (size_t i = 0; i < dict->list.narrays; i++) {
        const fc_array *array = &dict->list.arrays[i];
        fc_stream *stream = array->device == dict->fsdp->device ? dict->fsdp->copies : NULL;
        FC_TRY(array->device->copy(array->device, dict->memory[i], array->data, fc_array_bytes(array), stream, err));
    }
    return end_copies(dict->fsdp, err);
}

/* Uses arrays in host memory where they are. */
static fc_code borrow_arrays(fc_fsdp_state_dict *dict, fc_error *err) {
    dict->borrows = true;
    dict->memory = calloc(dict->list.narrays + 1, sizeof *dict->memory);
    for (size_t i = 0; dict->memory && i < dict->list.narrays; i++) {
        dict->memory[i] = dict->list.arrays[i].data;
    }
    return dict->memory ? FC_OK : fc_no_memory(err, NULL);
}

static bool are_on_host(const fc_state_list *list) {
    for (size_t i = 0; i < list->narrays; i++) {
        if (!list->arrays[i].device->is_host) {
            return false;
        }
    }
    return true;
}

static fc_code check_ranks(const fc_state_list *list, const fc_comm *ranks, fc_error *err) {
    if (!ranks->device->is_host) {
        return fc_fail(err, FC_EUSAGE, "a state dict needs a communicator with host memory, not %s",
                       ranks->device->name);
    }
    return fc_mesh_ranks(&list->mesh) == ranks->size
               ? FC_OK
               : fc_fail(err, FC_EUSAGE, "the state is that of %lld ranks, but %d ranks make the state dict",
                         (long long)fc_mesh_ranks(&list->mesh), ranks->size);
}

static fc_code fill_arrays(fc_fsdp_state_dict *dict, const fc_fsdp_state *state, fc_state_dict_type type,
                           bool may_borrow, fc_staging *spare, const fc_comm *ranks, fc_error *err) {
    FC_TRY(fc_state_list_new(state, type, false, &dict->list, err));
    FC_TRY(check_ranks(&dict->list, ranks, err));
    return may_borrow && are_on_host(&dict->list) ? borrow_arrays(dict, err) : copy_arrays(dict, spare, err);
}

fc_code fc_state_dict_make(const fc_fsdp_state *state, fc_state_dict_type type, bool may_borrow, fc_staging *spare,
                           fc_comm *ranks, fc_fsdp_state_dict **out, fc_error *err) {
    fc_fsdp_state_dict *dict = calloc(1, sizeof *dict);
    fc_code mine = dict ? FC_OK : fc_no_memory(err, NULL), rc;
    *out = NULL;
    if (dict) {
        dict->fsdp = state->fsdp;
        dict->type = type;
        mine = fill_arrays(dict, state, type, may_borrow, spare, ranks, err);
    }
    FC_TRY_GOTO(fc_comm_agree(ranks, mine, err), rc, failed);
    FC_TRY_GOTO(dict ? fc_state_gather(&dict->list, dict->memory, ranks, &dict->checkpoint, err) : FC_ENOMEM, rc,
                failed);
    *out = dict;
    return FC_OK;
failed:
    fc_fsdp_state_dict_free(dict);
    return rc;
}

fc_code fc_fsdp_state_dict_new(const fc_fsdp_state *state, fc_state_dict_type type, fc_comm *ranks,
                               fc_fsdp_state_dict **out, fc_error *err) {
    return fc_state_dict_make(state, type, false, NULL, ranks, out, err);
}

void fc_state_dict_settle(fc_fsdp_state_dict *dict) {
    fc_fsdp *fsdp = dict->fsdp;
    if (!dict->borrows && fsdp->copies) { /* a collective before the copies may never end, which this notices */
        fc_comm_wait(fsdp->shard, fsdp->copies, NULL);
    }
}

void fc_fsdp_state_dict_free(fc_fsdp_state_dict *dict) {
    if (!dict) {
        return;
    }
    fc_state_dict_settle(dict);
    fc_checkpoint_close(dict->checkpoint);
    if (dict->borrows) {
        free(dict->memory);
    }
    fc_staging_free(&dict->staging);
    fc_state_list_free(&dict->list);
    free(dict);
}

fc_code fc_fsdp_state_dict_wait(fc_fsdp_state_dict *dict, fc_error *err) {
    fc_device *device = dict->fsdp->device;
    return dict->borrows ? FC_OK : device->synchronize(device, dict->fsdp->copies, err);
}

const fc_checkpoint *fc_fsdp_state_dict_checkpoint(const fc_fsdp_state_dict *dict) {
    return dict->checkpoint;
}
