/*
 * The arithmetic of fc_low_rank_add: tiles of 6 × 16 sums, which fit the vector registers of x86-64 with FMA.
 */
#include "weights/low_rank.h"

#include <math.h>
#include <string.h>

#if defined(__x86_64__)
#define USE_FMA 1
#include <immintrin.h>
#endif

enum { ROWS = 6 };

/* Adds scale × left × right to ROWS rows of one panel. `stride` is that of `out`, `rank` that of `left`. */
typedef void (*tile_fn)(const float *left, const float *right, size_t rank, float scale, float *out, size_t stride);

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
__attribute__((target("avx2,fma"))) static void tile_fma(const float *left, const float *right, size_t rank,
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
#endif

static tile_fn choose_tile(void) {
#ifdef USE_FMA
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
        return tile_fma;
    }
#endif
    return tile_portable;
}

/* A tile at the edge goes through whole ones. */
static void edge(tile_fn tile, const float *left, const float *right, size_t rank, float scale, size_t rows,
                 size_t columns, float *out, size_t stride) {
    float sums[ROWS * FC_PANEL] = {0};
    for (size_t i = 0; i < rows; i++) {
        memcpy(sums + i * FC_PANEL, out + i * stride, columns * sizeof *out);
    }
    tile(left, right, rank, scale, sums, FC_PANEL);
    for (size_t i = 0; i < rows; i++) {
        memcpy(out + i * stride, sums + i * FC_PANEL, columns * sizeof *out);
    }
}

void fc_low_rank_add(const float *left, const float *right, size_t rank, float scale, size_t rows, size_t columns,
                     float *out) {
    const tile_fn tile = choose_tile();
    for (size_t j = 0; j < columns; j += FC_PANEL) {
        const float *panel = right + j * rank;
        const size_t width = columns - j < FC_PANEL ? columns - j : FC_PANEL;
        for (size_t i = 0; i < rows; i += ROWS) {
            const size_t height = rows - i < ROWS ? rows - i : ROWS;
            if (height == ROWS && width == FC_PANEL) {
                tile(left + i * rank, panel, rank, scale, out + i * columns + j, columns);
            } else {
                edge(tile, left + i * rank, panel, rank, scale, height, width, out + i * columns + j, columns);
            }
        }
    }
}
