/*
 * Deflate and inflate of whole chunks. From bytes to a zlib stream and back; the input of inflating may be hostile.
 *
 * ISA-L does level 1 about ten times as fast as zlib at nearly the same size, and inflates about twice as fast. It has
 * no levels that match zlib's others, so those are zlib's.
 */
#include "move/codec.h"

#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <zlib.h>

#ifdef FSDPCKPT_HAVE_ISAL
#include <isa-l/igzip_lib.h>
#endif

enum { MOST_AT_ONCE = 1 << 30 /* zlib counts in 32 bits */ };

struct fc_deflater {
    int level;
    z_stream zlib;
#ifdef FSDPCKPT_HAVE_ISAL
    struct isal_zstream isal;
    unsigned char level_buffer[ISAL_DEF_LVL1_DEFAULT];
#endif
};

static bool by_isal(int level) {
#ifdef FSDPCKPT_HAVE_ISAL
    return level == 1;
#else
    (void)level;
    return false;
#endif
}

fc_deflater *fc_deflater_new(int level) {
    fc_deflater *d = calloc(1, sizeof *d);
    if (!d) {
        return NULL;
    }
    d->level = level;
    if (!by_isal(level) && deflateInit(&d->zlib, level) != Z_OK) {
        free(d);
        return NULL;
    }
    return d;
}

void fc_deflater_free(fc_deflater *d) {
    if (d && !by_isal(d->level)) {
        deflateEnd(&d->zlib);
    }
    free(d);
}

size_t fc_deflater_size(void) {
    return sizeof(fc_deflater) + (300 << 10); /* zlib's state, as zconf.h counts it, with some slack */
}

static size_t deflate_all(fc_deflater *d, const unsigned char *in, size_t size, unsigned char *out, size_t room) {
    z_stream *z = &d->zlib;
    if (deflateReset(z) != Z_OK) {
        return 0;
    }
    z->next_in = (Bytef *)in;
    z->avail_in = (uInt)size;
    z->next_out = out;
    z->avail_out = (uInt)room;
    return deflate(z, Z_FINISH) == Z_STREAM_END ? room - z->avail_out : 0;
}

#ifdef FSDPCKPT_HAVE_ISAL

static size_t deflate_isal(fc_deflater *d, const unsigned char *in, size_t size, unsigned char *out, size_t room) {
    struct isal_zstream *z = &d->isal;
    /* ISA-L looks for matches among what earlier calls left in its tables: correct, but not the same every time. */
    memset(z, 0, sizeof *z);
    memset(d->level_buffer, 0, sizeof d->level_buffer);
    isal_deflate_stateless_init(z);
    z->level = 1;
    z->level_buf = d->level_buffer;
    z->level_buf_size = sizeof d->level_buffer;
    z->gzip_flag = IGZIP_ZLIB;
    z->end_of_stream = 1;
    z->next_in = (uint8_t *)in;
    z->avail_in = (uint32_t)size;
    z->next_out = out;
    z->avail_out = (uint32_t)room;
    return isal_deflate_stateless(z) == COMP_OK && z->avail_in == 0 ? room - z->avail_out : 0;
}

#else

static size_t deflate_isal(fc_deflater *d, const unsigned char *in, size_t size, unsigned char *out, size_t room) {
    (void)d, (void)in, (void)size, (void)out, (void)room;
    return 0; /* never asked, see by_isal */
}

#endif

size_t fc_deflate(fc_deflater *d, const unsigned char *in, size_t size, unsigned char *out, size_t room) {
    room = room < MOST_AT_ONCE ? room : MOST_AT_ONCE;
    if (size > MOST_AT_ONCE || room == 0) {
        return 0;
    }
    return by_isal(d->level) ? deflate_isal(d, in, size, out, room) : deflate_all(d, in, size, out, room);
}

static fc_code damaged(size_t produced, size_t out_size, fc_error *err) {
    return fc_fail(err, FC_ECORRUPT, "the compressed data is damaged after %zu of %zu bytes", produced, out_size);
}

static fc_code too_much(size_t out_size, fc_error *err) {
    return fc_fail(err, FC_ECORRUPT, "the compressed data holds more than the %zu bytes of the chunk", out_size);
}

static fc_code inflate_zlib(const unsigned char *in, size_t in_size, unsigned char *out, size_t out_size,
                            fc_error *err) {
    z_stream z = {0};
    if (inflateInit(&z) != Z_OK) {
        return fc_fail(err, FC_ENOMEM, "out of memory while inflating");
    }
    size_t in_left = in_size, out_left = out_size;
    z.next_in = (Bytef *)in;
    z.next_out = out;
    int rc = Z_OK;
    while (rc == Z_OK) {
        if (z.avail_in == 0 && in_left > 0) {
            z.avail_in = (uInt)(in_left < MOST_AT_ONCE ? in_left : MOST_AT_ONCE);
            in_left -= z.avail_in;
        }
        if (z.avail_out == 0 && out_left > 0) {
            z.avail_out = (uInt)(out_left < MOST_AT_ONCE ? out_left : MOST_AT_ONCE);
            out_left -= z.avail_out;
        }
        rc = inflate(&z, Z_NO_FLUSH);
    }
    size_t produced = out_size - out_left - z.avail_out;
    bool full = produced == out_size;
    inflateEnd(&z);
    if (rc == Z_STREAM_END && full) {
        return FC_OK;
    }
    if (rc == Z_BUF_ERROR && full) {
        return too_much(out_size, err);
    }
    if (rc == Z_MEM_ERROR) {
        return fc_fail(err, FC_ENOMEM, "out of memory while inflating");
    }
    return damaged(produced, out_size, err);
}

#ifdef FSDPCKPT_HAVE_ISAL

static fc_code inflate_isal(const unsigned char *in, size_t in_size, unsigned char *out, size_t out_size,
                            fc_error *err) {
    struct inflate_state *state = malloc(sizeof *state);
    if (!state) {
        return fc_fail(err, FC_ENOMEM, "out of memory while inflating");
    }
    isal_inflate_init(state);
    state->crc_flag = ISAL_ZLIB; /* parses the header and checks the Adler-32 at the end */
    state->next_in = (uint8_t *)in;
    state->avail_in = (uint32_t)in_size;
    state->next_out = out;
    state->avail_out = (uint32_t)out_size;
    int rc = isal_inflate_stateless(state);
    size_t produced = out_size - state->avail_out;
    free(state);
    if (rc == ISAL_OUT_OVERFLOW) {
        return too_much(out_size, err);
    }
    return rc == ISAL_DECOMP_OK && produced == out_size ? FC_OK : damaged(produced, out_size, err);
}

#endif

fc_code fc_inflate(const unsigned char *in, size_t in_size, unsigned char *out, size_t out_size, fc_error *err) {
#ifdef FSDPCKPT_HAVE_ISAL
    if (in_size <= MOST_AT_ONCE && out_size <= MOST_AT_ONCE) {
        return inflate_isal(in, in_size, out, out_size, err);
    }
#endif
    return inflate_zlib(in, in_size, out, out_size, err);
}
