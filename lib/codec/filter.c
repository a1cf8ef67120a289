/*
 * The table of HDF5 filters: see filter.h. The containers of LZ4 and bitshuffle are here, because only HDF5 has them.
 */
#include "codec/filter.h"

#include "base/big.h"
#include "base/checked.h"
#include "codec/bitshuffle.h"
#include "codec/blosc.h"
#include "codec/blosc2.h"
#include "codec/bzip2.h"
#include "codec/codec.h"
#include "codec/lz.h"
#include "codec/shuffle.h"
#include "codec/zstd.h"
#include "fsdpckpt/try.h"

#include <inttypes.h>
#include <string.h>

enum { INNER_LZ4 = 2, INNER_ZSTD = 3 }; /* how bitshuffle compresses its blocks; 0: not */

static const fc_filter_info filters[] = {
    {FC_FILTER_DEFLATE, "gzip", 1032, 0},
    {FC_FILTER_SHUFFLE, "shuffle", 1, 0},
    {FC_FILTER_BZIP2, "bzip2", 0, 0},
    {FC_FILTER_LZF, "lzf", 88, 0}, /* three bytes are at most 264 */
    {FC_FILTER_BLOSC, "blosc", 0, 1},
    {FC_FILTER_LZ4, "lz4", 255, 0}, /* a byte of a length is at most 255 */
    {FC_FILTER_BITSHUFFLE, "bitshuffle", 0, 1},
    {FC_FILTER_ZSTD, "zstd", 0, 0},
    {FC_FILTER_BLOSC2, "blosc2", 0, FC_BLOSC2_SCRATCH},
};

const fc_filter_info *fc_filter_find(uint32_t id) {
    for (size_t i = 0; i < sizeof filters / sizeof *filters; i++) {
        if (filters[i].id == id) {
            return &filters[i];
        }
    }
    return NULL;
}

bool fc_filter_compresses(const fc_filter *filter) {
    const fc_filter_info *info = fc_filter_find(filter->id);
    return filter->id == FC_FILTER_BITSHUFFLE ? filter->inner != 0 : info && info->most_smaller != 1;
}

/* Its parameters are two versions, the bytes per element, the elements per block (0: the default), the compression. */
static bool parse_bitshuffle(const unsigned *values, size_t count, uint32_t element, fc_filter *filter) {
    const unsigned inner = count > 4 ? values[4] : 0, block = count > 3 ? values[3] : 0;
    filter->inner = (uint16_t)inner;
    filter->block = block;
    return count >= 3 && values[2] == element && block % 8 == 0 &&
           (inner == 0 || inner == INNER_LZ4 || inner == INNER_ZSTD);
}

const char *fc_filter_lacking(const fc_filter *filter) {
    if (filter->id == FC_FILTER_BZIP2) {
        return fc_bzip2_is_built_in() ? NULL : "libbz2-dev";
    }
    const bool zstd = filter->id == FC_FILTER_ZSTD || filter->inner == INNER_ZSTD;
    return zstd && !fc_zstd_is_built_in() ? "libzstd-dev" : NULL;
}

bool fc_filter_parse(uint32_t id, const unsigned *parameters, size_t count, uint32_t element, fc_filter *filter) {
    *filter = (fc_filter){.id = (uint16_t)id};
    switch (id) {
    case FC_FILTER_SHUFFLE:
        return count == 1 && parameters[0] == element;
    case FC_FILTER_BITSHUFFLE:
        return parse_bitshuffle(parameters, count, element, filter);
    default:
        return fc_filter_find(id) || id == FC_FILTER_FLETCHER32;
    }
}

/* ---- containers ---- */

static fc_code damaged(const char *what, fc_error *err) {
    return fc_fail(err, FC_ECORRUPT, "the %s data is damaged", what);
}

/* What begins the data of LZ4 and compressed bitshuffle: the size of the result and of a block. */
typedef struct container {
    const unsigned char *in, *end;
    uint64_t block;
} container;

static fc_code read_container(const unsigned char *in, size_t in_size, size_t out_size, const char *what,
                              container *out, fc_error *err) {
    enum { HEADER = 12 };
    if (in_size < HEADER) {
        return damaged(what, err);
    }
    const uint64_t size = fc_load_big(in, 8);
    if (size != out_size) {
        return fc_fail(err, FC_ECORRUPT, "the %s data decodes to %" PRIu64 " bytes instead of %zu", what, size,
                       out_size);
    }
    *out = (container){in + HEADER, in + in_size, fc_load_big(in + 8, 4)};
    return out->block > 0 ? FC_OK : damaged(what, err);
}

/* Takes the next block, which its size in four bytes precedes. */
static bool next_block(container *c, const unsigned char **block, size_t *size) {
    if (c->end - c->in < 4) {
        return false;
    }
    *size = (size_t)fc_load_big(c->in, 4);
    c->in += 4;
    if (*size > (size_t)(c->end - c->in)) {
        return false;
    }
    *block = c->in;
    c->in += *size;
    return true;
}

/* A block that is as long as its result is stored as it is. */
static fc_code undo_lz4(const unsigned char *in, size_t in_size, unsigned char *out, size_t out_size, fc_error *err) {
    container c;
    FC_TRY(read_container(in, in_size, out_size, "lz4", &c, err));
    for (size_t done = 0, n; done < out_size; done += n) {
        const unsigned char *block;
        size_t size;
        n = out_size - done < c.block ? out_size - done : (size_t)c.block;
        if (!next_block(&c, &block, &size)) {
            return damaged("lz4", err);
        }
        if (size == n) {
            memcpy(out + done, block, n);
        } else if (!fc_lz4_decode(block, size, out + done, n)) {
            return damaged("lz4", err);
        }
    }
    return FC_OK;
}

/* Blocks have about 8 KiB by default. */
static uint64_t default_block(uint32_t element) {
    const uint64_t block = 8192 / element / 8 * 8;
    return block > 128 ? block : 128;
}

/* The parts of a chunk that bitshuffle treats apart: whole blocks, one shorter block, and up to 7 elements as they are.
   @return the bytes of the block at `done`; 0: the rest is not shuffled. */
static size_t block_at(size_t done, size_t size, uint64_t block, uint32_t element) {
    const size_t left = (size - done) / element, whole = left < block ? left / 8 * 8 : (size_t)block;
    return whole * element;
}

static fc_code undo_plain_bitshuffle(const fc_filter *filter, const unsigned char *in, size_t in_size, uint32_t element,
                                     unsigned char *out, size_t out_size, fc_error *err) {
    const uint64_t block = filter->block ? filter->block : default_block(element);
    size_t done = 0;
    if (in_size != out_size) {
        return damaged("bitshuffle", err);
    }
    for (size_t n; (n = block_at(done, out_size, block, element)) > 0; done += n) {
        fc_unshuffle_bits(in + done, out + done, n / element, element);
    }
    memcpy(out + done, in + done, out_size - done);
    return FC_OK;
}

static fc_code undo_bitshuffle(const fc_filter *filter, const unsigned char *in, size_t in_size, uint32_t element,
                               unsigned char *scratch, unsigned char *out, size_t out_size, fc_error *err) {
    container c;
    FC_TRY(read_container(in, in_size, out_size, "bitshuffle", &c, err));
    const uint64_t block = c.block / element;
    size_t done = 0;
    if (c.block % element != 0 || block % 8 != 0) {
        return damaged("bitshuffle", err);
    }
    for (size_t n; (n = block_at(done, out_size, block, element)) > 0; done += n) {
        const unsigned char *bytes;
        size_t size;
        if (!next_block(&c, &bytes, &size)) {
            return damaged("bitshuffle", err);
        }
        if (filter->inner == INNER_ZSTD) {
            FC_TRY(fc_zstd_decode(bytes, size, scratch, n, err));
        } else if (!fc_lz4_decode(bytes, size, scratch, n)) {
            return damaged("bitshuffle", err);
        }
        fc_unshuffle_bits(scratch, out + done, n / element, element);
    }
    if ((size_t)(c.end - c.in) != out_size - done) {
        return damaged("bitshuffle", err);
    }
    memcpy(out + done, c.in, out_size - done);
    return FC_OK;
}

fc_code fc_filter_undo(const fc_filter *filter, const unsigned char *in, size_t in_size, uint32_t element,
                       unsigned char *scratch, unsigned char *out, size_t out_size, fc_error *err) {
    switch (filter->id) {
    case FC_FILTER_DEFLATE:
        return fc_inflate(in, in_size, out, out_size, err);
    case FC_FILTER_SHUFFLE:
        if (in_size != out_size) {
            return damaged("shuffled", err);
        }
        fc_unshuffle(in, out, out_size, element);
        return FC_OK;
    case FC_FILTER_BZIP2:
        return fc_bzip2_decode(in, in_size, out, out_size, err);
    case FC_FILTER_LZF:
        return fc_lzf_decode(in, in_size, out, out_size) ? FC_OK : damaged("lzf", err);
    case FC_FILTER_LZ4:
        return undo_lz4(in, in_size, out, out_size, err);
    case FC_FILTER_ZSTD:
        return fc_zstd_decode(in, in_size, out, out_size, err);
    case FC_FILTER_BLOSC:
        return fc_blosc_decode(in, in_size, scratch, out, out_size, err);
    case FC_FILTER_BLOSC2:
        return fc_blosc2_decode(in, in_size, scratch, out, out_size, err);
    case FC_FILTER_BITSHUFFLE:
        return filter->inner ? undo_bitshuffle(filter, in, in_size, element, scratch, out, out_size, err)
                             : undo_plain_bitshuffle(filter, in, in_size, element, out, out_size, err);
    default:
        return fc_fail(err, FC_EUNSUPPORTED, "HDF5 filter %d is not supported", filter->id);
    }
}
