/*
 * Prefetching: gathers the parameters of the next units while this one computes. The recorded order determines the
 * units, the training state the time. A wrong guess is harmless: a unit is only gathered if it still needs its
 * parameters and was not prefetched yet.
 */
#include "fsdpckpt/try.h"
#include "train/state.h"

static fc_code gather_ahead(fc_fsdp_unit *next, bool needed, fc_error *err) {
    if (!needed || next->prefetched) {
        return FC_OK;
    }
    FC_TRY(fc_fsdp_unshard(next, err));
    next->prefetched = true;
    for (fc_fsdp_handle *h = next->handles; h; h = h->next) {
        fc_fsdp_trace(h, FC_ACTION_PREFETCH, FC_STREAM_UNSHARD);
    }
    return FC_OK;
}

static fc_code prefetch_backward(fc_fsdp_unit *unit, fc_error *err) {
    const fc_fsdp *fsdp = unit->fsdp;
    int limit = fsdp->options.backward_prefetch_limit ? fsdp->options.backward_prefetch_limit : 1;
    if (unit->post_forward_index == NOT_IN_ORDER) {
        return FC_OK;
    }
    for (int64_t i = unit->post_forward_index - 1; i >= 0 && limit-- > 0; i--) {
        fc_fsdp_unit *next = fsdp->post_forward_order.units[i];
        FC_TRY(gather_ahead(next, next->needs_pre_backward_unshard, err));
    }
    return FC_OK;
}

static fc_code prefetch_forward(fc_fsdp_unit *unit, fc_error *err) {
    const fc_fsdp *fsdp = unit->fsdp;
    int limit = fsdp->options.forward_prefetch_limit ? fsdp->options.forward_prefetch_limit : 1;
    if (unit->pre_forward_index == NOT_IN_ORDER) {
        return FC_OK;
    }
    int64_t end = fsdp->pre_forward_order.count;
    for (int64_t i = unit->pre_forward_index + 1; i < end && limit-- > 0; i++) {
        fc_fsdp_unit *next = fsdp->pre_forward_order.units[i];
        FC_TRY(gather_ahead(next, next->needs_pre_forward_unshard, err));
    }
    return FC_OK;
}

fc_code fc_fsdp_prefetch(fc_fsdp_unit *unit, fc_error *err) {
    const fc_fsdp_unit_options *o = &unit->options;
    fc_handle_state state;
    if (!unit->handles) {
        return FC_OK;
    }
    FC_TRY(fc_fsdp_handles_state(unit, &state, err));
    switch (state) {
    case FC_HANDLE_FORWARD:
        return o->forward_prefetch ? prefetch_forward(unit, err) : FC_OK;
    case FC_HANDLE_BACKWARD_PRE:
        return o->backward_prefetch == FC_BACKWARD_PREFETCH_PRE ? prefetch_backward(unit, err) : FC_OK;
    case FC_HANDLE_BACKWARD_POST:
        return o->backward_prefetch == FC_BACKWARD_PREFETCH_POST ? prefetch_backward(unit, err) : FC_OK;
    case FC_HANDLE_IDLE:
    case FC_HANDLE_SUMMON_FULL_PARAMS:
        break;
    }
    return fc_fail(err, FC_EUSAGE,
                   "unit '%s': prefetching is only supported in (BACKWARD_PRE, BACKWARD_POST, FORWARD) but currently "
                   "in %s",
                   unit->name, fc_handle_state_name(state));
}
