/*
 * The backend "local" apart from gathering and reducing: broadcasts, splits and agreement. A rank that fails or returns
 * early never leaves the others waiting.
 */
#include "comm_cases.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "on_all_sizes.h"

static void broadcasts(void **state) {
    (void)state;
    on_all_sizes(case_broadcast);
}

static void splits(void **state) {
    (void)state;
    on_all_sizes(case_split);
    on_all_sizes(case_split_mesh);
}

static void agreement(void **state) {
    (void)state;
    on_all_sizes(case_agree);
}

static void bad_calls_are_refused(void **state) {
    (void)state;
    on_all_sizes(case_refusals);
}

/* The errors that the ranks of a failing run get. */
typedef struct outcomes {
    int bad;
    fc_code codes[8];
    fc_error errors[8];
} outcomes;

static fc_code gather_int(fc_comm *comm, fc_error *err) {
    int all[8];
    return comm->all_gather(comm, &comm->rank, all, sizeof *all, err);
}

static fc_code one_fails(fc_comm *comm, void *context, fc_error *err) {
    outcomes *s = context;
    fc_code rc = gather_int(comm, err);
    assert_int_equal(rc, FC_OK);
    if (comm->rank == s->bad) {
        return fc_fail(err, FC_EIO, "the disk is full");
    }
    rc = gather_int(comm, err);
    s->codes[comm->rank] = rc;
    s->errors[comm->rank] = *err;
    return rc;
}

static void a_failure_reaches_all(void **state) {
    (void)state;
    for (int size = 2; size <= 8; size++) {
        for (int bad = 0; bad < size; bad++) {
            outcomes s = {.bad = bad};
            fc_error err = {FC_OK, ""};
            char wanted[64];
            snprintf(wanted, sizeof wanted, "rank %d: the disk is full", bad);
            assert_int_equal(fc_device_run_local(size, one_fails, &s, &err), FC_EIO);
            assert_string_equal(err.message, wanted);
            for (int r = 0; r < size; r++) {
                if (r != bad) {
                    assert_int_equal(s.codes[r], FC_EIO);
                    assert_string_equal(s.errors[r].message, wanted);
                }
            }
        }
    }
}

static fc_code one_leaves(fc_comm *comm, void *context, fc_error *err) {
    return comm->rank == *(int *)context ? FC_OK : comm->barrier(comm, err);
}

static void a_rank_returns_early(void **state) {
    (void)state;
    for (int bad = 0; bad < 4; bad++) {
        fc_error err = {FC_OK, ""};
        char wanted[96];
        snprintf(wanted, sizeof wanted, "rank %d: returned while other ranks wait for it in barrier", bad);
        assert_int_equal(fc_device_run_local(4, one_leaves, &bad, &err), FC_EUSAGE);
        assert_string_equal(err.message, wanted);
    }
}

/* Rank 3 fails while ranks 0 and 1 meet in a group without it, and rank 2 waits for it in another. */
static fc_code fails_elsewhere(fc_comm *comm, void *context, fc_error *err) {
    (void)context;
    fc_comm *group;
    fc_code rc = comm->split(comm, comm->rank / 2, &group, err);
    if (rc != FC_OK) {
        return rc;
    }
    if (comm->rank == 3) {
        rc = fc_fail(err, FC_ECORRUPT, "no tensor");
    } else {
        for (int i = 0; rc == FC_OK && i < 1000000; i++) {
            rc = group->barrier(group, err);
        }
    }
    group->free(group);
    return rc;
}

static void a_failure_crosses_groups(void **state) {
    (void)state;
    fc_error err = {FC_OK, ""};
    assert_int_equal(fc_device_run_local(4, fails_elsewhere, NULL, &err), FC_ECORRUPT);
    assert_string_equal(err.message, "rank 3: no tensor");
}

/* Buffers are freed as soon as a call returns, so a sanitizer finds a rank that still reads them. */
static fc_code fails_while_copying(fc_comm *comm, void *context, fc_error *err) {
    (void)context;
    fc_code rc = FC_OK;
    fc_comm *group;
    rc = comm->split(comm, comm->rank == 0, &group, err);
    if (rc != FC_OK) {
        return rc;
    }
    for (int i = 0; rc == FC_OK && i < 20; i++) {
        if (comm->rank == 0 && i == 3) {
            rc = fc_fail(err, FC_EIO, "gone");
            break;
        }
        size_t bytes = 100000;
        char *send = calloc(1, bytes), *recv = malloc(bytes * (size_t)group->size);
        rc = group->all_gather(group, send, recv, bytes, err);
        free(send);
        free(recv);
    }
    group->free(group);
    return rc;
}

static void freed_memory_is_not_read(void **state) {
    (void)state;
    for (int i = 0; i < 20; i++) {
        assert_int_equal(fc_device_run_local(4, fails_while_copying, NULL, NULL), FC_EIO);
    }
}

static fc_code different_calls(fc_comm *comm, void *context, fc_error *err) {
    float data[8] = {0};
    switch (*(int *)context) {
    case 0:
        return comm->rank == 1 ? comm->barrier(comm, err) : comm->broadcast(comm, data, 4, 0, err);
    case 1:
        return comm->broadcast(comm, data, comm->rank == 1 ? 8 : 4, 0, err);
    case 2:
        return comm->all_reduce(comm, data, 4, comm->rank == 1 ? FC_I32 : FC_F32, FC_REDUCE_SUM, err);
    default:
        return comm->broadcast(comm, data, 4, comm->rank == 1 ? 1 : 0, err);
    }
}

static void different_calls_are_refused(void **state) {
    (void)state;
    for (int kind = 0; kind < 4; kind++) {
        fc_error err = {FC_OK, ""};
        assert_int_equal(fc_device_run_local(3, different_calls, &kind, &err), FC_EUSAGE);
        assert_non_null(strstr(err.message, "rank 1: "));
    }
}

static fc_code cancelled(fc_comm *comm, void *context, fc_error *err) {
    static atomic_bool stop;
    (void)context;
    atomic_store(&stop, false);
    fc_code rc = comm->barrier(comm, err);
    if (rc != FC_OK) {
        return rc;
    }
    comm->cancel = &stop;
    if (comm->rank == 0) {
        atomic_store(&stop, true);
        while (rc == FC_OK) { /* never joins, so only the flag can end the wait of the others */
            rc = atomic_load(&stop) ? fc_fail(err, FC_EINTERRUPTED, "interrupted") : FC_OK;
        }
        return rc;
    }
    return comm->barrier(comm, err);
}

static void cancel_ends_every_wait(void **state) {
    (void)state;
    assert_int_equal(fc_device_run_local(4, cancelled, NULL, NULL), FC_EINTERRUPTED);
}

static fc_code nothing(fc_comm *comm, void *context, fc_error *err) {
    (void)comm;
    (void)context;
    (void)err;
    return FC_OK;
}

static void sizes_of_the_backend(void **state) {
    (void)state;
    assert_int_equal(fc_device_run_local(0, nothing, NULL, NULL), FC_EUSAGE);
    assert_int_equal(fc_device_run_local(-1, nothing, NULL, NULL), FC_EUSAGE);
    assert_int_equal(fc_device_run_local(1 << 20, nothing, NULL, NULL), FC_EUSAGE);
    assert_int_equal(fc_device_run_local(64, nothing, NULL, NULL), FC_OK);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(broadcasts),
        cmocka_unit_test(splits),
        cmocka_unit_test(agreement),
        cmocka_unit_test(bad_calls_are_refused),
        cmocka_unit_test(a_failure_reaches_all),
        cmocka_unit_test(a_rank_returns_early),
        cmocka_unit_test(a_failure_crosses_groups),
        cmocka_unit_test(freed_memory_is_not_read),
        cmocka_unit_test(different_calls_are_refused),
        cmocka_unit_test(cancel_ends_every_wait),
        cmocka_unit_test(sizes_of_the_backend),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
