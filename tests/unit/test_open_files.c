/*
 * Tests fc_open_files: files are taken in order, the first error in that order is returned, and every slot is released.
 */
#include "read/open_files.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <sched.h>
#include <stdio.h>
#include <sys/resource.h>

typedef struct fake_files {
    atomic_size_t opened, closed, held, most_held;
    size_t taken;
    size_t bad_open, bad_take; /* files that fail; SIZE_MAX: none */
} fake_files;

typedef struct fake_slot {
    fake_files *files;
    size_t index;
    size_t was; /* 0 if the slot was zeroed */
} fake_slot;

static fc_code open_fake(void *context, size_t index, void *slot, fc_error *err) {
    fake_files *files = context;
    fake_slot *s = slot;
    assert_int_equal(s->was, 0);
    *s = (fake_slot){files, index, 1};
    size_t held = atomic_fetch_add(&files->held, 1) + 1, most = atomic_load(&files->most_held);
    while (held > most && !atomic_compare_exchange_weak(&files->most_held, &most, held)) {
    }
    atomic_fetch_add(&files->opened, 1);
    for (size_t i = 0; i < index * 7 % 5; i++) { /* files take different times */
        sched_yield();
    }
    return index >= files->bad_open ? fc_fail(err, FC_ECORRUPT, "file %zu", index) : FC_OK;
}

static fc_code take_fake(void *context, size_t index, void *slot, fc_error *err) {
    fake_files *files = context;
    const fake_slot *s = slot;
    assert_int_equal(index, files->taken++);
    assert_int_equal(s->index, index);
    return index == files->bad_take ? fc_fail(err, FC_EINTERRUPTED, "taking %zu", index) : FC_OK;
}

static void close_fake(void *slot) {
    fake_files *files = ((fake_slot *)slot)->files;
    atomic_fetch_add(&files->closed, 1);
    atomic_fetch_sub(&files->held, 1);
}

static fc_code run(fake_files *files, size_t count, fc_error *err) {
    const fc_file_opener how = {.count = count,
                                .slot_size = sizeof(fake_slot),
                                .context = files,
                                .open = open_fake,
                                .take = take_fake,
                                .close = close_fake};
    fc_code rc = fc_open_files(&how, err);
    assert_int_equal(atomic_load(&files->opened), atomic_load(&files->closed));
    assert_in_range(atomic_load(&files->most_held), count > 0, 16);
    return rc;
}

static const size_t counts[] = {0, 1, 2, 15, 16, 33, 5000};

static void test_order(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        fake_files files = {.bad_open = SIZE_MAX, .bad_take = SIZE_MAX};
        assert_int_equal(run(&files, counts[i], NULL), FC_OK);
        assert_int_equal(files.taken, counts[i]);
    }
}

static void test_errors(void **state) {
    (void)state;
    for (size_t i = 1; i < sizeof counts / sizeof *counts; i++) {
        fc_error err;
        const size_t bad = counts[i] / 2;
        fake_files files = {.bad_open = bad, .bad_take = SIZE_MAX}; /* all from there on fail; the first is reported */
        char wanted[32];
        snprintf(wanted, sizeof wanted, "file %zu", bad);
        assert_int_equal(run(&files, counts[i], &err), FC_ECORRUPT);
        assert_string_equal(err.message, wanted);
        assert_int_equal(files.taken, bad);
        files = (fake_files){.bad_open = bad + 1, .bad_take = bad};
        snprintf(wanted, sizeof wanted, "taking %zu", bad);
        assert_int_equal(run(&files, counts[i], &err), FC_EINTERRUPTED);
        assert_string_equal(err.message, wanted);
        assert_int_equal(files.taken, bad + 1);
    }
}

/* With few descriptors, few files are open at a time. */
static void test_descriptors(void **state) {
    (void)state;
    struct rlimit before, few;
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &before), 0);
    few = before;
    few.rlim_cur = 12;
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &few), 0);
    fake_files files = {.bad_open = SIZE_MAX, .bad_take = SIZE_MAX};
    fc_code rc = run(&files, 1000, NULL);
    setrlimit(RLIMIT_NOFILE, &before);
    assert_int_equal(rc, FC_OK);
    assert_in_range(atomic_load(&files.most_held), 1, 6);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_order),
        cmocka_unit_test(test_errors),
        cmocka_unit_test(test_descriptors),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
