/*
 * Blosc 1: see blosc.h. https://github.com/Blosc/c-blosc/blob/main/README_CHUNK_FORMAT.rst describes the format.
 *
 * A header of 16 bytes, the offset of each block in 4 bytes, the blocks. A block is one stream or, if it was split, one
 * stream for each byte of an element; each stream begins with its length in 4 bytes. A stream of the length of what it
 * gives is stored as it is.
 */
#include "codec/blosc.h"

#include "base/checked.h"
#include "base/little.h"
#include "codec/bitshuffle.h"
#include "codec/codec.h"
#include "codec/lz.h"
#include "codec/shuffle.h"
#include "codec/zstd.h"
#include "fsdpckpt/try.h"

#include <inttypes.h>
#include <string.h>

enum {
    HEADER = 16,
    VERSION = 2,
    BYTES = 1,  /* flags: the bytes of a block are shuffled */
    STORED = 2, /* all elements are stored as they are, after the header */
    BITS = 4,   /* the bits of a block are shuffled */
    WHOLE = 16, /* blocks are not split */
    MOST_SPLITS = 16,
    LEAST_SPLIT = 128 /* bytes: smaller streams are not made */
};

enum { BLOSCLZ, LZ4, SNAPPY, ZLIB, ZSTD };

/* A buffer and its header. */
typedef struct buffer {
    const unsigned char *in;
    size_t in_size, block;
    int flags, compressor;
    size_t element;
} buffer;

static fc_code damaged(const char *what, fc_error *err) {
    return fc_fail(err, FC_ECORRUPT, "the Blosc data is damaged: %s", what);
}

static fc_code read_header(const unsigned char *in, size_t in_size, size_t out_size, buffer *b, fc_error *err) {
    if (in_size < HEADER) {
        return damaged("it has no header", err);
    }
    const uint64_t size = fc_load_little(in + 4, 4), block = fc_load_little(in + 8, 4);
    *b = (buffer){
        .in = in, .in_size = in_size, .block = block, .flags = in[2], .compressor = in[2] >> 5, .element = in[3]};
    if (in[0] != VERSION) {
        return fc_fail(err, FC_EUNSUPPORTED, "the Blosc data has version %d of the format, and only %d can be decoded",
                       in[0], VERSION);
    }
    if (size != out_size) {
        return fc_fail(err, FC_ECORRUPT, "the Blosc data decodes to %" PRIu64 " bytes instead of %zu", size, out_size);
    }
    if (fc_load_little(in + 12, 4) != in_size || b->element == 0 || (size > 0 && (block == 0 || block > size))) {
        return damaged("its header contradicts itself", err);
    }
    return FC_OK;
}

fc_code fc_blosc_decode_stream(int compressor, const unsigned char *in, size_t in_size, unsigned char *out,
                               size_t out_size, fc_error *err) {
    static const fc_lz_fn decoders[] = {[BLOSCLZ] = fc_blosclz_decode, [LZ4] = fc_lz4_decode};
    if (in_size == out_size) {
        memcpy(out, in, in_size);
        return FC_OK;
    }
    switch (compressor) {
    case BLOSCLZ:
    case LZ4:
        return decoders[compressor](in, in_size, out, out_size) ? FC_OK : damaged("a block cannot be decoded", err);
    case ZLIB:
        return fc_inflate(in, in_size, out, out_size, err);
    case ZSTD:
        return fc_zstd_decode(in, in_size, out, out_size, err);
    default:
        return fc_fail(err, FC_EUNSUPPORTED,
                       "Blosc compressed it with %s, which cannot be decoded: rewrite it with gzip or uncompressed",
                       compressor == SNAPPY ? "Snappy" : "an unknown method");
    }
}

/* Decodes the streams of a block at offset `at`. @param last whether the block is shorter than the others. */
static fc_code decode_streams(const buffer *b, uint64_t at, bool last, unsigned char *out, size_t size, fc_error *err) {
    const bool split = !(b->flags & WHOLE) && !last && b->element <= MOST_SPLITS && size / b->element >= LEAST_SPLIT;
    const size_t streams = split ? b->element : 1, each = size / streams;
    if (each * streams != size) {
        return damaged("a block cannot be split evenly", err);
    }
    for (size_t i = 0; i < streams; i++) {
        if (!fc_range_within(at, 4, b->in_size)) {
            return damaged("a block is outside of it", err);
        }
        const uint64_t length = fc_load_little(b->in + at, 4);
        at += 4;
        if (!fc_range_within(at, length, b->in_size)) {
            return damaged("a block is outside of it", err);
        }
        FC_TRY(fc_blosc_decode_stream(b->compressor, b->in + at, (size_t)length, out + i * each, each, err));
        at += length;
    }
    return FC_OK;
}

/* Undoes the shuffle of bits. Blosc does it only if the number of elements is a multiple of 8. */
static void restore_bits(const unsigned char *in, unsigned char *out, size_t size, size_t element) {
    const size_t count = size / element, shuffled = count % 8 ? 0 : count * element;
    if (shuffled > 0) {
        fc_unshuffle_bits(in, out, count, element);
    }
    memcpy(out + shuffled, in + shuffled, size - shuffled);
}

static fc_code decode_block(const buffer *b, size_t index, unsigned char *scratch, unsigned char *out, size_t size,
                            fc_error *err) {
    const uint64_t at = fc_load_little(b->in + HEADER + 4 * index, 4);
    const bool bytes = b->flags & BYTES && b->element > 1, bits = !bytes && b->flags & BITS && size >= b->element;
    FC_TRY(decode_streams(b, at, size < b->block, bytes || bits ? scratch : out, size, err));
    if (bytes) {
        fc_unshuffle(scratch, out, size, b->element);
    } else if (bits) {
        restore_bits(scratch, out, size, b->element);
    }
    return FC_OK;
}

fc_code fc_blosc_decode(const unsigned char *in, size_t in_size, unsigned char *scratch, unsigned char *out,
                        size_t out_size, fc_error *err) {
    buffer b = {0};
    FC_TRY(read_header(in, in_size, out_size, &b, err));
    if (b.flags & STORED) {
        if (in_size - HEADER != out_size) {
            return damaged("it is too short or too long", err);
        }
        memcpy(out, in + HEADER, out_size);
        return FC_OK;
    }
    const size_t blocks = out_size ? (out_size - 1) / b.block + 1 : 0;
    if (blocks > (in_size - HEADER) / 4) {
        return damaged("it is too short for its blocks", err);
    }
    for (size_t i = 0, done = 0; i < blocks; i++, done += b.block) {
        const size_t left = out_size - done;
        FC_TRY(decode_block(&b, i, scratch, out + done, left < b.block ? left : b.block, err));
    }
    return FC_OK;
}
