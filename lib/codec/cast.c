/*
 * fc_cast: the only function that changes values. The engine (lib/engine) owns the buffers.
 *
 * torch converts every pair of floating-point types through float32 (c10::convert). A cast here does the same: a
 * decoder produces float32 bits and an encoder consumes them, so 18 small loops replace 72. They work on blocks of a
 * fixed size because gcc -O2 vectorises a loop only when it knows the trip count. Apart from the conversions from and
 * to float64, they use integer arithmetic and two exact float additions, so neither flush-to-zero nor the caller's
 * build flags can change a result.
 *
 * NaNs follow c10's scalar conversions; for bfloat16 the result is 0x7fc0. (torch's AVX loop for contiguous float32 or
 * float64 → bfloat16 produces 0xffff for the same NaN, depending on the machine and on the element's position. No
 * definition could match both.)
 */
#include "fsdpckpt/cast.h"
#include "codec/cast_bits.h"

#include <string.h>

/*
 * The oracle test also builds this file with FSDPCKPT_PORTABLE_CAST, which leaves out the F16C instructions, to test
 * both paths. clang 14 cannot query F16C with __builtin_cpu_supports; it vectorises the portable loops well.
 */
#if defined(__x86_64__) && !defined(__clang__) && !defined(FSDPCKPT_PORTABLE_CAST)
#define USE_F16C 1
#include <immintrin.h>
#endif

enum { BLOCK = 256 };

/* The bits of BLOCK float32 values, passed from a decoder to an encoder. */
typedef uint32_t block_bits[BLOCK];

typedef void (*decode_fn)(const void *restrict src, uint32_t *restrict bits);
typedef void (*encode_fn)(const uint32_t *restrict bits, void *restrict dst);

/* ---- decoders: any type → float32 ---- */

#define DECODER(type, raw)                                                                                             \
    static void decode_##type(const void *restrict src, uint32_t *restrict bits) {                                     \
        raw in[BLOCK];                                                                                                 \
        memcpy(in, src, sizeof in);                                                                                    \
        for (int i = 0; i < BLOCK; i++) {                                                                              \
            bits[i] = fc_bits_of_##type(in[i]);                                                                        \
        }                                                                                                              \
    }
DECODER(f64, double)
DECODER(bf16, uint16_t)
DECODER(f16, uint16_t)
DECODER(e4m3fn, uint8_t)
DECODER(e4m3fnuz, uint8_t)
DECODER(e5m2, uint8_t)
DECODER(e5m2fnuz, uint8_t)
DECODER(e8m0fnu, uint8_t)

static void decode_f32(const void *restrict src, uint32_t *restrict bits) {
    memcpy(bits, src, sizeof(block_bits));
}

/* ---- encoders: float32 → any type ---- */

#define ENCODER(type, raw)                                                                                             \
    static void encode_##type(const uint32_t *restrict bits, void *restrict dst) {                                     \
        raw out[BLOCK];                                                                                                \
        for (int i = 0; i < BLOCK; i++) {                                                                              \
            out[i] = fc_##type##_of_bits(bits[i]);                                                                     \
        }                                                                                                              \
        memcpy(dst, out, sizeof out);                                                                                  \
    }
ENCODER(f64, double)
ENCODER(bf16, uint16_t)
ENCODER(f16, uint16_t)
ENCODER(e4m3fn, uint8_t)
ENCODER(e4m3fnuz, uint8_t)
ENCODER(e5m2, uint8_t)
ENCODER(e5m2fnuz, uint8_t)
ENCODER(e8m0fnu, uint8_t)

static void encode_f32(const uint32_t *restrict bits, void *restrict dst) {
    memcpy(dst, bits, sizeof(block_bits));
}

/* ---- float16 with the F16C instructions: the same bits, faster ---- */

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
    static const codec table[FC_DTYPE_COUNT] = {
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

/* Casts fewer than BLOCK elements through a zeroed block, so that the loops above handle only whole blocks. */
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
    if (!decode || !encode) {
        return; /* not two floating-point types, which the contract excludes */
    }
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
