/*
 * train: the reduction of gradients. Tests the divisors, communication hooks, HSDP, and the checks before gradients are
 * accumulated.
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

/* The values of torch's _get_gradient_predivide_factor. */
static void predivide_factors_are_those_of_torch(void **state) {
    (void)state;
    static const struct {
        int64_t ranks;
        double factor;
    } known[] = {{1, 1},  {2, 2},  {3, 2},  {4, 2},  {5, 2},  {6, 4},  {7, 2},     {8, 4},    {9, 2},
                 {10, 4}, {12, 4}, {16, 4}, {24, 8}, {32, 8}, {64, 8}, {1000, 16}, {1024, 32}};
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        assert_true(fc_gradient_predivide_factor(known[i].ranks) == known[i].factor);
    }
}

typedef struct hook_calls {
    int calls;
    int64_t grad, shard;
    fc_dtype dtype;
    double predivide, postdivide;
    bool padded_with_zeros;
} hook_calls;

/* Gives each rank a tenth of its own chunk. */
static fc_code own_hook(const fc_comm_hook *hook, fc_comm *comm, fc_array *grad, fc_array *shard, fc_stream *stream,
                        fc_error *err) {
    hook_calls *s = hook->state;
    fc_array chunk;
    s->calls++;
    s->grad = grad->sizes[0];
    s->shard = shard->sizes[0];
    s->dtype = grad->dtype;
    s->predivide = hook->predivide;
    s->postdivide = hook->postdivide;
    for (int64_t i = MODEL_NUMEL; i < grad->sizes[0]; i++) {
        s->padded_with_zeros = ((const float *)grad->data)[i] == 0;
    }
    fc_code rc = fc_array_narrow(grad, 0, comm->rank * shard->sizes[0], shard->sizes[0], &chunk, err);
    rc = rc == FC_OK ? fc_array_copy(shard, &chunk, stream, err) : rc;
    return rc == FC_OK
               ? comm->device->divide(comm->device, shard->dtype, shard->data, 10, (size_t)shard->sizes[0], stream, err)
               : rc;
}

/* The parameter and the unreduced gradient of unit 1, see fsdp_model.c. */
static float weight_of(int64_t i) {
    return (float)(i + 100) / 16;
}
static float grad_of(int64_t i, int rank) {
    return weight_of(i) + (float)(rank * 8 + i % 5) / 4;
}

static fc_code expect_shard(fsdp_model *m, fc_comm *comm, float (*wanted)(int64_t i, int rank), fc_error *err) {
    const fc_array *grad = fc_fsdp_sharded_grad(m->handles[1]);
    if (!grad) {
        return fc_fail(err, FC_EFOUND, "there is no gradient");
    }
    for (int64_t k = 0; k < grad->sizes[0]; k++) {
        int64_t i = k + comm->rank * grad->sizes[0];
        float want = i < MODEL_NUMEL ? wanted(i, comm->rank) : 0, got = ((const float *)grad->data)[k];
        if (got != want) {
            return fc_fail(err, FC_EFOUND, "element %lld is %g, not %g", (long long)i, (double)got, (double)want);
        }
    }
    return FC_OK;
}

static float tenth(int64_t i, int rank) {
    return grad_of(i, rank) / 10;
}

static fc_code with_own_hook(fc_comm *comm, void *context, fc_error *err) {
    fsdp_model m;
    hook_calls s = {0};
    fc_comm_hook hook = {.run = own_hook, .state = &s}, none = {0};
    fc_fsdp_options options = {0};
    fc_fsdp_unit_options unit = {0};
    (void)context;
    fc_code rc = model_open(&m, comm, NULL, comm->rank, options, unit, err);
    if (rc == FC_OK && fc_fsdp_register_comm_hook(m.fsdp, &none, NULL) != FC_EUSAGE) {
        rc = fc_fail(err, FC_EFOUND, "a hook without a function was taken");
    }
    rc = rc == FC_OK ? fc_fsdp_register_comm_hook(m.fsdp, &hook, err) : rc;
    rc = rc == FC_OK ? model_forward(&m, NULL, err) : rc;
    rc = rc == FC_OK ? model_backward(&m, NULL, err) : rc;
    rc = rc == FC_OK ? expect_shard(&m, comm, tenth, err) : rc;
    if (rc == FC_OK && (s.calls != MODEL_UNITS || s.grad != 39 || s.shard != 13 || s.dtype != FC_F32 ||
                        s.predivide != 2 || s.postdivide != 1.5 || !s.padded_with_zeros)) {
        rc = fc_fail(err, FC_EFOUND, "the hook was given something else");
    }
    model_close(&m);
    return rc;
}

static void hooks_replace_the_reduction(void **state) {
    (void)state;
    fc_error err = {FC_OK, ""};
    fc_code rc = fc_device_run_local(3, with_own_hook, NULL, &err);
    assert_string_equal(err.message, "");
    assert_int_equal(rc, FC_OK);
}

/* The average over four ranks, which is exact for these numbers. */
static float average(int64_t i, int rank) {
    (void)rank;
    return weight_of(i) + (float)((0 + 1 + 2 + 3) * 8 + 4 * (i % 5)) / 16;
}

typedef struct wanted_trace {
    fc_sharding_strategy strategy;
    const char *trace;
} wanted_trace;

static fc_code hybrid_rank(fc_comm *world, void *context, fc_error *err) {
    const wanted_trace *w = context;
    static const char *const shown[] = {"PRE_DIVIDE",  "REDUCE_SCATTER", "ALL_REDUCE",
                                        "POST_DIVIDE", "ACCUMULATE",     NULL};
    fsdp_model m = {0};
    fc_mesh mesh = {.ndim = 2, .sizes = {2, 2}};
    fc_comm *replicate = NULL, *shard = NULL;
    fc_fsdp_options options = {0};
    fc_fsdp_unit_options unit = {.strategy = w->strategy};
    fc_comm_hook hook = fc_reduce_scatter_hook();
    fc_code rc = fc_comm_split_mesh(world, &mesh, 0, &replicate, err);
    rc = rc == FC_OK ? fc_comm_split_mesh(world, &mesh, 1, &shard, err) : rc;
    rc = rc == FC_OK ? model_open(&m, shard, replicate, world->rank, options, unit, err) : rc;
    if (rc == FC_OK && fc_fsdp_register_comm_hook(m.fsdp, &hook, NULL) != FC_EUSAGE) {
        rc = fc_fail(err, FC_EFOUND, "a hook was taken with a hybrid strategy");
    }
    rc = rc == FC_OK ? model_forward(&m, NULL, err) : rc;
    model_clear(&m);
    rc = rc == FC_OK ? model_backward(&m, NULL, err) : rc;
    rc = rc == FC_OK ? expect_shard(&m, shard, average, err) : rc;
    /* The all-reduce waits for the reduce-scatter, and the optimizer waits for the all-reduce. */
    if (rc == FC_OK && (!strstr(model_events(&m, shown), w->trace) || !strstr(m.trace, "ALL_REDUCE<POST_BACKWARD") ||
                        !strstr(m.trace, "COMPUTE<ALL_REDUCE"))) {
        rc = fc_fail(err, FC_EFOUND, "the trace is %s", m.trace);
    }
    model_close(&m);
    if (shard) {
        shard->free(shard);
    }
    if (replicate) {
        replicate->free(replicate);
    }
    return rc;
}

static void hsdp_reduces_over_both_groups(void **state) {
    (void)state;
    wanted_trace w = {FC_HYBRID_SHARD,
                      "PRE_DIVIDE:unit3 REDUCE_SCATTER:unit3 ALL_REDUCE:unit3 POST_DIVIDE:unit3 PRE_DIVIDE:unit2"};
    fc_error err = {FC_OK, ""};
    for (int i = 0; i < 2; i++) {
        fc_code rc = fc_device_run_local(4, hybrid_rank, &w, &err);
        assert_string_equal(err.message, "");
        assert_int_equal(rc, FC_OK);
        w.strategy = FC_HYBRID_SHARD_ZERO2;
    }
}

typedef struct damage {
    int64_t size;
    bool other_device;
    const char *message;
} damage;

/* The caller can change the gradient between steps, so it is checked before the next backward adds to it. */
static fc_code damaged_rank(fc_comm *comm, void *context, fc_error *err) {
    const damage *d = context;
    fsdp_model m;
    fc_fsdp_options options = {0};
    fc_fsdp_unit_options unit = {0};
    fc_device other = *comm->device;
    other.name = "cuda:0";
    fc_code rc = model_open(&m, comm, NULL, comm->rank, options, unit, err);
    rc = rc == FC_OK ? model_forward(&m, NULL, err) : rc;
    rc = rc == FC_OK ? model_backward(&m, NULL, err) : rc;
    fc_array *grad = rc == FC_OK ? fc_fsdp_sharded_grad(m.handles[3]) : NULL;
    if (grad) {
        grad->sizes[0] = d->size;
        grad->device = d->other_device ? &other : grad->device;
        rc = model_forward(&m, NULL, err);
        rc = rc == FC_OK ? model_backward(&m, NULL, err) : rc;
    }
    model_close(&m);
    return rc;
}

static void accumulation_is_checked(void **state) {
    (void)state;
    static const damage damages[] = {
        {18, false,
         "unit 'unit3': post-backward: shape mismatch when accumulating gradients: existing gradient shape=[18] of "
         "float32, new gradient shape=[19] of float32"},
        {19, true,
         "unit 'unit3': post-backward: device mismatch when accumulating gradients: existing gradient device=cuda:0 "
         "new "
         "gradient device=cpu"},
    };
    for (size_t i = 0; i < 2; i++) {
        fc_error err = {FC_OK, ""};
        damage d = damages[i];
        assert_int_equal(fc_device_run_local(2, damaged_rank, &d, &err), FC_EUSAGE);
        if (!strstr(err.message, d.message)) {
            fail_msg("%s", err.message);
        }
    }
}

static fc_code refused_options(fc_comm *comm, void *context, fc_error *err) {
    fc_fsdp *fsdp = NULL;
    fc_fsdp_unit *unit;
    fc_fsdp_options options = {.check_order = true};
    (void)context;
    if (fc_fsdp_new(comm, NULL, NULL, &options, &fsdp, NULL) != FC_EUSAGE) {
        return fc_fail(err, FC_EFOUND, "check_order without warn was taken");
    }
    options.check_order = false;
    fc_code rc = fc_fsdp_new(comm, NULL, NULL, &options, &fsdp, err);
    fc_fsdp_unit_options hybrid_unit = {.is_root = true, .strategy = FC_HYBRID_SHARD};
    fc_fsdp_unit_options whole = {.is_root = true, .has_param_dtype = true, .param_dtype = FC_I32};
    if (rc == FC_OK && (fc_fsdp_add_unit(fsdp, "u", &hybrid_unit, &unit, NULL) != FC_EUSAGE ||
                        fc_fsdp_add_unit(fsdp, "u", &whole, &unit, NULL) != FC_EUSAGE)) {
        rc = fc_fail(err, FC_EFOUND, "a unit without replicas, or in whole numbers, was taken");
    }
    fc_fsdp_free(fsdp);
    return rc;
}

static void options_are_checked(void **state) {
    (void)state;
    fc_error err = {FC_OK, ""};
    fc_code rc = fc_device_run_local(1, refused_options, NULL, &err);
    assert_string_equal(err.message, "");
    assert_int_equal(rc, FC_OK);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(predivide_factors_are_those_of_torch),
        cmocka_unit_test(hooks_replace_the_reduction),
        cmocka_unit_test(hsdp_reduces_over_both_groups),
        cmocka_unit_test(accumulation_is_checked),
        cmocka_unit_test(options_are_checked),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
