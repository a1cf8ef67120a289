/*
 * Strided copies: how the elements of a box lie in a source and in a destination, in normal form, and the kernels that
 * move them within memory. Pure; lib/engine/source.c decides which bytes come from where.
 */
#ifndef FSDPCKPT_CODEC_STRIDED_H
#define FSDPCKPT_CODEC_STRIDED_H

#ifndef FSDPCKPT_PRIVATE
#error "this header is private to fsdpckpt: include <fsdpckpt/...> instead"
#endif

#include "fsdpckpt/box.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/** One loop of a copy. Strides are in bytes and not negative. */
typedef struct fc_axis {
    int64_t size; /**< more than 1 */
    int64_t src;  /**< 0 repeats the source */
    int64_t dst;
} fc_axis;

/**
 * A copy in normal form: `unit` bytes that are contiguous on both sides, repeated along `n` axes in descending order of
 * their source strides. Axes that make one are merged, so a contiguous copy has no axes at all.
 */
typedef struct fc_strided {
    int64_t unit;
    int n;
    fc_axis axes[FC_MAX_DIMS];
} fc_strided;

/**
 * The copy of a box of `sizes` (none of them 0) with strides in elements of `element` bytes on both sides.
 * @return false when a size in bytes overflows: the strides come from a file.
 */
bool fc_strided_make(fc_strided *copy, int ndim, const int64_t *sizes, const int64_t *src_strides,
                     const int64_t *dst_strides, int64_t element);

/** Bytes from the first to the end of the last source byte of the axes from `from` on. */
int64_t fc_strided_span(const fc_strided *copy, int from);

/** Whether every byte of the whole span is copied. */
bool fc_strided_is_dense(const fc_strided *copy);

/** Bytes that the copy writes. */
int64_t fc_strided_bytes(const fc_strided *copy);

/** Executes the copy. `src` and `dst` point at the first element and do not overlap. */
void fc_strided_copy(const fc_strided *copy, const unsigned char *src, unsigned char *dst);

/**
 * The same from elements of `element` bytes that are shuffled (see shuffle.h), in planes of `count` bytes at `planes`.
 * @param start bytes from the first to the first one wanted, were they not shuffled: a multiple of `element`.
 */
void fc_strided_unshuffle(const fc_strided *copy, const unsigned char *planes, size_t count, uint32_t element,
                          uint64_t start, unsigned char *dst);

/**
 * Flips the sign bit of the little-endian numbers of `width` bytes at `dst` that `copy` has placed: of the first, third
 * … of each run if `even`, of the others if `odd`.
 */
void fc_strided_flip(const fc_strided *copy, unsigned char *dst, uint32_t width, bool even, bool odd);

/** Reverses every `width` (2, 4 or 8) bytes of the destination's elements. */
void fc_strided_swap(const fc_strided *copy, unsigned char *dst, uint32_t width);

#endif
