/*
 * lib/read/decode.c and decode_lean.c: HDF5 filter pipelines, bytes that h5py 3.16 wrote, damaged and hostile input.
 */
#include "read/decode.h"
#include "read/decode_lean.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <zlib.h>

#include <cmocka.h>

enum { DEFLATE = 1, SHUFFLE = 2, FLETCHER32 = 3, SIZE = 4000 };

/* The checksums that h5py stored for arange(n) * 31 % 251 and for n bytes of 255. */
static void fletcher_equals_hdf5(void **state) {
    (void)state;
    static const struct {
        size_t size;
        uint32_t ramp, ones;
    } known[] = {{8, 0x6fa475f1, 0xffffffff},
                 {7, 0x6ecb7518, 0xff00ff00},
                 {1001, 0xa3f95599, 0xff00ff00},
                 {70000, 0x14ec8d56, 0xffffffff}};
    unsigned char *bytes = malloc(70000);
    assert_non_null(bytes);
    for (size_t k = 0; k < sizeof known / sizeof *known; k++) {
        for (size_t i = 0; i < known[k].size; i++) {
            bytes[i] = (unsigned char)(i * 31 % 251);
        }
        assert_int_equal(fc_fletcher32(bytes, known[k].size), known[k].ramp);
        memset(bytes, 255, known[k].size);
        assert_int_equal(fc_fletcher32(bytes, known[k].size), known[k].ones);
    }
    memset(bytes, 0, 100);
    assert_int_equal(fc_fletcher32(bytes, 100), 0);
    free(bytes);
}

static fc_extent extent_of(size_t length, size_t decoded, int count, const uint8_t *ids, uint32_t mask) {
    fc_extent extent = {.codec = FC_CODEC_FILTERED, .length = length, .decoded = decoded};
    extent.filters.count = (uint8_t)count;
    extent.filters.mask = mask;
    for (int i = 0; i < count; i++) {
        extent.filters.items[i].id = ids[i];
    }
    return extent;
}

/* A chunk that h5py wrote: uint32 arange(8) * 31 % 251 through shuffle, gzip and fletcher32. */
static void chunk_of_h5py(void **state) {
    (void)state;
    unsigned char stored[64] = {0x78, 0x5e, 0x63, 0x90, 0xb7, 0x8b, 0xad, 0x99, 0xbd, 0xeb, 0x26, 0x03,
                                0x0e, 0x00, 0x00, 0x5b, 0xac, 0x03, 0x65, 0x62, 0x44, 0x04, 0xd7};
    fc_extent extent = extent_of(23, 32, 3, (uint8_t[]){SHUFFLE, DEFLATE, FLETCHER32}, 0);
    uint32_t out[8];
    fc_error err;
    assert_int_equal(fc_decode_filters(&extent, stored, 4, (unsigned char *)out, &err), FC_OK);
    for (uint32_t i = 0; i < 8; i++) {
        assert_int_equal(out[i], i * 31 % 251);
    }
    stored[9] ^= 1;
    assert_int_equal(fc_decode_filters(&extent, stored, 4, (unsigned char *)out, &err), FC_ECORRUPT);
    assert_non_null(strstr(err.message, "fletcher32"));
}

static size_t encode(const uint8_t *ids, int count, uint32_t mask, size_t element, const unsigned char *in, size_t size,
                     unsigned char *out, size_t room) {
    unsigned char *from = malloc(room);
    assert_non_null(from);
    memcpy(out, in, size);
    for (int i = 0; i < count; i++) {
        if (mask >> i & 1) {
            continue;
        }
        memcpy(from, out, size);
        if (ids[i] == SHUFFLE) {
            size_t n = size / element;
            for (size_t e = 0; e < n; e++) {
                for (size_t b = 0; b < element; b++) {
                    out[b * n + e] = from[e * element + b];
                }
            }
        } else if (ids[i] == DEFLATE) {
            uLongf length = room;
            assert_int_equal(compress2(out, &length, from, size, 1), Z_OK);
            size = length;
        } else {
            uint32_t sum = fc_fletcher32(from, size);
            memcpy(out + size,
                   (unsigned char[]){(unsigned char)sum, (unsigned char)(sum >> 8), (unsigned char)(sum >> 16),
                                     (unsigned char)(sum >> 24)},
                   4);
            size += 4;
        }
    }
    free(from);
    return size;
}

static const uint8_t pipelines[][3] = {{SHUFFLE, DEFLATE, FLETCHER32}, {DEFLATE, SHUFFLE, FLETCHER32},
                                       {FLETCHER32, SHUFFLE, DEFLATE}, {FLETCHER32, DEFLATE, SHUFFLE},
                                       {SHUFFLE, FLETCHER32, DEFLATE}, {DEFLATE, FLETCHER32, SHUFFLE}};

/*
 * Every order and number of filters and every mask. Then with damage, which must fail or give other bytes but never
 * overrun the buffer (the sanitizers check that).
 */
static void every_pipeline(void **state) {
    (void)state;
    unsigned char in[SIZE], out[SIZE], stored[2 * SIZE + 100], copy[2 * SIZE + 100];
    uint64_t workspace = 0;
    srand(4);
    int checked = 0;
    for (size_t p = 0; p < sizeof pipelines / sizeof *pipelines; p++) {
        for (int count = 0; count <= 3; count++) {
            for (uint32_t mask = 0; mask < 8; mask++) {
                size_t size = SIZE - (size_t)(rand() % 20), element = (size_t)1 << rand() % 5;
                for (size_t i = 0; i < size; i++) {
                    in[i] = (unsigned char)(rand() % 9);
                }
                size_t length = encode(pipelines[p], count, mask, element, in, size, stored, sizeof stored);
                memcpy(copy, stored, length);
                fc_extent extent = extent_of(length, size, count, pipelines[p], mask);
                fc_error err = {FC_OK, ""};
                assert_true(fc_decode_workspace(&extent, &workspace));
                unsigned char *work = malloc(workspace); /* exact size, so that the sanitizer detects any overrun */
                assert_non_null(work);
                memcpy(work, copy, length);
                assert_int_equal(fc_decode_filters(&extent, work, (uint32_t)element, out, &err), FC_OK);
                assert_memory_equal(out, in, size);
                for (int i = 0; i < 30; i++) {
                    memcpy(work, copy, length);
                    work[(size_t)rand() % length] ^= (unsigned char)(1 + rand() % 255);
                    (void)fc_decode_filters(&extent, work, (uint32_t)element, out, &err);
                }
                extent.decoded = size - 1;
                memcpy(work, copy, length);
                assert_int_equal(fc_decode_filters(&extent, work, (uint32_t)element, out, &err), FC_ECORRUPT);
                free(work);
                checked++;
            }
        }
    }
    assert_int_equal(checked, 6 * 4 * 8);
}

typedef struct in_memory {
    const unsigned char *bytes;
    size_t size;
} in_memory;

static fc_code read_memory(void *context, uint64_t at, unsigned char *bytes, size_t size, fc_error *err) {
    const in_memory *m = context;
    (void)err;
    assert_true(at <= m->size && size <= m->size - at);
    memcpy(bytes, m->bytes + at, size);
    return FC_OK;
}

/* Every supported pipeline with windows of any size, then with damage, which must not overrun the buffer. */
static void lean_decoding_gives_the_same_bytes(void **state) {
    (void)state;
    unsigned char in[SIZE], stored[2 * SIZE + 100], window[500];
    int taken = 0;
    srand(5);
    for (size_t round = 0; round < 6 * 4 * 8 * 4; round++) {
        const uint8_t *ids = pipelines[round % 6];
        const int count = (int)(round / 6 % 4);
        const uint32_t mask = (uint32_t)(round / 24 % 8);
        size_t size = SIZE - (size_t)(rand() % 20), element = (size_t)1 << rand() % 5;
        for (size_t i = 0; i < size; i++) {
            in[i] = (unsigned char)(rand() % 9);
        }
        size_t length = encode(ids, count, mask, element, in, size, stored, sizeof stored);
        fc_extent extent = extent_of(length, size, count, ids, mask);
        if (!fc_decode_lean_can(&extent)) {
            continue;
        }
        taken++;
        fc_error err;
        in_memory memory = {stored, length};
        size_t some = 2 + (size_t)rand() % (sizeof window - 1);
        unsigned char *out = malloc(size); /* exact size, so that the sanitizer detects any overrun */
        assert_non_null(out);
        assert_int_equal(fc_decode_lean(&extent, read_memory, &memory, window, some, (uint32_t)element, out, &err),
                         FC_OK);
        assert_memory_equal(out, in, size);
        extent.decoded = size - 1;
        assert_int_equal(fc_decode_lean(&extent, read_memory, &memory, window, some, (uint32_t)element, out, &err),
                         FC_ECORRUPT);
        extent.decoded = size;
        extent.length = memory.size = length - 1;
        assert_int_equal(fc_decode_lean(&extent, read_memory, &memory, window, some, (uint32_t)element, out, &err),
                         FC_ECORRUPT);
        for (int i = 0; i < 20; i++) {
            stored[(size_t)rand() % length] ^= (unsigned char)(1 + rand() % 255);
            (void)fc_decode_lean(&extent, read_memory, &memory, window, some, (uint32_t)element, out, &err);
        }
        free(out);
    }
    assert_int_equal(taken, 4 * 27); /* counted by hand: 8, 10 and 9 with one, two and three filters */
}

/* 64 MiB of zeros in 64 KiB, declared as 1000 bytes: rejected without allocating memory for them. */
static void bomb_is_refused(void **state) {
    (void)state;
    size_t size = 64 << 20;
    unsigned char *zeros = calloc(1, size), out[1000];
    uLongf length = compressBound(size);
    unsigned char *stored = malloc(length);
    assert_true(zeros && stored);
    assert_int_equal(compress2(stored, &length, zeros, size, 9), Z_OK);
    fc_extent extent = extent_of(length, sizeof out, 1, (uint8_t[]){DEFLATE}, 0);
    fc_error err;
    assert_int_equal(fc_decode_filters(&extent, stored, 1, out, &err), FC_ECORRUPT);
    assert_string_equal(err.message, "the compressed data expands to more than the 1000 bytes of the chunk");
    extent.length = length / 2;
    unsigned char *big = malloc(size);
    assert_non_null(big);
    extent.decoded = size;
    assert_int_equal(fc_decode_filters(&extent, stored, 1, big, &err), FC_ECORRUPT);
    assert_non_null(strstr(err.message, "the compressed data is damaged after"));
    free(big);
    free(zeros);
    free(stored);
}

static void unknown_filter_is_refused(void **state) {
    (void)state;
    unsigned char bytes[4] = {0}, out[4];
    fc_extent extent = extent_of(4, 4, 1, (uint8_t[]){32}, 0);
    fc_error err;
    assert_int_equal(fc_decode_filters(&extent, bytes, 1, out, &err), FC_EUNSUPPORTED);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(fletcher_equals_hdf5),
        cmocka_unit_test(chunk_of_h5py),
        cmocka_unit_test(every_pipeline),
        cmocka_unit_test(bomb_is_refused),
        cmocka_unit_test(unknown_filter_is_refused),
        cmocka_unit_test(lean_decoding_gives_the_same_bytes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
