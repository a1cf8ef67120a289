/*
 * Finds which bytes differ. See changes.h.
 *
 * First the comparison, without a branch: each group of 64 bytes becomes a map, in which a bit is set for each byte
 * that differs. Then the places where changes begin and end, the edges, are read from the maps. How many edges a map
 * has cannot be foreseen, so a processor that counts bits with one instruction reads EDGES of each map, however many
 * there are.
 */
#include "codec/changes.h"

#include <stdbool.h>
#include <string.h>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

/* A unit test also builds this file with FSDPCKPT_PORTABLE_CHANGES, which leaves out the instructions of newer
   processors. */
#if defined(__x86_64__) && !defined(FSDPCKPT_PORTABLE_CHANGES)
#define USE_X86 1
#include <immintrin.h>
#endif

enum { GROUP = 64, GROUPS = FC_CHANGE_BLOCK / GROUP, WIDEN = FC_CHANGE_GAP - 1, EDGES = 4 };

typedef uint64_t __attribute__((vector_size(16))) word_pair;

static const unsigned char zeros[GROUP];

#ifdef __SSE2__

static inline __m128i same_bytes(const unsigned char *a, const unsigned char *b) {
    return _mm_cmpeq_epi8(_mm_loadu_si128((const __m128i *)(const void *)a),
                          _mm_loadu_si128((const __m128i *)(const void *)b));
}

static inline uint64_t bits(__m128i same) {
    return (uint64_t)(unsigned)_mm_movemask_epi8(same);
}

/* Returns the map of a group. @param equal counts the bytes that do not differ. */
static inline uint64_t map_group(const unsigned char *a, const unsigned char *b, size_t *equal) {
    const __m128i s0 = same_bytes(a, b), s1 = same_bytes(a + 16, b + 16), s2 = same_bytes(a + 32, b + 32),
                  s3 = same_bytes(a + 48, b + 48), none = _mm_setzero_si128();
    const __m128i each = _mm_sub_epi8(none, _mm_add_epi8(_mm_add_epi8(s0, s1), _mm_add_epi8(s2, s3)));
    const __m128i sums = _mm_sad_epu8(each, none);
    *equal += (size_t)_mm_cvtsi128_si32(sums) + (size_t)_mm_extract_epi16(sums, 4);
    return ~(bits(s0) | bits(s1) << 16 | bits(s2) << 32 | bits(s3) << 48);
}

#else

static inline uint64_t map_group(const unsigned char *a, const unsigned char *b, size_t *equal) {
    uint64_t map = 0;
    for (int i = 0; i < GROUP; i++) {
        map |= (uint64_t)(a[i] != b[i]) << i;
        *equal += a[i] == b[i];
    }
    return map;
}

#endif

/* Makes the maps of whole groups. @return how many bytes differ. */
static size_t map_groups(const unsigned char *old, const unsigned char *made, size_t groups, uint64_t *maps) {
    size_t equal = 0;
    if (old) {
        for (size_t g = 0; g < groups; g++) {
            maps[g] = map_group(old + g * GROUP, made + g * GROUP, &equal);
        }
    } else {
        for (size_t g = 0; g < groups; g++) {
            maps[g] = map_group(zeros, made + g * GROUP, &equal);
        }
    }
    return groups * GROUP - equal;
}

/* Makes the map of what is left after the whole groups. */
static size_t map_rest(const unsigned char *old, const unsigned char *made, size_t size, uint64_t *map) {
    unsigned char a[GROUP] = {0}, b[GROUP] = {0};
    size_t equal = 0;
    if (old) {
        memcpy(a, old, size);
    }
    memcpy(b, made, size);
    *map = map_group(a, b, &equal);
    return GROUP - equal;
}

/* Each pair of words is read before it is written: `out` may be `a`, which keeps compilers from vectorizing bytes. */
void fc_difference(unsigned char *out, const unsigned char *a, const unsigned char *b, size_t size) {
    size_t i = 0;
    for (word_pair x, y; i + sizeof x <= size; i += sizeof x) {
        memcpy(&x, a + i, sizeof x);
        memcpy(&y, b + i, sizeof y);
        x ^= y;
        memcpy(out + i, &x, sizeof x);
    }
    for (; i < size; i++) {
        out[i] = a[i] ^ b[i];
    }
}

/* Sets the WIDEN bits after each bit that is set, so that changes with a short gap become one. */
static inline uint64_t widen(uint64_t map, uint64_t before) {
    uint64_t wide = map;
    for (int i = 1; i <= WIDEN; i++) {
        wide |= map << i | before >> (GROUP - i);
    }
    return wide;
}

/* Lists where changes begin, and the WIDEN bits after their ends. @return the end of the list. */
static uint32_t *list_edges(const uint64_t *maps, size_t count, uint32_t *out) {
    uint64_t wide = 0, last = 0;
    for (size_t g = 0; g < count; g++) {
        const uint64_t before = wide >> (GROUP - 1);
        wide = widen(maps[g], last);
        last = maps[g];
        for (uint64_t edge = wide ^ (wide << 1 | before); edge != 0; edge &= edge - 1) {
            *out++ = (uint32_t)(g * GROUP) + (uint32_t)__builtin_ctzll(edge);
        }
    }
    return out;
}

/* ---- the same with the instructions of newer processors ---- */

#ifdef USE_X86

#define NEWER __attribute__((target("avx2,bmi,popcnt")))

static bool has_newer(void) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") && __builtin_cpu_supports("popcnt");
}

NEWER static inline uint64_t same_bits_newer(const unsigned char *bytes, __m256i other) {
    const __m256i same = _mm256_cmpeq_epi8(_mm256_loadu_si256((const __m256i *)(const void *)bytes), other);
    return (uint32_t)_mm256_movemask_epi8(same);
}

NEWER static size_t map_groups_newer(const unsigned char *old, const unsigned char *made, size_t groups,
                                     uint64_t *maps) {
    size_t differ = 0;
    for (size_t g = 0; g < groups; g++, made += GROUP) {
        __m256i first = _mm256_setzero_si256(), second = first;
        if (old) {
            first = _mm256_loadu_si256((const __m256i *)(const void *)(old + g * GROUP));
            second = _mm256_loadu_si256((const __m256i *)(const void *)(old + g * GROUP + GROUP / 2));
        }
        maps[g] = ~(same_bits_newer(made, first) | same_bits_newer(made + GROUP / 2, second) << (GROUP / 2));
        differ += (size_t)_mm_popcnt_u64(maps[g]);
    }
    return differ;
}

/* Stores the places of `count` bits from the lowest one on, and drops them from the map. Without a bit it stores what
   is overwritten. */
NEWER static inline uint64_t take_edges(uint64_t edge, int count, uint32_t at, uint32_t *out) {
    for (int i = 0; i < count; i++, edge = _blsr_u64(edge)) {
        out[i] = at + (uint32_t)_tzcnt_u64(edge);
    }
    return edge;
}

NEWER static uint32_t *list_edges_newer(const uint64_t *maps, size_t count, uint32_t *out) {
    uint64_t wide = 0, last = 0;
    for (size_t g = 0; g < count; g++) {
        const uint64_t before = wide >> (GROUP - 1);
        wide = widen(maps[g], last);
        last = maps[g];
        const uint32_t at = (uint32_t)(g * GROUP);
        uint64_t edge = wide ^ (wide << 1 | before);
        const int edges = (int)_mm_popcnt_u64(edge);
        edge = take_edges(edge, EDGES, at, out);
        if (edges > EDGES) {
            edge = take_edges(edge, EDGES, at, out + EDGES);
            take_edges(edge, edges - 2 * EDGES, at, out + (size_t)(2 * EDGES));
        }
        out += edges;
    }
    return out;
}

#endif

size_t fc_find_changes(const unsigned char *old, const unsigned char *made, size_t size, fc_change *changes,
                       size_t *bytes) {
    uint64_t maps[GROUPS + 2];
    uint32_t edges[2 * FC_MOST_CHANGES + 2 * EDGES], *end = edges;
    const size_t groups = size / GROUP;
    size_t (*map)(const unsigned char *, const unsigned char *, size_t, uint64_t *) = map_groups;
    uint32_t *(*list)(const uint64_t *, size_t, uint32_t *) = list_edges;
#ifdef USE_X86
    if (has_newer()) {
        map = map_groups_newer;
        list = list_edges_newer;
    }
#endif
    *bytes = map(old, made, groups, maps);
    *bytes += map_rest(old ? old + groups * GROUP : NULL, made + groups * GROUP, size - groups * GROUP, &maps[groups]);
    maps[groups + 1] = 0;
    if (*bytes > 0) {
        end = list(maps, groups + 2, edges);
    }
    const size_t count = (size_t)(end - edges) / 2;
    for (size_t i = 0; i < count; i++) {
        changes[i] = (fc_change){edges[2 * i], edges[2 * i + 1] - WIDEN};
    }
    return count;
}
