/*
 * bzip2 by libbz2. Only this file includes its header.
 */
#include "codec/bzip2.h"
#include "fsdpckpt/try.h"

#ifdef FSDPCKPT_HAVE_BZIP2
#include <bzlib.h>
#include <limits.h>
#include <stdlib.h>

bool fc_bzip2_is_built_in(void) {
    return true;
}

static fc_code damaged(fc_error *err) {
    return fc_fail(err, FC_ECORRUPT, "the bzip2 stream is damaged");
}

fc_code fc_bzip2_decode(const unsigned char *in, size_t in_size, unsigned char *out, size_t out_size, fc_error *err) {
    if (in_size > UINT_MAX || out_size > UINT_MAX) {
        return damaged(err); /* no chunk of HDF5 is so large */
    }
    unsigned made = (unsigned)out_size;
    switch (BZ2_bzBuffToBuffDecompress((char *)out, &made, (char *)in, (unsigned)in_size, 0, 0)) {
    case BZ_OK:
        break;
    case BZ_MEM_ERROR:
        return fc_no_memory(err, NULL);
    case BZ_OUTBUFF_FULL:
        return fc_fail(err, FC_ECORRUPT, "the bzip2 stream decodes to more than the %zu bytes that it should",
                       out_size);
    default:
        return damaged(err);
    }
    if (made != out_size) {
        return fc_fail(err, FC_ECORRUPT, "the bzip2 stream decodes to %u bytes instead of %zu", made, out_size);
    }
    return FC_OK;
}

fc_code fc_bzip2_count(const unsigned char *in, size_t in_size, uint64_t most, uint64_t *size, fc_error *err) {
    enum { BLOCK = 128 << 10 };
    if (in_size > UINT_MAX) {
        return damaged(err);
    }
    bz_stream stream = {.next_in = (char *)in, .avail_in = (unsigned)in_size};
    char *block = malloc(BLOCK);
    FC_NEED(block, err, NULL);
    int rc = BZ2_bzDecompressInit(&stream, 0, 0);
    const bool started = rc == BZ_OK;
    *size = 0;
    while (rc == BZ_OK && *size <= most) {
        stream.next_out = block;
        stream.avail_out = BLOCK;
        rc = BZ2_bzDecompress(&stream);
        *size += BLOCK - stream.avail_out;
        if (rc == BZ_OK && stream.avail_out > 0) {
            break; /* it wants more input, and there is none */
        }
    }
    if (started) {
        BZ2_bzDecompressEnd(&stream);
    }
    free(block);
    FC_NEED(rc != BZ_MEM_ERROR, err, NULL);
    return rc == BZ_STREAM_END && *size <= most ? FC_OK : damaged(err);
}

#else

bool fc_bzip2_is_built_in(void) {
    return false;
}

static fc_code not_built_in(fc_error *err) {
    return fc_fail(err, FC_EUNSUPPORTED,
                   "this build has no bzip2: install libbz2-dev, or libbz2 of the system, and build again");
}

fc_code fc_bzip2_decode(const unsigned char *in, size_t in_size, unsigned char *out, size_t out_size, fc_error *err) {
    (void)in, (void)in_size, (void)out, (void)out_size;
    return not_built_in(err);
}

fc_code fc_bzip2_count(const unsigned char *in, size_t in_size, uint64_t most, uint64_t *size, fc_error *err) {
    (void)in, (void)in_size, (void)most, (void)size;
    return not_built_in(err);
}

#endif
