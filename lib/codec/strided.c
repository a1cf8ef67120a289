/*
 * Strided copies: the normal form and the kernels that copy stored chunks into row-major tiles.
 *
 * The general copy is a nest of loops. Once neighbouring dimensions are merged, almost every real copy is a few long
 * runs: the rows of a shard are one run, and the columns of a tensor-parallel shard are one run per row. The remaining
 * case is the transpose, which transpose.c does in vector registers if the elements are contiguous on both sides. Else
 * the two innermost loops go block by block, so that both sides stay in the first-level cache.
 */
#include "codec/strided.h"

#include "base/checked.h"
#include "codec/shuffle.h"
#include "codec/transpose.h"

#include <string.h>

enum { BLOCK = 32 }; /* 32 × 32 elements of 4 bytes: 4 KiB per side, and 32 cache lines for the strided side */

static bool axis_from(int64_t size, int64_t src, int64_t dst, int64_t element, fc_axis *axis) {
    int64_t reach;
    axis->size = size;
    /* Checking the product with the size once here lets merging and fc_strided_span do without checks. */
    return fc_mul_i64(src, element, &axis->src) && fc_mul_i64(dst, element, &axis->dst) &&
           fc_mul_i64(axis->src, size, &reach) && fc_mul_i64(axis->dst, size, &reach);
}

/* Sorts by descending source stride, then by descending destination stride. Insertion sort, because there are few axes
   and they are mostly sorted. */
static void sort_axes(fc_strided *copy) {
    for (int i = 1; i < copy->n; i++) {
        fc_axis axis = copy->axes[i];
        int j = i;
        for (; j > 0 && (copy->axes[j - 1].src < axis.src ||
                         (copy->axes[j - 1].src == axis.src && copy->axes[j - 1].dst < axis.dst));
             j--) {
            copy->axes[j] = copy->axes[j - 1];
        }
        copy->axes[j] = axis;
    }
}

static void remove_axis(fc_strided *copy, int i) {
    copy->n--;
    memmove(&copy->axes[i], &copy->axes[i + 1], (size_t)(copy->n - i) * sizeof *copy->axes);
}

/* Merges neighbours that are contiguous with each other on both sides. */
static void merge_axes(fc_strided *copy) {
    for (int i = copy->n - 2; i >= 0; i--) {
        fc_axis *outer = &copy->axes[i], *inner = &copy->axes[i + 1];
        if (outer->src == inner->src * inner->size && outer->dst == inner->dst * inner->size) {
            inner->size *= outer->size;
            remove_axis(copy, i);
        }
    }
}

/* Merges axes that are contiguous with the unit on both sides into the unit. */
static void absorb_axes(fc_strided *copy) {
    for (int i = copy->n - 1; i >= 0; i--) {
        if (copy->axes[i].src == copy->unit && copy->axes[i].dst == copy->unit) {
            copy->unit *= copy->axes[i].size;
            remove_axis(copy, i);
            i = copy->n;
        }
    }
}

bool fc_strided_make(fc_strided *copy, int ndim, const int64_t *sizes, const int64_t *src_strides,
                     const int64_t *dst_strides, int64_t element) {
    copy->unit = element;
    copy->n = 0;
    int64_t span = element, volume = element;
    for (int d = 0; d < ndim; d++) {
        if (sizes[d] == 1) {
            continue;
        }
        fc_axis *axis = &copy->axes[copy->n++];
        if (!axis_from(sizes[d], src_strides[d], dst_strides[d], element, axis) ||
            !fc_add_i64(span, axis->src * (axis->size - 1), &span) || !fc_mul_i64(volume, axis->size, &volume)) {
            return false;
        }
    }
    sort_axes(copy);
    merge_axes(copy);
    absorb_axes(copy);
    return true;
}

int64_t fc_strided_span(const fc_strided *copy, int from) {
    int64_t span = copy->unit;
    for (int i = from; i < copy->n; i++) {
        span += copy->axes[i].src * (copy->axes[i].size - 1);
    }
    return span;
}

bool fc_strided_is_dense(const fc_strided *copy) {
    return fc_strided_bytes(copy) == fc_strided_span(copy, 0);
}

/* Two loops of fixed-size copies, which the compiler turns into single moves. */
#define COPY_PLANE(bytes)                                                                                              \
    static void copy_plane_##bytes(const fc_axis *outer, const fc_axis *inner, const unsigned char *src,               \
                                   unsigned char *dst) {                                                               \
        for (int64_t i = 0; i < outer->size; i++) {                                                                    \
            const unsigned char *s = src + i * outer->src;                                                             \
            unsigned char *d = dst + i * outer->dst;                                                                   \
            for (int64_t j = 0; j < inner->size; j++, s += inner->src, d += inner->dst) {                              \
                memcpy(d, s, bytes);                                                                                   \
            }                                                                                                          \
        }                                                                                                              \
    }
COPY_PLANE(1)
COPY_PLANE(2)
COPY_PLANE(4)
COPY_PLANE(8)
COPY_PLANE(16)

static void copy_plane(int64_t unit, const fc_axis *outer, const fc_axis *inner, const unsigned char *src,
                       unsigned char *dst) {
    switch (unit) {
    case 1:
        copy_plane_1(outer, inner, src, dst);
        return;
    case 2:
        copy_plane_2(outer, inner, src, dst);
        return;
    case 4:
        copy_plane_4(outer, inner, src, dst);
        return;
    case 8:
        copy_plane_8(outer, inner, src, dst);
        return;
    case 16:
        copy_plane_16(outer, inner, src, dst);
        return;
    default:
        for (int64_t i = 0; i < outer->size; i++) {
            for (int64_t j = 0; j < inner->size; j++) {
                memcpy(dst + i * outer->dst + j * inner->dst, src + i * outer->src + j * inner->src, (size_t)unit);
            }
        }
    }
}

/* Copies a transpose: `outer` has the smallest step in the source, `inner` in the destination. */
static void copy_transposed(int64_t unit, const fc_axis *outer, const fc_axis *inner, const unsigned char *src,
                            unsigned char *dst) {
    const fc_transpose t = {inner->size, outer->size, inner->src, outer->dst};
    if (outer->src == unit && inner->dst == unit && fc_transpose_run(&t, unit, src, dst)) {
        return;
    }
    for (int64_t i = 0; i < outer->size; i += BLOCK) {
        fc_axis rows = {outer->size - i < BLOCK ? outer->size - i : BLOCK, outer->src, outer->dst};
        for (int64_t j = 0; j < inner->size; j += BLOCK) {
            fc_axis columns = {inner->size - j < BLOCK ? inner->size - j : BLOCK, inner->src, inner->dst};
            copy_plane(unit, &rows, &columns, src + i * outer->src + j * inner->src,
                       dst + i * outer->dst + j * inner->dst);
        }
    }
}

/* Advances the indices of `n` axes like an odometer, and both offsets with them. @return false after the last. */
static bool step_axes(const fc_axis *axes, int n, int64_t *index, int64_t *src, int64_t *dst) {
    for (int i = n - 1; i >= 0; i--) {
        *src += axes[i].src;
        *dst += axes[i].dst;
        if (++index[i] < axes[i].size) {
            return true;
        }
        index[i] = 0;
        *src -= axes[i].src * axes[i].size;
        *dst -= axes[i].dst * axes[i].size;
    }
    return false;
}

/* The axis with the smallest destination stride. */
static int densest_in_destination(const fc_strided *copy) {
    int best = copy->n - 1;
    for (int i = 0; i < copy->n; i++) {
        if (copy->axes[i].dst < copy->axes[best].dst) {
            best = i;
        }
    }
    return best;
}

int64_t fc_strided_bytes(const fc_strided *copy) {
    int64_t bytes = copy->unit;
    for (int i = 0; i < copy->n; i++) {
        bytes *= copy->axes[i].size;
    }
    return bytes;
}

void fc_strided_copy(const fc_strided *copy, const unsigned char *src, unsigned char *dst) {
    if (copy->n == 0) {
        memcpy(dst, src, (size_t)copy->unit);
        return;
    }
    static const fc_axis once = {1, 0, 0};
    /* The two innermost loops and the axes around them. */
    fc_axis around[FC_MAX_DIMS], outer = once, inner;
    int inner_at = densest_in_destination(copy), last = copy->n - 1;
    bool transposed = inner_at != last;
    int outer_at = transposed ? last : last - 1;
    inner = copy->axes[inner_at];
    if (outer_at >= 0) {
        outer = copy->axes[outer_at];
    }
    int n = 0;
    for (int i = 0; i < copy->n; i++) {
        if (i != inner_at && i != outer_at) {
            around[n++] = copy->axes[i];
        }
    }
    int64_t index[FC_MAX_DIMS] = {0}, s = 0, d = 0;
    do {
        if (transposed) {
            copy_transposed(copy->unit, &outer, &inner, src + s, dst + d);
        } else {
            copy_plane(copy->unit, &outer, &inner, src + s, dst + d);
        }
    } while (step_axes(around, n, index, &s, &d));
}

void fc_strided_unshuffle(const fc_strided *copy, const unsigned char *planes, size_t count, uint32_t element,
                          uint64_t start, unsigned char *dst) {
    int64_t index[FC_MAX_DIMS] = {0}, s = (int64_t)start, d = 0;
    do {
        fc_unshuffle_run(planes + s / element, count, dst + d, (size_t)copy->unit / element, element);
    } while (step_axes(copy->axes, copy->n, index, &s, &d));
}

static void swap_run(unsigned char *bytes, size_t size, uint32_t width) {
    for (size_t i = 0; i + width <= size; i += width) {
        if (width == 2) {
            uint16_t v;
            memcpy(&v, bytes + i, sizeof v);
            v = __builtin_bswap16(v);
            memcpy(bytes + i, &v, sizeof v);
        } else if (width == 4) {
            uint32_t v;
            memcpy(&v, bytes + i, sizeof v);
            v = __builtin_bswap32(v);
            memcpy(bytes + i, &v, sizeof v);
        } else {
            uint64_t v;
            memcpy(&v, bytes + i, sizeof v);
            v = __builtin_bswap64(v);
            memcpy(bytes + i, &v, sizeof v);
        }
    }
}

void fc_strided_flip(const fc_strided *copy, unsigned char *dst, uint32_t width, bool even, bool odd) {
    int64_t index[FC_MAX_DIMS] = {0}, s = 0, d = 0;
    do {
        bool flip = even, other = odd;
        for (int64_t i = width - 1; i < copy->unit; i += width) {
            dst[d + i] ^= flip ? 0x80 : 0;
            bool next = other;
            other = flip;
            flip = next;
        }
    } while (step_axes(copy->axes, copy->n, index, &s, &d));
}

void fc_strided_swap(const fc_strided *copy, unsigned char *dst, uint32_t width) {
    if (width < 2) {
        return;
    }
    int64_t index[FC_MAX_DIMS] = {0}, s = 0, d = 0;
    do {
        swap_run(dst + d, (size_t)copy->unit, width);
    } while (step_axes(copy->axes, copy->n, index, &s, &d));
}
