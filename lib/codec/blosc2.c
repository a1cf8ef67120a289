/*
 * The contiguous frames of Blosc 2: see blosc2.h. README_CFRAME_FORMAT.rst and README_B2ND_METALAYER.rst of
 * https://github.com/Blosc/c-blosc2 describe them.
 *
 * A header in msgpack, whose fields always have the same width, the chunks, a chunk with their offsets, a trailer. The
 * header ends with metalayers; the one named b2nd says that the only chunk is an array that is cut into blocks.
 */
#include "codec/blosc2.h"

#include "base/big.h"
#include "base/checked.h"
#include "base/little.h"
#include "codec/blosc2_chunk.h"
#include "fsdpckpt/try.h"

#include <inttypes.h>
#include <string.h>

enum { FLAGS = 25, LAYERS = 92, LEAST_HEADER = 97 }; /* offsets in the header */

enum { MOST_VERSION = 3, OFFSETS_64 = 1, MOST_DIMS = 16 };

enum { FIXED_STRING = 0xa0, FIXED_LIST = 0x90, BYTES_32 = 0xc6, INT_32 = 0xd2, INT_64 = 0xd3 }; /* of msgpack */

/* A frame and its header. */
typedef struct frame {
    const unsigned char *in;
    uint64_t size, header, decoded, chunks, chunk; /* in bytes; `chunks` is the size of those that are stored */
    uint64_t element;
    fc_blosc2_grid grid;
} frame;

static fc_code damaged(const char *what, fc_error *err) {
    return fc_fail(err, FC_ECORRUPT, "the Blosc 2 frame is damaged: %s", what);
}

static fc_code unsupported(const char *what, fc_error *err) {
    return fc_fail(err, FC_EUNSUPPORTED,
                   "the Blosc 2 frame has %s, which cannot be decoded: rewrite it with gzip or uncompressed", what);
}

static bool is_frame(const unsigned char *in, size_t in_size) {
    static const char magic[] = "b2frame";
    return in_size >= LEAST_HEADER && (in[0] & 0xf0) == FIXED_LIST && in[1] == (FIXED_STRING | sizeof magic) &&
           memcmp(in + 2, magic, sizeof magic) == 0;
}

/* Reads the lists of a b2nd metalayer: a version, the rank, the shapes of the array, of a chunk and of a block. */
static bool read_shapes(const unsigned char *in, uint64_t size, int64_t *ndim, int64_t shapes[3][MOST_DIMS]) {
    static const int widths[3] = {8, 4, 4};
    uint64_t at = 3;
    *ndim = size >= at ? in[2] : 0;
    if (*ndim < 1 || *ndim > MOST_DIMS) {
        return false;
    }
    for (int i = 0; i < 3; i++) {
        const uint64_t each = 1 + (uint64_t)widths[i];
        if (!fc_range_within(at, 1 + (uint64_t)*ndim * each, size) || in[at++] != FIXED_LIST + *ndim) {
            return false;
        }
        for (int k = 0; k < *ndim; k++, at += each) {
            shapes[i][k] = (int64_t)fc_load_big(in + at + 1, widths[i]);
            if (in[at] != (widths[i] == 8 ? INT_64 : INT_32) || shapes[i][k] < 1 || shapes[i][k] > INT32_MAX) {
                return false;
            }
        }
    }
    return true;
}

/* Reads a b2nd metalayer. The filter of HDF5 makes one chunk of the whole array. */
static fc_code read_array(frame *f, const unsigned char *in, uint64_t size, fc_error *err) {
    int64_t shapes[3][MOST_DIMS], ndim = 0;
    if (!read_shapes(in, size, &ndim, shapes)) {
        return damaged("its array has no valid shape", err);
    }
    fc_blosc2_grid *g = &f->grid;
    g->ndim = (int)ndim;
    g->element = f->element;
    g->stored = f->element;
    f->decoded = f->element;
    for (int k = 0; k < g->ndim; k++) {
        const int64_t whole = shapes[0][k], block = shapes[2][k];
        if (shapes[1][k] != whole) {
            return unsupported("an array of several chunks", err);
        }
        g->shape[k] = whole;
        g->block[k] = block;
        if (block > whole || !fc_mul_u64(f->decoded, (uint64_t)whole, &f->decoded) ||
            !fc_mul_u64(g->stored, (uint64_t)((whole - 1) / block + 1) * (uint64_t)block, &g->stored)) {
            return damaged("its array has no valid shape", err);
        }
    }
    return FC_OK;
}

/* Finds the array among the metalayers: a map of names and offsets, and for each its bytes. */
static fc_code read_layers(frame *f, fc_error *err) {
    uint64_t at = LAYERS + 2;
    for (uint64_t left = fc_load_big(f->in + LAYERS, 2); left > 0; left--) {
        const uint64_t name = at < f->header ? f->in[at] & 0x1f : 0;
        if (!fc_range_within(at, 1 + name + 5, f->header) || (f->in[at] & 0xe0) != FIXED_STRING) {
            return damaged("its metalayers have invalid names", err);
        }
        const unsigned char *text = f->in + at + 1;
        const uint64_t offset = fc_load_big(text + name + 1, 4);
        at += 1 + name + 5;
        const uint64_t bytes = fc_range_within(offset, 5, f->header) ? fc_load_big(f->in + offset + 1, 4) : 0;
        if (text[name] != INT_32 || !fc_range_within(offset, 5 + bytes, f->header) || f->in[offset] != BYTES_32) {
            return damaged("a metalayer is outside of it", err);
        }
        if (name == 7 && memcmp(text, "caterva", 7) == 0) {
            return unsupported("an array of Caterva", err);
        }
        if (name == 4 && memcmp(text, "b2nd", 4) == 0) {
            return read_array(f, f->in + offset + 5, bytes, err);
        }
    }
    return FC_OK;
}

static fc_code read_frame(const unsigned char *in, size_t in_size, frame *f, fc_error *err) {
    *f = (frame){.in = in,
                 .size = fc_load_big(in + 16, 8),
                 .header = fc_load_big(in + 11, 4),
                 .decoded = fc_load_big(in + 30, 8),
                 .chunks = fc_load_big(in + 39, 8),
                 .element = fc_load_big(in + 48, 4),
                 .chunk = fc_load_big(in + 58, 4)};
    if ((in[FLAGS] & 0x0f) > MOST_VERSION || in[FLAGS] >> 4 != OFFSETS_64 || (in[FLAGS + 1] & 0x0f) != 0) {
        return unsupported("a form that is not contiguous, chunks of several sizes, or offsets of another size", err);
    }
    /* The chunk of offsets follows the chunks. */
    if (f->size > in_size || f->header < LEAST_HEADER || f->header > f->size || f->chunks > f->size - f->header ||
        f->element == 0 || f->decoded == 0) {
        return damaged("its header contradicts itself", err);
    }
    if (f->decoded > f->chunk) {
        return unsupported("several chunks", err);
    }
    return read_layers(f, err);
}

uint64_t fc_blosc2_size(const unsigned char *in, size_t in_size) {
    frame f;
    if (!is_frame(in, in_size)) {
        return in_size >= 8 ? fc_load_little(in + 4, 4) : 0;
    }
    return read_frame(in, in_size, &f, NULL) == FC_OK ? f.decoded : 0;
}

fc_code fc_blosc2_decode(const unsigned char *in, size_t in_size, unsigned char *scratch, unsigned char *out,
                         size_t out_size, fc_error *err) {
    static const fc_blosc2_grid no_grid = {0};
    unsigned char offset[8], room[FC_BLOSC2_SCRATCH * sizeof offset];
    frame f;
    if (!is_frame(in, in_size)) {
        if (in_size == 0 || in[0] >= 0x80) { /* the version of a chunk is a small number */
            return damaged("it begins neither as a frame nor as a chunk", err);
        }
        return fc_blosc2_decode_chunk(in, in_size, &no_grid, scratch, out, out_size, err);
    }
    FC_TRY(read_frame(in, in_size, &f, err));
    if (f.decoded != out_size) {
        return fc_fail(err, FC_ECORRUPT, "the Blosc 2 frame decodes to %" PRIu64 " bytes instead of %zu", f.decoded,
                       out_size);
    }
    const uint64_t offsets = f.header + f.chunks;
    FC_TRY(
        fc_blosc2_decode_chunk(in + offsets, (size_t)(f.size - offsets), &no_grid, room, offset, sizeof offset, err));
    /* The highest byte says that there is no chunk, and what its elements are. */
    if (offset[7] & 0x80) {
        return fc_blosc2_fill((fc_blosc2_special)(offset[7] & 7), f.element, out, out_size, err);
    }
    const uint64_t at = fc_load_little(offset, 8);
    if (at > f.chunks) {
        return damaged("its chunk is outside of it", err);
    }
    return fc_blosc2_decode_chunk(in + f.header + at, (size_t)(f.chunks - at), &f.grid, scratch, out, out_size, err);
}
