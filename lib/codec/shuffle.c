/*
 * Byte shuffle and its inverse. Elements of 2, 4, 8 and 16 bytes go through registers; other sizes go byte by byte.
 *
 * In registers, `element` vectors of 16 bytes hold 16 elements. One step splits neighbouring vectors into their even
 * and odd bytes and moves the even bytes to the first half of the vectors. Each half is then a set of elements of half
 * the size. After log2(element) steps, vector i holds the plane whose number is i with its bits reversed.
 */
#include "codec/shuffle.h"

#include <string.h>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#define ALWAYS_INLINE static inline __attribute__((always_inline))

/* At -O2 gcc would keep the vectors in memory. */
#if defined __GNUC__ && !defined __clang__
#define UNROLLED __attribute__((optimize("O3")))
#else
#define UNROLLED
#endif

static void shuffle_bytes(const unsigned char *in, unsigned char *out, size_t from, size_t count, size_t element) {
    for (size_t byte = 0; byte < element; byte++) {
        unsigned char *plane = out + byte * count;
        for (size_t i = from; i < count; i++) {
            plane[i] = in[i * element + byte];
        }
    }
}

static void unshuffle_bytes(const unsigned char *in, size_t plane, unsigned char *out, size_t from, size_t count,
                            size_t element) {
    for (size_t byte = 0; byte < element; byte++) {
        const unsigned char *bytes = in + byte * plane;
        for (size_t i = from; i < count; i++) {
            out[i * element + byte] = bytes[i];
        }
    }
}

#ifdef __SSE2__

enum { LANES = 16 };

#define LOAD(p) _mm_loadu_si128((const __m128i *)(const void *)(p))
#define STORE(p, v) _mm_storeu_si128((__m128i *)(void *)(p), v)

static inline __m128i even_bytes(__m128i a, __m128i b) {
    const __m128i low = _mm_set1_epi16(0xff);
    return _mm_packus_epi16(_mm_and_si128(a, low), _mm_and_si128(b, low));
}

static inline __m128i odd_bytes(__m128i a, __m128i b) {
    return _mm_packus_epi16(_mm_srli_epi16(a, 8), _mm_srli_epi16(b, 8));
}

/* One splitting step from `v` to `t`: `total` vectors in sets of `n`. All arguments are constants, so the compiler
   unrolls the loops and keeps the vectors in registers. */
ALWAYS_INLINE void split_once(const __m128i *v, __m128i *t, size_t n, size_t total) {
    for (size_t at = 0; at < total; at += n) {
        for (size_t i = 0; i < n / 2; i++) {
            t[at + i] = even_bytes(v[at + 2 * i], v[at + 2 * i + 1]);
            t[at + n / 2 + i] = odd_bytes(v[at + 2 * i], v[at + 2 * i + 1]);
        }
    }
}

ALWAYS_INLINE void join_once(const __m128i *v, __m128i *t, size_t n, size_t total) {
    for (size_t at = 0; at < total; at += n) {
        for (size_t i = 0; i < n / 2; i++) {
            t[at + 2 * i] = _mm_unpacklo_epi8(v[at + i], v[at + n / 2 + i]);
            t[at + 2 * i + 1] = _mm_unpackhi_epi8(v[at + i], v[at + n / 2 + i]);
        }
    }
}

ALWAYS_INLINE size_t reversed(size_t i, size_t n) {
    size_t r = 0;
    for (; n > 1; n >>= 1, i >>= 1) {
        r = r << 1 | (i & 1);
    }
    return r;
}

/* @return the number of elements that were shuffled; the rest is less than one set of lanes. */
ALWAYS_INLINE size_t shuffle_lanes(const unsigned char *in, unsigned char *out, size_t count, size_t element) {
    size_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        __m128i a[16], b[16];
        for (size_t k = 0; k < element; k++) {
            a[k] = LOAD(in + i * element + k * LANES);
        }
        split_once(a, b, element, element);
        if (element > 2) {
            split_once(b, a, element / 2, element);
        }
        if (element > 4) {
            split_once(a, b, element / 4, element);
        }
        if (element > 8) {
            split_once(b, a, element / 8, element);
        }
        const __m128i *done = element == 2 || element == 8 ? b : a;
        for (size_t k = 0; k < element; k++) {
            STORE(out + reversed(k, element) * count + i, done[k]);
        }
    }
    return i;
}

ALWAYS_INLINE size_t unshuffle_lanes(const unsigned char *in, size_t plane, unsigned char *out, size_t count,
                                     size_t element) {
    size_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        __m128i a[16], b[16];
        for (size_t k = 0; k < element; k++) {
            a[k] = LOAD(in + reversed(k, element) * plane + i);
        }
        join_once(a, b, 2, element);
        if (element > 2) {
            join_once(b, a, 4, element);
        }
        if (element > 4) {
            join_once(a, b, 8, element);
        }
        if (element > 8) {
            join_once(b, a, 16, element);
        }
        const __m128i *done = element == 2 || element == 8 ? b : a;
        for (size_t k = 0; k < element; k++) {
            STORE(out + i * element + k * LANES, done[k]);
        }
    }
    return i;
}

#define FOR_ELEMENT(n)                                                                                                 \
    UNROLLED static size_t shuffle_##n(const unsigned char *in, unsigned char *out, size_t count) {                    \
        return shuffle_lanes(in, out, count, n);                                                                       \
    }                                                                                                                  \
    UNROLLED static size_t unshuffle_##n(const unsigned char *in, size_t plane, unsigned char *out, size_t count) {    \
        return unshuffle_lanes(in, plane, out, count, n);                                                              \
    }

FOR_ELEMENT(2)
FOR_ELEMENT(4)
FOR_ELEMENT(8)
FOR_ELEMENT(16)

#define BY_ELEMENT(element, function, ...)                                                                             \
    ((element) == 2    ? function##_2(__VA_ARGS__)                                                                     \
     : (element) == 4  ? function##_4(__VA_ARGS__)                                                                     \
     : (element) == 8  ? function##_8(__VA_ARGS__)                                                                     \
     : (element) == 16 ? function##_16(__VA_ARGS__)                                                                    \
                       : 0)

#else

#define BY_ELEMENT(element, function, ...) ((size_t)0)

#endif

void fc_shuffle(const unsigned char *in, unsigned char *out, size_t size, size_t element) {
    if (element < 2) {
        memcpy(out, in, size);
        return;
    }
    size_t count = size / element;
    shuffle_bytes(in, out, BY_ELEMENT(element, shuffle, in, out, count), count, element);
    memcpy(out + count * element, in + count * element, size - count * element);
}

void fc_unshuffle_run(const unsigned char *in, size_t plane, unsigned char *out, size_t count, size_t element) {
    size_t done = BY_ELEMENT(element, unshuffle, in, plane, out, count);
    unshuffle_bytes(in, plane, out, done, count, element);
}

void fc_unshuffle(const unsigned char *in, unsigned char *out, size_t size, size_t element) {
    if (element < 2) {
        memcpy(out, in, size);
        return;
    }
    size_t count = size / element;
    fc_unshuffle_run(in, count, out, count, element);
    memcpy(out + count * element, in + count * element, size - count * element);
}
