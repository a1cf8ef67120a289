/*
 * Strided copies: how the elements of a box are laid out in a source and in a destination, in normal form, and the
 * kernels that move them within memory. lib/read/source.c decides which bytes to copy.
 */
#pragma once

#include "fsdpckpt/box.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/** One loop of a copy. Strides are in bytes and never negative. */
typedef struct fc_axis {
    int64_t size; /**< iterations, more than 1 */
    int64_t src;  /**< source stride; 0 repeats the source */
    int64_t dst;  /**< destination stride */
} fc_axis;

/**
 * A copy in normal form: `unit` bytes that are contiguous on both sides, repeated along `n` axes in descending order of
 * their source strides. Contiguous axes are merged, so a contiguous copy has no axes.
 */
typedef struct fc_strided {
    int64_t unit; /**< bytes */
    int n;        /**< axes in use */
    fc_axis axes[FC_MAX_DIMS];
} fc_strided;

/**
 * Describes the copy of a box of `sizes`, none of which may be 0. Strides are in elements of `element` bytes.
 * @return false when a size in bytes overflows, because the strides come from a file.
 */
bool fc_strided_make(fc_strided *copy, int ndim, const int64_t *sizes, const int64_t *src_strides,
                     const int64_t *dst_strides, int64_t element);

/** @return the bytes from the first to the last source byte of the axes from number `from` on. */
int64_t fc_strided_span(const fc_strided *copy, int from);

/** @return whether the copy reads every byte of its span. */
bool fc_strided_is_dense(const fc_strided *copy);

/** @return the number of bytes that the copy writes. */
int64_t fc_strided_bytes(const fc_strided *copy);

/** Copies. `src` and `dst` point to the first element and must not overlap. */
void fc_strided_copy(const fc_strided *copy, const unsigned char *src, unsigned char *dst);

/**
 * Copies from shuffled elements (see shuffle.h).
 * @param planes the first plane.
 * @param count elements in the shuffled data, which is the size of a plane in bytes.
 * @param start the offset in bytes that the first copied element would have in unshuffled data; a multiple of
 * `element`.
 */
void fc_strided_unshuffle(const fc_strided *copy, const unsigned char *planes, size_t count, uint32_t element,
                          uint64_t start, unsigned char *dst);

/**
 * Flips the sign bit of little-endian numbers of `width` bytes that `copy` has written to `dst`.
 * @param even flip the first, third, … number of each run.
 * @param odd flip the others.
 */
void fc_strided_flip(const fc_strided *copy, unsigned char *dst, uint32_t width, bool even, bool odd);

/** Reverses the byte order of the numbers of `width` (2, 4 or 8) bytes that `copy` has written to `dst`. */
void fc_strided_swap(const fc_strided *copy, unsigned char *dst, uint32_t width);
