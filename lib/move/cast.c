/*
 * fc_cast: the one place where values change. Bytes come from and go to the buffers of the engine (lib/move).
 *
 * torch converts every pair of floating-point types through float32 (c10::convert), so a cast here is a decoder to
 * float32 bits and an encoder from them: 18 small loops instead of 72. They work on blocks of a fixed size, because
 * gcc -O2 vectorises a loop only when it knows the trip count. All but the conversions from and to float64 is integer
 * arithmetic and two exact float additions, so neither flush-to-zero nor the build flags of the caller can change
 * a result.
 *
 * A NaN becomes what c10's scalar conversions make of it; for bfloat16 that is 0x7fc0. (torch's own AVX loop for
 * contiguous float32 or float64 → bfloat16 gives 0xffff for the same NaN, depending on the machine and on the position
 * of the element; no definition could equal both.)
 */
#include "fsdpckpt/move.h"

#include <string.h>

/*
 * FSDPCKPT_PORTABLE_CAST: the oracle test builds this file once more without the instructions, to test both ways.
 * clang (14) cannot ask the processor for F16C in __builtin_cpu_supports; its loops are vectorised well without.
 */
#if defined(__x86_64__) && !defined(__clang__) && !defined(FSDPCKPT_PORTABLE_CAST)
#define USE_F16C 1
#include <immintrin.h>
#endif

enum { BLOCK = 256 };

/* The bits of BLOCK float32 values: what stands between a decoder and an encoder. */
typedef uint32_t block_bits[BLOCK];

typedef void (*decode_fn)(const void *restrict src, uint32_t *restrict bits);
typedef void (*encode_fn)(const uint32_t *restrict bits, void *restrict dst);

static inline uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* ---- decoders: a type → float32 ---- */

static void decode_f64(const void *restrict src, uint32_t *restrict bits) {
    double in[BLOCK];
    float out[BLOCK];
    memcpy(in, src, sizeof in);
    for (int i = 0; i < BLOCK; i++) {
        out[i] = (float)in[i];
    }
    memcpy(bits, out, sizeof out);
}

static void decode_f32(const void *restrict src, uint32_t *restrict bits) {
    memcpy(bits, src, sizeof(block_bits));
}

static void decode_bf16(const void *restrict src, uint32_t *restrict bits) {
    uint16_t in[BLOCK];
    memcpy(in, src, sizeof in);
    for (int i = 0; i < BLOCK; i++) {
        bits[i] = (uint32_t)in[i] << 16;
    }
}

/*
 * An IEEE half: shift the fields into place and re-bias. A subnormal has an implicit bit too many then, which an exact
 * subtraction of 2^-14 takes away. A NaN is made quiet, as the F16C instruction does.
 */
static inline uint32_t half_to_bits(uint32_t h) {
    uint32_t magnitude = (h & 0x7fff) << 13;
    uint32_t normal = magnitude + (112u << 23);
    uint32_t subnormal = bits_of(float_of(magnitude + (113u << 23)) - float_of(113u << 23));
    uint32_t quiet = magnitude > 0x0f800000 ? 1u << 22 : 0;
    uint32_t special = magnitude | 0x7f800000 | quiet;
    uint32_t value = magnitude < (1u << 23) ? subnormal : normal;
    value = magnitude >= 0x0f800000 ? special : value;
    return value | (h & 0x8000) << 16;
}

static void decode_f16(const void *restrict src, uint32_t *restrict bits) {
    uint16_t in[BLOCK];
    memcpy(in, src, sizeof in);
    for (int i = 0; i < BLOCK; i++) {
        bits[i] = half_to_bits(in[i]);
    }
}

/* e5m2 is the upper byte of a half. */
static void decode_e5m2(const void *restrict src, uint32_t *restrict bits) {
    uint8_t in[BLOCK];
    memcpy(in, src, sizeof in);
    for (int i = 0; i < BLOCK; i++) {
        bits[i] = half_to_bits((uint32_t)in[i] << 8);
    }
}

/*
 * A byte with `mantissa` mantissa bits and exponent bias `bias`, neither infinity nor NaN: like a half above, with an
 * exact subtraction of the smallest normal number to undo the implicit bit of a subnormal.
 */
static inline uint32_t byte_to_bits(uint32_t byte, int mantissa, uint32_t bias) {
    uint32_t magnitude = (byte & 0x7f) << (23 - mantissa);
    uint32_t smallest = (128u - bias) << 23;
    uint32_t subnormal = bits_of(float_of(magnitude + smallest) - float_of(smallest));
    return magnitude < (1u << 23) ? subnormal : magnitude + ((127u - bias) << 23);
}

static void decode_e4m3fn(const void *restrict src, uint32_t *restrict bits) {
    uint8_t in[BLOCK];
    memcpy(in, src, sizeof in);
    for (int i = 0; i < BLOCK; i++) {
        uint32_t value = byte_to_bits(in[i], 3, 7);
        value = (in[i] & 0x7f) == 0x7f ? 0x7ff00000 : value;
        bits[i] = value | (uint32_t)(in[i] & 0x80) << 24;
    }
}

/* The fnuz types have one NaN, 0x80, where others have -0. */
static void decode_e4m3fnuz(const void *restrict src, uint32_t *restrict bits) {
    uint8_t in[BLOCK];
    memcpy(in, src, sizeof in);
    for (int i = 0; i < BLOCK; i++) {
        uint32_t value = byte_to_bits(in[i], 3, 8) | (uint32_t)(in[i] & 0x80) << 24;
        bits[i] = in[i] == 0x80 ? 0x7f800001 : value;
    }
}

static void decode_e5m2fnuz(const void *restrict src, uint32_t *restrict bits) {
    uint8_t in[BLOCK];
    memcpy(in, src, sizeof in);
    for (int i = 0; i < BLOCK; i++) {
        uint32_t value = byte_to_bits(in[i], 2, 16) | (uint32_t)(in[i] & 0x80) << 24;
        bits[i] = in[i] == 0x80 ? 0x7f800001 : value;
    }
}

/* e8m0 is an exponent alone; 0 is 2^-127, a subnormal float32, and 255 is NaN. */
static void decode_e8m0fnu(const void *restrict src, uint32_t *restrict bits) {
    uint8_t in[BLOCK];
    memcpy(in, src, sizeof in);
    for (int i = 0; i < BLOCK; i++) {
        uint32_t value = in[i] == 0 ? 0x00400000 : (uint32_t)in[i] << 23;
        bits[i] = in[i] == 0xff ? 0x7f800001 : value;
    }
}

/* ---- encoders: float32 → a type ---- */

static void encode_f64(const uint32_t *restrict bits, void *restrict dst) {
    float in[BLOCK];
    double out[BLOCK];
    memcpy(in, bits, sizeof in);
    for (int i = 0; i < BLOCK; i++) {
        out[i] = (double)in[i];
    }
    memcpy(dst, out, sizeof out);
}

static void encode_f32(const uint32_t *restrict bits, void *restrict dst) {
    memcpy(dst, bits, sizeof(block_bits));
}

static void encode_bf16(const uint32_t *restrict bits, void *restrict dst) {
    uint16_t out[BLOCK];
    for (int i = 0; i < BLOCK; i++) {
        uint32_t rounded = (bits[i] + 0x7fff + (bits[i] >> 16 & 1)) >> 16;
        out[i] = (uint16_t)((bits[i] & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
    }
    memcpy(dst, out, sizeof out);
}

/*
 * Rounds the magnitude `b` of a float32 (sign cleared) to a type with `mantissa` mantissa bits and exponent bias
 * `bias`, to nearest even; the result holds exponent and mantissa and may carry into the first unused exponent.
 * Below the smallest normal number, adding the power of two whose last place is the last place of a subnormal makes
 * the float addition do the rounding.
 */
static inline uint32_t round_to(uint32_t b, int mantissa, uint32_t bias) {
    int shift = 23 - mantissa;
    uint32_t magic = (128u - bias + (uint32_t)shift) << 23;
    uint32_t subnormal = bits_of(float_of(b) + float_of(magic)) - magic;
    uint32_t odd = b >> shift & 1;
    uint32_t normal = (b - ((127u - bias) << 23) + (1u << (shift - 1)) - 1 + odd) >> shift;
    return b < (128u - bias) << 23 ? subnormal : normal;
}

static void encode_f16(const uint32_t *restrict bits, void *restrict dst) {
    uint16_t out[BLOCK];
    for (int i = 0; i < BLOCK; i++) {
        uint32_t b = bits[i] & 0x7fffffff;
        uint32_t nan = 0x7e00 | (b >> 13 & 0x3ff);
        uint32_t value = b >= 143u << 23 ? 0x7c00 : round_to(b, 10, 15);
        value = b > 0x7f800000 ? nan : value;
        out[i] = (uint16_t)(value | (bits[i] >> 16 & 0x8000));
    }
    memcpy(dst, out, sizeof out);
}

/* Overflow saturates to 448, infinity included, since torch 2.15. */
static void encode_e4m3fn(const uint32_t *restrict bits, void *restrict dst) {
    uint8_t out[BLOCK];
    for (int i = 0; i < BLOCK; i++) {
        uint32_t b = bits[i] & 0x7fffffff;
        uint32_t value = round_to(b, 3, 7);
        value = b >= 1087u << 20 || value > 0x7e ? 0x7e : value;
        value = b > 0x7f800000 ? 0x7f : value;
        out[i] = (uint8_t)(value | (bits[i] >> 24 & 0x80));
    }
    memcpy(dst, out, sizeof out);
}

static void encode_e5m2(const uint32_t *restrict bits, void *restrict dst) {
    uint8_t out[BLOCK];
    for (int i = 0; i < BLOCK; i++) {
        uint32_t b = bits[i] & 0x7fffffff;
        uint32_t value = b >= 143u << 23 ? 0x7c : round_to(b, 2, 15);
        value = b > 0x7f800000 ? 0x7f : value;
        out[i] = (uint8_t)(value | (bits[i] >> 24 & 0x80));
    }
    memcpy(dst, out, sizeof out);
}

/* The fnuz types overflow to NaN, and what rounds to zero loses its sign: 0x80 would be NaN. */
static inline uint8_t encode_fnuz(uint32_t bits, int mantissa, uint32_t bias, uint32_t overflow) {
    uint32_t b = bits & 0x7fffffff;
    uint32_t value = round_to(b, mantissa, bias);
    uint32_t sign = value == 0 ? 0 : bits >> 24 & 0x80;
    return (uint8_t)(b >= overflow ? 0x80 : value | sign);
}

static void encode_e4m3fnuz(const uint32_t *restrict bits, void *restrict dst) {
    uint8_t out[BLOCK];
    for (int i = 0; i < BLOCK; i++) {
        out[i] = encode_fnuz(bits[i], 3, 8, 0x87u << 23);
    }
    memcpy(dst, out, sizeof out);
}

static void encode_e5m2fnuz(const uint32_t *restrict bits, void *restrict dst) {
    uint8_t out[BLOCK];
    for (int i = 0; i < BLOCK; i++) {
        out[i] = encode_fnuz(bits[i], 2, 16, 0x8fu << 23);
    }
    memcpy(dst, out, sizeof out);
}

/* The sign is dropped; a tie goes up, except between 2^-127 and the zero that e8m0 does not have. */
static void encode_e8m0fnu(const uint32_t *restrict bits, void *restrict dst) {
    uint8_t out[BLOCK];
    for (int i = 0; i < BLOCK; i++) {
        uint32_t exponent = bits[i] >> 23 & 0xff;
        uint32_t fraction = bits[i] & 0x7fffff;
        uint32_t threshold = exponent == 0 ? 0x400001 : 0x400000;
        uint32_t up = exponent != 0xff && fraction >= threshold ? 1 : 0;
        out[i] = (uint8_t)(exponent + up);
    }
    memcpy(dst, out, sizeof out);
}

/* ---- float16 by the F16C instructions, where the processor has them: the same bits, faster ---- */

#ifdef USE_F16C
__attribute__((target("avx,f16c"))) static void decode_f16_f16c(const void *restrict src, uint32_t *restrict bits) {
    for (int i = 0; i < BLOCK; i += 8) {
        __m128i half = _mm_loadu_si128((const __m128i *)((const char *)src + 2 * i));
        _mm256_storeu_ps((float *)(void *)(bits + i), _mm256_cvtph_ps(half));
    }
}

__attribute__((target("avx,f16c"))) static void encode_f16_f16c(const uint32_t *restrict bits, void *restrict dst) {
    for (int i = 0; i < BLOCK; i += 8) {
        __m256 value = _mm256_loadu_ps((const float *)(const void *)(bits + i));
        __m128i half = _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        _mm_storeu_si128((__m128i *)(void *)((char *)dst + 2 * i), half);
    }
}
#endif

typedef struct codec {
    decode_fn decode;
    encode_fn encode;
} codec;

static codec codec_of(fc_dtype dtype) {
    static const codec table[] = {
        [FC_F64] = {decode_f64, encode_f64},
        [FC_F32] = {decode_f32, encode_f32},
        [FC_F16] = {decode_f16, encode_f16},
        [FC_BF16] = {decode_bf16, encode_bf16},
        [FC_F8_E4M3FN] = {decode_e4m3fn, encode_e4m3fn},
        [FC_F8_E4M3FNUZ] = {decode_e4m3fnuz, encode_e4m3fnuz},
        [FC_F8_E5M2] = {decode_e5m2, encode_e5m2},
        [FC_F8_E5M2FNUZ] = {decode_e5m2fnuz, encode_e5m2fnuz},
        [FC_F8_E8M0FNU] = {decode_e8m0fnu, encode_e8m0fnu},
    };
#ifdef USE_F16C
    if (dtype == FC_F16 && __builtin_cpu_supports("f16c")) {
        return (codec){decode_f16_f16c, encode_f16_f16c};
    }
#endif
    return table[dtype];
}

/* A few elements, by way of a zeroed block, so that the loops above only know whole ones. */
static void cast_tail(decode_fn decode, encode_fn encode, const void *src, size_t src_bytes, void *dst,
                      size_t dst_bytes) {
    uint64_t in[BLOCK] = {0}, out[BLOCK];
    block_bits bits;
    memcpy(in, src, src_bytes);
    decode(in, bits);
    encode(bits, out);
    memcpy(dst, out, dst_bytes);
}

void fc_cast(fc_dtype from, const void *src, fc_dtype to, void *dst, size_t count) {
    size_t src_size = fc_dtype_size(from), dst_size = fc_dtype_size(to);
    if (from == to) {
        if (count > 0) {
            memcpy(dst, src, count * src_size);
        }
        return;
    }
    decode_fn decode = codec_of(from).decode;
    encode_fn encode = codec_of(to).encode;
    const char *in = src;
    char *out = dst;
    block_bits bits;
    for (; count >= BLOCK; count -= BLOCK) {
        decode(in, bits);
        encode(bits, out);
        in += BLOCK * src_size;
        out += BLOCK * dst_size;
    }
    if (count > 0) {
        cast_tail(decode, encode, in, count * src_size, out, count * dst_size);
    }
}
