/*
 * train: the order of work on streams. A device that runs streams in any order that events allow gives the same shards
 * as one that runs work at once. Without the events it does not.
 */
#include "deferred_device.h"
#include "fsdp_model.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

enum { RANKS = 4, STEPS = 3, MOST_SHARD = 2 * MODEL_NUMEL, SEEDS = 25 };

typedef struct outcome {
    float shards[RANKS][MODEL_UNITS][MOST_SHARD];
} outcome;

typedef struct trial {
    bool deferred, hybrid;
    deferred_options device;
    fc_fsdp_options options;
    fc_fsdp_unit_options unit;
    const char *steps; /* s: synchronise and optimize, n: accumulate */
    double clip;       /* the largest norm of the gradients; 0: any */
    outcome *out;
} trial;

static fc_code run_steps(fsdp_model *m, const trial *t, fc_device *device, outcome *out, int rank, fc_error *err) {
    fc_code rc = FC_OK;
    double norm;
    for (const char *step = t->steps; rc == FC_OK && *step; step++) {
        fc_fsdp_set_sync_gradients(m->fsdp, *step == 's');
        rc = model_forward(m, NULL, err);
        rc = rc == FC_OK ? model_backward(m, NULL, err) : rc;
        if (rc == FC_OK && *step == 's' && t->clip > 0) {
            rc = fc_fsdp_clip_grad_norm(m->fsdp, t->clip, 2, &norm, err);
        }
        rc = rc == FC_OK && *step == 's' ? model_optimize(m, err) : rc;
    }
    rc = rc == FC_OK ? device->synchronize(device, NULL, err) : rc;
    for (int i = 0; rc == FC_OK && i < MODEL_UNITS; i++) {
        const fc_array *shard = fc_fsdp_local_shard(m->handles[i]);
        rc = shard->device->copy(shard->device, out->shards[rank][i], shard->data, fc_array_bytes(shard), NULL, err);
    }
    return rc == FC_OK ? device->synchronize(device, NULL, err) : rc;
}

static fc_code on_rank(fc_comm *world, void *context, fc_error *err) {
    const trial *t = context;
    fsdp_model m = {0};
    fc_mesh mesh = {.ndim = 2, .sizes = {t->hybrid ? 2 : 1, t->hybrid ? RANKS / 2 : RANKS}};
    fc_device *device = world->device;
    fc_comm *inner[2] = {NULL}, *comms[2] = {NULL};
    fc_code rc = FC_OK;
    for (int d = 0; rc == FC_OK && d < 2; d++) {
        rc = fc_comm_split_mesh(world, &mesh, d, &inner[d], err);
        comms[d] = inner[d];
    }
    if (rc == FC_OK && t->deferred) {
        rc = deferred_device_new(&t->device, &device, err);
        rc = rc == FC_OK ? deferred_comm_new(device, inner[0], &comms[0], err) : rc;
        rc = rc == FC_OK ? deferred_comm_new(device, inner[1], &comms[1], err) : rc;
    }
    rc =
        rc == FC_OK ? model_open(&m, comms[1], t->hybrid ? comms[0] : NULL, world->rank, t->options, t->unit, err) : rc;
    rc = rc == FC_OK ? run_steps(&m, t, device, t->out, world->rank, err) : rc;
    model_close(&m);
    for (int d = 0; d < 2; d++) {
        if (comms[d] != inner[d]) {
            comms[d]->free(comms[d]);
        }
        if (inner[d]) {
            inner[d]->free(inner[d]);
        }
    }
    if (device != world->device) {
        device->destroy(device);
    }
    return rc;
}

static void run(trial *t, outcome *out) {
    fc_error err = {FC_OK, ""};
    memset(out, 0, sizeof *out);
    t->out = out;
    fc_code rc = fc_device_run_local(RANKS, on_rank, t, &err);
    assert_string_equal(err.message, "");
    assert_int_equal(rc, FC_OK);
}

/* Returns for how many seeds the result differs from that without streams. */
static int differences(trial t, bool ignore_waits) {
    static outcome expected, got;
    int found = 0;
    t.deferred = false;
    run(&t, &expected);
    t.deferred = true;
    t.device.ignore_waits = ignore_waits;
    for (t.device.seed = 1; t.device.seed <= SEEDS; t.device.seed++) {
        run(&t, &got);
        found += memcmp(&expected, &got, sizeof got) != 0;
    }
    return found;
}

static void check(const trial *t) {
    assert_int_equal(differences(*t, false), 0);
    assert_true(differences(*t, true) > 0);
}

static void results_do_not_depend_on_the_order(void **state) {
    (void)state;
    trial t = {.steps = "sss"};
    check(&t);
    t.unit.strategy = FC_SHARD_GRAD_OP;
    check(&t);
}

/* The processor cannot access the memory, and parameters are on the device only while they are used. */
static void device_memory_is_not_accessed(void **state) {
    (void)state;
    trial t = {.steps = "snsn",
               .device = {.remote = true},
               .options = {.use_orig_params = true, .backward_prefetch = FC_BACKWARD_PREFETCH_PRE}};
    check(&t);
    t.unit = (fc_fsdp_unit_options){.has_param_dtype = true, .param_dtype = FC_BF16};
    check(&t);
    t.steps = "sns";
    t.unit = (fc_fsdp_unit_options){.offload_params = true};
    check(&t);
    t.unit.has_param_dtype = true;
    t.unit.param_dtype = FC_BF16;
    check(&t);
    t.unit.strategy = FC_NO_SHARD;
    check(&t);
}

static void clipping(void **state) {
    (void)state;
    trial t = {.steps = "ss", .clip = 2, .device = {.remote = true}};
    check(&t);
    t.unit = (fc_fsdp_unit_options){.offload_params = true, .strategy = FC_HYBRID_SHARD};
    t.hybrid = true;
    check(&t);
}

static void prefetching(void **state) {
    (void)state;
    trial t = {.steps = "sss", .options = {.backward_prefetch = FC_BACKWARD_PREFETCH_PRE, .forward_prefetch = true}};
    check(&t);
    t.options.backward_prefetch = FC_BACKWARD_PREFETCH_POST;
    t.options.backward_prefetch_limit = t.options.forward_prefetch_limit = 3;
    check(&t);
}

static void mixed_precision_and_accumulation(void **state) {
    (void)state;
    trial t = {
        .steps = "nsns",
        .options = {.backward_prefetch = FC_BACKWARD_PREFETCH_PRE},
        .unit = {.has_param_dtype = true, .param_dtype = FC_BF16, .has_reduce_dtype = true, .reduce_dtype = FC_F32}};
    check(&t);
    t.unit.strategy = FC_NO_SHARD;
    check(&t);
}

static void hybrid(void **state) {
    (void)state;
    trial t = {.steps = "sns",
               .hybrid = true,
               .options = {.backward_prefetch = FC_BACKWARD_PREFETCH_PRE},
               .unit = {.strategy = FC_HYBRID_SHARD}};
    check(&t);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(results_do_not_depend_on_the_order),
        cmocka_unit_test(device_memory_is_not_accessed),
        cmocka_unit_test(clipping),
        cmocka_unit_test(prefetching),
        cmocka_unit_test(mixed_precision_and_accumulation),
        cmocka_unit_test(hybrid),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
