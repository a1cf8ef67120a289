/*
 * Byte shuffle and its inverse. Elements of 2, 4, 8 and 16 bytes, which is what tensors have, go through registers;
 * everything else byte by byte.
 *
 * In registers: `element` vectors of 16 bytes hold 16 elements. One step takes neighbouring vectors and parts them into
 * their even and their odd bytes, the even ones to the first half of the vectors; then each half is a set of elements
 * of half the size. After log2(element) steps vector i holds the plane whose number is i with its bits reversed.
 */
#include "move/shuffle.h"

#include <string.h>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

static void shuffle_bytes(const unsigned char *in, unsigned char *out, size_t from, size_t count, size_t element) {
    for (size_t byte = 0; byte < element; byte++) {
        unsigned char *plane = out + byte * count;
        for (size_t i = from; i < count; i++) {
            plane[i] = in[i * element + byte];
        }
    }
}

static void unshuffle_bytes(const unsigned char *in, unsigned char *out, size_t from, size_t count, size_t element) {
    for (size_t byte = 0; byte < element; byte++) {
        const unsigned char *plane = in + byte * count;
        for (size_t i = from; i < count; i++) {
            out[i * element + byte] = plane[i];
        }
    }
}

#ifdef __SSE2__

enum { LANES = 16 };

static inline size_t reversed(size_t i, size_t n) {
    size_t r = 0;
    for (; n > 1; n >>= 1, i >>= 1) {
        r = r << 1 | (i & 1);
    }
    return r;
}

static inline void part_once(__m128i *v, size_t n) {
    const __m128i low = _mm_set1_epi16(0xff);
    __m128i t[16];
    for (size_t i = 0; i < n / 2; i++) {
        t[i] = _mm_packus_epi16(_mm_and_si128(v[2 * i], low), _mm_and_si128(v[2 * i + 1], low));
        t[n / 2 + i] = _mm_packus_epi16(_mm_srli_epi16(v[2 * i], 8), _mm_srli_epi16(v[2 * i + 1], 8));
    }
    for (size_t i = 0; i < n; i++) {
        v[i] = t[i];
    }
}

static inline void join_once(__m128i *v, size_t n) {
    __m128i t[16];
    for (size_t i = 0; i < n / 2; i++) {
        t[2 * i] = _mm_unpacklo_epi8(v[i], v[n / 2 + i]);
        t[2 * i + 1] = _mm_unpackhi_epi8(v[i], v[n / 2 + i]);
    }
    for (size_t i = 0; i < n; i++) {
        v[i] = t[i];
    }
}

/* `element` is a constant wherever these are called, so that the compiler keeps the vectors in registers.
   @return how many elements are done. */
static inline size_t shuffle_lanes(const unsigned char *in, unsigned char *out, size_t count, size_t element) {
    size_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        __m128i v[16];
        for (size_t k = 0; k < element; k++) {
            v[k] = _mm_loadu_si128((const __m128i *)(const void *)(in + i * element + k * LANES));
        }
        for (size_t n = element; n > 1; n /= 2) {
            for (size_t at = 0; at < element; at += n) {
                part_once(v + at, n);
            }
        }
        for (size_t k = 0; k < element; k++) {
            _mm_storeu_si128((__m128i *)(void *)(out + reversed(k, element) * count + i), v[k]);
        }
    }
    return i;
}

static inline size_t unshuffle_lanes(const unsigned char *in, unsigned char *out, size_t count, size_t element) {
    size_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        __m128i v[16];
        for (size_t k = 0; k < element; k++) {
            v[k] = _mm_loadu_si128((const __m128i *)(const void *)(in + reversed(k, element) * count + i));
        }
        for (size_t n = 2; n <= element; n *= 2) {
            for (size_t at = 0; at < element; at += n) {
                join_once(v + at, n);
            }
        }
        for (size_t k = 0; k < element; k++) {
            _mm_storeu_si128((__m128i *)(void *)(out + i * element + k * LANES), v[k]);
        }
    }
    return i;
}

#define BY_ELEMENT(function, in, out, count, element)                                                                  \
    ((element) == 2    ? function(in, out, count, 2)                                                                   \
     : (element) == 4  ? function(in, out, count, 4)                                                                   \
     : (element) == 8  ? function(in, out, count, 8)                                                                   \
     : (element) == 16 ? function(in, out, count, 16)                                                                  \
                       : 0)

#else

#define BY_ELEMENT(function, in, out, count, element) ((size_t)0)

#endif

void fc_shuffle(const unsigned char *in, unsigned char *out, size_t size, size_t element) {
    if (element < 2) {
        memcpy(out, in, size);
        return;
    }
    size_t count = size / element;
    shuffle_bytes(in, out, BY_ELEMENT(shuffle_lanes, in, out, count, element), count, element);
    memcpy(out + count * element, in + count * element, size - count * element);
}

void fc_unshuffle(const unsigned char *in, unsigned char *out, size_t size, size_t element) {
    if (element < 2) {
        memcpy(out, in, size);
        return;
    }
    size_t count = size / element;
    unshuffle_bytes(in, out, BY_ELEMENT(unshuffle_lanes, in, out, count, element), count, element);
    memcpy(out + count * element, in + count * element, size - count * element);
}
