/*
 * train: the states of units and flat parameters, the calls that each state refuses, registration of post-backward, the
 * check of the execution order and memory.
 */
#include "fsdp_model.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "on_ranks.h"

static void open_model(fsdp_model *m, fc_comm *comm) {
    fc_error err = {FC_OK, ""};
    fc_fsdp_options options = {0};
    fc_fsdp_unit_options unit = {0};
    MUST(model_open(m, comm, NULL, comm->rank, options, unit, &err) == FC_OK);
}

static fc_handle_state state_of(const fsdp_model *m, int i) {
    fc_handle_state state;
    MUST(fc_fsdp_handles_state(m->units[i], &state, NULL) == FC_OK);
    return state;
}

static void walk(fc_comm *comm) {
    fsdp_model m;
    open_model(&m, comm);
    MUST(state_of(&m, 1) == FC_HANDLE_IDLE && fc_fsdp_unit_state(m.units[1]) == FC_STATE_IDLE);
    MUST(fc_fsdp_root_pre_forward(m.fsdp, NULL, 0, NULL) == FC_OK);
    MUST(fc_fsdp_pre_forward(m.units[0], true, NULL, 0, NULL) == FC_OK);
    MUST(fc_fsdp_pre_forward(m.units[1], true, NULL, 0, NULL) == FC_OK);
    MUST(state_of(&m, 1) == FC_HANDLE_FORWARD && fc_fsdp_unit_state(m.units[1]) == FC_STATE_FORWARD_BACKWARD);
    MUST(fc_fsdp_post_forward(m.units[1], NULL) == FC_OK);
    MUST(state_of(&m, 1) == FC_HANDLE_IDLE && fc_fsdp_unit_state(m.units[1]) == FC_STATE_IDLE);
    MUST(fc_fsdp_post_forward(m.units[0], NULL) == FC_OK);
    MUST(fc_fsdp_pre_backward(m.units[0], NULL) == FC_OK);
    MUST(fc_fsdp_pre_backward(m.units[1], NULL) == FC_OK);
    MUST(state_of(&m, 1) == FC_HANDLE_BACKWARD_PRE);
    /* When activation checkpointing runs the forward again, nothing changes. */
    MUST(fc_fsdp_pre_forward(m.units[1], true, NULL, 0, NULL) == FC_OK);
    MUST(fc_fsdp_post_forward(m.units[1], NULL) == FC_OK);
    MUST(state_of(&m, 1) == FC_HANDLE_BACKWARD_PRE);
    fc_fsdp_tensor t;
    MUST(fc_fsdp_param(m.handles[1], 0, &t, NULL) == FC_OK);
    MUST(fc_fsdp_post_backward(m.handles[1], NULL) == FC_OK);
    MUST(state_of(&m, 1) == FC_HANDLE_BACKWARD_POST);
    MUST(fc_fsdp_post_backward(m.handles[0], NULL) == FC_OK);
    MUST(fc_fsdp_post_backward_final(m.fsdp, NULL) == FC_OK);
    for (int i = 0; i < MODEL_UNITS; i++) {
        MUST(state_of(&m, i) == FC_HANDLE_IDLE && fc_fsdp_unit_state(m.units[i]) == FC_STATE_IDLE);
        MUST(!fc_fsdp_sharded_grad(m.handles[i])); /* no gradient was written */
    }
    MUST(fc_fsdp_memory(m.fsdp, NULL) == 0);
    model_close(&m);
}

static void calls_move_between_states(void **state) {
    (void)state;
    on_ranks(1, walk);
    on_ranks(3, walk);
}

static void refuse(fc_comm *comm) {
    fsdp_model m;
    fc_error err = {FC_OK, ""};
    fc_fsdp_tensor t;
    fc_array grad;
    open_model(&m, comm);
    MUST_FAIL(fc_fsdp_post_forward(m.units[1], &err), FC_EUSAGE, err, "unit 'unit1': post-forward without pre-forward");
    MUST_FAIL(fc_fsdp_param(m.handles[1], 0, &t, &err), FC_EUSAGE, err, "its parameters are sharded now");
    MUST_FAIL(fc_fsdp_grad(m.handles[1], 0, &grad, &err), FC_EUSAGE, err, "the state is IDLE");
    MUST_FAIL(fc_fsdp_post_backward(m.handles[1], &err), FC_EUSAGE, err,
              "unit 'unit1': expected to be in states [FORWARD_BACKWARD] but current state is IDLE");
    MUST_FAIL(fc_fsdp_post_backward_final(m.fsdp, &err), FC_EUSAGE, err, "before the pre-backward of the root unit");
    MUST(fc_fsdp_root_pre_forward(m.fsdp, NULL, 0, NULL) == FC_OK);
    MUST(fc_fsdp_pre_forward(m.units[1], true, NULL, 0, NULL) == FC_OK);
    MUST_FAIL(fc_fsdp_post_backward(m.handles[1], &err), FC_EUSAGE, err,
              "unit 'unit1': expects BACKWARD_PRE or BACKWARD_POST state but got FORWARD");
    MUST_FAIL(fc_fsdp_pre_backward(m.units[1], &err), FC_EUSAGE, err,
              "unit 'unit1': expected to be in states [IDLE] but current state is FORWARD_BACKWARD");
    MUST_FAIL(fc_fsdp_summon_full_params(m.handles[1], &grad, &err), FC_EUSAGE, err,
              "expected to be in states [IDLE] but current state is FORWARD_BACKWARD");
    model_close(&m);
}

static void bad_calls_are_refused(void **state) {
    (void)state;
    on_ranks(1, refuse);
}

/* A forward without gradients has no backward. */
static void no_grad(fc_comm *comm) {
    fsdp_model m;
    fc_error err = {FC_OK, ""};
    static const char *const registered[] = {"REGISTER_POST_BACKWARD", NULL};
    open_model(&m, comm);
    fc_fsdp_set_grad_enabled(m.fsdp, false);
    MUST(model_forward(&m, NULL, NULL) == FC_OK);
    MUST(strcmp(model_events(&m, registered), "") == 0);
    MUST(fc_fsdp_pre_backward(m.units[1], NULL) == FC_OK);
    MUST_FAIL(fc_fsdp_post_backward(m.handles[1], &err), FC_EUSAGE, err, "its forward ran with gradients disabled");
    model_close(&m);
}

static void without_gradients(void **state) {
    (void)state;
    on_ranks(2, no_grad);
}

/* A unit that runs twice in a forward is registered once, its parameters are gathered twice, its gradient is reduced
   once. */
static void twice(fc_comm *comm) {
    fsdp_model m;
    static const char *const shown[] = {"REGISTER_POST_BACKWARD", "ALL_GATHER", "REDUCE_SCATTER", NULL};
    static const int order[] = {1, 2, 1};
    open_model(&m, comm);
    MUST(model_forward(&m, order, NULL) == FC_OK);
    MUST(fc_fsdp_pre_backward(m.units[0], NULL) == FC_OK);
    MUST(fc_fsdp_pre_backward(m.units[1], NULL) == FC_OK);
    MUST(fc_fsdp_pre_backward(m.units[1], NULL) == FC_OK);
    fc_array grad;
    MUST(fc_fsdp_grad(m.handles[1], 0, &grad, NULL) == FC_OK);
    MUST(fc_fsdp_post_backward(m.handles[1], NULL) == FC_OK);
    MUST(fc_fsdp_post_backward_final(m.fsdp, NULL) == FC_OK);
    const char *got = model_events(&m, shown);
    const char *wanted = "ALL_GATHER:unit0 REGISTER_POST_BACKWARD:unit0 ALL_GATHER:unit1 REGISTER_POST_BACKWARD:unit1 "
                         "ALL_GATHER:unit2 REGISTER_POST_BACKWARD:unit2 ALL_GATHER:unit1 ALL_GATHER:unit1 "
                         "REDUCE_SCATTER:unit1";
    if (strcmp(got, wanted) != 0) {
        fprintf(stderr, "%s\n", got);
        abort();
    }
    MUST(fc_fsdp_sharded_grad(m.handles[1]) && !fc_fsdp_sharded_grad(m.handles[2]));
    model_close(&m);
}

static void registered_once(void **state) {
    (void)state;
    on_ranks(2, twice);
}

static void add_handle(fc_fsdp_unit *unit, fc_comm *comm, fc_dtype dtype, bool requires_grad, fc_fsdp_handle **out) {
    fc_fsdp_tensor t = {0};
    fc_fsdp_param_init init = {"w", &t, requires_grad, -1};
    MUST(fc_array_new(comm->device, dtype, 1, (int64_t[]){5}, &t.local, NULL) == FC_OK);
    memset(t.local.data, 0, fc_array_bytes(&t.local));
    MUST(fc_fsdp_add_handle(unit, &init, 1, out, NULL) == FC_OK);
    fc_array_free(&t.local);
}

/* A unit with two flat parameters, one of them frozen. */
static void two_handles(fc_comm *comm) {
    fc_fsdp *fsdp;
    fc_fsdp_unit *root, *unit;
    fc_fsdp_handle *a, *b;
    fc_error err = {FC_OK, ""};
    fc_fsdp_options options = {.backward_prefetch = FC_BACKWARD_PREFETCH_POST};
    fc_fsdp_unit_options of_root = {.is_root = true}, of_unit = {0};
    fc_handle_state state;
    fc_array grad;
    MUST(fc_fsdp_new(comm, NULL, NULL, &options, &fsdp, NULL) == FC_OK);
    MUST_FAIL(fc_fsdp_add_unit(fsdp, "x", &of_unit, &unit, &err), FC_EUSAGE, err, "the first unit must be the root");
    MUST(fc_fsdp_add_unit(fsdp, "root", &of_root, &root, NULL) == FC_OK);
    MUST(fc_fsdp_add_unit(fsdp, "layer", &of_unit, &unit, NULL) == FC_OK);
    MUST_FAIL(fc_fsdp_handles_state(root, &state, &err), FC_EUSAGE, err, "expects a non-empty handles key");
    add_handle(unit, comm, FC_F32, true, &a);
    add_handle(unit, comm, FC_BF16, false, &b);
    for (int step = 0; step < 2; step++) {
        MUST(fc_fsdp_root_pre_forward(fsdp, NULL, 0, NULL) == FC_OK);
        MUST(fc_fsdp_pre_forward(root, true, NULL, 0, NULL) == FC_OK);
        MUST(fc_fsdp_pre_forward(unit, true, NULL, 0, NULL) == FC_OK);
        MUST(fc_fsdp_post_forward(unit, NULL) == FC_OK);
        MUST(fc_fsdp_post_forward(root, NULL) == FC_OK);
        MUST(fc_fsdp_pre_backward(root, NULL) == FC_OK);
        MUST(fc_fsdp_pre_backward(unit, NULL) == FC_OK);
        MUST(fc_fsdp_grad(a, 0, &grad, NULL) == FC_OK);
        MUST_FAIL(fc_fsdp_grad(b, 0, &grad, &err), FC_EUSAGE, err, "has no parameter 0 that requires a gradient");
        MUST(fc_fsdp_post_backward(a, NULL) == FC_OK);
        MUST_FAIL(fc_fsdp_handles_state(unit, &state, &err), FC_EUSAGE, err,
                  "unit 'layer': expects uniform training state but got {BACKWARD_POST, BACKWARD_PRE}");
        MUST(fc_fsdp_post_backward(b, NULL) == FC_OK);
        MUST(fc_fsdp_handles_state(unit, &state, &err) == FC_OK && state == FC_HANDLE_BACKWARD_POST);
        MUST(fc_fsdp_post_backward_final(fsdp, NULL) == FC_OK);
        MUST(fc_fsdp_sharded_grad(a) && !fc_fsdp_sharded_grad(b) && fc_fsdp_memory(fsdp, NULL) == 0);
    }
    fc_fsdp_free(fsdp);
}

static void several_flat_parameters(void **state) {
    (void)state;
    on_ranks(2, two_handles);
}

static void changed_order(fc_comm *comm) {
    fsdp_model m;
    static const int other[] = {2, 1, 3};
    fc_fsdp_options options = {.check_order = true};
    fc_fsdp_unit_options unit = {0};
    MUST(model_open(&m, comm, NULL, comm->rank, options, unit, NULL) == FC_OK);
    for (int step = 0; step < 4; step++) {
        m.warning[0] = 0;
        const int *order = step > 0 ? other : NULL;
        MUST(model_forward(&m, order, NULL) == FC_OK);
        MUST(model_backward(&m, order, NULL) == FC_OK);
        MUST(model_optimize(&m, NULL) == FC_OK);
        char wanted[512];
        snprintf(wanted, sizeof wanted,
                 "forward order differs from that of the first iteration on rank %d; collectives are unchecked and may "
                 "give incorrect results or hang: expected to all-gather for 'unit%d' but trying to all-gather "
                 "parameters for 'unit%d'",
                 comm->rank, 2, 1);                            /* the last of the two swapped units */
        MUST(strcmp(m.warning, step == 1 ? wanted : "") == 0); /* the warning is given once */
    }
    model_close(&m);
}

static fc_code ranks_differ(fc_comm *comm, void *context, fc_error *err) {
    fsdp_model m;
    static const int orders[2][3] = {{1, 2, 3}, {1, 3, 2}};
    fc_fsdp_options options = {.check_order = true};
    fc_fsdp_unit_options unit = {0};
    (void)context;
    fc_code rc = model_open(&m, comm, NULL, comm->rank, options, unit, err);
    rc = rc == FC_OK ? model_forward(&m, orders[comm->rank == 2], err) : rc;
    model_close(&m);
    return rc;
}

static void execution_order(void **state) {
    (void)state;
    fc_error err = {FC_OK, ""};
    on_ranks(2, changed_order);
    assert_int_equal(fc_device_run_local(3, ranks_differ, NULL, &err), FC_EUSAGE);
    assert_non_null(strstr(err.message, "forward order differs across ranks: rank 0 is all-gathering parameters for "
                                        "'unit2' while rank 2 is all-gathering parameters for 'unit3'"));
}

/* summon_full_params gives full parameters in full precision, between steps. */
static void summon(fc_comm *comm) {
    fsdp_model m;
    fc_fsdp_options options = {.use_orig_params = true};
    fc_fsdp_unit_options unit = {.has_param_dtype = true, .param_dtype = FC_BF16};
    fc_array full;
    MUST(model_open(&m, comm, NULL, comm->rank, options, unit, NULL) == FC_OK);
    MUST(fc_fsdp_summon_full_params(m.handles[2], &full, NULL) == FC_OK);
    MUST(full.dtype == FC_F32 && full.sizes[0] == fc_fsdp_layout(m.handles[2])->numel);
    for (int i = 0; i < MODEL_NUMEL; i++) {
        MUST(((const float *)full.data)[i] == (float)(i + 200) / 16);
    }
    fc_array_free(&full);
    model_close(&m);
}

static void full_params(void **state) {
    (void)state;
    on_ranks(1, summon);
    on_ranks(3, summon);
}

/* Views of parameters and gradients in the shards, as with use_orig_params. */
static void original(fc_comm *comm) {
    fc_fsdp *fsdp;
    fc_fsdp_unit *root;
    fc_fsdp_handle *h;
    fc_fsdp_options options = {.use_orig_params = true};
    fc_fsdp_unit_options unit = {.is_root = true};
    fc_fsdp_tensor t[3] = {{.is_dtensor = false}, {.is_dtensor = false}, {.is_dtensor = false}};
    fc_fsdp_param_init init[3];
    fc_array view;
    bool has;
    MUST(fc_fsdp_new(comm, NULL, NULL, &options, &fsdp, NULL) == FC_OK);
    MUST(fc_fsdp_add_unit(fsdp, "root", &unit, &root, NULL) == FC_OK);
    for (int i = 0; i < 3; i++) { /* 5 elements at 0, 8 and 16, the last one frozen; shards of 11 on 2 ranks */
        MUST(fc_array_new(comm->device, FC_F32, 1, (int64_t[]){5}, &t[i].local, NULL) == FC_OK);
        for (int k = 0; k < 5; k++) {
            ((float *)t[i].local.data)[k] = (float)(10 * i + k);
        }
        init[i] = (fc_fsdp_param_init){"w", &t[i], i < 2, -1};
    }
    MUST(fc_fsdp_add_handle(root, init, 3, &h, NULL) == FC_OK);
    MUST(fc_fsdp_layout(h)->shard_numel == 11);
    for (int step = 0; step < 2; step++) {
        MUST(fc_fsdp_root_pre_forward(fsdp, NULL, 0, NULL) == FC_OK);
        MUST(fc_fsdp_pre_forward(root, true, NULL, 0, NULL) == FC_OK);
        MUST(fc_fsdp_post_forward(root, NULL) == FC_OK);
        MUST(fc_fsdp_pre_backward(root, NULL) == FC_OK);
        for (size_t i = 0; i < 2; i++) {
            MUST(fc_fsdp_grad(h, i, &view, NULL) == FC_OK);
            for (int k = 0; k < 5; k++) {
                ((float *)view.data)[k] = (float)(100 * (i + 1)) + (float)k;
            }
        }
        MUST(fc_fsdp_grad(h, 2, &view, NULL) == FC_EUSAGE);
        MUST(fc_fsdp_post_backward(h, NULL) == FC_OK);
        MUST(fc_fsdp_post_backward_final(fsdp, NULL) == FC_OK);
        static const int64_t held[2][3] = {{5, 3, 0}, {0, 2, 5}};
        for (size_t i = 0; i < 3; i++) {
            int64_t n = held[comm->rank][i];
            int skipped = i == 1 && comm->rank == 1 ? 3 : 0;
            MUST(fc_fsdp_param_shard(h, i, &view, NULL) == FC_OK && view.sizes[0] == n);
            MUST(n == 0 || ((float *)view.data)[0] == (float)(10 * i) + (float)skipped);
            MUST(fc_fsdp_param_grad(h, i, &view, &has, NULL) == FC_OK && has == (n > 0 && i < 2));
            MUST(!has || (view.sizes[0] == n && ((float *)view.data)[0] == (float)(100 * (i + 1)) + (float)skipped));
        }
        MUST(fc_fsdp_set_grad_none(h, 1, NULL) == FC_OK);
        MUST(fc_fsdp_param_grad(h, 1, &view, &has, NULL) == FC_OK && !has);
        MUST(((const float *)fc_fsdp_sharded_grad(h)->data)[comm->rank == 0 ? 8 : 0] == 0);
        MUST(fc_fsdp_zero_grad(fsdp, NULL) == FC_OK);
        MUST(fc_fsdp_param_grad(h, 0, &view, &has, NULL) == FC_OK && !has);
    }
    for (int i = 0; i < 3; i++) {
        fc_array_free(&t[i].local);
    }
    fc_fsdp_free(fsdp);
}

static void original_parameters(void **state) {
    (void)state;
    on_ranks(2, original);
}

/* FSDP over TP: the flat parameter consists of TP-local tensors, and its views are DTensors. */
static void two_dimensions(fc_comm *comm) {
    const fc_mesh sizes = {.ndim = 2, .sizes = {2, 2}, .names = {"dp", "tp"}};
    const fc_placement columns = {FC_SHARD, 1, 0};
    fc_device_mesh mesh, tp;
    fc_fsdp *fsdp;
    fc_fsdp_unit *root;
    fc_fsdp_handle *h;
    fc_fsdp_options options = {.use_orig_params = false};
    fc_fsdp_unit_options unit = {.is_root = true};
    fc_fsdp_tensor weight, seen, again;
    fc_array local, grad, full;
    float values[6];
    MUST(fc_device_mesh_new(comm, &sizes, &mesh, NULL) == FC_OK && fc_device_mesh_slice(&mesh, 1, &tp, NULL) == FC_OK);
    for (int i = 0; i < 6; i++) {
        values[i] = (float)(10 * tp.coordinate[0] + i);
    }
    MUST(fc_array_over(comm->device, FC_F32, 2, (int64_t[]){3, 2}, values, &local, NULL) == FC_OK);
    MUST(fc_dtensor_from_local(&local, &tp, &columns, 2, (int64_t[]){3, 4}, &weight, NULL) == FC_OK);
    MUST(fc_fsdp_new(mesh.groups[0], NULL, NULL, &options, &fsdp, NULL) == FC_OK);
    MUST(fc_fsdp_add_unit(fsdp, "root", &unit, &root, NULL) == FC_OK);
    fc_fsdp_param_init init = {"weight", &weight, true, -1};
    MUST(fc_fsdp_add_handle(root, &init, 1, &h, NULL) == FC_OK && fc_fsdp_layout(h)->shard_numel == 3);
    MUST(fc_fsdp_root_pre_forward(fsdp, NULL, 0, NULL) == FC_OK);
    MUST(fc_fsdp_pre_forward(root, true, NULL, 0, NULL) == FC_OK);
    MUST(fc_fsdp_param(h, 0, &seen, NULL) == FC_OK);
    MUST(seen.is_dtensor && seen.fsdp_flattened && seen.spec.shape[1] == 4 && seen.spec.placements[0].dim == 1);
    MUST(memcmp(seen.local.data, values, sizeof values) == 0);
    /* A view of a flat parameter cannot be flattened again. */
    fc_error err;
    again = seen;
    init.tensor = &again;
    MUST_FAIL(fc_fsdp_add_handle(root, &init, 1, &h, &err), FC_EUSAGE, err,
              "weight: cannot flatten a view into a flat");
    MUST(fc_fsdp_post_forward(root, NULL) == FC_OK && fc_fsdp_pre_backward(root, NULL) == FC_OK);
    MUST(fc_fsdp_grad(h, 0, &grad, NULL) == FC_OK && grad.ndim == 2);
    for (int i = 0; i < 6; i++) {
        ((float *)grad.data)[i] = (float)(2 * mesh.coordinate[0]) + values[i];
    }
    MUST(fc_fsdp_post_backward(h, NULL) == FC_OK && fc_fsdp_post_backward_final(fsdp, NULL) == FC_OK);
    for (int i = 0; i < 3; i++) { /* the average is over dp only */
        float got = ((const float *)fc_fsdp_sharded_grad(h)->data)[i];
        MUST(got == values[3 * mesh.coordinate[0] + i] + 1);
    }
    /* The state dict: (Shard(0), Shard(1)) on the whole mesh, and back. */
    MUST(fc_fsdp_summon_full_params(h, &full, NULL) == FC_OK);
    fc_array view;
    MUST(fc_flat_view(fc_fsdp_layout(h), &full, 0, &view, NULL) == FC_OK);
    MUST(fc_dtensor_from_local(&view, &tp, &columns, 2, (int64_t[]){3, 4}, &weight, NULL) == FC_OK);
    MUST(fc_chunk_dtensor_data(&weight, &tp, NULL, &seen, NULL) == FC_OK);
    MUST(seen.spec.placements[0].kind == FC_SHARD && seen.spec.placements[1].dim == 1);
    MUST(seen.local.sizes[0] == (mesh.coordinate[0] == 0 ? 2 : 1) && seen.local.sizes[1] == 2);
    MUST(fc_all_gather_dtensor(&seen, &mesh, NULL, &local, NULL) == FC_OK);
    MUST(memcmp(local.data, values, sizeof values) == 0);
    fc_array_free(&local);
    fc_array_free(&seen.local);
    fc_array_free(&full);
    fc_fsdp_free(fsdp);
    fc_device_mesh_free(&mesh);
}

static void fsdp_over_tp(void **state) {
    (void)state;
    on_ranks(4, two_dimensions);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(calls_move_between_states),
        cmocka_unit_test(bad_calls_are_refused),
        cmocka_unit_test(without_gradients),
        cmocka_unit_test(registered_once),
        cmocka_unit_test(several_flat_parameters),
        cmocka_unit_test(execution_order),
        cmocka_unit_test(full_params),
        cmocka_unit_test(original_parameters),
        cmocka_unit_test(fsdp_over_tp),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
