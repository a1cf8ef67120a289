/*
 * The transpose kernels. See transpose.h.
 *
 * A vector has 16 bytes, so LANES elements. One step zips the first half of N vectors with the second: seen as one
 * array, the elements of both halves alternate afterwards. That rotates the bits of each element's number, those of
 * its vector before those of its lane, by one. So the same step, done often enough, does everything: N vectors are
 * interleaved after log2(N) steps, taken apart after log2(LANES) steps, and a square is transposed by either.
 */
#include "codec/transpose.h"

#include <string.h>

#define ALWAYS_INLINE static inline __attribute__((always_inline))

#ifdef __clang__
#define SHUFFLE(type, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define SHUFFLE(type, a, b, ...) __builtin_shuffle(a, b, (type){__VA_ARGS__})
#define UNROLL _Pragma("GCC unroll 16") /* or the vectors would be kept in memory */
#endif

/* The vectors in one column of a strip stay in the first-level cache while the columns next to it are copied. */
enum { VECTOR = 16, STRIP = 64 };

typedef uint8_t vector8 __attribute__((vector_size(VECTOR)));
typedef uint16_t vector16 __attribute__((vector_size(VECTOR)));
typedef uint32_t vector32 __attribute__((vector_size(VECTOR)));
typedef uint64_t vector64 __attribute__((vector_size(VECTOR)));

#define LOW8(a, b) SHUFFLE(vector8, a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23)
#define HIGH8(a, b) SHUFFLE(vector8, a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)
#define LOW16(a, b) SHUFFLE(vector16, a, b, 0, 8, 1, 9, 2, 10, 3, 11)
#define HIGH16(a, b) SHUFFLE(vector16, a, b, 4, 12, 5, 13, 6, 14, 7, 15)
#define LOW32(a, b) SHUFFLE(vector32, a, b, 0, 4, 1, 5)
#define HIGH32(a, b) SHUFFLE(vector32, a, b, 2, 6, 3, 7)
#define LOW64(a, b) SHUFFLE(vector64, a, b, 0, 2)
#define HIGH64(a, b) SHUFFLE(vector64, a, b, 1, 3)

/*
 * Transposes a tile of `height` rows and `width` columns. Where one of them is less than LANES, the rows of the tile
 * are contiguous in the source, or those of its transpose in the destination.
 */
#define TILE(bits)                                                                                                     \
    ALWAYS_INLINE void tile_##bits(const fc_transpose *t, int height, int width, const unsigned char *src,             \
                                   unsigned char *dst) {                                                               \
        enum { LANES = VECTOR * 8 / (bits) };                                                                          \
        const int64_t from = width < LANES ? VECTOR : t->src, to = height < LANES ? VECTOR : t->dst;                   \
        const int n = height < width ? height : width, steps = __builtin_ctz((unsigned)height);                        \
        vector##bits v[LANES], zipped[LANES];                                                                          \
        UNROLL for (int i = 0; i < n; i++) {                                                                           \
            memcpy(&v[i], src + i * from, VECTOR);                                                                     \
        }                                                                                                              \
        UNROLL for (int step = 0; step < steps; step++) {                                                              \
            UNROLL for (int i = 0; i < n / 2; i++) {                                                                   \
                zipped[2 * i] = LOW##bits(v[i], v[i + n / 2]);                                                         \
                zipped[2 * i + 1] = HIGH##bits(v[i], v[i + n / 2]);                                                    \
            }                                                                                                          \
            UNROLL for (int i = 0; i < n; i++) {                                                                       \
                v[i] = zipped[i];                                                                                      \
            }                                                                                                          \
        }                                                                                                              \
        UNROLL for (int i = 0; i < n; i++) {                                                                           \
            memcpy(dst + i * to, &v[i], VECTOR);                                                                       \
        }                                                                                                              \
    }

/* Transposes all whole tiles, then the edges element by element. */
#define TILES(bits)                                                                                                    \
    ALWAYS_INLINE void edge_##bits(const fc_transpose *t, int64_t row, int64_t column, int64_t columns,                \
                                   const unsigned char *src, unsigned char *dst) {                                     \
        for (int64_t i = row; i < t->rows; i++) {                                                                      \
            for (int64_t j = column; j < columns; j++) {                                                               \
                memcpy(dst + j * t->dst + i * (bits) / 8, src + i * t->src + j * (bits) / 8, (bits) / 8);              \
            }                                                                                                          \
        }                                                                                                              \
    }                                                                                                                  \
    ALWAYS_INLINE void tiles_##bits(const fc_transpose *t, int height, int width, const unsigned char *src,            \
                                    unsigned char *dst) {                                                              \
        const int64_t rows = t->rows / height * height, columns = t->columns / width * width;                          \
        for (int64_t strip = 0; strip < rows; strip += STRIP) {                                                        \
            const int64_t end = rows - strip < STRIP ? rows : strip + STRIP;                                           \
            for (int64_t j = 0; j < columns; j += width) {                                                             \
                for (int64_t i = strip; i < end; i += height) {                                                        \
                    tile_##bits(t, height, width, src + i * t->src + j * (bits) / 8,                                   \
                                dst + j * t->dst + i * (bits) / 8);                                                    \
                }                                                                                                      \
            }                                                                                                          \
        }                                                                                                              \
        edge_##bits(t, rows, 0, columns, src, dst);                                                                    \
        edge_##bits(t, 0, columns, t->columns, src, dst);                                                              \
    }

/* Takes N vectors in a tile if the other side of these rows or columns is contiguous. */
#define NARROW(bits, N)                                                                                                \
    if (LANES > (N) && t->rows == (N) && t->dst == (N)*SIZE) {                                                         \
        tiles_##bits(t, N, LANES, src, dst);                                                                           \
        return;                                                                                                        \
    }                                                                                                                  \
    if (LANES > (N) && t->columns == (N) && t->src == (N)*SIZE) {                                                      \
        tiles_##bits(t, LANES, N, src, dst);                                                                           \
        return;                                                                                                        \
    }

#define TRANSPOSE(bits)                                                                                                \
    TILE(bits)                                                                                                         \
    TILES(bits)                                                                                                        \
    static void transpose_##bits(const fc_transpose *t, const unsigned char *src, unsigned char *dst) {                \
        enum { SIZE = (bits) / 8, LANES = VECTOR / SIZE };                                                             \
        NARROW(bits, 2)                                                                                                \
        NARROW(bits, 4)                                                                                                \
        NARROW(bits, 8)                                                                                                \
        tiles_##bits(t, LANES, LANES, src, dst);                                                                       \
    }
TRANSPOSE(8)
TRANSPOSE(16)
TRANSPOSE(32)
TRANSPOSE(64)

bool fc_transpose_run(const fc_transpose *t, int64_t size, const unsigned char *src, unsigned char *dst) {
    switch (size) {
    case 1:
        transpose_8(t, src, dst);
        return true;
    case 2:
        transpose_16(t, src, dst);
        return true;
    case 4:
        transpose_32(t, src, dst);
        return true;
    case 8:
        transpose_64(t, src, dst);
        return true;
    default:
        return false;
    }
}
