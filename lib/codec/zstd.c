/*
 * Zstandard by libzstd, whole and as a stream. Only this file and zstd_runs.c include its header.
 */
#include "codec/zstd.h"
#include "base/little.h"
#include "fsdpckpt/try.h"

#include <stdlib.h>
#include <string.h>

size_t fc_zstd_encoder_memory(int level) {
    /* KiB, as ZSTD_estimateCStreamSize of libzstd 1.5.4 has them; that function is not in the shared library's API */
    static const size_t most[] = {0, 1340, 2048, 3580, 4860, 5890, 5890, 8960, 8960, 17200};
    const size_t levels = sizeof most / sizeof *most;
    return most[level < 1 ? 1 : (size_t)level < levels ? (size_t)level : levels - 1] << 10;
}

/* As RFC 8878, 3.1.1 has it: libzstd exports no function for this. */
bool fc_zstd_frame(const unsigned char *in, size_t in_size, uint64_t *window, uint64_t *content) {
    static const unsigned char magic[] = {0x28, 0xb5, 0x2f, 0xfd};
    static const int id_bytes[] = {0, 1, 2, 4}, content_bytes[] = {0, 2, 4, 8};
    size_t at = sizeof magic + 1;
    if (in_size < at + 1 || memcmp(in, magic, sizeof magic) != 0) {
        return false;
    }
    const unsigned descriptor = in[sizeof magic], size_flag = descriptor >> 6;
    const bool single = descriptor >> 5 & 1;
    const int bytes = size_flag == 0 && single ? 1 : content_bytes[size_flag];
    if (!single) {
        const unsigned w = in[at++];
        const uint64_t base = UINT64_C(1) << (10 + (w >> 3));
        *window = base + base / 8 * (w & 7);
    }
    at += (size_t)id_bytes[descriptor & 3];
    if (in_size < at + (size_t)bytes) {
        return false;
    }
    *content = bytes == 0 ? UINT64_MAX : fc_load_little(in + at, bytes) + (bytes == 2 ? 256 : 0);
    if (single) {
        *window = *content;
    }
    return true;
}

#ifdef FSDPCKPT_HAVE_ZSTD
#include <zstd.h>
#include <zstd_errors.h>

struct fc_zstd_decoder {
    ZSTD_DCtx *context;
};

struct fc_zstd_encoder {
    ZSTD_CCtx *context;
};

bool fc_zstd_is_built_in(void) {
    return true;
}

/* Returns the error of a call on a stream of someone else's, or FC_OK. */
static fc_code decoding_error(size_t result, fc_error *err) {
    if (!ZSTD_isError(result)) {
        return FC_OK;
    }
    switch (ZSTD_getErrorCode(result)) {
    case ZSTD_error_memory_allocation:
        return fc_no_memory(err, NULL);
    case ZSTD_error_frameParameter_windowTooLarge:
        return fc_fail(err, FC_ECORRUPT, "the zstd frame asks for a window of more than %d MiB",
                       FC_ZSTD_MOST_WINDOW >> 20);
    default:
        return fc_fail(err, FC_ECORRUPT, "the zstd stream is damaged: %s", ZSTD_getErrorName(result));
    }
}

/* The same for a call that only lack of memory can end. */
static fc_code encoding_error(size_t result, fc_error *err) {
    if (!ZSTD_isError(result)) {
        return FC_OK;
    }
    if (ZSTD_getErrorCode(result) == ZSTD_error_memory_allocation) {
        return fc_no_memory(err, NULL);
    }
    return fc_fail(err, FC_EIO, "zstd cannot compress: %s", ZSTD_getErrorName(result));
}

fc_code fc_zstd_decoder_new(fc_zstd_decoder **out, fc_error *err) {
    fc_zstd_decoder *d = calloc(1, sizeof *d);
    *out = d;
    FC_NEED(d, err, NULL);
    d->context = ZSTD_createDCtx();
    if (!d->context) {
        free(d);
        *out = NULL;
        return fc_no_memory(err, NULL);
    }
    return FC_OK;
}

void fc_zstd_decoder_free(fc_zstd_decoder *d) {
    if (d) {
        ZSTD_freeDCtx(d->context);
        free(d);
    }
}

void fc_zstd_decoder_reset(fc_zstd_decoder *d) {
    ZSTD_DCtx_reset(d->context, ZSTD_reset_session_only);
}

fc_code fc_zstd_decode_step(fc_zstd_decoder *d, const unsigned char *in, size_t in_size, unsigned char *out,
                            size_t out_size, fc_zstd_step *step, fc_error *err) {
    ZSTD_inBuffer from = {in, in_size, 0};
    ZSTD_outBuffer to = {out, out_size, 0};
    const size_t left = ZSTD_decompressStream(d->context, &to, &from);
    FC_TRY(decoding_error(left, err));
    *step = (fc_zstd_step){.taken = from.pos, .made = to.pos, .finished = left == 0};
    return FC_OK;
}

fc_code fc_zstd_decode(const unsigned char *in, size_t in_size, unsigned char *out, size_t out_size, fc_error *err) {
    const size_t made = ZSTD_decompress(out, out_size, in, in_size);
    if (ZSTD_isError(made) && ZSTD_getErrorCode(made) == ZSTD_error_dstSize_tooSmall) {
        return fc_fail(err, FC_ECORRUPT, "the zstd stream decodes to more than the %zu bytes that it should", out_size);
    }
    FC_TRY(decoding_error(made, err));
    if (made != out_size) {
        return fc_fail(err, FC_ECORRUPT, "the zstd stream decodes to %zu bytes instead of %zu", made, out_size);
    }
    return FC_OK;
}

fc_code fc_zstd_encoder_new(int level, fc_zstd_encoder **out, fc_error *err) {
    fc_zstd_encoder *e = calloc(1, sizeof *e);
    *out = e;
    FC_NEED(e, err, NULL);
    e->context = ZSTD_createCCtx();
    if (!e->context || ZSTD_isError(ZSTD_CCtx_setParameter(e->context, ZSTD_c_compressionLevel, level))) {
        fc_zstd_encoder_free(e);
        *out = NULL;
        return fc_no_memory(err, NULL);
    }
    return FC_OK;
}

void fc_zstd_encoder_free(fc_zstd_encoder *e) {
    if (e) {
        ZSTD_freeCCtx(e->context);
        free(e);
    }
}

fc_code fc_zstd_encoder_begin(fc_zstd_encoder *e, unsigned long long size, fc_error *err) {
    ZSTD_CCtx_reset(e->context, ZSTD_reset_session_only);
    return encoding_error(ZSTD_CCtx_setPledgedSrcSize(e->context, size), err);
}

fc_code fc_zstd_encode_step(fc_zstd_encoder *e, const unsigned char *in, size_t in_size, bool last, unsigned char *out,
                            size_t out_size, fc_zstd_step *step, fc_error *err) {
    ZSTD_inBuffer from = {in, in_size, 0};
    ZSTD_outBuffer to = {out, out_size, 0};
    const size_t left = ZSTD_compressStream2(e->context, &to, &from, last ? ZSTD_e_end : ZSTD_e_continue);
    FC_TRY(encoding_error(left, err));
    *step = (fc_zstd_step){.taken = from.pos, .made = to.pos, .finished = last && left == 0};
    return FC_OK;
}

#else

bool fc_zstd_is_built_in(void) {
    return false;
}

static fc_code not_built_in(fc_error *err) {
    return fc_fail(err, FC_EUNSUPPORTED,
                   "this build has no Zstandard: install libzstd-dev, or libzstd of the system, and build again");
}

fc_code fc_zstd_decode(const unsigned char *in, size_t in_size, unsigned char *out, size_t out_size, fc_error *err) {
    (void)in, (void)in_size, (void)out, (void)out_size;
    return not_built_in(err);
}

fc_code fc_zstd_decoder_new(fc_zstd_decoder **out, fc_error *err) {
    *out = NULL;
    return not_built_in(err);
}

void fc_zstd_decoder_free(fc_zstd_decoder *d) {
    (void)d;
}

void fc_zstd_decoder_reset(fc_zstd_decoder *d) {
    (void)d;
}

fc_code fc_zstd_decode_step(fc_zstd_decoder *d, const unsigned char *in, size_t in_size, unsigned char *out,
                            size_t out_size, fc_zstd_step *step, fc_error *err) {
    (void)d, (void)in, (void)in_size, (void)out, (void)out_size, (void)step;
    return not_built_in(err);
}

fc_code fc_zstd_encoder_new(int level, fc_zstd_encoder **out, fc_error *err) {
    (void)level;
    *out = NULL;
    return not_built_in(err);
}

void fc_zstd_encoder_free(fc_zstd_encoder *e) {
    (void)e;
}

fc_code fc_zstd_encoder_begin(fc_zstd_encoder *e, unsigned long long size, fc_error *err) {
    (void)e, (void)size;
    return not_built_in(err);
}

fc_code fc_zstd_encode_step(fc_zstd_encoder *e, const unsigned char *in, size_t in_size, bool last, unsigned char *out,
                            size_t out_size, fc_zstd_step *step, fc_error *err) {
    (void)e, (void)in, (void)in_size, (void)last, (void)out, (void)out_size, (void)step;
    return not_built_in(err);
}

#endif
