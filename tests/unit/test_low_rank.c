/*
 * lib/weights/low_rank_kernel.c: each kernel gives the bits of a plain loop of fused multiply-adds, at all edges, and
 * writes nothing outside.
 */
#include "weights/low_rank.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { MOST_ROWS = 30, MOST_COLUMNS = 100, MOST_RANK = 40, WIDE = MOST_COLUMNS + FC_PANEL, CANARY = 16 };

static float random_value(void) {
    return (float)(rand() - RAND_MAX / 2) / (float)(1 << (rand() % 24));
}

static void fill(float *values, size_t count) {
    for (size_t i = 0; i < count; i++) {
        values[i] = random_value();
    }
}

static float expected(const float *left, const float *right, size_t rank, size_t j, float scale, float before) {
    float sum = 0;
    for (size_t k = 0; k < rank; k++) {
        sum = fmaf(left[k], right[j / FC_PANEL * FC_PANEL * rank + k * FC_PANEL + j % FC_PANEL], sum);
    }
    return fmaf(scale, sum, before);
}

static void equals_the_plain_loop(void **state) {
    (void)state;
    float *left = calloc((MOST_ROWS + FC_LEFT_SPARE) * MOST_RANK, sizeof *left);
    float *right = calloc(WIDE * MOST_RANK, sizeof *right);
    float *out = malloc((MOST_ROWS * MOST_COLUMNS + CANARY) * sizeof *out),
          *before = malloc(MOST_ROWS * MOST_COLUMNS * sizeof *out);
    assert_true(left && right && out && before);
    srand(5);
    for (int n = 0; n < 400; n++) {
        const size_t rows = 1 + (size_t)rand() % MOST_ROWS, columns = 1 + (size_t)rand() % MOST_COLUMNS;
        const size_t rank = 1 + (size_t)rand() % MOST_RANK;
        const float scale = random_value();
        fill(left, (rows + FC_LEFT_SPARE) * rank);
        fill(right, WIDE * rank);
        fill(before, rows * columns);
        memcpy(out, before, rows * columns * sizeof *out);
        memset(out + rows * columns, 0xee, CANARY * sizeof *out);
        fc_low_rank_add(left, right, rank, scale, rows, columns, out);
        for (size_t i = 0; i < rows * columns; i++) {
            const float sum = expected(left + i / columns * rank, right, rank, i % columns, scale, before[i]);
            assert_memory_equal(&out[i], &sum, sizeof sum);
        }
        for (size_t i = 0; i < CANARY * sizeof *out; i++) {
            assert_int_equal(((unsigned char *)(out + rows * columns))[i], 0xee);
        }
    }
    free(left);
    free(right);
    free(out);
    free(before);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(equals_the_plain_loop)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
