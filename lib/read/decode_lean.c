/*
 * Lean decoding. Some programs (e.g. h5repack) store a whole dataset as one chunk, which may take most of the memory
 * limit and leave no room for the results of the filters in between. The inflated bytes go directly to their elements,
 * plane by plane.
 */
#include "read/decode_lean.h"
#include "codec/filter.h"
#include "fsdpckpt/try.h"

#include <inttypes.h>
#include <string.h>
#include <zlib.h>

enum { OTHER = 9 };

static bool applied(const fc_extent *extent, int i) {
    return !(extent->filters.mask >> i & 1);
}

/* Returns the applied filters, in order, as one number: 21 for shuffle, then deflate. All but the first three are 9. */
static int pipeline(const fc_extent *extent) {
    int ids = 0;
    for (int i = 0; i < extent->filters.count; i++) {
        const int id = extent->filters.items[i].id;
        ids = applied(extent, i) ? ids * 10 + (id < OTHER ? id : OTHER) : ids;
    }
    return ids;
}

bool fc_decode_lean_can(const fc_extent *extent) {
    int ids = pipeline(extent);
    return ids == FC_FILTER_DEFLATE || ids == FC_FILTER_SHUFFLE * 10 + FC_FILTER_DEFLATE;
}

/* Moves `size` bytes, which start at `at` in the shuffled chunk, to their elements. */
static void put(const unsigned char *in, uint64_t at, size_t size, uint64_t count, uint32_t element,
                unsigned char *out) {
    while (size > 0) {
        uint64_t plane = count ? at / count : element, i = count ? at % count : 0;
        if (plane >= element) { /* an incomplete element at the end is not shuffled */
            memcpy(out + at, in, size);
            return;
        }
        size_t n = size < count - i ? size : (size_t)(count - i);
        unsigned char *to = out + i * element + plane;
        for (size_t k = 0; k < n; k++) {
            to[k * element] = in[k];
        }
        in += n;
        at += n;
        size -= n;
    }
}

fc_code fc_decode_lean(const fc_extent *extent, fc_stored_fn read, void *context, unsigned char *window,
                       size_t window_size, uint32_t element, unsigned char *out, fc_error *err) {
    const bool shuffled = pipeline(extent) != FC_FILTER_DEFLATE;
    const size_t half = window_size / 2 < 1 << 30 ? window_size / 2 : 1 << 30;
    const uint64_t count = shuffled ? extent->decoded / element : 0;
    uint64_t at = 0, done = 0;
    z_stream z = {0};
    if (inflateInit(&z) != Z_OK) {
        return fc_fail(err, FC_ENOMEM, "out of memory while inflating");
    }
    fc_code rc = FC_OK;
    int got = Z_OK;
    while (got == Z_OK) {
        if (z.avail_in == 0 && at < extent->length) {
            size_t n = extent->length - at < half ? (size_t)(extent->length - at) : half;
            FC_TRY_GOTO(read(context, at, window, n, err), rc, out);
            z.next_in = window;
            z.avail_in = (uInt)n;
            at += n;
        }
        z.next_out = window + half;
        z.avail_out = (uInt)half;
        got = inflate(&z, Z_NO_FLUSH);
        size_t n = half - z.avail_out;
        if (n > extent->decoded - done) {
            rc =
                fc_fail(err, FC_ECORRUPT, "the compressed data expands to more than the %" PRIu64 " bytes of the chunk",
                        extent->decoded);
            goto out;
        }
        put(window + half, done, n, count, shuffled ? element : 0, out);
        done += n;
    }
    if (got == Z_MEM_ERROR) {
        rc = fc_fail(err, FC_ENOMEM, "out of memory while inflating");
    } else if (got != Z_STREAM_END || done != extent->decoded) {
        rc = fc_fail(err, FC_ECORRUPT, "the compressed data is damaged after %" PRIu64 " of %" PRIu64 " bytes", done,
                     extent->decoded);
    }
out:
    inflateEnd(&z);
    return rc;
}
