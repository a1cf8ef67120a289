/*
 * Prefetching: the parameters of the unit that runs next are gathered while this one computes. Which one that is says
 * the recorded order; whether now is the time, the training state. Mistaken guesses are harmless: only a unit that
 * still needs its parameters, and was not prefetched yet, is gathered.
 */
#include "base/try.h"
#include "train/state.h"

static fc_code gather_ahead(fc_fsdp_unit *target, bool needed, fc_error *err) {
    if (!needed || target->prefetched) {
        return FC_OK;
    }
    fc_code rc = fc_fsdp_unshard(target, err);
    if (rc == FC_OK) {
        target->prefetched = true;
        for (fc_fsdp_handle *h = target->handles; h; h = h->next) {
            fc_fsdp_tell(h, FC_ACTION_PREFETCH, FC_STREAM_UNSHARD);
        }
    }
    return rc;
}

static fc_code backward(fc_fsdp_unit *unit, fc_error *err) {
    const fc_fsdp *fsdp = unit->fsdp;
    int limit = fsdp->options.backward_prefetch_limit ? fsdp->options.backward_prefetch_limit : 1;
    fc_code rc = FC_OK;
    if (unit->post_forward_index == NOT_IN_ORDER) {
        return FC_OK;
    }
    for (int64_t i = unit->post_forward_index - 1; rc == FC_OK && i >= 0 && limit-- > 0; i--) {
        fc_fsdp_unit *target = fsdp->post_forward_order.units[i];
        rc = gather_ahead(target, target->needs_pre_backward_unshard, err);
    }
    return rc;
}

static fc_code forward(fc_fsdp_unit *unit, fc_error *err) {
    const fc_fsdp *fsdp = unit->fsdp;
    int limit = fsdp->options.forward_prefetch_limit ? fsdp->options.forward_prefetch_limit : 1;
    fc_code rc = FC_OK;
    if (unit->pre_forward_index == NOT_IN_ORDER) {
        return FC_OK;
    }
    int64_t end = fsdp->pre_forward_order.count;
    for (int64_t i = unit->pre_forward_index + 1; rc == FC_OK && i < end && limit-- > 0; i++) {
        fc_fsdp_unit *target = fsdp->pre_forward_order.units[i];
        rc = gather_ahead(target, target->needs_pre_forward_unshard, err);
    }
    return rc;
}

fc_code fc_fsdp_prefetch(fc_fsdp_unit *unit, fc_error *err) {
    const fc_fsdp_options *o = &unit->fsdp->options;
    fc_handle_state state;
    if (!unit->handles) {
        return FC_OK;
    }
    FC_TRY(fc_fsdp_handles_state(unit, &state, err));
    switch (state) {
    case FC_HANDLE_FORWARD:
        return o->forward_prefetch ? forward(unit, err) : FC_OK;
    case FC_HANDLE_BACKWARD_PRE:
        return o->backward_prefetch == FC_BACKWARD_PREFETCH_PRE ? backward(unit, err) : FC_OK;
    case FC_HANDLE_BACKWARD_POST:
        return o->backward_prefetch == FC_BACKWARD_PREFETCH_POST ? backward(unit, err) : FC_OK;
    case FC_HANDLE_IDLE:
    case FC_HANDLE_SUMMON_FULL_PARAMS:
        break;
    }
    return fc_fail(err, FC_EUSAGE,
                   "unit '%s': prefetching is only supported in (BACKWARD_PRE, BACKWARD_POST, FORWARD) but currently "
                   "in %s",
                   unit->name, fc_handle_state_name(state));
}
