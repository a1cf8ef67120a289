/*
 * Undoes HDF5 filter pipelines in memory: the filters of lib/codec/filter.h and fletcher32. Every number here may come
 * from a hostile file.
 *
 * A pipeline is listed in the order in which it was applied, so decoding goes from its end to its start. The result of
 * a compression must have the decoded size plus 4 bytes per fletcher32. A pipeline with a second compression, which no
 * program writes, therefore fails as damaged.
 */
#include "read/decode.h"

#include "base/checked.h"
#include "base/little.h"
#include "codec/filter.h"
#include "fsdpckpt/try.h"

#include <inttypes.h>
#include <string.h>

enum { CHECKSUM_SIZE = 4 };

uint32_t fc_fletcher32(const unsigned char *bytes, size_t size) {
    uint32_t a = 0, b = 0;
    size_t words = size / 2;
    while (words > 0) {
        size_t block = words < 360 ? words : 360; /* this many additions cannot overflow 32 bits */
        words -= block;
        for (; block > 0; block--, bytes += 2) {
            a += (uint32_t)bytes[0] << 8 | bytes[1];
            b += a;
        }
        a = (a & 0xffff) + (a >> 16);
        b = (b & 0xffff) + (b >> 16);
    }
    if (size % 2) {
        a += (uint32_t)bytes[0] << 8;
        b += a;
        a = (a & 0xffff) + (a >> 16);
        b = (b & 0xffff) + (b >> 16);
    }
    a = (a & 0xffff) + (a >> 16);
    b = (b & 0xffff) + (b >> 16);
    return b << 16 | a;
}

/* The stored checksum is little-endian; HDF5 before 1.6.3 swapped the bytes of each half on some machines. */
static fc_code check_fletcher(const unsigned char *bytes, size_t size, fc_error *err) {
    const unsigned char *p = bytes + size;
    const uint32_t stored = (uint32_t)fc_load_little(p, 4);
    uint32_t swapped = p[1] | (uint32_t)p[0] << 8 | (uint32_t)p[3] << 16 | (uint32_t)p[2] << 24;
    uint32_t sum = fc_fletcher32(bytes, size);
    if (sum != stored && sum != swapped) {
        return fc_fail(err, FC_ECORRUPT,
                       "the fletcher32 checksum is %08" PRIx32 " but %08" PRIx32 " is recorded: the data is damaged",
                       sum, stored);
    }
    return FC_OK;
}

static bool applied(const fc_filters *filters, int i) {
    return !(filters->mask >> i & 1);
}

/*
 * Computes the size before filter `i`, a compression, was applied: that of the elements and the checksums of earlier
 * filters.
 */
static bool uncompressed_size(const fc_extent *extent, int i, uint64_t *size) {
    *size = extent->decoded;
    for (int j = 0; j < i; j++) {
        if (applied(&extent->filters, j) && extent->filters.items[j].id == FC_FILTER_FLETCHER32 &&
            !fc_add_u64(*size, CHECKSUM_SIZE, size)) {
            return false;
        }
    }
    return *size <= SIZE_MAX;
}

/* Computes the size after undoing filter `i` on `size` bytes. Returns false when the sizes are invalid. */
static bool undone_size(const fc_extent *extent, int i, uint64_t size, uint64_t *out) {
    const fc_filter *filter = &extent->filters.items[i];
    if (filter->id == FC_FILTER_FLETCHER32) {
        *out = size - CHECKSUM_SIZE;
        return size >= CHECKSUM_SIZE;
    }
    *out = size;
    return !fc_filter_compresses(filter) || uncompressed_size(extent, i, out);
}

/* Computes the bytes that undoing filter `i` needs besides its result of `size` bytes. */
static uint64_t scratch_size(const fc_extent *extent, int i, uint64_t size) {
    const fc_filter_info *info = fc_filter_find(extent->filters.items[i].id);
    if (!info || !fc_filter_compresses(&extent->filters.items[i])) {
        return 0;
    }
    return fc_mul_u64(size, info->scratch, &size) ? size : UINT64_MAX;
}

bool fc_decode_workspace(const fc_extent *extent, uint64_t *bytes) {
    uint64_t total = extent->length, size = extent->length;
    for (int i = extent->filters.count - 1; i >= 0; i--) {
        if (!applied(&extent->filters, i)) {
            continue;
        }
        /* The results of filter 0 and of a checksum's removal need no room of their own. */
        if (!undone_size(extent, i, size, &size) || !fc_add_u64(total, scratch_size(extent, i, size), &total) ||
            (i > 0 && extent->filters.items[i].id != FC_FILTER_FLETCHER32 && !fc_add_u64(total, size, &total))) {
            return false;
        }
    }
    *bytes = total;
    return total <= SIZE_MAX;
}

bool fc_decode_gives_planes(const fc_extent *extent, uint32_t element) {
    const fc_filters *f = &extent->filters;
    return extent->codec == FC_CODEC_FILTERED && element > 1 && extent->first % element == 0 && f->count == 2 &&
           f->mask == 0 && f->items[0].id == FC_FILTER_SHUFFLE && fc_filter_compresses(&f->items[1]) &&
           scratch_size(extent, 1, 1) == 0;
}

/* Bytes on their way through the pipeline, and where in the workspace the next step may write. */
typedef struct stage {
    unsigned char *bytes;
    size_t size;
    unsigned char *next;
} stage;

/* Undoes filter `i` into `out`, or in place when it only removes a checksum. What needs scratch uses the free end of
   the workspace. */
static fc_code undo_filter(const fc_extent *extent, int i, uint32_t element, stage *s, unsigned char *out,
                           fc_error *err) {
    uint64_t size;
    if (!undone_size(extent, i, s->size, &size)) {
        return fc_fail(err, FC_ECORRUPT, "the chunk has only %zu bytes, too few for its checksum", s->size);
    }
    const fc_filter *filter = &extent->filters.items[i];
    fc_code rc;
    if (filter->id == FC_FILTER_FLETCHER32) {
        rc = check_fletcher(s->bytes, (size_t)size, err);
        out = s->bytes;
    } else {
        s->next += out == s->next ? size : 0;
        rc = fc_filter_undo(filter, s->bytes, s->size, element, s->next, out, (size_t)size, err);
    }
    s->bytes = out;
    s->size = (size_t)size;
    return rc;
}

fc_code fc_decode_filters(const fc_extent *extent, unsigned char *workspace, uint32_t element, unsigned char *out,
                          fc_error *err) {
    stage s = {workspace, (size_t)extent->length, workspace + extent->length};
    for (int i = extent->filters.count - 1; i >= 0; i--) {
        if (!applied(&extent->filters, i)) {
            continue;
        }
        if (i == 0 && !fc_filter_compresses(&extent->filters.items[0]) &&
            extent->filters.items[0].id != FC_FILTER_FLETCHER32 && s.size != extent->decoded) {
            break; /* it would overflow `out` */
        }
        /* Filter 0 was applied to the elements, so undoing it writes directly to `out`. */
        FC_TRY(undo_filter(extent, i, element, &s, i == 0 ? out : s.next, err));
    }
    if (s.size != extent->decoded) {
        return fc_fail(err, FC_ECORRUPT, "the chunk decodes to %zu bytes instead of %" PRIu64, s.size, extent->decoded);
    }
    if (s.bytes != out) {
        memcpy(out, s.bytes, s.size);
    }
    return FC_OK;
}
