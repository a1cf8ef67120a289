/*
 * The chunks of Blosc 2: see blosc2_chunk.h. https://github.com/Blosc/c-blosc2/blob/main/README_CHUNK_FORMAT.rst
 * describes the format.
 *
 * A header of 32 bytes, the offset of each block in 4 bytes, the blocks. A block is one stream or, if it was split, one
 * stream for each byte of an element. The filters of a chunk were applied to each block before it was compressed.
 */
#include "codec/blosc2_chunk.h"

#include "base/checked.h"
#include "base/little.h"
#include "codec/bitshuffle.h"
#include "codec/blosc.h"
#include "codec/blosc2.h"
#include "codec/shuffle.h"
#include "codec/strided.h"
#include "fsdpckpt/try.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

enum { SHORT_HEADER = 16, HEADER = 32, LEAST_VERSION = 4, MOST_VERSION = 6, FILTERS = 6 };

enum { EXTENDED = 1 | 4, STORED = 2, WHOLE = 16 }; /* bits of the first flags */

enum { DICTIONARY = 1, LAZY = 8, INSTRUMENTED = 128 }; /* bits of the second flags; bits 4 to 6 are special values */

enum { NO_FILTER, BYTES, BITS, DELTA, TRUNCATED, USER_CODEC = 6 };

/* A filter to undo. */
typedef struct step {
    int filter;
    size_t element; /* bytes that it treats together */
} step;

/* A chunk and its header. */
typedef struct chunk {
    const unsigned char *in;
    size_t size, block, element; /* in bytes; `size` is that of `in` */
    uint64_t stored;             /* bytes of all blocks, decoded */
    int flags, more_flags;
    step steps[FILTERS]; /* in the order in which they are undone */
    int nsteps, swaps;   /* swaps: those of the steps that need a second place */
    const fc_blosc2_grid *grid;
    fc_strided to_array, reference; /* copies of a whole block to the array, and of the first one from it */
} chunk;

static fc_code damaged(const char *what, fc_error *err) {
    return fc_fail(err, FC_ECORRUPT, "the Blosc 2 data is damaged: %s", what);
}

static fc_code unsupported(const char *what, fc_error *err) {
    return fc_fail(err, FC_EUNSUPPORTED,
                   "the Blosc 2 data has %s, which cannot be decoded: rewrite it with gzip or uncompressed", what);
}

/* Names what a registered number stands for. */
static fc_code unsupported_number(const char *kind, int number, fc_error *err) {
    static const char *const filters[] = {"ndcell", "ndmean", "bytedelta", "bytedelta", "int_trunc"};
    static const char *const codecs[] = {"ndlz", "zfp", "zfp", "zfp", "openhtj2k", "grok", "openzl", "j2k", "htj2k"};
    const bool filter = strcmp(kind, "filter") == 0;
    const char *const *names = filter ? filters : codecs;
    const size_t count = filter ? sizeof filters / sizeof *filters : sizeof codecs / sizeof *codecs;
    const size_t at = (size_t)number - 32;
    char text[64];
    snprintf(text, sizeof text, "the %s %d (%s)", kind, number, number >= 32 && at < count ? names[at] : "unknown");
    return unsupported(text, err);
}

static fc_code read_filters(chunk *c, fc_error *err) {
    const unsigned char *ids = c->in + 16, *meta = c->in + 24;
    for (int i = FILTERS - 1; i >= 0; i--) {
        if (ids[i] == NO_FILTER || ids[i] == TRUNCATED) {
            continue; /* what was truncated is gone */
        }
        if (ids[i] > TRUNCATED) {
            return unsupported_number("filter", ids[i], err);
        }
        if (c->nsteps > 0 && c->steps[c->nsteps - 1].filter == DELTA) {
            return unsupported("a delta of shuffled bytes", err);
        }
        c->swaps += ids[i] != DELTA;
        c->steps[c->nsteps++] = (step){ids[i], ids[i] == BYTES && meta[i] ? meta[i] : c->element};
    }
    return FC_OK;
}

static fc_code read_header(const unsigned char *in, size_t in_size, chunk *c, fc_error *err) {
    if (in_size < HEADER) {
        return damaged("it has no header", err);
    }
    const uint64_t size = fc_load_little(in + 12, 4);
    *c = (chunk){.in = in,
                 .size = (size_t)size,
                 .element = in[3],
                 .stored = fc_load_little(in + 4, 4),
                 .block = (size_t)fc_load_little(in + 8, 4),
                 .flags = in[2],
                 .more_flags = in[31]};
    if (in[0] < LEAST_VERSION || in[0] > MOST_VERSION) {
        return fc_fail(err, FC_EUNSUPPORTED,
                       "the Blosc 2 data has version %d of the format, and only %d to %d can be decoded", in[0],
                       LEAST_VERSION, MOST_VERSION);
    }
    if (in[30]) {
        return unsupported("blocks of variable length", err);
    }
    if ((c->flags & EXTENDED) != EXTENDED || size < HEADER || size > in_size || c->element == 0 || c->block == 0 ||
        c->more_flags & LAZY) {
        return damaged("its header contradicts itself", err);
    }
    c->block = c->block > c->stored ? (size_t)c->stored : c->block;
    return FC_OK;
}

fc_code fc_blosc2_fill(fc_blosc2_special special, uint64_t element, unsigned char *out, size_t out_size,
                       fc_error *err) {
    memset(out, 0, out_size);
    if (special == FC_BLOSC2_ZEROS || special == FC_BLOSC2_UNSET) {
        return FC_OK;
    }
    if (special != FC_BLOSC2_NANS || (element != 4 && element != 8) || out_size % element != 0) {
        return damaged("its special value is unknown", err);
    }
    for (size_t at = 0; at < out_size; at += element) { /* the quiet NaN */
        out[at + element - 2] = element == 4 ? 0xc0 : 0xf8;
        out[at + element - 1] = 0x7f;
    }
    return FC_OK;
}

/* A chunk of equal elements. One that a file gives follows the header, and its size is not that of the header. */
static fc_code decode_special(const chunk *c, int special, unsigned char *out, size_t out_size, fc_error *err) {
    const size_t element = c->size - HEADER;
    if (special != FC_BLOSC2_VALUE) {
        return fc_blosc2_fill((fc_blosc2_special)special, c->element, out, out_size, err);
    }
    if (element == 0 || out_size % element != 0) {
        return damaged("its special value is unknown", err);
    }
    for (size_t at = 0; at < out_size; at += element) {
        memcpy(out + at, c->in + HEADER, element);
    }
    return FC_OK;
}

/* Decodes a stream at `at`, and moves `at` behind it. Its size is in the 4 bytes before it: 0 for zeros, and less than
   0 for a byte that is repeated. */
static fc_code decode_stream(const chunk *c, uint64_t *at, unsigned char *out, size_t out_size, fc_error *err) {
    if (!fc_range_within(*at, 4, c->size)) {
        return damaged("a block is outside of it", err);
    }
    const int32_t size = (int32_t)fc_load_little(c->in + *at, 4);
    *at += 4;
    if (!fc_range_within(*at, size < 0 ? 1 : (uint64_t)size, c->size)) {
        return damaged("a block is outside of it", err);
    }
    if (size <= 0) {
        if (size < -255 || (size < 0 && !(c->in[*at] & 1))) {
            return damaged("a block has an unknown kind", err);
        }
        memset(out, -size, out_size);
        *at += size < 0;
        return FC_OK;
    }
    FC_TRY(fc_blosc_decode_stream(c->flags >> 5, c->in + *at, (size_t)size, out, out_size, err));
    *at += (uint64_t)size;
    return FC_OK;
}

static fc_code decode_streams(const chunk *c, size_t index, unsigned char *out, size_t size, fc_error *err) {
    const size_t streams = c->flags & WHOLE || size < c->block ? 1 : c->element, each = size / streams;
    uint64_t at = fc_load_little(c->in + HEADER + 4 * index, 4);
    if (each * streams != size || each == 0) {
        return damaged("a block cannot be split evenly", err);
    }
    for (size_t i = 0; i < streams; i++) {
        FC_TRY(decode_stream(c, &at, out + i * each, each, err));
    }
    return FC_OK;
}

/* Undoes the difference to the element before in the first block, and to the same element of the first block in any
   other. Only elements of 1, 2, 4 or 8 bytes are treated as such. */
static void undo_delta(const unsigned char *first, unsigned char *bytes, size_t size, size_t element) {
    const size_t width = element == 2 || element == 4 || element % 8 == 0 ? (element < 8 ? element : 8) : 1;
    const size_t whole = size / width * width;
    for (size_t i = first ? 0 : width; i < whole; i++) {
        bytes[i] ^= first ? first[i] : bytes[i - width];
    }
}

static void undo_bits(const unsigned char *in, unsigned char *out, size_t size, size_t element) {
    const size_t count = size / element / 8 * 8, shuffled = count * element;
    if (shuffled > 0) {
        fc_unshuffle_bits(in, out, count, element);
    }
    memcpy(out + shuffled, in + shuffled, size - shuffled);
}

/* Undoes the filters of the block in `block`. Each that needs a second place swaps the two.
   @param out the chunk, whose first block is decoded unless this is it. */
static void undo_filters(const chunk *c, size_t index, unsigned char *block, unsigned char *spare, size_t size,
                         const unsigned char *out) {
    for (int i = 0; i < c->nsteps; i++) {
        const step *s = &c->steps[i];
        if (s->filter == DELTA) {
            const unsigned char *first = index == 0 ? NULL : out;
            if (first && c->grid->ndim > 0) {
                fc_strided_copy(&c->reference, out, spare);
                first = spare;
            }
            undo_delta(first, block, size, s->element);
            continue;
        }
        if (s->filter == BITS) {
            undo_bits(block, spare, size, s->element);
        } else {
            fc_unshuffle(block, spare, size, s->element);
        }
        unsigned char *const swapped = block;
        block = spare;
        spare = swapped;
    }
}

/* Copies block number `index` to its place in the array, without what is outside of it. */
static fc_code place_block(const chunk *c, uint64_t index, const unsigned char *block, unsigned char *out,
                           fc_error *err) {
    const fc_blosc2_grid *g = c->grid;
    int64_t size[FC_MAX_DIMS], from[FC_MAX_DIMS], to[FC_MAX_DIMS], at = 0;
    bool whole = true;
    if (!fc_row_major_strides(g->ndim, g->block, from) || !fc_row_major_strides(g->ndim, g->shape, to)) {
        return damaged("its array is too large", err);
    }
    for (int k = g->ndim - 1; k >= 0; k--) {
        const int64_t blocks = (g->shape[k] - 1) / g->block[k] + 1,
                      start = (int64_t)(index % (uint64_t)blocks) * g->block[k];
        index /= (uint64_t)blocks;
        size[k] = g->shape[k] - start < g->block[k] ? g->shape[k] - start : g->block[k];
        whole &= size[k] == g->block[k];
        at += start * to[k];
    }
    fc_strided copy;
    if (!whole && !fc_strided_make(&copy, g->ndim, size, from, to, (int64_t)g->element)) {
        return damaged("its array is too large", err);
    }
    fc_strided_copy(whole ? &c->to_array : &copy, block, out + (uint64_t)at * g->element);
    return FC_OK;
}

static fc_code prepare_copies(chunk *c, fc_error *err) {
    const fc_blosc2_grid *g = c->grid;
    int64_t inside[FC_MAX_DIMS], outside[FC_MAX_DIMS];
    return fc_row_major_strides(g->ndim, g->block, inside) && fc_row_major_strides(g->ndim, g->shape, outside) &&
                   fc_strided_make(&c->to_array, g->ndim, g->block, inside, outside, (int64_t)g->element) &&
                   fc_strided_make(&c->reference, g->ndim, g->block, outside, inside, (int64_t)g->element)
               ? FC_OK
               : damaged("its array is too large", err);
}

static fc_code decode_blocks(const chunk *c, unsigned char *scratch, unsigned char *out, size_t out_size,
                             fc_error *err) {
    const bool array = c->grid->ndim > 0;
    uint64_t done = 0;
    for (size_t i = 0; done < c->stored; i++) {
        const size_t size = c->stored - done < c->block ? (size_t)(c->stored - done) : c->block;
        /* The last filter leaves the block in `home`, which without an array is where it belongs. */
        unsigned char *const home = array ? scratch + out_size : out + done;
        if (c->flags & STORED) {
            memcpy(home, c->in + HEADER + done, size);
        } else {
            unsigned char *const first = c->swaps % 2 ? scratch : home, *const second = c->swaps % 2 ? home : scratch;
            FC_TRY(decode_streams(c, i, first, size, err));
            undo_filters(c, i, first, second, size, out);
        }
        if (array) {
            FC_TRY(place_block(c, i, home, out, err));
        }
        done += size;
    }
    return FC_OK;
}

/* Checks what the header says of the blocks. */
static fc_code check_blocks(const chunk *c, fc_error *err) {
    if (c->more_flags & (DICTIONARY | INSTRUMENTED)) {
        return unsupported(c->more_flags & DICTIONARY ? "a dictionary" : "an instrumented codec", err);
    }
    if (c->grid->ndim > 0) {
        uint64_t block = c->grid->element;
        for (int k = 0; k < c->grid->ndim; k++) {
            block *= (uint64_t)c->grid->block[k]; /* at most the size of the array */
        }
        if (block != c->block) {
            return damaged("its blocks are not those of the array", err);
        }
    }
    if (c->flags & STORED) {
        return c->size - HEADER == c->stored ? FC_OK : damaged("it is too short or too long", err);
    }
    const uint64_t blocks = c->stored ? (c->stored - 1) / c->block + 1 : 0;
    return blocks <= (c->size - HEADER) / 4 ? FC_OK : damaged("it is too short for its blocks", err);
}

fc_code fc_blosc2_decode_chunk(const unsigned char *in, size_t in_size, const fc_blosc2_grid *grid,
                               unsigned char *scratch, unsigned char *out, size_t out_size, fc_error *err) {
    chunk c = {0};
    if (in_size >= SHORT_HEADER && (in[2] & EXTENDED) != EXTENDED && grid->ndim == 0) {
        const uint64_t size = fc_load_little(in + 12, 4);
        return fc_blosc_decode(in, size < in_size ? (size_t)size : in_size, scratch, out, out_size, err);
    }
    FC_TRY(read_header(in, in_size, &c, err));
    c.grid = grid;
    const uint64_t expected = grid->ndim > 0 ? grid->stored : out_size;
    if (c.stored != expected) {
        return fc_fail(err, FC_ECORRUPT, "the Blosc 2 data decodes to %" PRIu64 " bytes instead of %" PRIu64, c.stored,
                       expected);
    }
    const int special = c.more_flags >> 4 & 7;
    if (special) {
        return decode_special(&c, special, out, out_size, err);
    }
    if (c.flags >> 5 == USER_CODEC && !(c.flags & STORED)) {
        return unsupported_number("codec", in[22], err);
    }
    FC_TRY(check_blocks(&c, err));
    if (!(c.flags & STORED)) {
        FC_TRY(read_filters(&c, err));
    }
    if (grid->ndim > 0) {
        FC_TRY(prepare_copies(&c, err));
    }
    return decode_blocks(&c, scratch, out, out_size, err);
}
