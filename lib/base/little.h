/*
 * Little-endian numbers, as all of our formats store them, at any address.
 */
#pragma once

#include <stdint.h>

/** @return the number in the `bytes` (at most 8) bytes at `at`. */
static inline uint64_t fc_load_little(const unsigned char *at, int bytes) {
    uint64_t value = 0;
    for (int i = 0; i < bytes; i++) {
        value |= (uint64_t)at[i] << 8 * i;
    }
    return value;
}

/** Stores the low `bytes` (at most 8) bytes of `value` at `at`. */
static inline void fc_store_little(unsigned char *at, uint64_t value, int bytes) {
    for (int i = 0; i < bytes; i++) {
        at[i] = (unsigned char)(value >> 8 * i);
    }
}
