/*
 * The inverse of bitshuffle: see bitshuffle.h.
 */
#include "codec/bitshuffle.h"

#include <stdint.h>

/* Transposes 8 × 8 bits: bit j of byte i becomes bit i of byte j. Swaps 1 × 1, then 2 × 2, then 4 × 4 blocks. */
static uint64_t transpose_bits(uint64_t x) {
    uint64_t t = (x ^ x >> 7) & 0x00aa00aa00aa00aau;
    x ^= t ^ t << 7;
    t = (x ^ x >> 14) & 0x0000cccc0000ccccu;
    x ^= t ^ t << 14;
    t = (x ^ x >> 28) & 0x00000000f0f0f0f0u;
    return x ^ t ^ t << 28;
}

void fc_unshuffle_bits(const unsigned char *in, unsigned char *out, size_t count, size_t element) {
    const size_t plane = count / 8; /* bytes */
    for (size_t byte = 0; byte < element; byte++, in += 8 * plane) {
        for (size_t i = 0; i < plane; i++) {
            uint64_t x = 0;
            for (size_t bit = 0; bit < 8; bit++) {
                x |= (uint64_t)in[bit * plane + i] << 8 * bit;
            }
            x = transpose_bits(x);
            unsigned char *to = out + 8 * i * element + byte;
            for (size_t k = 0; k < 8; k++) {
                to[k * element] = (unsigned char)(x >> 8 * k);
            }
        }
    }
}
