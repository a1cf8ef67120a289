/*
 * train: how far gathers and reductions overlap with the computation. A device with a virtual clock does no work: each
 * stream has a time, a task adds what it takes, and events carry times between streams. So the length of a step is
 * exact. As with NCCL, collectives of one communicator run one after the other in the order of their calls.
 */
#include "fsdpckpt/train/fsdp.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <cmocka.h>

enum { UNITS = 16, NUMEL = 64, RANKS = 4, GATHER = 1, FORWARD = 1, BACKWARD = 2, REDUCE = 1 };

struct fc_stream {
    long now;
};

struct fc_event {
    long at;
};

/* The clock of the network, and the bytes of device memory. */
typedef struct machine {
    long network;
    size_t bytes;
} machine;

static long later(long a, long b) {
    return a > b ? a : b;
}

static fc_code alloc_memory(fc_device *device, size_t bytes, void **out, fc_error *err) {
    (void)err;
    ((machine *)device->state)->bytes += bytes;
    *out = calloc(1, bytes);
    return *out ? FC_OK : FC_ENOMEM;
}

static void release_memory(fc_device *device, void *memory) {
    (void)device;
    free(memory);
}

static fc_code new_stream(fc_device *device, fc_stream **out, fc_error *err) {
    (void)device, (void)err;
    *out = calloc(1, sizeof **out);
    return *out ? FC_OK : FC_ENOMEM;
}

static void free_stream(fc_device *device, fc_stream *stream) {
    (void)device;
    free(stream);
}

static fc_code new_event(fc_device *device, fc_event **out, fc_error *err) {
    (void)device, (void)err;
    *out = calloc(1, sizeof **out);
    return *out ? FC_OK : FC_ENOMEM;
}

static void free_event(fc_device *device, fc_event *event) {
    (void)device;
    free(event);
}

static fc_code record(fc_device *device, fc_event *event, fc_stream *stream, fc_error *err) {
    (void)device, (void)err;
    event->at = stream->now;
    return FC_OK;
}

static fc_code wait_for(fc_device *device, fc_stream *stream, fc_event *event, fc_error *err) {
    (void)device, (void)err;
    stream->now = later(stream->now, event->at);
    return FC_OK;
}

static fc_code synchronize(fc_device *device, fc_stream *stream, fc_error *err) {
    (void)device, (void)stream, (void)err;
    return FC_OK;
}

static fc_code copy(fc_device *device, void *dst, const void *src, size_t bytes, fc_stream *stream, fc_error *err) {
    (void)device, (void)dst, (void)src, (void)bytes, (void)stream, (void)err;
    return FC_OK;
}

static fc_code zero(fc_device *device, void *dst, size_t bytes, fc_stream *stream, fc_error *err) {
    (void)device, (void)dst, (void)bytes, (void)stream, (void)err;
    return FC_OK;
}

static fc_code copy_box(fc_device *device, void *dst, const fc_strided_box *to, const void *src,
                        const fc_strided_box *from, uint32_t element, fc_stream *stream, fc_error *err) {
    (void)device, (void)dst, (void)to, (void)src, (void)from, (void)element, (void)stream, (void)err;
    return FC_OK;
}

static fc_code divide(fc_device *device, fc_dtype dtype, void *data, double divisor, size_t count, fc_stream *stream,
                      fc_error *err) {
    (void)device, (void)dtype, (void)data, (void)divisor, (void)count, (void)stream, (void)err;
    return FC_OK;
}

static void take_time(fc_comm *comm, fc_stream *stream, long time) {
    machine *m = comm->device->state;
    m->network = stream->now = later(m->network, stream->now) + time;
}

static fc_code all_gather(fc_comm *comm, const void *send, void *recv, size_t bytes, fc_stream *stream, fc_error *err) {
    (void)send, (void)recv, (void)bytes, (void)err;
    take_time(comm, stream, GATHER);
    return FC_OK;
}

static fc_code reduce_scatter(fc_comm *comm, const void *send, void *recv, size_t count, fc_dtype dtype, fc_reduce op,
                              fc_stream *stream, fc_error *err) {
    (void)send, (void)recv, (void)count, (void)dtype, (void)op, (void)err;
    take_time(comm, stream, REDUCE);
    return FC_OK;
}

/* A model of equal units under a root without parameters. */
typedef struct model {
    machine machine;
    fc_device device;
    fc_comm comm;
    fc_stream compute;
    fc_fsdp *fsdp;
    fc_fsdp_unit *root, *units[UNITS];
    fc_fsdp_handle *handles[UNITS];
    fc_error err;
} model;

#define MUST(call) assert_int_equal((call), FC_OK)

static void add_units(model *m, fc_sharding_strategy strategy) {
    const fc_fsdp_unit_options root = {.is_root = true, .strategy = strategy}, unit = {.strategy = strategy};
    int64_t numel = NUMEL;
    MUST(fc_fsdp_add_unit(m->fsdp, "root", &root, &m->root, &m->err));
    for (int i = 0; i < UNITS; i++) {
        fc_fsdp_tensor tensor = {0};
        const fc_fsdp_param_init param = {"weight", &tensor, true, -1};
        MUST(fc_array_new(&m->device, FC_F32, 1, &numel, &tensor.local, &m->err));
        MUST(fc_fsdp_add_unit(m->fsdp, "unit", &unit, &m->units[i], &m->err));
        MUST(fc_fsdp_add_handle(m->units[i], &param, 1, &m->handles[i], &m->err));
        fc_array_free(&tensor.local);
    }
    m->machine.bytes = 0; /* from here on, only the pool allocates */
}

static void open_model(model *m, const fc_fsdp_options *options, fc_sharding_strategy strategy) {
    *m = (model){.device = {.name = "virtual",
                            .is_host = true,
                            .alloc = alloc_memory,
                            .release = release_memory,
                            .stream_new = new_stream,
                            .stream_free = free_stream,
                            .synchronize = synchronize,
                            .event_new = new_event,
                            .event_free = free_event,
                            .record = record,
                            .wait = wait_for,
                            .copy = copy,
                            .zero = zero,
                            .copy_box = copy_box,
                            .divide = divide}};
    m->device.state = &m->machine;
    static const fc_device_collectives collectives = {.all_gather = all_gather, .reduce_scatter = reduce_scatter};
    m->comm = (fc_comm){.size = RANKS, .device = &m->device, .on_device = &collectives};
    MUST(fc_fsdp_new(&m->comm, NULL, &m->compute, options, &m->fsdp, &m->err));
    add_units(m, strategy);
}

static void forward(model *m) {
    MUST(fc_fsdp_root_pre_forward(m->fsdp, NULL, 0, &m->err));
    MUST(fc_fsdp_pre_forward(m->root, true, NULL, 0, &m->err));
    for (int i = 0; i < UNITS; i++) {
        MUST(fc_fsdp_pre_forward(m->units[i], true, NULL, 0, &m->err));
        m->compute.now += FORWARD;
        MUST(fc_fsdp_post_forward(m->units[i], &m->err));
    }
    MUST(fc_fsdp_post_forward(m->root, &m->err));
}

/* Returns when the last gradient is computed. */
static long backward(model *m) {
    fc_array grad;
    MUST(fc_fsdp_pre_backward(m->root, &m->err));
    for (int i = UNITS; i-- > 0;) {
        MUST(fc_fsdp_pre_backward(m->units[i], &m->err));
        MUST(fc_fsdp_grad(m->handles[i], 0, &grad, &m->err));
        m->compute.now += BACKWARD;
        MUST(fc_fsdp_post_backward(m->handles[i], &m->err));
    }
    long computed = m->compute.now;
    MUST(fc_fsdp_post_backward_final(m->fsdp, &m->err));
    MUST(fc_fsdp_zero_grad(m->fsdp, &m->err));
    return computed;
}

/* What a step takes: the forward, the backward until its last gradient, and until that is reduced; and its memory. */
typedef struct lengths {
    long forward, backward, reduced;
    size_t blocks;
} lengths;

static lengths measure(fc_fsdp_options options, fc_sharding_strategy strategy) {
    model m;
    lengths l = {0};
    open_model(&m, &options, strategy);
    for (int step = 0; step < 5; step++) { /* the first one has no order to prefetch by, and memory must not grow */
        long start = m.compute.now;
        forward(&m);
        long middle = m.compute.now, computed = backward(&m);
        l = (lengths){middle - start, computed - middle, m.compute.now - middle, m.machine.bytes / (NUMEL * 4)};
    }
    fc_fsdp_free(m.fsdp);
    return l;
}

static void check(const char *what, fc_fsdp_options options, lengths wanted) {
    lengths l = measure(options, FC_FULL_SHARD);
    print_message("%s: forward %ld, backward %ld and %ld, %zu units of memory\n", what, l.forward, l.backward,
                  l.reduced, l.blocks);
    assert_int_equal(l.forward, wanted.forward);
    assert_int_equal(l.backward, wanted.backward);
    assert_int_equal(l.reduced, wanted.reduced);
    assert_int_equal(l.blocks, wanted.blocks);
}

/* Only the first gather and the last reduction are not hidden by the computation. */
enum { ALL_FORWARD = GATHER + UNITS * FORWARD, ALL_BACKWARD = UNITS * BACKWARD, ALL_REDUCED = ALL_BACKWARD + REDUCE };

static void prefetching_hides_the_network(void **state) {
    (void)state;
    check("the default", (fc_fsdp_options){0}, (lengths){ALL_FORWARD, ALL_BACKWARD, ALL_REDUCED, 4});
    check("forward too", (fc_fsdp_options){.forward_prefetch = true},
          (lengths){ALL_FORWARD, ALL_BACKWARD, ALL_REDUCED, 4});
    check("after the gradients", (fc_fsdp_options){.backward_prefetch = FC_BACKWARD_PREFETCH_POST},
          (lengths){ALL_FORWARD, ALL_BACKWARD, ALL_REDUCED, 3});
    check("after the gradients, forward too",
          (fc_fsdp_options){.backward_prefetch = FC_BACKWARD_PREFETCH_POST, .forward_prefetch = true},
          (lengths){ALL_FORWARD, ALL_BACKWARD, ALL_REDUCED, 3});
}

/* Each unit further ahead costs the memory of one unit, and nothing is left to gain. */
static void further_ahead_costs_memory(void **state) {
    (void)state;
    for (int ahead = 1; ahead <= 4; ahead++) {
        fc_fsdp_options o = {
            .forward_prefetch = true, .forward_prefetch_limit = ahead, .backward_prefetch_limit = ahead};
        check("ahead", o, (lengths){ALL_FORWARD, ALL_BACKWARD, ALL_REDUCED, 3 + (size_t)ahead});
    }
}

/* The gather of a unit then follows the reduction of the one before it, as in torch. */
static void without_prefetch(void **state) {
    (void)state;
    long unhidden = (UNITS - 1) * (GATHER + REDUCE);
    fc_fsdp_options o = {.backward_prefetch = FC_BACKWARD_PREFETCH_NONE};
    check("none", o, (lengths){ALL_FORWARD, ALL_BACKWARD + unhidden, ALL_REDUCED + unhidden, 3});
}

/* One freed unit less, and every gather of the backward waits for the computation that used its memory. */
static void fewer_gathers_in_flight(void **state) {
    (void)state;
    fc_fsdp_options o = {.limit_all_gathers = 1};
    lengths l = measure(o, FC_FULL_SHARD);
    assert_int_equal(l.blocks, 3);
    assert_true(l.backward > ALL_BACKWARD);
    o.limit_all_gathers = 3;
    check("three", o, (lengths){ALL_FORWARD, ALL_BACKWARD, ALL_REDUCED, 4});
}

static void kept_parameters_are_gathered_once(void **state) {
    (void)state;
    lengths l = measure((fc_fsdp_options){0}, FC_SHARD_GRAD_OP);
    assert_int_equal(l.forward, ALL_FORWARD);
    assert_int_equal(l.reduced, ALL_REDUCED);
    assert_in_range(l.blocks, UNITS + 1, UNITS + 2); /* the parameters, and gradients that are being reduced */
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(prefetching_hides_the_network),
        cmocka_unit_test(further_ahead_costs_memory),
        cmocka_unit_test(without_prefetch),
        cmocka_unit_test(fewer_gathers_in_flight),
        cmocka_unit_test(kept_parameters_are_gathered_once),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
