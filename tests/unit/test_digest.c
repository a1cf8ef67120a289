/*
 * CRC-64 and CRC-32: known values, a comparison with a bitwise CRC, and combinations of random runs. Built twice: with
 * ISA-L where it is available, and without.
 */
#include "base/crc.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { MOST = 5000 };

/* Computes the CRC bit by bit, from the definition. */
static uint64_t slow_crc(uint64_t polynomial, uint64_t ones, const unsigned char *bytes, size_t size) {
    uint64_t crc = ones;
    for (size_t i = 0; i < size; i++) {
        crc ^= bytes[i];
        for (int k = 0; k < 8; k++) {
            crc = crc & 1 ? crc >> 1 ^ polynomial : crc >> 1;
        }
    }
    return crc ^ ones;
}

static uint64_t slow_crc64(const unsigned char *bytes, size_t size) {
    return slow_crc(0xc96c5795d7870f42u, UINT64_MAX, bytes, size);
}

static uint32_t slow_crc32(const unsigned char *bytes, size_t size) {
    return (uint32_t)slow_crc(0xedb88320u, UINT32_MAX, bytes, size);
}

static void fill(unsigned char *bytes, size_t size) {
    for (size_t i = 0; i < size; i++) {
        bytes[i] = (unsigned char)(rand() >> 7);
    }
}

static void known_values(void **state) {
    (void)state;
    assert_true(fc_crc64(0, "123456789", 9) == 0x995dc9bbdf1939fau);
    assert_true(fc_crc32(0, "123456789", 9) == 0xcbf43926u);
    assert_true(fc_crc64(0, "", 0) == 0);
    assert_true(fc_crc32(0, "", 0) == 0);
    assert_true(fc_crc64(fc_crc64(0, "1234", 4), "56789", 5) == 0x995dc9bbdf1939fau);
    assert_true(fc_crc32(fc_crc32(0, "1234", 4), "56789", 5) == 0xcbf43926u);
}

static void every_length(void **state) {
    (void)state;
    static unsigned char bytes[700];
    srand(1);
    fill(bytes, sizeof bytes);
    for (size_t size = 0; size + 8 <= sizeof bytes; size++) {
        size_t at = size % 8;
        assert_true(fc_crc64(0, bytes + at, size) == slow_crc64(bytes + at, size));
        assert_true(fc_crc32(0, bytes + at, size) == slow_crc32(bytes + at, size));
    }
}

/* A buffer is cut anywhere. Its CRC is continued over the cut, and combined from the CRCs of both runs. */
static void cut_in_two(void **state) {
    (void)state;
    static unsigned char bytes[MOST];
    srand(2);
    for (int i = 0; i < 300; i++) {
        size_t size = (size_t)rand() % MOST, first = size ? (size_t)rand() % (size + 1) : 0;
        fill(bytes, size);
        uint64_t whole = slow_crc64(bytes, size), head = fc_crc64(0, bytes, first);
        uint32_t whole32 = slow_crc32(bytes, size), head32 = fc_crc32(0, bytes, first);
        assert_true(fc_crc64(head, bytes + first, size - first) == whole);
        assert_true(fc_crc64_combine(head, fc_crc64(0, bytes + first, size - first), size - first) == whole);
        assert_true(fc_crc32(head32, bytes + first, size - first) == whole32);
        assert_true(fc_crc32_combine(head32, fc_crc32(0, bytes + first, size - first), size - first) == whole32);
    }
}

/* CRCs without pre- and postconditioning add up in any order. */
static void many_runs(void **state) {
    (void)state;
    static unsigned char bytes[MOST];
    srand(3);
    for (int i = 0; i < 100; i++) {
        size_t size = 1 + (size_t)rand() % MOST, step = 1 + (size_t)rand() % size;
        size_t pieces = (size - 1) / step + 1;
        uint64_t sum = 0;
        uint32_t sum32 = 0;
        fill(bytes, size);
        for (size_t k = 0; k < pieces; k++) {
            size_t at = (pieces % 7 ? k * 7 % pieces : pieces - 1 - k) * step;
            size_t n = size - at < step ? size - at : step;
            sum ^= fc_crc64_shift(fc_crc64_bare(bytes + at, n), size - at - n);
            sum32 ^= fc_crc32_shift(fc_crc32_bare(bytes + at, n), size - at - n);
        }
        assert_true(fc_crc64_finish(sum, size) == slow_crc64(bytes, size));
        assert_true(fc_crc32_finish(sum32, size) == slow_crc32(bytes, size));
    }
}

/* Shifts over distances larger than any memory add up, and a prepared shift gives the same result. */
static void far_shifts(void **state) {
    (void)state;
    srand(4);
    for (int i = 0; i < 200; i++) {
        uint64_t a = ((uint64_t)rand() << 31 ^ (uint64_t)rand()) >> rand() % 50;
        uint64_t b = ((uint64_t)rand() << 31 ^ (uint64_t)rand()) >> rand() % 50;
        uint64_t crc = (uint64_t)rand() << 33 ^ (uint64_t)rand();
        assert_true(fc_crc64_shift(crc, a + b) == fc_crc64_shift(fc_crc64_shift(crc, a), b));
        assert_true(fc_crc32_shift((uint32_t)crc, a + b) == fc_crc32_shift(fc_crc32_shift((uint32_t)crc, a), b));
        fc_crc64_factor factor;
        fc_crc64_factor_init(&factor, a);
        assert_true(fc_crc64_multiply(&factor, crc) == fc_crc64_shift(crc, a));
    }
    const unsigned char zero = 0;
    assert_true(fc_crc64_shift(0x1234, 1) == ~fc_crc64(~(uint64_t)0x1234, &zero, 1));
    assert_true(fc_crc64_finish(0, 0) == 0);
    assert_true(fc_crc32_finish(0, 0) == 0);
}

/* Copies of a run with gaps between them, and more copies than anyone could write out. */
static void repeated_runs(void **state) {
    (void)state;
    unsigned char bytes[MOST];
    srand(5);
    for (int i = 0; i < 200; i++) {
        size_t size = 1 + (size_t)rand() % 16, distance = size + (size_t)rand() % 30, times = (size_t)rand() % 100;
        memset(bytes, 0, sizeof bytes);
        fill(bytes, size);
        uint64_t sum = fc_crc64_repeat(fc_crc64_bare(bytes, size), distance, times);
        for (size_t k = 1; k < times; k++) {
            memcpy(bytes + k * distance, bytes, size);
        }
        size_t length = times > 0 ? (times - 1) * distance + size : 0;
        assert_true(fc_crc64_finish(sum, length) == slow_crc64(bytes, length));
        uint64_t many = ((uint64_t)1 << 40) + times, crc = fc_crc64_bare(bytes, size);
        assert_true(fc_crc64_repeat(crc, size, 2 * many) ==
                    (fc_crc64_shift(fc_crc64_repeat(crc, size, many), many * size) ^ fc_crc64_repeat(crc, size, many)));
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(known_values), cmocka_unit_test(every_length), cmocka_unit_test(cut_in_two),
        cmocka_unit_test(many_runs),    cmocka_unit_test(far_shifts),   cmocka_unit_test(repeated_runs),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
