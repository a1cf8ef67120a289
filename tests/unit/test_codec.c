/*
 * lib/codec: compares byte planes with a plain loop, inflates streams with zlib, and tests output buffers that are too
 * small and streams that are damaged or hostile.
 */
#include "codec/codec.h"
#include "codec/shuffle.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <zlib.h>

#include <cmocka.h>

enum { CANARY = 64 };

static void fill_random(unsigned char *bytes, size_t size) {
    for (size_t i = 0; i < size; i++) {
        bytes[i] = (unsigned char)(rand() >> 7);
    }
}

static void shuffle_equals_the_plain_loop(void **state) {
    (void)state;
    enum { MOST = 700 };
    unsigned char in[MOST + 3], out[MOST + CANARY], back[MOST + CANARY];
    srand(1);
    fill_random(in, sizeof in);
    for (size_t element = 1; element <= 17; element++) {
        for (size_t size = 0; size <= MOST; size += size < 40 ? 1 : 13) {
            const unsigned char *from = in + size % 3; /* not aligned */
            size_t count = size / element;
            memset(out, 0xee, sizeof out);
            memset(back, 0xee, sizeof back);
            fc_shuffle(from, out, size, element);
            for (size_t i = 0; i < size; i++) {
                size_t to = i < count * element ? i % element * count + i / element : i;
                assert_int_equal(out[to], from[i]);
            }
            fc_unshuffle(out, back, size, element);
            assert_memory_equal(back, from, size);
            for (size_t i = size; i < size + CANARY; i++) {
                assert_int_equal(out[i], 0xee);
                assert_int_equal(back[i], 0xee);
            }
        }
    }
}

/* The kinds of test data. */
typedef enum plane { NOISE, ZEROS, SKEWED, TEXT, ONE_NOISY_HALF, COUNTER, KINDS } plane;

static void fill(plane kind, unsigned char *bytes, size_t size) {
    for (size_t i = 0; i < size; i++) {
        unsigned r = (unsigned)rand() >> 7;
        switch (kind) {
        case ZEROS:
            bytes[i] = 0;
            break;
        case SKEWED: /* like exponents: few values, but no repeated strings */
            bytes[i] = (unsigned char)(60 - __builtin_ctz(r | 1 << 12) * 2 + (r >> 15 & 1));
            break;
        case TEXT:
            bytes[i] = (unsigned char)"layers.0.weight "[i % 16];
            break;
        case COUNTER: /* all values are equally frequent, yet the data repeats */
            bytes[i] = (unsigned char)i;
            break;
        case ONE_NOISY_HALF:
            bytes[i] = i < size / 2 ? (unsigned char)r : 7;
            break;
        default:
            bytes[i] = (unsigned char)r;
        }
    }
}

static void expect_inflates_to(const unsigned char *stream, size_t length, const unsigned char *plain, size_t size) {
    unsigned char *out = malloc(size + CANARY);
    uLongf got = size;
    fc_error err;
    assert_non_null(out);
    memset(out, 0xee, size + CANARY);
    assert_int_equal(uncompress(out, &got, stream, length), Z_OK); /* with zlib, as any other program */
    assert_int_equal(got, size);
    assert_memory_equal(out, plain, size);
    memset(out, 0xee, size + CANARY);
    assert_int_equal(fc_inflate(stream, length, out, size, &err), FC_OK);
    assert_memory_equal(out, plain, size);
    for (int i = 0; i < CANARY; i++) {
        assert_int_equal(out[size + (size_t)i], 0xee);
    }
    free(out);
}

static void streams_of_all_levels(void **state) {
    (void)state;
    static const size_t sizes[] = {1, 2, 3, 7, 100, 288, 289, 290, 4096, 65535, 65536, 70001, 131072, 131073, 400001};
    static const int levels[] = {1, 6, 9};
    srand(2);
    for (size_t l = 0; l < sizeof levels / sizeof *levels; l++) {
        fc_deflater *d = fc_deflater_new(levels[l]);
        assert_non_null(d);
        for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
            for (plane k = NOISE; k < KINDS; k++) {
                const size_t size = sizes[s], room = size + size / 100 + 100;
                unsigned char *plain = malloc(size), *out = malloc(room);
                assert_true(plain && out);
                fill(k, plain, size);
                static const size_t elements[] = {0, 1, 2, 4, 8, 3};
                size_t element = elements[(s + k) % 6]; /* planes that need not divide the size */
                size_t length = fc_deflate(d, plain, size, element ? size / element : 0, out, room);
                assert_in_range(length, 1, room);
                assert_true(k != COUNTER || size < 65535 || length < size / 10);
                assert_true(k != ZEROS || size < 65535 || length < size / 20);
                assert_true(k != SKEWED || size < 4096 || length < size * 6 / 10);
                expect_inflates_to(out, length, plain, size);
                free(plain);
                free(out);
            }
        }
        fc_deflater_free(d);
    }
}

/* A plane of noise is stored. The codes of the plane after it stay efficient. */
static void noise_before_exponents(void **state) {
    (void)state;
    enum { SIZE = 1 << 20, HALF = SIZE / 2 };
    unsigned char *plain = malloc(SIZE), *out = malloc(SIZE), *alone = malloc(SIZE);
    fc_deflater *d = fc_deflater_new(1);
    assert_true(plain && out && alone && d);
    srand(7);
    fill(NOISE, plain, HALF);
    fill(SKEWED, plain + HALF, HALF);
    size_t exponents = fc_deflate(d, plain + HALF, HALF, 0, alone, SIZE);
    size_t both = fc_deflate(d, plain, SIZE, HALF, out, SIZE);
    assert_in_range(both, exponents + HALF, exponents + HALF + HALF / 1000);
    expect_inflates_to(out, both, plain, SIZE);
    fc_deflater_free(d);
    free(plain);
    free(out);
    free(alone);
}

/* Returns the entropy of the bytes, the smallest size that codes for single bytes can reach. */
static double least_bytes(const unsigned char *bytes, size_t size) {
    size_t counts[256] = {0};
    double bits = 0;
    for (size_t i = 0; i < size; i++) {
        counts[bytes[i]]++;
    }
    for (int v = 0; v < 256; v++) {
        bits += counts[v] ? (double)counts[v] * log2((double)size / (double)counts[v]) : 0;
    }
    return bits / 8;
}

/* Level 1 with ISA-L comes within 4 % of the entropy of exponents (zlib's level 1 needs half as much again, plain ISA-L
   a quarter more) and still finds repetitions. */
static void exponents_come_near_their_entropy(void **state) {
    (void)state;
#ifndef FSDPCKPT_HAVE_ISAL
    skip();
#endif
    enum { SIZE = 1 << 19 };
    unsigned char *plain = malloc(SIZE), *out = malloc(SIZE);
    fc_deflater *d = fc_deflater_new(1);
    assert_true(plain && out && d);
    srand(8);
    fill(SKEWED, plain, SIZE);
    size_t length = fc_deflate(d, plain, SIZE, 0, out, SIZE);
    assert_true((double)length < least_bytes(plain, SIZE) * 1.04);
    expect_inflates_to(out, length, plain, SIZE);
    memcpy(plain + 1000, plain, 1000); /* the same thousand exponents, repeated */
    for (size_t at = 2000; at + 1000 <= SIZE; at += 1000) {
        memcpy(plain + at, plain, 1000);
    }
    length = fc_deflate(d, plain, SIZE, 0, out, SIZE);
    assert_in_range(length, 1, SIZE / 50);
    expect_inflates_to(out, length, plain, SIZE);
    fc_deflater_free(d);
    free(plain);
    free(out);
}

/* Level 1 finds equal rows that are further apart than a short sample reaches, both in a plane of exponents and in one
   of mantissas, which otherwise is noise. */
static void equal_rows_far_apart(void **state) {
    (void)state;
    enum { ROW = 16 << 10, ROWS = 32, SIZE = ROW * ROWS };
    unsigned char *plain = malloc(SIZE), *out = malloc(SIZE);
    fc_deflater *d = fc_deflater_new(1);
    assert_true(plain && out && d);
    srand(9);
    for (int kind = 0; kind < 2; kind++) {
        fill(kind ? NOISE : SKEWED, plain, SIZE);
        size_t apart = fc_deflate(d, plain, SIZE, 0, out, SIZE);
        apart = apart ? apart : SIZE;             /* no distance for noise */
        for (int row = 1; row < ROWS; row += 2) { /* each row twice */
            memcpy(plain + (size_t)row * ROW, plain + (size_t)(row - 1) * ROW, ROW);
        }
        size_t length = fc_deflate(d, plain, SIZE, 0, out, SIZE);
        assert_in_range(length, 1, apart * 7 / 10);
        expect_inflates_to(out, length, plain, SIZE);
        for (int row = ROWS / 2 + 1; row < ROWS; row++) { /* the second half is one row */
            memcpy(plain + (size_t)row * ROW, plain + (size_t)ROWS / 2 * ROW, ROW);
        }
        fill(kind ? NOISE : SKEWED, plain, (size_t)ROWS / 2 * ROW);
        length = fc_deflate(d, plain, SIZE, 0, out, SIZE);
        assert_in_range(length, 1, apart * 7 / 10);
        expect_inflates_to(out, length, plain, SIZE);
    }
    fc_deflater_free(d);
    free(plain);
    free(out);
}

/* Earlier chunks leave no trace, because the file must not depend on which worker had which chunk. */
static void earlier_chunks_leave_no_trace(void **state) {
    (void)state;
    enum { SIZE = 80000 };
    unsigned char *plain = malloc(SIZE), *other = malloc(SIZE), *first = malloc(SIZE), *again = malloc(SIZE);
    assert_true(plain && other && first && again);
    srand(6);
    for (int round = 0; round < 200; round++) {
        fc_deflater *d = fc_deflater_new(1);
        assert_non_null(d);
        fill((plane)(rand() % KINDS), plain, SIZE / 2);
        fill((plane)(rand() % KINDS), plain + SIZE / 2, SIZE / 2);
        size_t size = fc_deflate(d, plain, SIZE, SIZE / 2, first, SIZE);
        for (int i = 0; i < 3; i++) {
            fill((plane)(rand() % KINDS), other, SIZE);
            fc_deflate(d, other, 1 + (size_t)rand() % SIZE, (size_t)rand() % SIZE, again, SIZE);
        }
        assert_int_equal(fc_deflate(d, plain, SIZE, SIZE / 2, again, SIZE), size);
        assert_memory_equal(first, again, size);
        fc_deflater_free(d);
    }
    free(plain);
    free(other);
    free(first);
    free(again);
}

/* The output depends on nothing but the input: not on where the deflater and the buffers lie in memory, nor on what is
   next to the input. ISA-L's level 1 hashes the address of its state, without the lowest 16 bits, where it should hash
   the third byte of its input. In 300 bytes that begin like "abab", the output differs at one address in 512, for each
   a and b at another. */
static void memory_around_leaves_no_trace(void **state) {
    (void)state;
    enum { MOST = 20000, STEPS = 300, STEP = 64 << 10, SMALL = 300, INPUTS = KINDS + 40 };
    static unsigned char plain[INPUTS][MOST], first[INPUTS][MOST], in[MOST + 2 * CANARY], out[MOST];
    static size_t lengths[INPUTS];
    void *spacers[STEPS];
    srand(11);
    for (int i = 0; i < INPUTS; i++) {
        fill(i < KINDS ? (plane)i : SKEWED, plain[i], MOST);
        for (int at = 0; i >= KINDS && at < 16; at++) {
            plain[i][at] = (unsigned char)(at % 2 ? i : 40);
        }
    }
    for (int step = 0; step < STEPS; step++) {
        fc_deflater *d = fc_deflater_new(1);
        assert_non_null(d);
        for (int i = step % 10 ? KINDS : 0; i < INPUTS; i++) {
            const size_t size = i < KINDS ? MOST : SMALL;
            memset(in, step, sizeof in);
            memset(out, step, sizeof out);
            memcpy(in + step % CANARY, plain[i], size);
            size_t length = fc_deflate(d, in + step % CANARY, size, 0, out, sizeof out);
            if (step == 0) {
                lengths[i] = length;
                memcpy(first[i], out, length);
            }
            assert_int_equal(length, lengths[i]);
            assert_memory_equal(out, first[i], length);
        }
        fc_deflater_free(d);
        spacers[step] = malloc(STEP); /* takes the place of the deflater's first bytes, so that the next one moves */
        assert_non_null(spacers[step]);
    }
    for (int step = 0; step < STEPS; step++) {
        free(spacers[step]);
    }
}

/* Nothing is written past the buffer, and a stream is either complete or missing. */
static void too_small_buffers_are_reported(void **state) {
    (void)state;
    enum { SIZE = 3000 };
    unsigned char plain[SIZE], out[SIZE + 300 + CANARY];
    srand(3);
    for (plane k = NOISE; k < KINDS; k++) {
        fill(k, plain, SIZE);
        for (int level = 1; level <= 6; level += 5) {
            fc_deflater *d = fc_deflater_new(level);
            bool fitted = false;
            assert_non_null(d);
            for (size_t room = 0; room < SIZE + 300; room += 1 + room / 50) {
                memset(out, 0xee, sizeof out);
                size_t length = fc_deflate(d, plain, SIZE, room % 3 * SIZE / 4, out, room);
                assert_true(length <= room);
                fitted |= length > 0;
                assert_true(room < SIZE + 100 || length > 0);
                if (length > 0) {
                    expect_inflates_to(out, length, plain, SIZE);
                }
                for (size_t i = room; i < sizeof out; i++) {
                    assert_int_equal(out[i], 0xee);
                }
            }
            assert_true(fitted);
            fc_deflater_free(d);
        }
    }
}

static void damaged_streams_are_refused(void **state) {
    (void)state;
    enum { SIZE = 20000 };
    unsigned char *plain = malloc(SIZE), *stream = malloc(SIZE), *out = malloc(SIZE + CANARY), *bad = malloc(SIZE);
    fc_deflater *d = fc_deflater_new(1);
    fc_error err;
    assert_true(plain && stream && out && bad && d);
    srand(4);
    fill(SKEWED, plain, SIZE / 2);
    fill(TEXT, plain + SIZE / 2, SIZE / 2);
    size_t length = fc_deflate(d, plain, SIZE, 0, stream, SIZE);
    assert_in_range(length, 100, SIZE);
    for (size_t cut = 0; cut < length; cut += 1 + cut / 20) {
        assert_int_equal(fc_inflate(stream, cut, out, SIZE, &err), FC_ECORRUPT);
    }
    assert_int_equal(fc_inflate(stream, length - 1, out, SIZE, &err), FC_ECORRUPT);
    /* Output larger or smaller than the buffer: a bomb ends at the buffer. */
    memset(out, 0xee, SIZE + CANARY);
    assert_int_equal(fc_inflate(stream, length, out, SIZE - 1, &err), FC_ECORRUPT);
    assert_non_null(strstr(err.message, "more than the 19999 bytes"));
    assert_int_equal(out[SIZE - 1], 0xee);
    assert_int_equal(fc_inflate(stream, length, out, SIZE + 1, &err), FC_ECORRUPT);
    /* Adler-32 may miss a flipped bit: the codes of a skewed alphabet can resynchronise with an equal sum. */
    int wrong = 0;
    for (int i = 0; i < 2000; i++) {
        memcpy(bad, stream, length);
        bad[(size_t)rand() % length] ^= (unsigned char)(1 << rand() % 8);
        memset(out + SIZE, 0xee, CANARY);
        fc_code rc = fc_inflate(bad, length, out, SIZE, &err);
        assert_true(rc == FC_ECORRUPT || rc == FC_OK);
        wrong += rc == FC_OK && memcmp(out, plain, SIZE) != 0;
        assert_int_equal(out[SIZE], 0xee);
    }
    assert_in_range(wrong, 0, 10);
    fc_deflater_free(d);
    free(plain);
    free(stream);
    free(out);
    free(bad);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(shuffle_equals_the_plain_loop),  cmocka_unit_test(streams_of_all_levels),
        cmocka_unit_test(too_small_buffers_are_reported), cmocka_unit_test(damaged_streams_are_refused),
        cmocka_unit_test(noise_before_exponents),         cmocka_unit_test(exponents_come_near_their_entropy),
        cmocka_unit_test(equal_rows_far_apart),           cmocka_unit_test(earlier_chunks_leave_no_trace),
        cmocka_unit_test(memory_around_leaves_no_trace),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
