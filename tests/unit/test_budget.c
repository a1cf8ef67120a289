/*
 * Unit tests of how the memory of a job is divided among its workers, and of how many there are.
 */
#include "read/budget.h"
#include "read/source.h"
#include "read/tuning.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

enum { MIB = 1 << 20 };

/* What all workers hold. */
static uint64_t held(const fc_budget *b, const fc_worker_needs *needs) {
    const uint64_t window = b->window + fc_source_overhead();
    return (uint64_t)b->threads *
           ((uint64_t)needs->sources * window + (uint64_t)needs->tiles * b->large_tile + needs->extra);
}

/* Whatever the memory, the workers and the decoded chunks fit in it. */
static void test_memory(void **state) {
    static const uint64_t sizes[] = {2 * MIB, 4 * MIB, 8 * MIB, FC_DEFAULT_MEMORY, 256ULL * MIB, 4096ULL * MIB};
    fc_error err;
    (void)state;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        for (int remote = 0; remote < 2; remote++) {
            for (int sides = 1; sides < 3; sides++) {
                const fc_work_options options = {.memory = sizes[i]};
                const fc_worker_needs needs = {.sources = sides, .tiles = sides, .extra = 10000, .remote = remote};
                fc_budget b;
                assert_int_equal(fc_budget_divide(&options, FC_THREADS_REMOTE, &needs, &b, &err), FC_OK);
                assert_in_range(b.threads, 1, FC_THREADS_REMOTE);
                assert_in_range(b.tile, FC_LEAST_TILE_BYTES, FC_TILE_BYTES);
                assert_in_range(b.window, FC_LEAST_TILE_BYTES, FC_SCRATCH_BYTES);
                assert_true(held(&b, &needs) <= (remote ? sizes[i] / 4 * 3 : sizes[i] / 2));
                assert_true(held(&b, &needs) + b.decoded * (uint64_t)sides <= sizes[i]);
                assert_true(!remote || b.threads == 1 || b.tile >= FC_LEAST_REMOTE_BYTES);
            }
        }
    }
}

/* The default memory is enough for all requests to servers, of a size that is worth one. */
static void test_servers(void **state) {
    const fc_worker_needs needs = {.sources = 1, .tiles = 1, .extra = 10000, .remote = true};
    fc_budget b;
    fc_error err;
    (void)state;
    assert_int_equal(fc_budget_divide(NULL, FC_THREADS_REMOTE, &needs, &b, &err), FC_OK);
    assert_int_equal(b.threads, FC_THREADS_REMOTE);
    assert_true(b.tile >= 3 * FC_TILE_BYTES / 4);
    assert_int_equal(fc_wanted_threads(0, true, 1), FC_THREADS_REMOTE);
    assert_int_equal(fc_wanted_threads(0, true, 4), FC_THREADS_REMOTE / 4);
    assert_int_equal(fc_wanted_threads(0, true, 1000), FC_THREADS_SHARED);
    assert_int_equal(fc_wanted_threads(0, false, 1), 0);
    assert_int_equal(fc_wanted_threads(3, true, 4), 3);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_memory), cmocka_unit_test(test_servers)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
