/*
 * Scalar conversions between every floating-point type and the bits of a float32. fc_cast runs them in blocks on the
 * CPU and lib/gather/cuda runs them in the threads of a GPU, so both produce the same bits.
 *
 * They use integer arithmetic and a few exact float additions. Only float64 needs the processor's own conversion.
 */
#pragma once

#include <stdint.h>
#include <string.h>

#ifdef __CUDACC__
#define FC_ELEMENT static __device__ __forceinline__
#else
#define FC_ELEMENT static inline
#endif

FC_ELEMENT uint32_t fc_float_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

FC_ELEMENT float fc_float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* ---- to the bits of a float32 ---- */

FC_ELEMENT uint32_t fc_bits_of_f64(double value) {
#ifdef __CUDACC__
    /* A GPU gives every NaN the same bits. CPUs keep the sign and as much of the payload as fits. */
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    if (value != value) {
        return (uint32_t)(bits >> 32 & 0x80000000) | 0x7fc00000 | (uint32_t)(bits >> 29 & 0x3fffff);
    }
#endif
    return fc_float_bits((float)value);
}

FC_ELEMENT uint32_t fc_bits_of_bf16(uint16_t value) {
    return (uint32_t)value << 16;
}

/*
 * An IEEE half: shifts the fields into place and re-biases the exponent. A subnormal then has an implicit bit too many,
 * which an exact subtraction of 2^-14 removes. A NaN becomes quiet, as with the F16C instruction.
 */
FC_ELEMENT uint32_t fc_bits_of_f16(uint32_t h) {
    uint32_t magnitude = (h & 0x7fff) << 13;
    uint32_t normal = magnitude + (112u << 23);
    uint32_t subnormal = fc_float_bits(fc_float_of(magnitude + (113u << 23)) - fc_float_of(113u << 23));
    uint32_t quiet = magnitude > 0x0f800000 ? 1u << 22 : 0;
    uint32_t special = magnitude | 0x7f800000 | quiet;
    uint32_t value = magnitude < (1u << 23) ? subnormal : normal;
    value = magnitude >= 0x0f800000 ? special : value;
    return value | (h & 0x8000) << 16;
}

/*
 * A byte with `mantissa` mantissa bits and exponent bias `bias` that is neither infinity nor NaN. As for a half, an
 * exact subtraction of the smallest normal number removes the implicit bit of a subnormal.
 */
FC_ELEMENT uint32_t fc_bits_of_byte(uint32_t byte, int mantissa, uint32_t bias) {
    uint32_t magnitude = (byte & 0x7f) << (23 - mantissa);
    uint32_t smallest = (128u - bias) << 23;
    uint32_t subnormal = fc_float_bits(fc_float_of(magnitude + smallest) - fc_float_of(smallest));
    return magnitude < (1u << 23) ? subnormal : magnitude + ((127u - bias) << 23);
}

FC_ELEMENT uint32_t fc_bits_of_e4m3fn(uint8_t byte) {
    uint32_t value = fc_bits_of_byte(byte, 3, 7);
    value = (byte & 0x7f) == 0x7f ? 0x7ff00000 : value;
    return value | (uint32_t)(byte & 0x80) << 24;
}

/* e5m2 is the upper byte of a half. */
FC_ELEMENT uint32_t fc_bits_of_e5m2(uint8_t byte) {
    return fc_bits_of_f16((uint32_t)byte << 8);
}

/* The fnuz types have a single NaN, 0x80, which is -0 in the other types. */
FC_ELEMENT uint32_t fc_bits_of_e4m3fnuz(uint8_t byte) {
    uint32_t value = fc_bits_of_byte(byte, 3, 8) | (uint32_t)(byte & 0x80) << 24;
    return byte == 0x80 ? 0x7f800001 : value;
}

FC_ELEMENT uint32_t fc_bits_of_e5m2fnuz(uint8_t byte) {
    uint32_t value = fc_bits_of_byte(byte, 2, 16) | (uint32_t)(byte & 0x80) << 24;
    return byte == 0x80 ? 0x7f800001 : value;
}

/* e8m0 has only an exponent. 0 is 2^-127, a subnormal float32; 255 is NaN. */
FC_ELEMENT uint32_t fc_bits_of_e8m0fnu(uint8_t byte) {
    uint32_t value = byte == 0 ? 0x00400000 : (uint32_t)byte << 23;
    return byte == 0xff ? 0x7f800001 : value;
}

/* ---- from the bits of a float32 ---- */

FC_ELEMENT double fc_f64_of_bits(uint32_t bits) {
#ifdef __CUDACC__
    if ((bits & 0x7fffffff) > 0x7f800000) { /* a NaN, as above */
        uint64_t wide =
            (uint64_t)(bits & 0x80000000) << 32 | (uint64_t)0x7ff80000 << 32 | (uint64_t)(bits & 0x3fffff) << 29;
        double nan;
        memcpy(&nan, &wide, sizeof nan);
        return nan;
    }
#endif
    return (double)fc_float_of(bits);
}

FC_ELEMENT uint16_t fc_bf16_of_bits(uint32_t bits) {
    uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
}

/*
 * Rounds the magnitude `b` of a float32 (sign cleared) to nearest even, to a type with `mantissa` mantissa bits and
 * exponent bias `bias`. The result contains exponent and mantissa and may carry into the first unused exponent.
 * Below the smallest normal number the float addition rounds: it adds the power of two whose last place equals the last
 * place of a subnormal.
 */
FC_ELEMENT uint32_t fc_round_bits(uint32_t b, int mantissa, uint32_t bias) {
    int shift = 23 - mantissa;
    uint32_t magic = (128u - bias + (uint32_t)shift) << 23;
    uint32_t subnormal = fc_float_bits(fc_float_of(b) + fc_float_of(magic)) - magic;
    uint32_t odd = b >> shift & 1;
    uint32_t normal = (b - ((127u - bias) << 23) + (1u << (shift - 1)) - 1 + odd) >> shift;
    return b < (128u - bias) << 23 ? subnormal : normal;
}

FC_ELEMENT uint16_t fc_f16_of_bits(uint32_t bits) {
    uint32_t b = bits & 0x7fffffff;
    uint32_t nan = 0x7e00 | (b >> 13 & 0x3ff);
    uint32_t value = b >= 143u << 23 ? 0x7c00 : fc_round_bits(b, 10, 15);
    value = b > 0x7f800000 ? nan : value;
    return (uint16_t)(value | (bits >> 16 & 0x8000));
}

/* Overflow and infinity saturate to 448, as in torch since 2.15. */
FC_ELEMENT uint8_t fc_e4m3fn_of_bits(uint32_t bits) {
    uint32_t b = bits & 0x7fffffff;
    uint32_t value = fc_round_bits(b, 3, 7);
    value = b >= 1087u << 20 || value > 0x7e ? 0x7e : value;
    value = b > 0x7f800000 ? 0x7f : value;
    return (uint8_t)(value | (bits >> 24 & 0x80));
}

FC_ELEMENT uint8_t fc_e5m2_of_bits(uint32_t bits) {
    uint32_t b = bits & 0x7fffffff;
    uint32_t value = b >= 143u << 23 ? 0x7c : fc_round_bits(b, 2, 15);
    value = b > 0x7f800000 ? 0x7f : value;
    return (uint8_t)(value | (bits >> 24 & 0x80));
}

/* The fnuz types overflow to NaN. A value that rounds to zero loses its sign, because 0x80 is NaN. */
FC_ELEMENT uint8_t fc_fnuz_of_bits(uint32_t bits, int mantissa, uint32_t bias, uint32_t overflow) {
    uint32_t b = bits & 0x7fffffff;
    uint32_t value = fc_round_bits(b, mantissa, bias);
    uint32_t sign = value == 0 ? 0 : bits >> 24 & 0x80;
    return (uint8_t)(b >= overflow ? 0x80 : value | sign);
}

FC_ELEMENT uint8_t fc_e4m3fnuz_of_bits(uint32_t bits) {
    return fc_fnuz_of_bits(bits, 3, 8, 0x87u << 23);
}

FC_ELEMENT uint8_t fc_e5m2fnuz_of_bits(uint32_t bits) {
    return fc_fnuz_of_bits(bits, 2, 16, 0x8fu << 23);
}

/* Drops the sign. A tie rounds up, except between 2^-127 and zero, which e8m0 cannot express. */
FC_ELEMENT uint8_t fc_e8m0fnu_of_bits(uint32_t bits) {
    uint32_t exponent = bits >> 23 & 0xff;
    uint32_t fraction = bits & 0x7fffff;
    uint32_t threshold = exponent == 0 ? 0x400001 : 0x400000;
    uint32_t up = exponent != 0xff && fraction >= threshold ? 1 : 0;
    return (uint8_t)(exponent + up);
}
