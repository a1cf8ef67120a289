/*
 * Box arithmetic: scalars, empty boxes, and numbers near 2^63.
 */
#include "fsdpckpt/box.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

static void element_counts(void **state) {
    (void)state;
    int64_t n = -1;
    assert_true(fc_numel(0, NULL, &n));
    assert_int_equal(n, 1);
    assert_true(fc_numel(3, (int64_t[]){2, 3, 4}, &n));
    assert_int_equal(n, 24);
    assert_true(fc_numel(3, (int64_t[]){INT64_MAX, INT64_MAX, 0}, &n));
    assert_int_equal(n, 0);
    assert_false(fc_numel(2, (int64_t[]){INT64_C(1) << 32, INT64_C(1) << 31}, &n));
    assert_false(fc_numel(2, (int64_t[]){0, -1}, &n));
    fc_box scalar = {0, NULL, NULL};
    assert_int_equal(fc_box_volume(&scalar), 1);
}

static void boxes_within_boxes(void **state) {
    (void)state;
    const int64_t shape[] = {4, 6};
    fc_box box = {2, (int64_t[]){1, 2}, (int64_t[]){3, 4}};
    assert_true(fc_box_within(&box, shape));
    box.sizes = (int64_t[]){4, 4};
    assert_false(fc_box_within(&box, shape));
    box.sizes = (int64_t[]){INT64_MAX, 1};
    assert_false(fc_box_within(&box, shape));
    box.sizes = (int64_t[]){-1, 1};
    assert_false(fc_box_within(&box, shape));
    box.offsets = (int64_t[]){-1, 0};
    box.sizes = (int64_t[]){2, 2};
    assert_false(fc_box_within(&box, shape));
    box.offsets = (int64_t[]){4, 0};
    box.sizes = (int64_t[]){0, 6};
    assert_true(fc_box_within(&box, shape));
    fc_box scalar = {0, NULL, NULL};
    assert_true(fc_box_within(&scalar, NULL));
}

static void equal_boxes(void **state) {
    (void)state;
    fc_box a = {2, (int64_t[]){1, 2}, (int64_t[]){3, 4}};
    fc_box b = {2, (int64_t[]){1, 2}, (int64_t[]){3, 4}};
    assert_true(fc_box_equal(&a, &b));
    b.sizes = (int64_t[]){3, 5};
    assert_false(fc_box_equal(&a, &b));
    b.sizes = a.sizes;
    b.offsets = (int64_t[]){0, 2};
    assert_false(fc_box_equal(&a, &b));
    b = (fc_box){1, a.offsets, a.sizes};
    assert_false(fc_box_equal(&a, &b));
    fc_box scalar = {0, NULL, NULL};
    assert_true(fc_box_equal(&scalar, &scalar));
}

static void intersections(void **state) {
    (void)state;
    int64_t offsets[2], sizes[2];
    fc_box a = {2, (int64_t[]){0, 0}, (int64_t[]){4, 4}};
    fc_box b = {2, (int64_t[]){2, 1}, (int64_t[]){4, 2}};
    assert_true(fc_box_intersect(&a, &b, offsets, sizes));
    assert_memory_equal(offsets, ((int64_t[]){2, 1}), sizeof offsets);
    assert_memory_equal(sizes, ((int64_t[]){2, 2}), sizeof sizes);
    b.offsets = (int64_t[]){4, 0}; /* touches without sharing an element */
    assert_false(fc_box_intersect(&a, &b, offsets, sizes));
    b.offsets = (int64_t[]){1, 1};
    b.sizes = (int64_t[]){0, 2};
    assert_false(fc_box_intersect(&a, &b, offsets, sizes));
    fc_box scalar = {0, NULL, NULL};
    assert_true(fc_box_intersect(&scalar, &scalar, offsets, sizes));
}

static void row_major_strides(void **state) {
    (void)state;
    int64_t s[3];
    assert_true(fc_row_major_strides(3, (int64_t[]){2, 3, 4}, s));
    assert_memory_equal(s, ((int64_t[]){12, 4, 1}), sizeof s);
    assert_true(fc_row_major_strides(3, (int64_t[]){2, 0, 4}, s));
    assert_memory_equal(s, ((int64_t[]){4, 4, 1}), sizeof s);
    assert_false(fc_row_major_strides(3, (int64_t[]){4, INT64_C(1) << 31, INT64_C(1) << 31}, s));
    assert_true(fc_row_major_strides(0, NULL, s));
}

static void row_major_is_as_in_torch(void **state) {
    (void)state;
    assert_true(fc_is_row_major(0, NULL, NULL));
    assert_true(fc_is_row_major(3, (int64_t[]){2, 3, 4}, (int64_t[]){12, 4, 1}));
    assert_false(fc_is_row_major(3, (int64_t[]){2, 3, 4}, (int64_t[]){24, 8, 2}));
    assert_false(fc_is_row_major(2, (int64_t[]){2, 3}, (int64_t[]){1, 2}));
    assert_false(fc_is_row_major(2, (int64_t[]){2, 3}, (int64_t[]){0, 1}));
    /* torch: torch.empty(1, 3).as_strided((1, 3), (7, 1)).is_contiguous() and torch.empty(2, 0).t() are True. */
    assert_true(fc_is_row_major(2, (int64_t[]){1, 3}, (int64_t[]){7, 1}));
    assert_true(fc_is_row_major(2, (int64_t[]){0, 3}, (int64_t[]){9, 9}));
    assert_false(fc_is_row_major(3, (int64_t[]){4, INT64_C(1) << 31, INT64_C(1) << 31},
                                 (int64_t[]){INT64_C(1) << 62, INT64_C(1) << 31, 1}));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(element_counts),    cmocka_unit_test(boxes_within_boxes),
        cmocka_unit_test(equal_boxes),       cmocka_unit_test(intersections),
        cmocka_unit_test(row_major_strides), cmocka_unit_test(row_major_is_as_in_torch),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
