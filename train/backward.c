/*
 * The backward of a step: pre-backward of units, post-backward of flat parameters, and the end of the backward.
 */
#include "fsdpckpt/try.h"
#include "train/state.h"

static fc_code enter_backward(fc_fsdp_unit *unit, fc_error *err) {
    bool begins = unit->options.is_root && !unit->fsdp->callback_queued;
    if (begins || unit->handles) {
        FC_TRY(fc_fsdp_expect_state(unit, FC_STATE_IDLE, err));
    }
    if (begins) {
        unit->fsdp->callback_queued = true;
    }
    unit->state = FC_STATE_FORWARD_BACKWARD;
    return FC_OK;
}

static fc_code unshard_for_backward(fc_fsdp_unit *unit, fc_error *err) {
    bool is_needed = unit->needs_pre_backward_unshard;
    unit->needs_pre_backward_unshard = false; /* from now on no other unit prefetches it */
    if (!is_needed) {
        return FC_OK;
    }
    if (!unit->prefetched) {
        FC_TRY(fc_fsdp_unshard(unit, err));
    }
    return fc_fsdp_wait_unsharded(unit, err);
}

static fc_code pre_backward(fc_fsdp_unit *unit, fc_error *err) {
    if (unit->handles && unit->ran_pre_backward) {
        return FC_OK;
    }
    fc_code rc;
    FC_TRY(enter_backward(unit, err));
    if (!unit->handles) {
        return FC_OK;
    }
    for (fc_fsdp_handle *h = unit->handles; h; h = h->next) {
        h->state = FC_HANDLE_BACKWARD_PRE;
    }
    FC_TRY_GOTO(unshard_for_backward(unit, err), rc, out);
    FC_TRY_GOTO(fc_fsdp_prefetch(unit, err), rc, out);
    for (fc_fsdp_handle *h = unit->handles; h; h = h->next) {
        FC_TRY_GOTO(fc_fsdp_prepare_for_backward(h, err), rc, out);
    }
out:
    unit->ran_pre_backward = true;
    return rc;
}

fc_code fc_fsdp_pre_backward(fc_fsdp_unit *unit, fc_error *err) {
    return fc_fsdp_note(unit->fsdp, pre_backward(unit, err));
}

static fc_code check_post_backward(const fc_fsdp_handle *h, fc_error *err) {
    FC_TRY(fc_fsdp_expect_state(h->unit, FC_STATE_FORWARD_BACKWARD, err));
    if (h->state != FC_HANDLE_BACKWARD_PRE && h->state != FC_HANDLE_BACKWARD_POST) {
        return fc_fail(err, FC_EUSAGE, "unit '%s': expects BACKWARD_PRE or BACKWARD_POST state but got %s",
                       h->unit->name, fc_handle_state_name(h->state));
    }
    if (!h->registered) {
        return fc_fail(err, FC_EUSAGE, "unit '%s': has no backward, because its forward ran with gradients disabled",
                       h->unit->name);
    }
    return FC_OK;
}

/* A unit prefetches the next one when the last of its flat parameters is done: only then are their states equal. */
static fc_code reshard_in_backward(fc_fsdp_handle *h, fc_error *err) {
    fc_handle_state state;
    FC_TRY(fc_fsdp_reshard(h, fc_fsdp_should_free_in_backward(h), err));
    if (fc_fsdp_handles_state(h->unit, &state, NULL) == FC_OK) {
        FC_TRY(fc_fsdp_prefetch(h->unit, err));
    }
    return FC_OK;
}

static fc_code post_backward(fc_fsdp_handle *h, fc_error *err) {
    fc_fsdp *fsdp = h->unit->fsdp;
    FC_TRY(check_post_backward(h, err));
    h->state = FC_HANDLE_BACKWARD_POST;
    if (!h->layout.requires_grad) {
        return reshard_in_backward(h, err);
    }
    h->post_backward_called = true;
    fc_code rc;
    FC_TRY(fc_fsdp_add_fresh(h, err));
    if (!h->grad) {
        return FC_OK;
    }
    FC_TRY_GOTO(reshard_in_backward(h, err), rc, out);
    if (fsdp->sync_gradients) {
        FC_TRY_GOTO(fc_fsdp_wait(fsdp, FC_STREAM_POST_BACKWARD, FC_STREAM_COMPUTE, err), rc, out);
        rc = fc_fsdp_reduce_grad(h, err);
    }
out:
    return rc == FC_OK ? FC_OK : fc_context(err, rc, "unit '%s': post-backward", h->unit->name);
}

fc_code fc_fsdp_post_backward(fc_fsdp_handle *h, fc_error *err) {
    return fc_fsdp_note(h->unit->fsdp, post_backward(h, err));
}

static fc_code wait_for_reductions(fc_fsdp *fsdp, fc_error *err) {
    FC_TRY(fc_fsdp_wait(fsdp, FC_STREAM_COMPUTE, FC_STREAM_POST_BACKWARD, err));
    if (fsdp->owns_stream[FC_STREAM_ALL_REDUCE]) {
        FC_TRY(fc_fsdp_wait(fsdp, FC_STREAM_COMPUTE, FC_STREAM_ALL_REDUCE, err));
    }
    for (const fc_fsdp_unit *u = fsdp->units; u; u = u->next) {
        if (u->options.offload_params) { /* the host is about to read the gradients */
            return fc_comm_wait(fsdp->shard, fsdp->streams[FC_STREAM_COMPUTE], err);
        }
    }
    return FC_OK;
}

/* Ends the backward of one handle: its parameters are resharded, and its gradient is the optimizer's. */
static fc_code finalize_handle(const fc_fsdp *fsdp, fc_fsdp_handle *h, fc_error *err) {
    if (h->use_unsharded) {
        FC_TRY(fc_fsdp_reshard(h, fc_fsdp_should_free_in_backward(h), err));
    }
    return h->layout.requires_grad && fsdp->sync_gradients ? fc_fsdp_prepare_for_optim(h, err) : FC_OK;
}

/* A unit whose output the loss did not use has no post-backward, but its parameters may be unsharded. */
static fc_code finalize_unit(fc_fsdp_unit *unit, fc_error *err) {
    fc_code rc = FC_OK;
    for (fc_fsdp_handle *h = unit->handles; h; h = h->next) {
        FC_TRY_GOTO(finalize_handle(unit->fsdp, h, err), rc, out);
        h->registered = false;
        if (h->layout.requires_grad && unit->fsdp->sync_gradients) {
            h->post_backward_called = false;
        }
        h->state = FC_HANDLE_IDLE;
    }
out:
    unit->state = FC_STATE_IDLE;
    unit->ran_pre_backward = unit->needs_pre_backward_unshard = unit->prefetched = false;
    unit->post_forward_index = NOT_IN_ORDER;
    return rc;
}

static fc_code post_backward_final(fc_fsdp *fsdp, fc_error *err) {
    if (!fsdp->callback_queued) {
        return fc_fail(err, FC_EUSAGE, "the backward ends before the pre-backward of the root unit");
    }
    fc_code rc = fsdp->sync_gradients ? wait_for_reductions(fsdp, err) : FC_OK;
    rc = rc == FC_OK ? fc_fsdp_wait_copies(fsdp, err) : rc; /* the optimizer is about to change the shards */
    fc_order_next_iteration(fsdp);
    for (fc_fsdp_unit *u = fsdp->units; u && rc == FC_OK; u = u->next) {
        rc = finalize_unit(u, err);
    }
    fsdp->callback_queued = false;
    return rc;
}

fc_code fc_fsdp_post_backward_final(fc_fsdp *fsdp, fc_error *err) {
    return fc_fsdp_note(fsdp, post_backward_final(fsdp, err));
}
