/*
 * Bare CRCs: CRCs without the inversions before and after, which makes them linear. The bare CRC of a buffer is the XOR
 * of the bare CRCs of its runs, each shifted by the bytes that follow it. The order does not matter, so threads and
 * ranks can each add theirs. fc_crc64_finish and fc_crc32_finish turn the sum into an ordinary CRC.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

/** Continues `crc`, 0 at the start, over `size` bytes, like zlib's crc32(). */
uint64_t fc_crc64(uint64_t crc, const void *bytes, size_t size);

/** Returns the CRC-64 of two consecutive runs of bytes from their CRCs and the length of the second in bytes. */
uint64_t fc_crc64_combine(uint64_t first, uint64_t second, uint64_t second_size);

/**
 * Returns the CRC-64 of `size` bytes from the sum that threads and ranks have computed: the XOR of the CRCs of all
 * parts, without the inversions (init and xorout 0), each with zeros in place of all other bytes. See
 * fc_move_options.digests.
 */
uint64_t fc_crc64_finish(uint64_t sum, uint64_t size);

/** Continues a CRC-32 as zip and gzip use it; see fc_crc64. */
uint32_t fc_crc32(uint32_t crc, const void *bytes, size_t size);

/** Returns the CRC-32 of two consecutive runs of bytes. */
uint32_t fc_crc32_combine(uint32_t first, uint32_t second, uint64_t second_size);

static inline uint64_t fc_crc64_bare(const void *bytes, size_t size) {
    return ~fc_crc64(~(uint64_t)0, bytes, size);
}

static inline uint32_t fc_crc32_bare(const void *bytes, size_t size) {
    return ~fc_crc32(~(uint32_t)0, bytes, size);
}

/** @return the bare CRC of a run after `bytes` zero bytes are appended. */
uint64_t fc_crc64_shift(uint64_t crc, uint64_t bytes);

/** @return the bare CRC of `times` copies of a run, whose bare CRC is `crc`, at distances of `bytes`. */
uint64_t fc_crc64_repeat(uint64_t crc, uint64_t bytes, uint64_t times);

static inline uint32_t fc_crc32_shift(uint32_t crc, uint64_t bytes) {
    return fc_crc32_combine(crc, 0, bytes);
}

/** @return the CRC-32 of `size` bytes whose bare CRC is `sum`. */
static inline uint32_t fc_crc32_finish(uint32_t sum, uint64_t size) {
    return sum ^ ~fc_crc32_shift(~(uint32_t)0, size);
}

/** A prepared shift by a fixed number of bytes. Applying it takes 16 look-ups in 2 KiB. */
typedef struct fc_crc64_factor {
    uint64_t of[16][16]; /**< [i][v]: the product for value v of nibble i */
} fc_crc64_factor;

void fc_crc64_factor_init(fc_crc64_factor *factor, uint64_t bytes);

static inline uint64_t fc_crc64_multiply(const fc_crc64_factor *factor, uint64_t crc) {
    uint64_t product = 0;
    for (int i = 0; i < 16; i++) {
        product ^= factor->of[i][crc >> 4 * i & 15];
    }
    return product;
}

/** The same for a CRC-32: 8 look-ups in 512 bytes. */
typedef struct fc_crc32_factor {
    uint32_t of[8][16];
} fc_crc32_factor;

void fc_crc32_factor_init(fc_crc32_factor *factor, uint64_t bytes);

static inline uint32_t fc_crc32_multiply(const fc_crc32_factor *factor, uint32_t crc) {
    uint32_t product = 0;
    for (int i = 0; i < 8; i++) {
        product ^= factor->of[i][crc >> 4 * i & 15];
    }
    return product;
}
