/*
 * The kernels of the statistics. See tally.h.
 *
 * Types of one or two bytes: each code is counted, then the codes that occur are added up, weighted. Others: blocks of
 * float64. Distances from a value of the block are summed, not the values, so that a large mean costs no digits; blocks
 * are joined as in Chan, Golub and LeVeque. A block with values that are not finite, or whose squares leave the range
 * of float64, is added up again with care.
 */
#include "stats/tally.h"

#include "fsdpckpt/cast.h"

#include <float.h>
#include <math.h>
#include <string.h>

enum {
    BLOCK = 512,
    FEW = 8192 /* counting the codes of fewer elements costs more than adding the elements up */
};

_Static_assert(LDBL_MANT_DIG >= 64, "long double must hold each 64-bit integer");

typedef double lanes __attribute__((vector_size(32)));
typedef int64_t masks __attribute__((vector_size(32)));
enum {
    WIDTH = sizeof(lanes) / sizeof(double),
    SETS = 2,
    LANES = SETS * WIDTH
}; /* two sets do not wait for each other */

/* Sums over a block, of distances from a pivot. */
typedef struct block_sums {
    double sum, squares, min, max;
    uint64_t zeros;
} block_sums;

/* ---- blocks of float64 ---- */

/* Adds up `count` values, which must be followed by room for LANES - 1 more. NaN and infinities make `squares` NaN or
 * infinite. */
static inline __attribute__((always_inline)) void add_lanes(double *x, size_t count, double pivot, block_sums *out) {
    const lanes origin = pivot - (lanes){0};
    lanes sum[SETS] = {{0}}, squares[SETS] = {{0}}, low[SETS] = {origin, origin}, high[SETS] = {origin, origin};
    masks zeros[SETS] = {{0}};
    const size_t padding = (LANES - count % LANES) % LANES;
    for (size_t i = 0; i < padding; i++) {
        x[count + i] = pivot;
    }
    for (size_t i = 0; i < count; i += LANES) {
        for (size_t k = 0; k < SETS; k++) {
            lanes v;
            memcpy(&v, x + i + k * WIDTH, sizeof v);
            const lanes d = v - origin;
            const masks below = v<low[k], above = v> high[k];
            sum[k] += d;
            squares[k] += d * d;
            low[k] = (lanes)(((masks)v & below) | ((masks)low[k] & ~below));
            high[k] = (lanes)(((masks)v & above) | ((masks)high[k] & ~above));
            zeros[k] -= v == 0;
        }
    }
    *out = (block_sums){.min = pivot, .max = pivot, .zeros = pivot == 0 ? 0 - (uint64_t)padding : 0};
    for (size_t i = 0; i < LANES; i++) {
        const size_t k = i / WIDTH, l = i % WIDTH;
        out->sum += sum[k][l];
        out->squares += squares[k][l];
        out->min = low[k][l] < out->min ? low[k][l] : out->min;
        out->max = high[k][l] > out->max ? high[k][l] : out->max;
        out->zeros += (uint64_t)zeros[k][l];
    }
}

static void add_lanes_plain(double *x, size_t count, double pivot, block_sums *out) {
    add_lanes(x, count, pivot, out);
}

#ifdef __x86_64__
__attribute__((target("avx2"))) static void add_lanes_avx2(double *x, size_t count, double pivot, block_sums *out) {
    add_lanes(x, count, pivot, out);
}
#endif

/* Both ways give the same bits. */
static void sum_block(double *x, size_t count, double pivot, block_sums *out) {
#ifdef __x86_64__
    if (__builtin_cpu_supports("avx2")) {
        add_lanes_avx2(x, count, pivot, out);
        return;
    }
#endif
    add_lanes_plain(x, count, pivot, out);
}

/* Whether a sum of squares is finite and so large that no square in it was lost below the range of float64. */
static bool is_sound(const block_sums *b) {
    return isfinite(b->squares) && (b->squares > 1e-270 || b->min == b->max);
}

/* The same in the range of long double. All values are finite. */
static void add_wide(const double *x, size_t count, fc_stats *block) {
    for (size_t i = 0; i < count; i++) {
        block->mean += (long double)x[i] / (long double)count;
    }
    for (size_t i = 0; i < count; i++) {
        const long double d = (long double)x[i] - block->mean;
        block->squares += d * d;
    }
}

/* Adds a block of `count` finite values, at least one, with these sums. */
static void add_sums(fc_stats *to, const double *x, size_t count, double pivot, const block_sums *sums) {
    const long double n = (long double)count;
    fc_stats block = {.values = count, .finite = count, .zeros = sums->zeros};
    block.min = sums->min;
    block.max = sums->max;
    block.ordered = true;
    if (is_sound(sums)) {
        block.mean = pivot + sums->sum / n;
        block.squares = sums->squares - (long double)sums->sum * sums->sum / n;
        block.squares = block.squares < 0 ? 0 : block.squares;
    } else {
        add_wide(x, count, &block);
    }
    fc_stats_add(to, &block);
}

/* Counts NaN and infinities. @return the number of finite values, which are moved to the front. */
static size_t keep_finite(double *x, size_t count, fc_stats *to) {
    size_t kept = 0;
    for (size_t i = 0; i < count; i++) {
        if (isfinite(x[i])) {
            x[kept++] = x[i];
        } else if (isnan(x[i])) {
            to->nans++;
        } else {
            to->infinities++;
        }
    }
    to->values += count - kept;
    return kept;
}

/* Adds up to BLOCK values; `x` has room for LANES more. */
static void add_block(fc_stats *to, double *x, size_t count) {
    block_sums sums;
    sum_block(x, count, x[0], &sums);
    if (!isfinite(sums.squares)) {
        count = keep_finite(x, count, to);
        if (count == 0) {
            return;
        }
        sum_block(x, count, x[0], &sums);
    }
    add_sums(to, x, count, x[0], &sums);
}

/* ---- bins ---- */

static void count_bins(fc_tally *tally, const float *x, size_t count) {
    for (size_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, &x[i], sizeof bits);
        tally->bins[i & 1][bits >> FC_TALLY_SHIFT]++; /* two tables: equal neighbours need not wait for each other */
    }
}

/* Values that float32 cannot express are counted as its largest. */
static float narrow(double value) {
    return isfinite(value) && fabs(value) > FLT_MAX ? copysignf(FLT_MAX, (float)value) : (float)value;
}

static void count_wide_bins(fc_tally *tally, const double *x, size_t count) {
    float narrowed[BLOCK];
    for (size_t i = 0; i < count; i++) {
        narrowed[i] = narrow(x[i]);
    }
    count_bins(tally, narrowed, count);
}

/* ---- types of four and more bytes ---- */

/* Loads up to BLOCK elements as float64. 64-bit integers are rounded; the extremes are found separately. */
static void load_block(fc_dtype dtype, const unsigned char *bytes, size_t count, double *out) {
    union {
        float f32[BLOCK];
        int32_t i32[BLOCK];
        uint32_t u32[BLOCK];
        int64_t i64[BLOCK];
        uint64_t u64[BLOCK];
    } in;
    memcpy(&in, bytes, count * fc_dtype_size(dtype));
    switch (dtype) {
    case FC_F32:
        for (size_t i = 0; i < count; i++) {
            out[i] = in.f32[i];
        }
        break;
    case FC_I32:
        for (size_t i = 0; i < count; i++) {
            out[i] = in.i32[i];
        }
        break;
    case FC_U32:
        for (size_t i = 0; i < count; i++) {
            out[i] = in.u32[i];
        }
        break;
    case FC_I64:
        for (size_t i = 0; i < count; i++) {
            out[i] = (double)in.i64[i];
        }
        break;
    case FC_U64:
        for (size_t i = 0; i < count; i++) {
            out[i] = (double)in.u64[i];
        }
        break;
    default:
        memcpy(out, &in, count * sizeof *out);
    }
}

/* Replaces the extremes, which are of rounded values, by the exact ones. */
static void find_extremes(fc_stats *to, fc_dtype dtype, const unsigned char *bytes, size_t count) {
    uint64_t low = UINT64_MAX, high = 0;
    const uint64_t flip = dtype == FC_I64 ? (uint64_t)1 << 63 : 0; /* orders signed as unsigned integers */
    for (size_t i = 0; i < count; i++) {
        uint64_t raw;
        memcpy(&raw, bytes + 8 * i, sizeof raw);
        raw ^= flip;
        low = raw < low ? raw : low;
        high = raw > high ? raw : high;
    }
    to->min = dtype == FC_I64 ? (long double)(int64_t)(low ^ flip) : (long double)low;
    to->max = dtype == FC_I64 ? (long double)(int64_t)(high ^ flip) : (long double)high;
}

static void tally_blocks(fc_tally *tally, fc_dtype dtype, const unsigned char *bytes, size_t count) {
    const size_t size = fc_dtype_size(dtype);
    double x[BLOCK + LANES];
    for (size_t at = 0, n; at < count; at += n) {
        n = count - at < BLOCK ? count - at : BLOCK;
        load_block(dtype, bytes + at * size, n, x);
        if (tally->binned && dtype == FC_F32) {
            float f[BLOCK];
            memcpy(f, bytes + at * size, n * size);
            count_bins(tally, f, n);
        } else if (tally->binned) {
            count_wide_bins(tally, x, n);
        }
        add_block(&tally->stats, x, n);
    }
    if (dtype == FC_I64 || dtype == FC_U64) {
        find_extremes(&tally->stats, dtype, bytes, count);
    }
}

/* ---- complex types ---- */

/* Keeps the complex numbers with two finite parts. @return their number. */
static size_t split_finite(const double *pairs, size_t count, double *real, double *imaginary, fc_stats *to) {
    size_t kept = 0;
    for (size_t i = 0; i < count; i++) {
        const double re = pairs[2 * i], im = pairs[2 * i + 1];
        if (isfinite(re) && isfinite(im)) {
            to->zeros += re == 0 && im == 0;
            real[kept] = re;
            imaginary[kept++] = im;
        } else {
            to->nans += isnan(re) || isnan(im);
            to->infinities += !isnan(re) && !isnan(im);
        }
    }
    return kept;
}

static void tally_complex(fc_stats *to, fc_dtype dtype, const unsigned char *bytes, size_t count) {
    double pairs[2 * BLOCK], real[BLOCK + LANES], imaginary[BLOCK + LANES];
    for (size_t at = 0, n; at < count; at += n) {
        n = count - at < BLOCK ? count - at : BLOCK;
        if (fc_dtype_get(dtype)->component == FC_F64) {
            memcpy(pairs, bytes + at * fc_dtype_size(dtype), n * sizeof(double[2]));
        } else {
            fc_cast(fc_dtype_get(dtype)->component, bytes + at * fc_dtype_size(dtype), FC_F64, pairs, 2 * n);
        }
        fc_stats re = {0}, im = {0}, block = {.values = n};
        block.finite = split_finite(pairs, n, real, imaginary, &block);
        if (block.finite > 0) {
            add_block(&re, real, block.finite);
            add_block(&im, imaginary, block.finite);
        }
        block.mean = re.mean;
        block.mean_imaginary = im.mean;
        block.squares = re.squares + im.squares;
        fc_stats_add(to, &block);
    }
}

/* ---- types of one and two bytes ---- */

/* The numbers of float4_e2m1fn, by code. */
static const float four_bits[16] = {0, .5F, 1, 1.5F, 2, 3, 4, 6, -0., -.5F, -1., -1.5F, -2., -3., -4., -6.};

static void fill_values(fc_tally *tally, fc_dtype dtype) {
    uint16_t codes[FC_TALLY_CODES];
    unsigned char bytes[256];
    const size_t count = fc_dtype_size(dtype) == 2 ? FC_TALLY_CODES : 256;
    const fc_dtype_class cls = fc_dtype_get(dtype)->cls;
    for (size_t i = 0; i < count; i++) {
        codes[i] = (uint16_t)i;
        bytes[i & 255] = (unsigned char)i;
        if (cls == FC_CLASS_SIGNED) {
            tally->values[i] = count == 256 ? (float)(int8_t)i : (float)(int16_t)i;
        } else {
            tally->values[i] = cls == FC_CLASS_BOOL ? (float)(i != 0) : (float)i;
        }
    }
    if (cls == FC_CLASS_PACKED) {
        memcpy(tally->values, four_bits, sizeof four_bits);
    } else if (cls == FC_CLASS_FLOAT) {
        fc_cast(dtype, count == 256 ? (const void *)bytes : codes, FC_F32, tally->values, count);
    }
    tally->dtype = dtype;
    tally->ready = true;
}

static void count_bytes(uint32_t *codes, const unsigned char *bytes, size_t count) {
    uint32_t odd[256] = {0};
    size_t i = 0;
    for (; i + 2 <= count; i += 2) {
        codes[bytes[i]]++;
        odd[bytes[i + 1]]++;
    }
    if (i < count) {
        codes[bytes[i]]++;
    }
    for (i = 0; i < 256; i++) {
        codes[i] += odd[i];
    }
}

/* Four equal neighbours are counted at once: counting one after the other would wait for the memory each time. */
static void count_pairs(uint32_t *codes, const unsigned char *bytes, size_t count) {
    size_t i = 0;
    for (; i + 4 <= count; i += 4) {
        uint64_t four;
        memcpy(&four, bytes + 2 * i, sizeof four);
        if (four == (four & 0xffff) * UINT64_C(0x1000100010001)) {
            codes[four & 0xffff] += 4;
            continue;
        }
        codes[four & 0xffff]++;
        codes[four >> 16 & 0xffff]++;
        codes[four >> 32 & 0xffff]++;
        codes[four >> 48]++;
    }
    for (; i < count; i++) {
        uint16_t code;
        memcpy(&code, bytes + 2 * i, sizeof code);
        codes[code]++;
    }
}

/* Turns counts of bytes into counts of the numbers in their halves. */
static void split_halves(uint32_t *codes) {
    uint32_t numbers[256] = {0};
    for (uint32_t i = 0; i < 256; i++) {
        numbers[i & 15] += codes[i];
        numbers[i >> 4] += codes[i];
    }
    memcpy(codes, numbers, sizeof numbers);
}

/* Adds a code that occurs `count` times; `pivot` is NaN before the first finite one. */
static void add_code(fc_tally *tally, float value, uint32_t count, double *pivot, fc_stats *block, block_sums *sums) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if (tally->binned) {
        tally->bins[0][bits >> FC_TALLY_SHIFT] += count;
    }
    if (!isfinite(value)) {
        *(isnan(value) ? &block->nans : &block->infinities) += count;
        return;
    }
    if (isnan(*pivot)) {
        *pivot = sums->min = sums->max = value;
    }
    const double d = (double)value - *pivot;
    block->finite += count;
    block->zeros += value == 0 ? count : 0;
    sums->sum += count * d;
    sums->squares += count * d * d;
    sums->min = value < sums->min ? value : sums->min;
    sums->max = value > sums->max ? value : sums->max;
}

/* Adds up the codes that occur, and clears their counts. */
static void add_codes(fc_tally *tally, size_t ncodes) {
    block_sums sums = {0};
    fc_stats block = {0};
    double pivot = NAN;
    for (size_t i = 0; i < ncodes; i += 4) {
        uint32_t *c = tally->codes + i;
        if ((c[0] | c[1] | c[2] | c[3]) == 0) {
            continue;
        }
        for (size_t k = 0; k < 4; k++) {
            if (c[k] > 0) {
                add_code(tally, tally->values[i + k], c[k], &pivot, &block, &sums);
                c[k] = 0;
            }
        }
    }
    block.values = block.finite + block.nans + block.infinities;
    block.ordered = block.finite > 0;
    if (block.ordered) {
        const long double n = (long double)block.finite;
        block.mean = pivot + sums.sum / n;
        block.squares = sums.squares - (long double)sums.sum * sums.sum / n;
        block.squares = block.squares < 0 ? 0 : block.squares;
        block.min = sums.min;
        block.max = sums.max;
    }
    fc_stats_add(&tally->stats, &block);
}

/* Looks up a few elements of two bytes and adds them up as float64. */
static void tally_few(fc_tally *tally, const unsigned char *bytes, size_t count) {
    double x[BLOCK + LANES];
    for (size_t at = 0, n; at < count; at += n) {
        n = count - at < BLOCK ? count - at : BLOCK;
        for (size_t i = 0; i < n; i++) {
            uint16_t code;
            memcpy(&code, bytes + 2 * (at + i), sizeof code);
            x[i] = tally->values[code];
        }
        if (tally->binned) {
            count_wide_bins(tally, x, n);
        }
        add_block(&tally->stats, x, n);
    }
}

static void tally_codes(fc_tally *tally, fc_dtype dtype, const unsigned char *bytes, size_t count) {
    if (!tally->ready || tally->dtype != dtype) {
        fill_values(tally, dtype);
    }
    if (fc_dtype_size(dtype) == 2 && count < FEW) {
        tally_few(tally, bytes, count);
        return;
    }
    if (fc_dtype_size(dtype) == 2) {
        count_pairs(tally->codes, bytes, count);
        add_codes(tally, FC_TALLY_CODES);
        return;
    }
    count_bytes(tally->codes, bytes, count);
    if (fc_dtype_get(dtype)->cls == FC_CLASS_PACKED) {
        split_halves(tally->codes);
    }
    add_codes(tally, 256);
}

void fc_tally_elements(fc_tally *tally, fc_dtype dtype, const unsigned char *elements, size_t count) {
    tally->stats = (fc_stats){0};
    if (fc_dtype_get(dtype)->cls == FC_CLASS_COMPLEX) {
        tally_complex(&tally->stats, dtype, elements, count);
    } else if (fc_dtype_size(dtype) <= 2) {
        tally_codes(tally, dtype, elements, count);
    } else {
        tally_blocks(tally, dtype, elements, count);
    }
}
