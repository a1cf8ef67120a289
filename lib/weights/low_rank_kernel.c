/*
 * The arithmetic of fc_low_rank_add: tiles of 6 × 16 sums, which fit the vector registers of x86-64 with FMA, or of 12
 * × 16 with AVX-512. Each sum is the same chain of operations in all of them.
 */
#include "weights/low_rank.h"

#include <math.h>
#include <string.h>

#if defined(__x86_64__)
#define USE_FMA 1
#include <immintrin.h>
#endif

#ifndef FSDPCKPT_MOST_VECTOR
#define FSDPCKPT_MOST_VECTOR 64 /* a unit test also builds this file with less */
#endif

enum { MOST_VECTOR = FSDPCKPT_MOST_VECTOR }; /* bytes */
enum { ROWS = 6, MOST_ROWS = 12 };
_Static_assert((int)MOST_ROWS <= (int)FC_LEFT_SPARE, "a tile at the edge reads as many rows as a whole one");

/* Adds scale × left × right to some rows of one panel. `stride` is that of `out`, `rank` that of `left`. */
typedef struct kernel {
    size_t rows;
    void (*tile)(const float *left, const float *right, size_t rank, float scale, float *out, size_t stride);
} kernel;

static void tile_portable(const float *left, const float *right, size_t rank, float scale, float *out, size_t stride) {
    float sums[ROWS][FC_PANEL] = {{0}};
    for (size_t k = 0; k < rank; k++) {
        for (size_t i = 0; i < ROWS; i++) {
            for (size_t j = 0; j < FC_PANEL; j++) {
                sums[i][j] = fmaf(left[i * rank + k], right[k * FC_PANEL + j], sums[i][j]);
            }
        }
    }
    for (size_t i = 0; i < ROWS; i++) {
        for (size_t j = 0; j < FC_PANEL; j++) {
            out[i * stride + j] = fmaf(scale, sums[i][j], out[i * stride + j]);
        }
    }
}

#ifdef USE_FMA
__attribute__((target("avx2,fma"))) static void half_fma(const float *left, const float *right, size_t rank,
                                                         float scale, float *out, size_t stride) {
    __m256 low[ROWS], high[ROWS];
    const __m256 factor = _mm256_set1_ps(scale);
#pragma GCC unroll 6
    for (int i = 0; i < ROWS; i++) {
        low[i] = high[i] = _mm256_setzero_ps();
    }
    for (size_t k = 0; k < rank; k++) {
        const __m256 first = _mm256_loadu_ps(right + k * FC_PANEL), second = _mm256_loadu_ps(right + k * FC_PANEL + 8);
#pragma GCC unroll 6
        for (int i = 0; i < ROWS; i++) {
            const __m256 factor_left = _mm256_broadcast_ss(left + (size_t)i * rank + k);
            low[i] = _mm256_fmadd_ps(factor_left, first, low[i]);
            high[i] = _mm256_fmadd_ps(factor_left, second, high[i]);
        }
    }
#pragma GCC unroll 6
    for (int i = 0; i < ROWS; i++) {
        float *to = out + (size_t)i * stride;
        _mm256_storeu_ps(to, _mm256_fmadd_ps(factor, low[i], _mm256_loadu_ps(to)));
        _mm256_storeu_ps(to + 8, _mm256_fmadd_ps(factor, high[i], _mm256_loadu_ps(to + 8)));
    }
}

static void tile_fma(const float *left, const float *right, size_t rank, float scale, float *out, size_t stride) {
    half_fma(left, right, rank, scale, out, stride);
    half_fma(left, right + FC_PANEL / 2, rank, scale, out + FC_PANEL / 2, stride);
}

__attribute__((target("avx512f"))) static void tile_avx512(const float *left, const float *right, size_t rank,
                                                           float scale, float *out, size_t stride) {
    __m512 low[MOST_ROWS], high[MOST_ROWS];
    const __m512 factor = _mm512_set1_ps(scale);
#pragma GCC unroll 12
    for (int i = 0; i < MOST_ROWS; i++) {
        low[i] = high[i] = _mm512_setzero_ps();
    }
    for (size_t k = 0; k < rank; k++) {
        const __m512 first = _mm512_loadu_ps(right + k * FC_PANEL), second = _mm512_loadu_ps(right + k * FC_PANEL + 16);
#pragma GCC unroll 12
        for (int i = 0; i < MOST_ROWS; i++) {
            const __m512 factor_left = _mm512_set1_ps(left[(size_t)i * rank + k]);
            low[i] = _mm512_fmadd_ps(factor_left, first, low[i]);
            high[i] = _mm512_fmadd_ps(factor_left, second, high[i]);
        }
    }
#pragma GCC unroll 12
    for (int i = 0; i < MOST_ROWS; i++) {
        float *to = out + (size_t)i * stride;
        _mm512_storeu_ps(to, _mm512_fmadd_ps(factor, low[i], _mm512_loadu_ps(to)));
        _mm512_storeu_ps(to + 16, _mm512_fmadd_ps(factor, high[i], _mm512_loadu_ps(to + 16)));
    }
}
#endif

static kernel choose_kernel(void) {
#ifdef USE_FMA
    if (MOST_VECTOR >= 64 && __builtin_cpu_supports("avx512f")) {
        return (kernel){MOST_ROWS, tile_avx512};
    }
    if (MOST_VECTOR >= 32 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
        return (kernel){ROWS, tile_fma};
    }
#endif
    return (kernel){ROWS, tile_portable};
}

/* A tile at the edge goes through whole ones. */
static void edge(const kernel *k, const float *left, const float *right, size_t rank, float scale, size_t rows,
                 size_t columns, float *out, size_t stride) {
    float sums[MOST_ROWS * FC_PANEL] = {0};
    for (size_t i = 0; i < rows; i++) {
        memcpy(sums + i * FC_PANEL, out + i * stride, columns * sizeof *out);
    }
    k->tile(left, right, rank, scale, sums, FC_PANEL);
    for (size_t i = 0; i < rows; i++) {
        memcpy(out + i * stride, sums + i * FC_PANEL, columns * sizeof *out);
    }
}

void fc_low_rank_add(const float *left, const float *right, size_t rank, float scale, size_t rows, size_t columns,
                     float *out) {
    const kernel k = choose_kernel();
    for (size_t j = 0; j < columns; j += FC_PANEL) {
        const float *panel = right + j * rank;
        const size_t width = columns - j < FC_PANEL ? columns - j : FC_PANEL;
        for (size_t i = 0; i < rows; i += k.rows) {
            const size_t height = rows - i < k.rows ? rows - i : k.rows;
            if (height == k.rows && width == FC_PANEL) {
                k.tile(left + i * rank, panel, rank, scale, out + i * columns + j, columns);
            } else {
                edge(&k, left + i * rank, panel, rank, scale, height, width, out + i * columns + j, columns);
            }
        }
    }
}
