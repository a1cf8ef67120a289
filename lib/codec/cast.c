/*
 * fc_cast: the only function that changes values. The engine (lib/read, lib/move) owns the buffers.
 *
 * torch converts every pair of floating-point types through float32 (c10::convert). A cast here does the same: a
 * decoder produces float32 bits and an encoder consumes them, so 18 small loops replace 72. They work on blocks of a
 * fixed size because gcc -O2 vectorises a loop only when it knows the trip count. Where float32 is aligned it needs
 * neither. Apart from the conversions from and
 * to float64, they use integer arithmetic and two exact float additions, so neither flush-to-zero nor the caller's
 * build flags can change a result.
 *
 * NaNs follow c10's scalar conversions; for bfloat16 the result is 0x7fc0. (torch's AVX loop for contiguous float32 or
 * float64 → bfloat16 produces 0xffff for the same NaN, depending on the machine and on the element's position. No
 * definition could match both.)
 */
#include "fsdpckpt/cast.h"
#include "codec/cast_bits.h"

#include <stdbool.h>
#include <string.h>

/*
 * The oracle test also builds this file with FSDPCKPT_PORTABLE_CAST, which leaves out the F16C and AVX2 instructions,
 * to test both paths. clang 14 cannot query F16C with __builtin_cpu_supports; it vectorises the portable loops well.
 */
#if defined(__x86_64__) && !defined(__clang__) && !defined(FSDPCKPT_PORTABLE_CAST)
#define USE_X86 1
#include <immintrin.h>
#endif

enum { BLOCK = 256 };

/* The bits of BLOCK float32 values, passed from a decoder to an encoder. They may be the caller's floats. */
typedef uint32_t __attribute__((may_alias)) float_bits;
typedef float_bits block_bits[BLOCK];

typedef void (*decode_fn)(const void *restrict src, float_bits *restrict bits);
typedef void (*encode_fn)(const float_bits *restrict bits, void *restrict dst);

/* ---- decoders: any type → float32, and encoders: float32 → any type ---- */

#define DECODER(target, suffix, type, raw)                                                                             \
    target static void decode_##type##suffix(const void *restrict src, float_bits *restrict bits) {                    \
        raw in[BLOCK];                                                                                                 \
        memcpy(in, src, sizeof in);                                                                                    \
        for (int i = 0; i < BLOCK; i++) {                                                                              \
            bits[i] = fc_bits_of_##type(in[i]);                                                                        \
        }                                                                                                              \
    }
#define ENCODER(target, suffix, type, raw)                                                                             \
    target static void encode_##type##suffix(const float_bits *restrict bits, void *restrict dst) {                    \
        raw out[BLOCK];                                                                                                \
        for (int i = 0; i < BLOCK; i++) {                                                                              \
            out[i] = fc_##type##_of_bits(bits[i]);                                                                     \
        }                                                                                                              \
        memcpy(dst, out, sizeof out);                                                                                  \
    }
#define BOTH(target, suffix, type, raw)                                                                                \
    DECODER(target, suffix, type, raw)                                                                                 \
    ENCODER(target, suffix, type, raw)
#define LOOPS(target, suffix)                                                                                          \
    BOTH(target, suffix, f64, double)                                                                                  \
    BOTH(target, suffix, bf16, uint16_t)                                                                               \
    BOTH(target, suffix, f16, uint16_t)                                                                                \
    BOTH(target, suffix, e4m3fn, uint8_t)                                                                              \
    BOTH(target, suffix, e4m3fnuz, uint8_t)                                                                            \
    BOTH(target, suffix, e5m2, uint8_t)                                                                                \
    BOTH(target, suffix, e5m2fnuz, uint8_t)                                                                            \
    BOTH(target, suffix, e8m0fnu, uint8_t)
LOOPS(, )

/* float32 needs no loop where it is aligned. */
static void decode_f32(const void *restrict src, float_bits *restrict bits) {
    memcpy(bits, src, sizeof(block_bits));
}

static void encode_f32(const float_bits *restrict bits, void *restrict dst) {
    memcpy(dst, bits, sizeof(block_bits));
}

/* ---- the same bits with the instructions of newer processors ---- */

#ifdef USE_X86
LOOPS(__attribute__((target("avx2"))), _avx2)

__attribute__((target("avx,f16c"))) static void decode_f16_f16c(const void *restrict src, float_bits *restrict bits) {
    for (int i = 0; i < BLOCK; i += 8) {
        __m128i half = _mm_loadu_si128((const __m128i *)((const char *)src + 2 * i));
        _mm256_storeu_ps((float *)(void *)(bits + i), _mm256_cvtph_ps(half));
    }
}

__attribute__((target("avx,f16c"))) static void encode_f16_f16c(const float_bits *restrict bits, void *restrict dst) {
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

#define CODEC(type, suffix)                                                                                            \
    { decode_##type##suffix, encode_##type##suffix }
#define CODECS(suffix)                                                                                                 \
    {                                                                                                                  \
        [FC_F64] = CODEC(f64, suffix), [FC_F32] = CODEC(f32, ), [FC_F16] = CODEC(f16, suffix),                         \
        [FC_BF16] = CODEC(bf16, suffix), [FC_F8_E4M3FN] = CODEC(e4m3fn, suffix),                                       \
        [FC_F8_E4M3FNUZ] = CODEC(e4m3fnuz, suffix), [FC_F8_E5M2] = CODEC(e5m2, suffix),                                \
        [FC_F8_E5M2FNUZ] = CODEC(e5m2fnuz, suffix), [FC_F8_E8M0FNU] = CODEC(e8m0fnu, suffix),                          \
    }

static codec codec_of(fc_dtype dtype) {
    static const codec table[FC_DTYPE_COUNT] = CODECS();
#ifdef USE_X86
    static const codec faster[FC_DTYPE_COUNT] = CODECS(_avx2);
    if (dtype == FC_F16 && __builtin_cpu_supports("f16c")) {
        return (codec){decode_f16_f16c, encode_f16_f16c};
    }
    if (__builtin_cpu_supports("avx2")) {
        return faster[dtype];
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
    const bool is_decoded = from == FC_F32 && (uintptr_t)src % sizeof(float_bits) == 0;
    const bool stays_decoded = to == FC_F32 && (uintptr_t)dst % sizeof(float_bits) == 0;
    block_bits between;
    for (; count >= BLOCK; count -= BLOCK) {
        const float_bits *bits = is_decoded ? (const void *)in : between;
        float_bits *decoded = stays_decoded ? (void *)out : between;
        if (!is_decoded) {
            decode(in, decoded);
        }
        if (!stays_decoded) {
            encode(bits, out);
        }
        in += BLOCK * src_size;
        out += BLOCK * dst_size;
    }
    if (count > 0) {
        cast_tail(decode, encode, in, count * src_size, out, count * dst_size);
    }
}
