/*
 * train: which units are prefetched, and when. The expected order of gathers and frees is written out here;
 * tests/oracle/fsdp_step.py compares it with torch.
 */
#include "fsdp_model.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

static const char *const moves[] = {"ALL_GATHER", "PREFETCH", "FREE", NULL};

typedef struct expectation {
    fc_fsdp_options options;
    fc_fsdp_unit_options unit;
    const int *second_order; /* the order of the units in the second iteration; NULL: the same as in the first */
    const char *forward[2], *backward[2];
} expectation;

static fc_code check_words(const char *what, int iteration, const char *got, const char *wanted, fc_error *err) {
    if (wanted && strcmp(got, wanted) != 0) {
        return fc_fail(err, FC_EFOUND, "%s %d: got %s, wanted %s", what, iteration, got, wanted);
    }
    return FC_OK;
}

static fc_code on_rank(fc_comm *comm, void *context, fc_error *err) {
    const expectation *e = context;
    fsdp_model m;
    fc_code rc = model_open(&m, comm, NULL, comm->rank, e->options, e->unit, err);
    for (int k = 0; rc == FC_OK && k < 2; k++) {
        const int *order = k == 1 ? e->second_order : NULL;
        model_clear(&m);
        rc = model_forward(&m, order, err);
        rc = rc == FC_OK ? check_words("forward", k, model_events(&m, moves), e->forward[k], err) : rc;
        model_clear(&m);
        rc = rc == FC_OK ? model_backward(&m, order, err) : rc;
        rc = rc == FC_OK ? check_words("backward", k, model_events(&m, moves), e->backward[k], err) : rc;
        rc = rc == FC_OK ? model_optimize(&m, err) : rc;
    }
    if (rc == FC_OK && fc_fsdp_memory(m.fsdp, NULL) != 0) {
        rc = fc_fail(err, FC_EFOUND, "memory is left in use between steps");
    }
    model_close(&m);
    return rc;
}

static void check(expectation *e) {
    fc_error err = {FC_OK, ""};
    fc_code rc = fc_device_run_local(3, on_rank, e, &err);
    assert_string_equal(err.message, "");
    assert_int_equal(rc, FC_OK);
}

#define FORWARD "ALL_GATHER:unit0 ALL_GATHER:unit1 FREE:unit1 ALL_GATHER:unit2 FREE:unit2 ALL_GATHER:unit3 FREE:unit3"

static void without_prefetch(void **state) {
    (void)state;
    expectation e = {.options = {.backward_prefetch = FC_BACKWARD_PREFETCH_NONE},
                     .forward = {FORWARD, FORWARD},
                     .backward = {"ALL_GATHER:unit3 FREE:unit3 ALL_GATHER:unit2 FREE:unit2 ALL_GATHER:unit1 FREE:unit1 "
                                  "FREE:unit0"}};
    check(&e);
}

/* A unit is prefetched before the computation of another: the root's pre-backward gathers unit 3, and unit 3's gathers
   unit 2. The root was never freed. */
static void backward_pre(void **state) {
    (void)state;
    static const char *const wanted =
        "ALL_GATHER:unit3 PREFETCH:unit3 ALL_GATHER:unit2 PREFETCH:unit2 FREE:unit3 ALL_GATHER:unit1 PREFETCH:unit1 "
        "FREE:unit2 FREE:unit1 FREE:unit0";
    expectation e = {.forward = {FORWARD, FORWARD}, /* the default, as in torch */
                     .backward = {wanted, wanted}};
    check(&e);
}

/* Prefetching after the parameters of a unit are freed. */
static void backward_post(void **state) {
    (void)state;
    static const char *const wanted =
        "ALL_GATHER:unit3 FREE:unit3 ALL_GATHER:unit2 PREFETCH:unit2 FREE:unit2 ALL_GATHER:unit1 PREFETCH:unit1 "
        "FREE:unit1 FREE:unit0";
    expectation e = {.options = {.backward_prefetch = FC_BACKWARD_PREFETCH_POST},
                     .forward = {FORWARD, FORWARD},
                     .backward = {wanted, wanted}};
    check(&e);
}

/* Forward prefetch works from the second iteration on, when the order is known. */
static void forward_order(void **state) {
    (void)state;
    expectation e = {.options = {.forward_prefetch = true},
                     .forward = {FORWARD, "ALL_GATHER:unit0 ALL_GATHER:unit1 PREFETCH:unit1 ALL_GATHER:unit2 "
                                          "PREFETCH:unit2 FREE:unit1 ALL_GATHER:unit3 PREFETCH:unit3 FREE:unit2 "
                                          "FREE:unit3"}};
    check(&e);
}

static void two_units_ahead(void **state) {
    (void)state;
    expectation e = {.options = {.forward_prefetch = true,
                                 .forward_prefetch_limit = 2,
                                 .backward_prefetch = FC_BACKWARD_PREFETCH_PRE,
                                 .backward_prefetch_limit = 2},
                     .forward = {FORWARD, "ALL_GATHER:unit0 ALL_GATHER:unit1 PREFETCH:unit1 ALL_GATHER:unit2 "
                                          "PREFETCH:unit2 ALL_GATHER:unit3 PREFETCH:unit3 FREE:unit1 FREE:unit2 "
                                          "FREE:unit3"},
                     .backward = {"ALL_GATHER:unit3 PREFETCH:unit3 ALL_GATHER:unit2 PREFETCH:unit2 ALL_GATHER:unit1 "
                                  "PREFETCH:unit1 FREE:unit3 FREE:unit2 FREE:unit1 FREE:unit0"}};
    check(&e);
}

/* The order of the first iteration is wrong for the second. Units gathered by mistake are freed at the end, and none is
   gathered twice. */
static void another_order(void **state) {
    (void)state;
    static const int order[] = {3, 1, 2};
    expectation e = {.options = {.forward_prefetch = true},
                     .second_order = order,
                     .forward = {FORWARD, "ALL_GATHER:unit0 ALL_GATHER:unit1 PREFETCH:unit1 ALL_GATHER:unit3 "
                                          "FREE:unit3 ALL_GATHER:unit2 PREFETCH:unit2 FREE:unit1 FREE:unit2"}};
    check(&e);
}

/* SHARD_GRAD_OP keeps parameters from forward to backward, so the backward prefetches nothing. */
static void kept_parameters(void **state) {
    (void)state;
    expectation e = {
        .options = {.backward_prefetch = FC_BACKWARD_PREFETCH_PRE},
        .unit = {.strategy = FC_SHARD_GRAD_OP},
        .forward = {"ALL_GATHER:unit0 ALL_GATHER:unit1 ALL_GATHER:unit2 ALL_GATHER:unit3"},
        .backward = {"PREFETCH:unit3 PREFETCH:unit2 FREE:unit3 PREFETCH:unit1 FREE:unit2 FREE:unit1 FREE:unit0"}};
    check(&e);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(without_prefetch), cmocka_unit_test(backward_pre),    cmocka_unit_test(backward_post),
        cmocka_unit_test(forward_order),    cmocka_unit_test(two_units_ahead), cmocka_unit_test(another_order),
        cmocka_unit_test(kept_parameters),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
