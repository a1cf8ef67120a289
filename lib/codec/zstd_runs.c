/*
 * Zstandard frames without a search. See zstd_runs.h.
 *
 * ZSTD_compressSequences writes a whole frame of matches that the caller found, and wants all bytes at once. A delta
 * wants one frame of a tensor of any size. So each block is a frame of its own first, without its header: its tables of
 * codes are in it, and the only distance is 1, which is also the first of the three that a decoder remembers, whatever
 * the block before it was.
 *
 * The function is in the part of libzstd's API that may change, but its arguments are the same since version 1.4.7, and
 * the shared library exports it. Where it is missing, the caller searches.
 */
#include "codec/zstd_runs.h"

#include "base/little.h"
#include "fsdpckpt/try.h"

#include <stdlib.h>
#include <string.h>

enum { BLOCK_HEADER = 3, RLE_BLOCK = 1, WINDOW_LOG = 17, LEAST_WINDOW_LOG = 10 };

void fc_zstd_runs_begin(uint64_t size, unsigned char out[FC_ZSTD_RUNS_HEADER]) {
    static const unsigned char start[] = {0x28,
                                          0xb5,
                                          0x2f,
                                          0xfd, /* magic number */
                                          0xc0, /* the size has 8 bytes; a window follows */
                                          (WINDOW_LOG - LEAST_WINDOW_LOG) << 3};
    _Static_assert(1 << WINDOW_LOG == FC_CHANGE_BLOCK, "a block has at most as many bytes as the window");
    memcpy(out, start, sizeof start);
    fc_store_little(out + sizeof start, size, 8);
}

size_t fc_zstd_runs_memory(void) {
    enum { CONTEXT = 1024 << 10 }; /* ZSTD_sizeof_CCtx of libzstd 1.5.4 says 889 KiB */
    return CONTEXT + (FC_MOST_CHANGES + 1) * 16;
}

#ifdef FSDPCKPT_HAVE_ZSTD_SEQUENCES
#define ZSTD_STATIC_LINKING_ONLY
#include <zstd.h>
#include <zstd_errors.h>

enum { SEPARATE_HEADER = 6, LEAST_MATCH = 3, LEAST_LOG = 6 };

struct fc_zstd_runs {
    ZSTD_CCtx *context;
    ZSTD_Sequence sequences[FC_MOST_CHANGES + 1];
};

bool fc_zstd_runs_is_built_in(void) {
    return true;
}

static bool set_parameters(ZSTD_CCtx *context) {
    static const struct {
        ZSTD_cParameter parameter;
        int value;
    } list[] = {
        {ZSTD_c_compressionLevel, 1},
        {ZSTD_c_windowLog, WINDOW_LOG},
        {ZSTD_c_hashLog, LEAST_LOG}, /* of tables that nothing is searched in */
        {ZSTD_c_chainLog, LEAST_LOG},
        {ZSTD_c_contentSizeFlag, 0}, /* of the separate frames */
        {ZSTD_c_blockDelimiters, ZSTD_sf_explicitBlockDelimiters},
        {ZSTD_c_searchForExternalRepcodes, ZSTD_ps_enable}, /* distance 1 takes no bits */
    };
    for (size_t i = 0; i < sizeof list / sizeof *list; i++) {
        if (ZSTD_isError(ZSTD_CCtx_setParameter(context, list[i].parameter, list[i].value))) {
            return false;
        }
    }
    return true;
}

fc_code fc_zstd_runs_new(fc_zstd_runs **out, fc_error *err) {
    fc_zstd_runs *z = calloc(1, sizeof *z);
    *out = z;
    FC_NEED(z, err, NULL);
    z->context = ZSTD_createCCtx();
    FC_NEED(z->context, err, NULL);
    return set_parameters(z->context)
               ? FC_OK
               : fc_fail(err, FC_EUNSUPPORTED, "libzstd %s is older than the one that this program was built with",
                         ZSTD_versionString());
}

void fc_zstd_runs_free(fc_zstd_runs *z) {
    if (z) {
        ZSTD_freeCCtx(z->context);
        free(z);
    }
}

/* Lists the matches of a block, each with the literals before it: the first 0 of a run is one. The last entry has the
   literals that are left. */
static size_t list_sequences(ZSTD_Sequence *out, size_t size, const fc_change *changes, size_t count) {
    size_t n = 0, literals = 0, end = 0;
    for (size_t i = 0; i <= count; i++) {
        const size_t next = i < count ? changes[i].begin : size;
        if (next > end + LEAST_MATCH) {
            out[n++] = (ZSTD_Sequence){1, (unsigned)(end + 1 - literals), (unsigned)(next - end - 1), 0};
            literals = next;
        }
        end = i < count ? changes[i].end : size;
    }
    out[n++] = (ZSTD_Sequence){0, (unsigned)(size - literals), 0, 0};
    return n;
}

fc_code fc_zstd_runs_block(fc_zstd_runs *z, const unsigned char *block, size_t size, const fc_change *changes,
                           size_t count, bool last, unsigned char *out, size_t *made, fc_error *err) {
    if (count == 0) {
        fc_store_little(out, (uint64_t)size << 3 | RLE_BLOCK << 1 | last, BLOCK_HEADER);
        out[BLOCK_HEADER] = 0;
        *made = BLOCK_HEADER + 1;
        return FC_OK;
    }
    const size_t n = list_sequences(z->sequences, size, changes, count);
    const size_t all = ZSTD_compressSequences(z->context, out, FC_ZSTD_RUNS_MOST, z->sequences, n, block, size);
    if (ZSTD_isError(all)) {
        return ZSTD_getErrorCode(all) == ZSTD_error_memory_allocation
                   ? fc_no_memory(err, NULL)
                   : fc_fail(err, FC_EIO, "zstd cannot compress: %s", ZSTD_getErrorName(all));
    }
    *made = all - SEPARATE_HEADER;
    memmove(out, out + SEPARATE_HEADER, *made);
    out[0] = (unsigned char)((out[0] & ~1) | last);
    return FC_OK;
}

#else

bool fc_zstd_runs_is_built_in(void) {
    return false;
}

fc_code fc_zstd_runs_new(fc_zstd_runs **out, fc_error *err) {
    *out = NULL;
    return fc_fail(err, FC_EUNSUPPORTED, "this build has no libzstd, or one before 1.5.4");
}

void fc_zstd_runs_free(fc_zstd_runs *z) {
    (void)z;
}

fc_code fc_zstd_runs_block(fc_zstd_runs *z, const unsigned char *block, size_t size, const fc_change *changes,
                           size_t count, bool last, unsigned char *out, size_t *made, fc_error *err) {
    (void)z, (void)block, (void)size, (void)changes, (void)count, (void)last, (void)out, (void)made;
    return fc_fail(err, FC_EUNSUPPORTED, "this build has no libzstd, or one before 1.5.4");
}

#endif
