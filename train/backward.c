/*
 * The backward half of a step: pre-backward of units, post-backward of flat parameters, and the end.
 */
#include "base/try.h"
#include "train/state.h"

static fc_code enter_backward(fc_fsdp_unit *unit, fc_error *err) {
    fc_fsdp *fsdp = unit->fsdp;
    fc_code rc = FC_OK;
    if (unit->options.is_root && !fsdp->callback_queued) {
        rc = fc_fsdp_expect_state(unit, FC_STATE_IDLE, err);
        fsdp->callback_queued = rc == FC_OK;
    } else if (unit->handles) {
        rc = fc_fsdp_expect_state(unit, FC_STATE_IDLE, err);
    }
    if (rc == FC_OK) {
        unit->state = FC_STATE_FORWARD_BACKWARD;
    }
    return rc;
}

static fc_code unshard_for_backward(fc_fsdp_unit *unit, fc_error *err) {
    fc_code rc = FC_OK;
    if (unit->needs_pre_backward_unshard) {
        rc = unit->prefetched ? FC_OK : fc_fsdp_unshard(unit, err);
        rc = rc == FC_OK ? fc_fsdp_wait_unsharded(unit, err) : rc;
    }
    unit->needs_pre_backward_unshard = false; /* from now on it is no target for prefetching */
    return rc;
}

fc_code fc_fsdp_pre_backward(fc_fsdp_unit *unit, fc_error *err) {
    if (unit->handles && unit->ran_pre_backward) {
        return FC_OK;
    }
    fc_code rc = enter_backward(unit, err);
    if (rc != FC_OK || !unit->handles) {
        return rc;
    }
    for (fc_fsdp_handle *h = unit->handles; h; h = h->next) {
        h->state = FC_HANDLE_BACKWARD_PRE;
    }
    rc = unshard_for_backward(unit, err);
    rc = rc == FC_OK ? fc_fsdp_prefetch(unit, err) : rc;
    for (fc_fsdp_handle *h = unit->handles; h && rc == FC_OK; h = h->next) {
        rc = fc_fsdp_prepare_for_backward(h, err);
    }
    unit->ran_pre_backward = true;
    return rc;
}

static fc_code check_post_backward(const fc_fsdp_handle *h, fc_error *err) {
    FC_TRY(fc_fsdp_expect_state(h->unit, FC_STATE_FORWARD_BACKWARD, err));
    if (h->state != FC_HANDLE_BACKWARD_PRE && h->state != FC_HANDLE_BACKWARD_POST) {
        return fc_fail(err, FC_EUSAGE, "unit '%s': expects BACKWARD_PRE or BACKWARD_POST state but got %s",
                       h->unit->name, fc_handle_state_name(h->state));
    }
    if (!h->registered) {
        return fc_fail(err, FC_EUSAGE, "unit '%s': its forward ran without gradients: there is no backward for it",
                       h->unit->name);
    }
    return FC_OK;
}

/* Prefetching goes unit by unit: with several flat parameters, when the last of them is done. */
static fc_code reshard_in_backward(fc_fsdp_handle *h, fc_error *err) {
    fc_handle_state state;
    FC_TRY(fc_fsdp_reshard(h, fc_fsdp_should_free_in_backward(h), err));
    if (fc_fsdp_handles_state(h->unit, &state, NULL) == FC_OK) {
        FC_TRY(fc_fsdp_prefetch(h->unit, err));
    }
    return FC_OK;
}

fc_code fc_fsdp_post_backward(fc_fsdp_handle *h, fc_error *err) {
    fc_fsdp *fsdp = h->unit->fsdp;
    FC_TRY(check_post_backward(h, err));
    h->state = FC_HANDLE_BACKWARD_POST;
    if (!h->layout.requires_grad) {
        return reshard_in_backward(h, err);
    }
    h->post_backward_called = true;
    fc_code rc = fc_fsdp_add_fresh(h, err);
    if (rc != FC_OK || !h->grad) {
        return rc;
    }
    rc = reshard_in_backward(h, err);
    if (rc == FC_OK && fsdp->sync_gradients) {
        rc = fc_fsdp_wait(fsdp, FC_STREAM_POST_BACKWARD, FC_STREAM_COMPUTE, err);
        rc = rc == FC_OK ? fc_fsdp_reduce_grad(h, err) : rc;
    }
    return rc == FC_OK ? FC_OK : fc_context(err, rc, "unit '%s': post-backward", h->unit->name);
}

static fc_code wait_for_reductions(fc_fsdp *fsdp, fc_error *err) {
    fc_code rc = fc_fsdp_wait(fsdp, FC_STREAM_COMPUTE, FC_STREAM_POST_BACKWARD, err);
    if (rc == FC_OK && fsdp->replicate) {
        rc = fc_fsdp_wait(fsdp, FC_STREAM_COMPUTE, FC_STREAM_ALL_REDUCE, err);
    }
    for (const fc_fsdp_unit *u = fsdp->units; u && rc == FC_OK; u = u->next) {
        if (u->options.offload_params) { /* the host is about to read them */
            return fsdp->device->synchronize(fsdp->device, fsdp->streams[FC_STREAM_COMPUTE], err);
        }
    }
    return rc;
}

/* A unit whose output the loss did not use has no post-backward, but its parameters may have been gathered. */
static fc_code finalize_unit(fc_fsdp_unit *unit, fc_error *err) {
    fc_code rc = FC_OK;
    for (fc_fsdp_handle *h = unit->handles; h && rc == FC_OK; h = h->next) {
        if (h->use_unsharded) {
            rc = fc_fsdp_reshard(h, fc_fsdp_should_free_in_backward(h), err);
        }
        h->registered = false;
        if (rc == FC_OK && h->layout.requires_grad && unit->fsdp->sync_gradients) {
            rc = fc_fsdp_prepare_for_optim(h, err);
            h->post_backward_called = false;
        }
        h->state = FC_HANDLE_IDLE;
    }
    unit->state = FC_STATE_IDLE;
    unit->ran_pre_backward = unit->needs_pre_backward_unshard = unit->prefetched = false;
    unit->post_forward_index = NOT_IN_ORDER;
    return rc;
}

fc_code fc_fsdp_post_backward_final(fc_fsdp *fsdp, fc_error *err) {
    if (!fsdp->callback_queued) {
        return fc_fail(err, FC_EUSAGE, "the end of a backward that the root's pre-backward has not begun");
    }
    fc_code rc = fsdp->sync_gradients ? wait_for_reductions(fsdp, err) : FC_OK;
    fc_order_next_iteration(fsdp);
    for (fc_fsdp_unit *u = fsdp->units; u && rc == FC_OK; u = u->next) {
        rc = finalize_unit(u, err);
    }
    fsdp->callback_queued = false;
    return rc;
}
