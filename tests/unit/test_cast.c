/*
 * fc_cast: the values that define rounding, overflow, NaN and zero of each dtype, and counts around the block size.
 * tests/oracle/cast.py compares millions more with torch.
 */
#include "fsdpckpt/cast.h"
#include "fsdpckpt/read.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static uint64_t cast_one(fc_dtype from, uint64_t bits, fc_dtype to) {
    uint64_t out = 0;
    fc_cast(from, &bits, to, &out, 1);
    return out;
}

static uint64_t from_float(float value, fc_dtype to) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return cast_one(FC_F32, bits, to);
}

static float to_float(fc_dtype from, uint64_t bits) {
    uint32_t out = (uint32_t)cast_one(from, bits, FC_F32);
    float value;
    memcpy(&value, &out, sizeof value);
    return value;
}

static void bf16_rounds_to_even(void **state) {
    (void)state;
    assert_int_equal(cast_one(FC_F32, 0x3f808000, FC_BF16), 0x3f80); /* a tie, down to even */
    assert_int_equal(cast_one(FC_F32, 0x3f818000, FC_BF16), 0x3f82); /* a tie, up to even */
    assert_int_equal(cast_one(FC_F32, 0x3f808001, FC_BF16), 0x3f81);
    assert_int_equal(cast_one(FC_F32, 0x7f7fffff, FC_BF16), 0x7f80); /* the largest float overflows */
    assert_int_equal(cast_one(FC_F32, 0xffc12345, FC_BF16), 0x7fc0); /* NaN as c10::BFloat16 */
    assert_int_equal(cast_one(FC_F32, 0x80000001, FC_BF16), 0x8000);
    assert_int_equal(cast_one(FC_BF16, 0x7f81, FC_F32), 0x7f810000); /* a signalling NaN keeps its bits */
}

static void f64_goes_through_f32(void **state) {
    (void)state;
    /* 1 + 2^-8 + 2^-30 would round up directly to bfloat16. Through float32 it is a tie, which rounds down to even. */
    double value = 1 + ldexp(1, -8) + ldexp(1, -30);
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    assert_int_equal(cast_one(FC_F64, bits, FC_BF16), 0x3f80);
    assert_int_equal(cast_one(FC_BF16, 0x3f81, FC_F64), UINT64_C(0x3ff0200000000000));
}

static void f16_edges(void **state) {
    (void)state;
    assert_int_equal(from_float(65504.0f, FC_F16), 0x7bff);
    assert_int_equal(from_float(65519.996f, FC_F16), 0x7bff);
    assert_int_equal(from_float(65520.0f, FC_F16), 0x7c00);
    assert_int_equal(from_float(-INFINITY, FC_F16), 0xfc00);
    assert_int_equal(from_float(ldexpf(1, -24), FC_F16), 0x0001);
    assert_int_equal(from_float(ldexpf(1, -25), FC_F16), 0x0000); /* a tie, to even zero */
    assert_int_equal(from_float(ldexpf(-3, -26), FC_F16), 0x8001);
    assert_int_equal(cast_one(FC_F32, 0x7f802000, FC_F16), 0x7e01); /* a NaN is made quiet, its payload kept */
    assert_int_equal(cast_one(FC_F16, 0xfc01, FC_F32), 0xffc02000);
    assert_true(to_float(FC_F16, 0x0001) == ldexpf(1, -24));
    assert_true(to_float(FC_F16, 0x03ff) == ldexpf(1023, -24));
    assert_true(to_float(FC_F16, 0x3c00) == 1.0f);
}

static void fp8_overflow_nan_and_zero(void **state) {
    (void)state;
    assert_int_equal(from_float(448.0f, FC_F8_E4M3FN), 0x7e);
    assert_int_equal(from_float(1e9f, FC_F8_E4M3FN), 0x7e);
    assert_int_equal(from_float(-INFINITY, FC_F8_E4M3FN), 0xfe);
    assert_int_equal(from_float(-NAN, FC_F8_E4M3FN) & 0x7f, 0x7f);
    assert_int_equal(from_float(-0.0f, FC_F8_E4M3FN), 0x80);
    assert_int_equal(from_float(57344.0f, FC_F8_E5M2), 0x7b);
    assert_int_equal(from_float(61440.0f, FC_F8_E5M2), 0x7c); /* halfway to the first value out of range: infinity */
    assert_int_equal(from_float(-1e9f, FC_F8_E5M2), 0xfc);
    assert_int_equal(from_float(240.0f, FC_F8_E4M3FNUZ), 0x7f);
    assert_int_equal(from_float(248.0f, FC_F8_E4M3FNUZ), 0x80);
    assert_int_equal(from_float(-0.0f, FC_F8_E4M3FNUZ), 0x00);
    assert_int_equal(from_float(ldexpf(-1, -12), FC_F8_E4M3FNUZ),
                     0x00); /* rounds to zero without a sign, since -0 would be NaN */
    assert_int_equal(from_float(INFINITY, FC_F8_E5M2FNUZ), 0x80);
    assert_int_equal(from_float(-0.0f, FC_F8_E5M2FNUZ), 0x00);
    assert_true(to_float(FC_F8_E4M3FN, 0x01) == ldexpf(1, -9));
    assert_true(to_float(FC_F8_E4M3FNUZ, 0x01) == ldexpf(1, -10));
    assert_true(to_float(FC_F8_E5M2FNUZ, 0xff) == -57344.0f);
    assert_true(isnan(to_float(FC_F8_E4M3FN, 0x7f)) && isnan(to_float(FC_F8_E5M2FNUZ, 0x80)));
    assert_true(isinf(to_float(FC_F8_E5M2, 0xfc)));
}

static void e8m0_is_an_exponent(void **state) {
    (void)state;
    assert_int_equal(from_float(1.0f, FC_F8_E8M0FNU), 127);
    assert_int_equal(from_float(-1.5f, FC_F8_E8M0FNU), 128); /* the sign is lost, a tie goes up */
    assert_int_equal(cast_one(FC_F32, 0x00400000, FC_F8_E8M0FNU), 0);
    assert_int_equal(cast_one(FC_F32, 0x00400001, FC_F8_E8M0FNU), 1);
    assert_int_equal(from_float(INFINITY, FC_F8_E8M0FNU), 255);
    assert_true(to_float(FC_F8_E8M0FNU, 0) == ldexpf(1, -127));
    assert_true(isnan(to_float(FC_F8_E8M0FNU, 255)));
}

static const fc_dtype floats[] = {FC_F64,         FC_F32,     FC_F16,         FC_BF16,      FC_F8_E4M3FN,
                                  FC_F8_E4M3FNUZ, FC_F8_E5M2, FC_F8_E5M2FNUZ, FC_F8_E8M0FNU};
enum { FLOATS = sizeof floats / sizeof *floats };

/* Whole blocks, tails and odd addresses give the same values as single elements. Nothing else is written. */
static void any_count_and_alignment(void **state) {
    (void)state;
    static const size_t counts[] = {0, 1, 255, 256, 257, 1000};
    unsigned char in[1000 * 8 + 1], out[1000 * 8 + 2];
    for (size_t i = 0; i < sizeof in; i++) {
        in[i] = (unsigned char)(i * 131 + (i >> 8) * 17);
    }
    for (int f = 0; f < FLOATS; f++) {
        for (int t = 0; t < FLOATS; t++) {
            size_t from_size = fc_dtype_size(floats[f]), to_size = fc_dtype_size(floats[t]);
            for (size_t c = 0; c < sizeof counts / sizeof *counts; c++) {
                memset(out, 0xa5, sizeof out);
                fc_cast(floats[f], in + 1, floats[t], out + 1, counts[c]);
                assert_int_equal(out[0], 0xa5);
                assert_int_equal(out[1 + counts[c] * to_size], 0xa5);
                for (size_t i = 0; i < counts[c]; i++) {
                    uint64_t bits = 0;
                    memcpy(&bits, in + 1 + i * from_size, from_size);
                    uint64_t want = cast_one(floats[f], bits, floats[t]);
                    assert_memory_equal(out + 1 + i * to_size, &want, to_size);
                }
            }
        }
    }
}

/* A cast to a wider type and back changes nothing but the payloads of NaNs. */
static void widening_loses_nothing(void **state) {
    (void)state;
    for (int f = FLOATS - 1; f > 1; f--) {
        uint32_t count = fc_dtype_size(floats[f]) == 1 ? 256 : 65536;
        for (uint32_t bits = 0; bits < count; bits++) {
            if (isnan(to_float(floats[f], bits))) {
                continue;
            }
            assert_int_equal(cast_one(FC_F32, cast_one(floats[f], bits, FC_F32), floats[f]), bits);
            assert_int_equal(cast_one(FC_F64, cast_one(floats[f], bits, FC_F64), floats[f]), bits);
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bf16_rounds_to_even),
        cmocka_unit_test(f64_goes_through_f32),
        cmocka_unit_test(f16_edges),
        cmocka_unit_test(fp8_overflow_nan_and_zero),
        cmocka_unit_test(e8m0_is_an_exponent),
        cmocka_unit_test(any_count_and_alignment),
        cmocka_unit_test(widening_loses_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
