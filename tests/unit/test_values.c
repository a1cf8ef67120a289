/*
 * diff's kernels: the result does not depend on the tiles; which values count as equal; how elements are formatted.
 * tests/oracle/diff.py compares the numbers with numpy's.
 */
#include "diff/values.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { N = 2000 };

static void check_same(const fc_deviation *a, const fc_deviation *b) {
    assert_int_equal(a->different, b->different);
    assert_int_equal(a->first, b->first);
    assert_memory_equal(a->first_a, b->first_a, sizeof a->first_a);
    assert_memory_equal(a->first_b, b->first_b, sizeof a->first_b);
    assert_true(a->max_abs == b->max_abs && a->max_rel == b->max_rel);
    assert_int_equal(a->max_abs_at, b->max_abs_at);
    assert_int_equal(a->max_rel_at, b->max_rel_at);
    assert_int_equal(a->nan_both, b->nan_both);
    assert_int_equal(a->nan_one, b->nan_one);
}

/* A tensor is compared in tiles, and their results are added up in any order. */
static void tiles_in_any_order(void **state) {
    (void)state;
    static double a[N], b[N];
    srand(3);
    for (int i = 0; i < N; i++) {
        a[i] = rand() % 50;
        b[i] = rand() % 7 ? a[i] : rand() % 5 ? rand() % 50 : NAN;
    }
    fc_value_rule rule = {.a = FC_F64, .b = FC_F64};
    for (int round = 0; round < 100; round++) {
        fc_deviation whole = {0}, sum = {0}, parts[8] = {{0}};
        size_t cuts[9] = {0};
        rule.tolerant = round % 2;
        rule.atol = 3;
        fc_values_compare(&rule, (void *)a, (void *)b, N, &whole);
        assert_true(whole.different > 10 && whole.nan_one > 10);
        for (int i = 1; i < 8; i++) {
            cuts[i] = cuts[i - 1] + (size_t)rand() % (N / 8);
        }
        cuts[8] = N;
        for (int i = 0; i < 8; i++) {
            const int64_t shape = N, from = (int64_t)cuts[i], size = (int64_t)(cuts[i + 1] - cuts[i]);
            const fc_box box = {1, &from, &size};
            fc_values_compare(&rule, (void *)(a + from), (void *)(b + from), (size_t)size, &parts[i]);
            fc_deviation_place(&parts[i], 1, &box, &shape);
        }
        int start = rand() % 8, step = rand() % 2 ? 3 : 5;
        for (int i = 0; i < 8; i++) {
            fc_deviation_add(&sum, &parts[(start + i * step) % 8]);
        }
        check_same(&whole, &sum);
    }
}

static uint64_t different(fc_dtype dtype, const void *a, const void *b, size_t n, bool tolerant, bool equal_nan) {
    fc_value_rule rule = {.a = dtype, .b = dtype, .tolerant = tolerant, .equal_nan = equal_nan};
    fc_deviation sum = {0};
    fc_values_compare(&rule, a, b, n, &sum);
    return sum.different;
}

static void equal_values(void **state) {
    (void)state;
    const float zero[] = {0.0F}, minus[] = {-0.0F}, nan[] = {NAN};
    uint32_t payload = 0x7fc00001;
    assert_int_equal(different(FC_F32, zero, minus, 1, false, false), 1);
    assert_int_equal(different(FC_F32, zero, minus, 1, true, false), 0);
    assert_int_equal(different(FC_F32, nan, nan, 1, false, false), 0);
    assert_int_equal(different(FC_F32, nan, nan, 1, true, false), 1);
    assert_int_equal(different(FC_F32, nan, nan, 1, true, true), 0);
    assert_int_equal(different(FC_F32, nan, &payload, 1, false, false), 1);
    assert_int_equal(different(FC_F32, nan, &payload, 1, false, true), 0);
    assert_int_equal(different(FC_F32, nan, zero, 1, false, true), 1);
    const unsigned char packed_a[] = {1, 2, 3}, packed_b[] = {1, 9, 4};
    assert_int_equal(different(FC_F4_E2M1FN_X2, packed_a, packed_b, 3, true, true), 2);
    assert_int_equal(different(FC_OPAQUE, packed_a, packed_b, 3, false, false), 2);
    /* 2^53 + 1 and 2^53 are equal as float64 but not as integers. */
    const int64_t big_a[] = {INT64_C(9007199254740993)}, big_b[] = {INT64_C(9007199254740992)};
    assert_int_equal(different(FC_I64, big_a, big_b, 1, true, false), 1);
}

static void mixed_integers(void **state) {
    (void)state;
    const int64_t a[] = {INT64_MIN, -1, 5};
    const uint64_t b[] = {UINT64_MAX, UINT64_MAX, 5};
    fc_value_rule rule = {.a = FC_I64, .b = FC_U64, .tolerant = true};
    fc_deviation sum = {0};
    fc_values_compare(&rule, (const void *)a, (const void *)b, 3, &sum);
    assert_int_equal(sum.different, 2);
    assert_true(sum.max_abs == 27670116110564327423.0);
}

static void elements_as_text(void **state) {
    (void)state;
    static const struct {
        fc_dtype dtype;
        unsigned char bytes[16];
        const char *text;
    } cases[] = {
        {FC_F32, {0xcd, 0xcc, 0xcc, 0x3d}, "0.1"},
        {FC_F64, {0x9a, 0x99, 0x99, 0x99, 0x99, 0x99, 0xb9, 0x3f}, "0.1"},
        {FC_F16, {0x00, 0x7c}, "inf"},
        {FC_BF16, {0xc0, 0xff}, "nan"},
        {FC_F8_E4M3FN, {0x7e}, "448"},
        {FC_F8_E4M3FN, {0x7d}, "416"},
        {FC_I8, {0x80}, "-128"},
        {FC_U64, {0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff}, "18446744073709551615"},
        {FC_I64, {0, 0, 0, 0, 0, 0, 0, 0x80}, "-9223372036854775808"},
        {FC_BOOL, {0}, "false"},
        {FC_BOOL, {1}, "true"},
        {FC_BOOL, {7}, "true (0x07)"},
        {FC_C64, {0, 0, 0x80, 0x3f, 0, 0, 0, 0xc0}, "(1-2j)"},
        {FC_C64, {0, 0, 0x80, 0x3f, 0, 0, 0xc0, 0x7f}, "(1+nanj)"},
        {FC_F4_E2M1FN_X2, {0x5a}, "0x5a"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char text[FC_ELEMENT_TEXT];
        assert_string_equal(fc_element_text(cases[i].dtype, cases[i].bytes, text), cases[i].text);
    }
}

static void indexes_of_elements(void **state) {
    (void)state;
    const int64_t shape[] = {3, 4, 5};
    int64_t index[3];
    fc_unravel(3, shape, 2 * 20 + 1 * 5 + 4, index);
    assert_int_equal(index[0], 2);
    assert_int_equal(index[1], 1);
    assert_int_equal(index[2], 4);
    fc_unravel(0, shape, 0, index);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tiles_in_any_order), cmocka_unit_test(equal_values),        cmocka_unit_test(mixed_integers),
        cmocka_unit_test(elements_as_text),   cmocka_unit_test(indexes_of_elements),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
