/*
 * Units of a wrap policy as units of the step. Here, and nowhere else, the options of a plan become those of a unit.
 */
#include "fsdpckpt/try.h"
#include "train/state.h"

/* Returns the options of the step for those of a planned unit. */
static fc_fsdp_unit_options step_options(const fc_unit_options *planned, bool is_root) {
    bool mixed = planned->mixed_precision;
    return (fc_fsdp_unit_options){
        .is_root = is_root,
        .strategy = planned->strategy,
        .has_param_dtype = mixed && planned->param_dtype != FC_OPAQUE,
        .has_reduce_dtype = mixed && planned->reduce_dtype != FC_OPAQUE,
        .param_dtype = planned->param_dtype,
        .reduce_dtype = planned->reduce_dtype,
        .has_buffer_dtype = mixed && planned->buffer_dtype != FC_OPAQUE,
        .buffer_dtype = planned->buffer_dtype,
        .fp32_inputs = planned->fp32_inputs,
        .keep_low_precision_grads = mixed && planned->keep_low_precision_grads,
        .cast_forward_inputs = mixed && planned->cast_forward_inputs,
        .no_cast_root_forward_inputs = planned->no_cast_root_forward_inputs,
        .offload_params = planned->cpu_offload,
        .has_prefetch = true,
        .backward_prefetch = planned->prefetch,
        .forward_prefetch = planned->forward_prefetch,
    };
}

/* Everything that adding one unit needs; freed after it. */
typedef struct draft {
    fc_arena *arena;
    fc_fsdp_param_init *params;
    fc_fsdp_tensor *tensors;
    size_t loaded;
} draft;

static void free_draft(draft *d) {
    for (size_t i = 0; i < d->loaded; i++) {
        fc_array_free(&d->tensors[i].local);
    }
    fc_arena_free(d->arena);
}

/* Loads the parameters of a unit. A parameter with several names is loaded once; its other names share the tensor. */
static fc_code load_unit(const fc_fsdp_plan *plan, const fc_unit *unit, draft *d, fc_error *err) {
    const fc_flat_desc *descs;
    d->arena = fc_arena_new();
    d->params = d->arena ? fc_arena_calloc(d->arena, unit->nnames, sizeof *d->params) : NULL;
    d->tensors = d->arena ? fc_arena_calloc(d->arena, unit->nnames, sizeof *d->tensors) : NULL;
    FC_NEED(d->params && d->tensors, err, unit->fqn);
    FC_TRY(fc_unit_flat_descs(plan->tree, unit, d->arena, &descs, err));
    for (size_t i = 0; i < unit->nnames; i++) {
        const fc_flat_desc *desc = &descs[i];
        const fc_fsdp_tensor *tensor = &d->tensors[d->loaded];
        if (desc->shared_with >= 0) {
            tensor = d->params[desc->shared_with].tensor;
        } else {
            FC_TRY(plan->load(plan->context, &plan->tree->parameters[unit->names[i]], &d->tensors[d->loaded], err));
            d->loaded++;
        }
        d->params[i] = (fc_fsdp_param_init){desc->fqn, tensor, desc->requires_grad, desc->shared_with};
    }
    return FC_OK;
}

static fc_code check_orig_params(const fc_fsdp *fsdp, const fc_unit *unit, const char *name, fc_error *err) {
    return unit->options.use_orig_params == fsdp->options.use_orig_params
               ? FC_OK
               : fc_fail(err, FC_EUSAGE,
                         "unit '%s': expects one homogeneous value for use_orig_params, but the plan says %s and the "
                         "instance %s",
                         name, unit->options.use_orig_params ? "true" : "false",
                         fsdp->options.use_orig_params ? "true" : "false");
}

static fc_code add_unit(fc_fsdp *fsdp, const fc_fsdp_plan *plan, const fc_unit *unit, fc_fsdp_unit **out,
                        fc_fsdp_handle **handle, fc_error *err) {
    const char *name = unit->fqn[0] ? unit->fqn : "(root)";
    fc_fsdp_unit_options options = step_options(&unit->options, unit->module == 0);
    draft d = {0};
    *handle = NULL;
    FC_TRY(check_orig_params(fsdp, unit, name, err));
    if (plan->adjust) {
        FC_TRY(plan->adjust(plan->context, unit, &options, err));
    }
    FC_TRY(fc_fsdp_add_unit(fsdp, name, &options, out, err));
    if (unit->nnames == 0) {
        return FC_OK;
    }
    fc_code rc;
    FC_TRY_GOTO(load_unit(plan, unit, &d, err), rc, out);
    rc = fc_fsdp_add_handle(*out, d.params, unit->nnames, handle, err);
out:
    free_draft(&d);
    return rc;
}

/* Finds the unit of a module: its own, or that of its nearest ancestor that has one. */
static fc_fsdp_unit *unit_of(const fc_fsdp_plan *plan, fc_fsdp_unit *const *units, uint32_t m) {
    for (;; m = plan->tree->modules[m].parent) {
        uint32_t one = plan->tree->modules[m].same_as;
        for (size_t i = 0; i < plan->units->count; i++) {
            if (plan->units->units[i].module == one) {
                return units[i];
            }
        }
    }
}

static fc_code add_buffers(const fc_fsdp_plan *plan, fc_fsdp_unit *const *units, fc_error *err) {
    for (size_t i = 0; i < plan->tree->nparameters; i++) {
        const fc_parameter *p = &plan->tree->parameters[i];
        fc_fsdp_tensor values = {0};
        plan->buffers[i] = NULL;
        if (!p->buffer || p->ignored || p->same_as != i) {
            continue;
        }
        FC_TRY(plan->load(plan->context, p, &values, err));
        fc_code rc = fc_fsdp_add_buffer(unit_of(plan, units, p->module), p->fqn, &values.local, &plan->buffers[i], err);
        fc_array_free(&values.local);
        FC_TRY(rc);
    }
    return FC_OK;
}

/* The plan has the root last, the step needs it first. */
static fc_code add_all(fc_fsdp *fsdp, const fc_fsdp_plan *plan, fc_fsdp_unit **units, fc_fsdp_handle **handles,
                       fc_error *err) {
    size_t root = plan->units->count - 1;
    FC_TRY(add_unit(fsdp, plan, &plan->units->units[root], &units[root], &handles[root], err));
    for (size_t i = 0; i < root; i++) {
        FC_TRY(add_unit(fsdp, plan, &plan->units->units[i], &units[i], &handles[i], err));
    }
    return plan->buffers ? add_buffers(plan, units, err) : FC_OK;
}

fc_code fc_fsdp_add_planned(fc_fsdp *fsdp, const fc_fsdp_plan *plan, fc_fsdp_unit **units, fc_fsdp_handle **handles,
                            fc_error *err) {
    return fc_fsdp_note(fsdp, add_all(fsdp, plan, units, handles, err));
}
