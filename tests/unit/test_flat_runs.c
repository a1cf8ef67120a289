/*
 * Flat runs as boxes. For every run of several small shapes, the boxes cover the run exactly and in order, each is a
 * run itself, and there are as few as possible.
 */
#include "sharding/flat_runs.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

enum { MOST = 512 };

/* Returns the flat index of element `k` of a box, counted in the box's row-major order. */
static int64_t element(int ndim, const int64_t *shape, const int64_t *dims, int64_t k) {
    int64_t flat = 0, stride = 1;
    for (int d = ndim - 1; d >= 0; d--) {
        flat += (dims[d] + k % dims[ndim + d]) * stride;
        k /= dims[ndim + d];
        stride *= shape[d];
    }
    return flat;
}

/* Returns whether elements [start, end) form a box, which is true if their bounding box has the same volume. */
static bool is_box(int ndim, const int64_t *shape, int64_t start, int64_t end) {
    int64_t low[4], high[4], volume = 1;
    for (int64_t i = start; i < end; i++) {
        int64_t rest = i;
        for (int d = ndim - 1; d >= 0; d--) {
            int64_t at = rest % shape[d];
            rest /= shape[d];
            low[d] = i == start || at < low[d] ? at : low[d];
            high[d] = i == start || at > high[d] ? at : high[d];
        }
    }
    for (int d = 0; d < ndim; d++) {
        volume *= high[d] - low[d] + 1;
    }
    return volume == end - start;
}

/* Returns the smallest possible number of boxes, by trying every way to cut the run. */
static int fewest(int ndim, const int64_t *shape, int64_t start, int64_t end) {
    int best[MOST];
    best[0] = 0;
    for (int64_t n = 1; n <= end - start; n++) {
        best[n] = MOST;
        for (int64_t k = 0; k < n; k++) {
            if (best[k] + 1 < best[n] && is_box(ndim, shape, start + k, start + n)) {
                best[n] = best[k] + 1;
            }
        }
    }
    return best[end - start];
}

static void check_run(int ndim, const int64_t *shape, int64_t start, int64_t end) {
    fc_flat_run run;
    int64_t dims[8], first, at = start;
    int boxes = 0;
    assert_true(fc_flat_run_start(&run, ndim, shape, start, end));
    while (fc_flat_run_next(&run, dims, &first)) {
        fc_box box = {ndim, dims, dims + ndim};
        int64_t volume = fc_box_volume(&box);
        assert_true(fc_box_within(&box, shape));
        assert_true(volume > 0);
        assert_int_equal(first, at);
        for (int64_t k = 0; k < volume; k++) {
            assert_int_equal(element(ndim, shape, dims, k), at++);
        }
        boxes++;
    }
    assert_int_equal(at, end);
    assert_true(boxes <= fc_flat_run_most(ndim));
    assert_int_equal(boxes, fewest(ndim, shape, start, end));
}

static void every_run(void **state) {
    static const struct {
        int ndim;
        int64_t shape[4];
    } shapes[] = {{0, {0}},       {1, {7}},          {1, {1}},          {2, {4, 5}},
                  {2, {1, 6}},    {2, {6, 1}},       {3, {3, 2, 4}},    {3, {2, 1, 3}},
                  {3, {1, 1, 1}}, {4, {2, 3, 2, 2}}, {4, {2, 1, 2, 3}}, {4, {2, 2, 2, 2}}};
    (void)state;
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++) {
        int64_t numel;
        assert_true(fc_numel(shapes[s].ndim, shapes[s].shape, &numel));
        for (int64_t start = 0; start <= numel; start++) {
            for (int64_t end = start; end <= numel; end++) {
                check_run(shapes[s].ndim, shapes[s].shape, start, end);
            }
        }
    }
}

static void an_empty_run_has_no_boxes(void **state) {
    const int64_t shape[] = {3, 0, 2};
    fc_flat_run run;
    int64_t dims[6], start;
    (void)state;
    assert_true(fc_flat_run_start(&run, 3, shape, 0, 0));
    assert_false(fc_flat_run_next(&run, dims, &start));
    assert_false(fc_flat_run_start(&run, 3, shape, 0, 1));
}

static void bad_runs_are_refused(void **state) {
    const int64_t shape[] = {3, 4}, huge[] = {INT64_MAX, 2}, negative[] = {3, -4};
    fc_flat_run run;
    (void)state;
    assert_false(fc_flat_run_start(&run, 2, shape, -1, 4));
    assert_false(fc_flat_run_start(&run, 2, shape, 5, 4));
    assert_false(fc_flat_run_start(&run, 2, shape, 0, 13));
    assert_false(fc_flat_run_start(&run, 2, huge, 0, 1));
    assert_false(fc_flat_run_start(&run, 2, negative, 0, 0));
}

static void large_numbers(void **state) {
    const int64_t shape[] = {2, INT64_MAX / 2};
    fc_flat_run run;
    int64_t dims[4], start;
    (void)state;
    assert_true(fc_flat_run_start(&run, 2, shape, INT64_MAX / 2 - 1, INT64_MAX - 1));
    assert_true(fc_flat_run_next(&run, dims, &start));
    assert_memory_equal(dims, ((int64_t[]){0, INT64_MAX / 2 - 1, 1, 1}), sizeof dims);
    assert_true(fc_flat_run_next(&run, dims, &start));
    assert_memory_equal(dims, ((int64_t[]){1, 0, 1, INT64_MAX / 2}), sizeof dims);
    assert_int_equal(start, INT64_MAX / 2);
    assert_false(fc_flat_run_next(&run, dims, &start));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_run),
        cmocka_unit_test(an_empty_run_has_no_boxes),
        cmocka_unit_test(bad_runs_are_refused),
        cmocka_unit_test(large_numbers),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
