/*
 * MD5 (RFC 1321), which buckets with Object Lock demand of what is sent. Nothing here relies on it for security. See
 * uploads.h.
 */
#include "net/fetcher/uploads.h"

#include <string.h>

static uint32_t word(const unsigned char *at) {
    return (uint32_t)at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24;
}

static void add_block(uint32_t state[4], const unsigned char block[64]) {
    static const uint32_t sines[64] = {
        0xd76aa478, 0xe8c7b756, 0x242070db, 0xc1bdceee, 0xf57c0faf, 0x4787c62a, 0xa8304613, 0xfd469501,
        0x698098d8, 0x8b44f7af, 0xffff5bb1, 0x895cd7be, 0x6b901122, 0xfd987193, 0xa679438e, 0x49b40821,
        0xf61e2562, 0xc040b340, 0x265e5a51, 0xe9b6c7aa, 0xd62f105d, 0x02441453, 0xd8a1e681, 0xe7d3fbc8,
        0x21e1cde6, 0xc33707d6, 0xf4d50d87, 0x455a14ed, 0xa9e3e905, 0xfcefa3f8, 0x676f02d9, 0x8d2a4c8a,
        0xfffa3942, 0x8771f681, 0x6d9d6122, 0xfde5380c, 0xa4beea44, 0x4bdecfa9, 0xf6bb4b60, 0xbebfbc70,
        0x289b7ec6, 0xeaa127fa, 0xd4ef3085, 0x04881d05, 0xd9d4d039, 0xe6db99e5, 0x1fa27cf8, 0xc4ac5665,
        0xf4292244, 0x432aff97, 0xab9423a7, 0xfc93a039, 0x655b59c3, 0x8f0ccc92, 0xffeff47d, 0x85845dd1,
        0x6fa87e4f, 0xfe2ce6e0, 0xa3014314, 0x4e0811a1, 0xf7537e82, 0xbd3af235, 0x2ad7d2bb, 0xeb86d391};
    static const unsigned char turns[4][4] = {{7, 12, 17, 22}, {5, 9, 14, 20}, {4, 11, 16, 23}, {6, 10, 15, 21}};
    uint32_t a = state[0], b = state[1], c = state[2], d = state[3];
    for (unsigned i = 0; i < 64; i++) {
        const unsigned round = i / 16;
        const uint32_t mixed = round == 0   ? (b & c) | (~b & d)
                               : round == 1 ? (d & b) | (~d & c)
                               : round == 2 ? b ^ c ^ d
                                            : c ^ (b | ~d);
        const unsigned at = (round == 0 ? i : round == 1 ? 5 * i + 1 : round == 2 ? 3 * i + 5 : 7 * i) % 16;
        const uint32_t sum = a + mixed + sines[i] + word(block + (size_t)4 * at);
        const unsigned turn = turns[round][i % 4];
        a = d;
        d = c;
        c = b;
        b += sum << turn | sum >> (32 - turn);
    }
    state[0] += a;
    state[1] += b;
    state[2] += c;
    state[3] += d;
}

void md5_begin(md5 *m) {
    *m = (md5){.state = {0x67452301, 0xefcdab89, 0x98badcfe, 0x10325476}};
}

void md5_add(md5 *m, const void *bytes, size_t size) {
    const unsigned char *at = bytes;
    while (size > 0) {
        const size_t used = m->size % sizeof m->block, room = sizeof m->block - used;
        const size_t n = size < room ? size : room;
        memcpy(m->block + used, at, n);
        m->size += n;
        at += n;
        size -= n;
        if (n == room) {
            add_block(m->state, m->block);
        }
    }
}

void md5_end(md5 *m, unsigned char out[MD5_BYTES]) {
    static const unsigned char padding[64] = {0x80};
    const uint64_t bits = m->size * 8;
    unsigned char end[8];
    for (unsigned i = 0; i < sizeof end; i++) {
        end[i] = (unsigned char)(bits >> 8 * i);
    }
    md5_add(m, padding, 1 + (119 - m->size % 64) % 64);
    md5_add(m, end, sizeof end);
    for (unsigned i = 0; i < MD5_BYTES; i++) {
        out[i] = (unsigned char)(m->state[i / 4] >> 8 * (i % 4));
    }
}
