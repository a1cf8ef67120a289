/*
 * SipHash-1-3 (Aumasson, Bernstein): see siphash.h. Used by the pickle machine and by the readers of JSON.
 */
#include "core/siphash.h"

#include <string.h>
#include <sys/random.h>

#define ROTATE(x, b) ((x) << (b) | (x) >> (64 - (b)))

static inline void sip_round(uint64_t v[4]) {
    v[0] += v[1], v[2] += v[3];
    v[1] = ROTATE(v[1], 13) ^ v[0], v[3] = ROTATE(v[3], 16) ^ v[2];
    v[0] = ROTATE(v[0], 32);
    v[2] += v[1], v[0] += v[3];
    v[1] = ROTATE(v[1], 17) ^ v[2], v[3] = ROTATE(v[3], 21) ^ v[0];
    v[2] = ROTATE(v[2], 32);
}

uint64_t fc_siphash(const uint64_t key[2], const void *bytes, size_t size) {
    const unsigned char *s = bytes;
    uint64_t v[4] = {key[0] ^ UINT64_C(0x736f6d6570736575), key[1] ^ UINT64_C(0x646f72616e646f6d),
                     key[0] ^ UINT64_C(0x6c7967656e657261), key[1] ^ UINT64_C(0x7465646279746573)};
    uint64_t last = (uint64_t)size << 56;
    for (; size >= 8; s += 8, size -= 8) {
        uint64_t m;
        memcpy(&m, s, 8);
        v[3] ^= m;
        sip_round(v);
        v[0] ^= m;
    }
    for (size_t i = 0; i < size; i++) {
        last |= (uint64_t)s[i] << (8 * i);
    }
    v[3] ^= last;
    sip_round(v);
    v[0] ^= last;
    v[2] ^= 0xff;
    for (int i = 0; i < 3; i++) {
        sip_round(v);
    }
    return v[0] ^ v[1] ^ v[2] ^ v[3];
}

void fc_siphash_key(uint64_t key[2]) {
    key[0] = (uint64_t)(uintptr_t)key;
    key[1] = 0;
    if (getrandom(key, 2 * sizeof *key, GRND_NONBLOCK) < 0) {
        key[0] = (uint64_t)(uintptr_t)key;
    }
}
