/*
 * Big-endian numbers, as containers of other programs have them, at any address.
 */
#pragma once

#include <stdint.h>

/** @return the number in the `bytes` (at most 8) bytes at `at`. */
static inline uint64_t fc_load_big(const unsigned char *at, int bytes) {
    uint64_t value = 0;
    for (int i = 0; i < bytes; i++) {
        value = value << 8 | at[i];
    }
    return value;
}
