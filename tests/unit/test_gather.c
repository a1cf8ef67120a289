/*
 * lib/codec/strided.c: the normal form of strided copies, and the kernels against brute force.
 */
#include "codec/shuffle.h"
#include "codec/strided.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { SOURCE_BYTES = 1 << 20, TARGET_BYTES = 1 << 18 };

/* Copies element by element, as defined. */
static void by_the_book(int ndim, const int64_t *sizes, const int64_t *src_strides, const int64_t *dst_strides,
                        int64_t element, const unsigned char *src, unsigned char *dst) {
    int64_t index[FC_MAX_DIMS] = {0};
    for (;;) {
        int64_t s = 0, d = 0;
        for (int i = 0; i < ndim; i++) {
            s += index[i] * src_strides[i];
            d += index[i] * dst_strides[i];
        }
        memcpy(dst + d * element, src + s * element, (size_t)element);
        int i = ndim - 1;
        for (; i >= 0; i--) {
            if (++index[i] < sizes[i]) {
                break;
            }
            index[i] = 0;
        }
        if (i < 0) {
            return;
        }
    }
}

/* Makes strides with the dimensions in random order, with gaps. @return elements that they span. */
static int64_t random_strides(int ndim, const int64_t *sizes, bool gaps, int64_t *strides) {
    int order[8];
    for (int i = 0; i < ndim; i++) {
        int j = rand() % (i + 1);
        order[i] = order[j];
        order[j] = i;
    }
    int64_t stride = 1;
    for (int i = 0; i < ndim; i++) {
        strides[order[i]] = stride;
        stride *= sizes[order[i]] + (gaps ? rand() % 3 : 0);
    }
    return stride;
}

static void random_copies(void **state) {
    (void)state;
    unsigned char *src = malloc(SOURCE_BYTES), *dst = malloc(TARGET_BYTES), *expected = malloc(TARGET_BYTES);
    unsigned char *planes = malloc(SOURCE_BYTES);
    assert_true(src && dst && expected && planes);
    srand(3);
    for (int i = 0; i < SOURCE_BYTES; i++) {
        src[i] = (unsigned char)rand();
    }
    static const int64_t elements[] = {1, 2, 4, 8, 16};
    int done = 0;
    for (int n = 0; n < 20000; n++) {
        int ndim = rand() % 6;
        int64_t sizes[8], src_strides[8], dst_strides[8], element = elements[rand() % 5];
        for (int d = 0; d < ndim; d++) {
            sizes[d] = 1 + (ndim <= 2 ? rand() % 80 : rand() % 6);
        }
        int64_t from = random_strides(ndim, sizes, rand() % 2, src_strides);
        int64_t to = random_strides(ndim, sizes, rand() % 2, dst_strides);
        for (int d = 0; d < ndim; d++) {
            if (rand() % 10 == 0) {
                src_strides[d] = rand() % 3; /* repeats, or overlaps as torch's as_strided does */
                from += 3 * sizes[d];
            }
        }
        if (from * element > SOURCE_BYTES || to * element > TARGET_BYTES) {
            continue;
        }
        memset(dst, 0xaa, TARGET_BYTES);
        memset(expected, 0xaa, TARGET_BYTES);
        by_the_book(ndim, sizes, src_strides, dst_strides, element, src, expected);
        fc_strided copy;
        assert_true(fc_strided_make(&copy, ndim, sizes, src_strides, dst_strides, element));
        assert_true(fc_strided_span(&copy, 0) <= from * element);
        fc_strided_copy(&copy, src, dst);
        size_t seen = TARGET_BYTES < to * element + 64 ? TARGET_BYTES : (size_t)(to * element + 64);
        assert_memory_equal(dst, expected, seen);
        /* The same from byte planes of a chunk that begins before the first element. */
        size_t before = (size_t)(rand() % 5), count = (size_t)from + before;
        if ((count + 3) * (size_t)element <= SOURCE_BYTES) {
            fc_shuffle(src, planes, count * (size_t)element, (size_t)element);
            memset(dst, 0xaa, TARGET_BYTES);
            memset(expected, 0xaa, TARGET_BYTES);
            size_t start = before * (size_t)element;
            by_the_book(ndim, sizes, src_strides, dst_strides, element, src + start, expected);
            fc_strided_unshuffle(&copy, planes, count, (uint32_t)element, start, dst);
            assert_memory_equal(dst, expected, seen);
        }
        done++;
    }
    assert_true(done > 15000);
    free(planes);
    free(src);
    free(dst);
    free(expected);
}

/* Transposes, interleaves and their opposites, at all edges of the kernels' tiles. */
static void transposes(void **state) {
    (void)state;
    enum { MOST = 150, ROOM = MOST * (MOST + 3) * 16 };
    static const int64_t narrow[] = {1, 2, 3, 4, 5, 8, 16, 17}, elements[] = {1, 2, 4, 8, 16};
    unsigned char *src = malloc(ROOM), *dst = malloc(ROOM), *expected = malloc(ROOM);
    assert_true(src && dst && expected);
    srand(4);
    for (int i = 0; i < ROOM; i++) {
        src[i] = (unsigned char)rand();
    }
    for (int n = 0; n < 6000; n++) {
        const int64_t few = n % 3 == 0 ? 1 + rand() % 70 : narrow[n % 8], many = 1 + rand() % MOST;
        const int64_t rows = n & 8 ? few : many, columns = n & 8 ? many : few, element = elements[rand() % 5];
        const int64_t sizes[] = {rows, columns}, from[] = {columns + (n & 16 ? rand() % 3 : 0), 1};
        const int64_t to[] = {1, rows + (n & 32 ? rand() % 3 : 0)};
        const size_t seen = (size_t)(columns * (rows + 2) * element), start = n & 64 ? (size_t)element : 0;
        memset(dst, 0xaa, seen);
        memset(expected, 0xaa, seen);
        by_the_book(2, sizes, from, to, element, src + start, expected);
        fc_strided copy;
        assert_true(fc_strided_make(&copy, 2, sizes, from, to, element));
        fc_strided_copy(&copy, src + start, dst);
        assert_memory_equal(dst, expected, seen);
    }
    free(src);
    free(dst);
    free(expected);
}

static void all_dimensions(void **state) {
    (void)state;
    /* 32 dimensions, 10 of them of size 2, reversed: no two can be merged. */
    int64_t sizes[FC_MAX_DIMS], src_strides[FC_MAX_DIMS], dst_strides[FC_MAX_DIMS];
    int64_t stride = 1;
    for (int d = 0; d < FC_MAX_DIMS; d++) {
        sizes[d] = d % 3 == 0 && d < 30 ? 2 : 1;
        src_strides[d] = stride;
        stride *= sizes[d];
    }
    stride = 1;
    for (int d = FC_MAX_DIMS - 1; d >= 0; d--) {
        dst_strides[d] = stride;
        stride *= sizes[d];
    }
    uint16_t src[1024], dst[1024], expected[1024];
    for (int i = 0; i < 1024; i++) {
        src[i] = (uint16_t)i;
    }
    by_the_book(FC_MAX_DIMS, sizes, src_strides, dst_strides, 2, (unsigned char *)src, (unsigned char *)expected);
    fc_strided copy;
    assert_true(fc_strided_make(&copy, FC_MAX_DIMS, sizes, src_strides, dst_strides, 2));
    assert_int_equal(copy.n, 10);
    fc_strided_copy(&copy, (unsigned char *)src, (unsigned char *)dst);
    assert_memory_equal(dst, expected, sizeof dst);
}

static void contiguous_is_one_run(void **state) {
    (void)state;
    fc_strided copy;
    int64_t sizes[4] = {3, 1, 5, 7}, strides[4] = {35, 9999, 7, 1};
    assert_true(fc_strided_make(&copy, 4, sizes, strides, strides, 4));
    assert_int_equal(copy.n, 0);
    assert_int_equal(copy.unit, 3 * 5 * 7 * 4);
    /* Copying a transposed tensor to a transposed target is contiguous too. */
    int64_t transposed[2] = {1, 6}, shape[2] = {6, 4};
    assert_true(fc_strided_make(&copy, 2, shape, transposed, transposed, 2));
    assert_int_equal(copy.n, 0);
    assert_int_equal(copy.unit, 48);
}

static void columns_are_one_run_per_row(void **state) {
    (void)state;
    fc_strided copy;
    int64_t sizes[3] = {10, 4, 8}, src[3] = {32, 8, 1}, dst[3] = {64, 16, 1};
    assert_true(fc_strided_make(&copy, 3, sizes, src, dst, 2));
    assert_int_equal(copy.n, 1);
    assert_int_equal(copy.unit, 16);
    assert_int_equal(copy.axes[0].size, 40);
    assert_int_equal(copy.axes[0].dst, 32);
}

static void overflow_is_refused(void **state) {
    (void)state;
    fc_strided copy;
    int64_t dst[2] = {2, 1};
    assert_false(fc_strided_make(&copy, 2, (int64_t[]){2, 2}, (int64_t[]){INT64_MAX / 2, 1}, dst, 4));
    assert_false(fc_strided_make(&copy, 2, (int64_t[]){3, 2}, (int64_t[]){INT64_MAX / 8, 1}, dst, 4));
    /* Each axis fits, but their sum overflows. */
    assert_false(fc_strided_make(&copy, 2, (int64_t[]){2, 2}, (int64_t[]){INT64_MAX / 2, INT64_MAX / 2 + 1}, dst, 1));
}

static void swaps_elements(void **state) {
    (void)state;
    unsigned char bytes[24], expected[24];
    for (uint32_t width = 2; width <= 8; width *= 2) {
        for (int i = 0; i < 24; i++) {
            bytes[i] = expected[i] = (unsigned char)i;
        }
        /* Two rows of 8 bytes in a target with rows of 16: the bytes between them stay. */
        for (uint32_t i = 0; i < 8; i++) {
            expected[i] = (unsigned char)(i / width * width + width - 1 - i % width);
            expected[16 + i] = (unsigned char)(16 + expected[i]);
        }
        fc_strided copy;
        int64_t n = 8 / width;
        assert_true(fc_strided_make(&copy, 2, (int64_t[]){2, n}, (int64_t[]){n, 1}, (int64_t[]){2 * n, 1}, width));
        fc_strided_swap(&copy, bytes, width);
        assert_memory_equal(bytes, expected, sizeof bytes);
    }
}

/* Flips sign bits in rows of three complex numbers, in every second row: negated, conjugated, and both. */
static void flips_signs(void **state) {
    (void)state;
    fc_strided copy;
    int64_t sizes[2] = {2, 3}, from[2] = {3, 1}, to[2] = {6, 1};
    assert_true(fc_strided_make(&copy, 2, sizes, from, to, 8));
    for (int kind = 1; kind < 4; kind++) {
        bool negate = kind & 1, conjugate = kind & 2;
        float numbers[24];
        for (int i = 0; i < 24; i++) {
            numbers[i] = (float)(i + 1);
        }
        fc_strided_flip(&copy, (unsigned char *)numbers, 4, negate, negate != conjugate);
        for (int i = 0; i < 24; i++) {
            bool placed = i % 12 < 6, flipped = i % 2 ? negate != conjugate : negate;
            assert_float_equal(numbers[i], placed && flipped ? -(i + 1) : i + 1, 0);
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(random_copies),
        cmocka_unit_test(transposes),
        cmocka_unit_test(all_dimensions),
        cmocka_unit_test(contiguous_is_one_run),
        cmocka_unit_test(columns_are_one_run_per_row),
        cmocka_unit_test(overflow_is_refused),
        cmocka_unit_test(swaps_elements),
        cmocka_unit_test(flips_signs),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
