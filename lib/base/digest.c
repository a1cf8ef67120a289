/*
 * CRC-64/XZ and CRC-32, and the arithmetic that combines the digests of adjacent runs.
 *
 * A CRC is the remainder of the bytes, read as a polynomial over GF(2), modulo a fixed polynomial. In the reflected
 * form used here, the highest bit of a number is the coefficient of x^0. Each byte that follows a run multiplies the
 * run's remainder by x^8, so multiplication is all that combining needs. Where ISA-L is built in, it computes
 * remainders with carry-less multiplication at tens of gigabytes per second.
 */
#include "base/crc.h"
#include "base/little.h"

#include <zlib.h>

#ifdef FSDPCKPT_HAVE_ISAL
#include <isa-l/crc.h>
#include <isa-l/crc64.h>
#endif

static const uint64_t polynomial = 0xc96c5795d7870f42u; /* ECMA-182, without x^64 */

/* x^(8 * 2^k): the factor by which 2^k following bytes multiply a remainder. */
static const uint64_t powers[64] = {
    0x0080000000000000u, 0x0000800000000000u, 0x0000000080000000u, 0xc96c5795d7870f42u, 0x6d5f4ad7e3c3afa0u,
    0xd49f7e445077d8eau, 0x040fb02a53c216fau, 0x6bec35957b9ef3a0u, 0xb0e3bb0658964afeu, 0x218578c7a2dff638u,
    0x6dbb920f24dd5cf2u, 0x7a140cfcdb4d5eb5u, 0x41b3705ecbc4057bu, 0xd46ab656accac1eau, 0x329beda6fc34fb73u,
    0x51a4fcd4350b9797u, 0x314fa85637efae9du, 0xacf27e9a1518d512u, 0xffe2a3388a4d8ce7u, 0x48b9697e60cc2e4eu,
    0xada73cb78dd62460u, 0x3ea5454d8ce5c1bbu, 0x5e84e3a6c70feaf1u, 0x90fd49b66cbd81d1u, 0xe2943e0c1db254e8u,
    0xecfa6adeca8834a1u, 0xf513e212593ee321u, 0xf36ae57331040916u, 0x63fbd333b87b6717u, 0xbd60f8e152f50b8bu,
    0xa5ce4a8299c1567du, 0x0bd445f0cbdb55eeu, 0xfdd6824e20134285u, 0xcead8b6ebda2227au, 0xe44b17e4f5d4fb5cu,
    0x9b29c81ad01ca7c5u, 0x1b4366e40fea4055u, 0x27bca1551aae167bu, 0xaa57bcd1b39a5690u, 0xd7fce83fa1234db9u,
    0xcce4986efea3ff8eu, 0x3602a4d9e65341f1u, 0x722b1da2df516145u, 0xecfc3ddd3a08da83u, 0x0fb96dcca83507e6u,
    0x125f2fe78d70f080u, 0x842f50b7651aa516u, 0x09bc34188cd9836fu, 0xf43666c84196d909u, 0xb56feb30c0df6ccbu,
    0xaa66e04ce7f30958u, 0xb7b1187e9af29547u, 0x113255f8476495deu, 0x8fb19f783095d77eu, 0xaec4aacc7c82b133u,
    0xf64e6d09218428cfu, 0x036a72ea5ac258a0u, 0x5235ef12eb7aaa6au, 0x2fed7b1685657853u, 0x8ef8951d46606fb5u,
    0x9d58c1090f034d14u, 0x36f6c59a9fdaa97bu, 0xbe2d517d98682592u, 0x7bcd738fef5729f1u,
};

static uint64_t times_x(uint64_t a) {
    return a >> 1 ^ (polynomial & (0 - (a & 1)));
}

static uint64_t multiply(uint64_t a, uint64_t b) {
    uint64_t sum = 0;
    for (; a; a <<= 1) {
        sum ^= b & (0 - (a >> 63));
        b = times_x(b);
    }
    return sum;
}

uint64_t fc_crc64_shift(uint64_t crc, uint64_t bytes) {
    for (int k = 0; bytes && crc; k++, bytes >>= 1) {
        if (bytes & 1) {
            crc = multiply(crc, powers[k]);
        }
    }
    return crc;
}

uint64_t fc_crc64_repeat(uint64_t crc, uint64_t bytes, uint64_t times) {
    uint64_t sum = 0, done = 0, block = crc; /* `block` is the sum of 2^k copies */
    for (uint64_t copies = 1; times; copies <<= 1, times >>= 1) {
        if (times & 1) {
            sum ^= fc_crc64_shift(block, done * bytes);
            done += copies;
        }
        block ^= fc_crc64_shift(block, copies * bytes);
    }
    return sum;
}

void fc_crc64_factor_init(fc_crc64_factor *factor, uint64_t bytes) {
    uint64_t bit[64];
    bit[63] = fc_crc64_shift((uint64_t)1 << 63, bytes);
    for (int i = 62; i >= 0; i--) {
        bit[i] = times_x(bit[i + 1]);
    }
    for (int i = 0; i < 16; i++) {
        factor->of[i][0] = 0;
        for (int k = 0; k < 4; k++) {
            for (int v = 0; v < 1 << k; v++) {
                factor->of[i][v | 1 << k] = factor->of[i][v] ^ bit[4 * i + k];
            }
        }
    }
}

#ifdef FSDPCKPT_HAVE_ISAL

uint64_t fc_crc64(uint64_t crc, const void *bytes, size_t size) {
    return crc64_ecma_refl(crc, bytes, size); /* inverts before and after, like zlib's crc32 */
}

uint32_t fc_crc32(uint32_t crc, const void *bytes, size_t size) {
    return crc32_gzip_refl(crc, bytes, size);
}

#else

/* Expands the remainders of the eight single-bit bytes to those of all 256 bytes. */
#define ALL1(c, b0) (c), (c) ^ (b0)
#define ALL2(c, b1, ...) ALL1(c, __VA_ARGS__), ALL1((c) ^ (b1), __VA_ARGS__)
#define ALL3(c, b2, ...) ALL2(c, __VA_ARGS__), ALL2((c) ^ (b2), __VA_ARGS__)
#define ALL4(c, b3, ...) ALL3(c, __VA_ARGS__), ALL3((c) ^ (b3), __VA_ARGS__)
#define ALL5(c, b4, ...) ALL4(c, __VA_ARGS__), ALL4((c) ^ (b4), __VA_ARGS__)
#define ALL6(c, b5, ...) ALL5(c, __VA_ARGS__), ALL5((c) ^ (b5), __VA_ARGS__)
#define ALL7(c, b6, ...) ALL6(c, __VA_ARGS__), ALL6((c) ^ (b6), __VA_ARGS__)
#define ALL(b0, b1, b2, b3, b4, b5, b6, b7) ALL8((uint64_t)0, b7, b6, b5, b4, b3, b2, b1, b0)
#define ALL8(c, b7, ...) ALL7(c, __VA_ARGS__), ALL7((c) ^ (b7), __VA_ARGS__)

/* table[n][b]: the remainder of byte b followed by n bytes. */
static const uint64_t table[8][256] = {
    {ALL(0xb32e4cbe03a75f6fu, 0xf4843657a840a05bu, 0x7bd0c384ff8f5e33u, 0xf7a18709ff1ebc66u, 0x7d9ba13851336649u,
         0xfb374270a266cc92u, 0x64b62bcaebc387a1u, 0xc96c5795d7870f42u)},
    {ALL(0x54e979925cd0f10du, 0xa9d2f324b9a1e21au, 0xc17d4962dc4ddab1u, 0x10223dee1795abe7u, 0x20447bdc2f2b57ceu,
         0x4088f7b85e56af9cu, 0x8111ef70bcad5f38u, 0x90fb71cad654a0f5u)},
    {ALL(0x3f0be14a916a6dcbu, 0x7e17c29522d4db96u, 0xfc2f852a45a9b72cu, 0x6a87a57f245d70ddu, 0xd50f4afe48bae1bau,
         0x38c63ad73e7bddf1u, 0x718c75ae7cf7bbe2u, 0xe318eb5cf9ef77c4u)},
    {ALL(0x1dee8a5e222ca1dcu, 0x3bdd14bc445943b8u, 0x77ba297888b28770u, 0xef7452f111650ee0u, 0x4c300ac98dc40345u,
         0x986015931b88068au, 0xa218840d981e1391u, 0xd6e9a7309f3239a7u)},
    {ALL(0x5c2d776033c4205eu, 0xb85aeec0678840bcu, 0xe26d72ab601e9ffdu, 0x56024a7d6f33217fu, 0xac0494fade6642feu,
         0xcad186de13c29b79u, 0x077ba297888b2877u, 0x0ef7452f111650eeu)},
    {ALL(0x6184d55f721267c6u, 0xc309aabee424cf8cu, 0x14cbfa566747819du, 0x2997f4acce8f033au, 0x532fe9599d1e0674u,
         0xa65fd2b33a3c0ce8u, 0xde670a4ddb760755u, 0x2e16bbb019e2102fu)},
    {ALL(0x22ef0d5934f964ecu, 0x45de1ab269f2c9d8u, 0x8bbc3564d3e593b0u, 0x85a0c5e208c539e5u, 0x999924efbe846d4fu,
         0xa1eae6f4d206c41bu, 0xd10d62c20b0396b3u, 0x30c26aafb90933e3u)},
    {ALL(0xdabe95afc7875f40u, 0x27a584742000a005u, 0x4f4b08e84001400au, 0x9e9611d080028014u, 0xaff48c8aaf0b1eadu,
         0xcd31b63ef11823dfu, 0x08bbc3564d3e593bu, 0x117786ac9a7cb276u)},
};

static uint64_t eight_bytes(uint64_t crc, const unsigned char *p) {
    crc ^= fc_load_little(p, 8);
    return table[7][crc & 255] ^ table[6][crc >> 8 & 255] ^ table[5][crc >> 16 & 255] ^ table[4][crc >> 24 & 255] ^
           table[3][crc >> 32 & 255] ^ table[2][crc >> 40 & 255] ^ table[1][crc >> 48 & 255] ^ table[0][crc >> 56];
}

uint64_t fc_crc64(uint64_t crc, const void *bytes, size_t size) {
    const unsigned char *p = bytes;
    crc = ~crc;
    for (; size >= 8; size -= 8, p += 8) {
        crc = eight_bytes(crc, p);
    }
    for (; size > 0; size--) {
        crc = crc >> 8 ^ table[0][(crc ^ *p++) & 255];
    }
    return ~crc;
}

uint32_t fc_crc32(uint32_t crc, const void *bytes, size_t size) {
    return (uint32_t)crc32_z(crc, bytes, size);
}

#endif

uint64_t fc_crc64_combine(uint64_t first, uint64_t second, uint64_t second_size) {
    return fc_crc64_shift(first, second_size) ^ second;
}

uint32_t fc_crc32_combine(uint32_t first, uint32_t second, uint64_t second_size) {
    return (uint32_t)crc32_combine(first, second, (z_off_t)second_size);
}

void fc_crc32_factor_init(fc_crc32_factor *factor, uint64_t bytes) {
    static const uint32_t crc32_polynomial = 0xedb88320u;
    uint32_t bit[32];
    bit[31] = fc_crc32_shift((uint32_t)1 << 31, bytes);
    for (int i = 30; i >= 0; i--) {
        bit[i] = bit[i + 1] >> 1 ^ (crc32_polynomial & (0 - (bit[i + 1] & 1)));
    }
    for (int i = 0; i < 8; i++) {
        factor->of[i][0] = 0;
        for (int k = 0; k < 4; k++) {
            for (int v = 0; v < 1 << k; v++) {
                factor->of[i][v | 1 << k] = factor->of[i][v] ^ bit[4 * i + k];
            }
        }
    }
}

uint64_t fc_crc64_finish(uint64_t sum, uint64_t size) {
    return sum ^ ~fc_crc64_shift(~(uint64_t)0, size);
}
