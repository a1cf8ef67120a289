/*
 * Deflates and inflates whole chunks in memory, in zlib's format. The input of inflating may be hostile.
 *
 * ISA-L compresses at level 1 about ten times as fast as zlib, to nearly the same size, and inflates about twice as
 * fast. It has no counterparts of zlib's other levels, so zlib does those.
 *
 * Level 1 compresses each byte plane on its own. In shuffled weights the mantissa planes are noise. ISA-L would encode
 * noise in eight-bit codes, which saves nothing and is slow to inflate; stored blocks cost only a copy in either
 * direction, and the codes for the exponent planes then fit exponents alone. Exponents have few distinct values in no
 * particular order. ISA-L's matches among them are so short that doing without them makes the result a fifth smaller
 * and both directions faster, so only runs of one byte are matched there. Where a sample shows other repetitions, all
 * matches are used. A short sample may contain only one of the equal rows of a wide embedding, so a look back over
 * deflate's whole window decides where to take the sample.
 */
#include "codec/codec.h"
#include "fsdpckpt/try.h"

#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <zlib.h>

#ifdef FSDPCKPT_HAVE_ISAL
#include <isa-l/igzip_lib.h>
#endif

enum { MOST_AT_ONCE = 1 << 30 /* bytes; zlib counts in 32 bits */ };

#ifdef FSDPCKPT_HAVE_ISAL
/* How ISA-L searches for repetitions. */
typedef struct search {
    uint32_t level;         /* ISA-L's own numbering */
    uint32_t distance_bits; /* the logarithm of the largest distance; 0 means the largest that deflate allows */
    uint32_t buffer;        /* bytes of working memory that the level needs */
} search;

static const search RUNS = {1, 1, ISAL_DEF_LVL1_DEFAULT}, MATCHES = {3, 0, ISAL_DEF_LVL3_DEFAULT};

enum { LARGEST_BUFFER = ISAL_DEF_LVL3_DEFAULT };
#endif

struct fc_deflater {
    int level;
    z_stream zlib;
#ifdef FSDPCKPT_HAVE_ISAL
    struct isal_zstream isal;
    unsigned char level_buffer[LARGEST_BUFFER];
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
    /* Next to ISA-L, zlib only stores (its level 0). The blocks need no header, and storing needs hardly any memory. */
    int rc = by_isal(level) ? deflateInit2(&d->zlib, 0, Z_DEFLATED, -15, 1, Z_DEFAULT_STRATEGY)
                            : deflateInit(&d->zlib, level);
    if (rc != Z_OK) {
        free(d);
        return NULL;
    }
    return d;
}

void fc_deflater_free(fc_deflater *d) {
    if (d) {
        deflateEnd(&d->zlib);
    }
    free(d);
}

size_t fc_deflater_size(void) {
    return sizeof(fc_deflater) + (300 << 10); /* the size of zlib's state according to zconf.h, and some slack */
}

/* Compresses with zlib. `last` ends the stream; otherwise the output ends at a byte so that more blocks can follow. */
static size_t zlib_blocks(fc_deflater *d, const unsigned char *in, size_t size, bool last, unsigned char *out,
                          size_t room) {
    z_stream *z = &d->zlib;
    if (deflateReset(z) != Z_OK) {
        return 0;
    }
    z->next_in = (Bytef *)in;
    z->avail_in = (uInt)size;
    z->next_out = out;
    z->avail_out = (uInt)room;
    int rc = deflate(z, last ? Z_FINISH : Z_FULL_FLUSH);
    bool complete = last ? rc == Z_STREAM_END : rc == Z_OK && z->avail_in == 0 && z->avail_out > 0;
    return complete ? room - z->avail_out : 0;
}

#ifdef FSDPCKPT_HAVE_ISAL

enum {
    HEADER = 2,
    TRAILER = 4,
    SAMPLE = 16 << 10, /* bytes that are compressed to choose a search */
    NOISE_SAMPLE = 4 << 10,
    STRIPE = 64,
    LEAST_PLANE = 16 << 10, /* bytes; codes of its own do not pay for a smaller plane */
    WINDOW = 32 << 10,      /* bytes that deflate can look back */
    ANCHOR = 64,            /* bytes between two remembered positions */
    ANCHOR_BITS = 10,
    GLANCE = 2 * ANCHOR, /* bytes that are looked up per position */
    EQUAL = 16,          /* bytes that must match */
    GLANCES = 5          /* odd: rows have even lengths, and the first of two equal rows repeats nothing */
};

/* Prepares ISA-L for a new stream. */
static struct isal_zstream *isal_new_stream(fc_deflater *d, search how, unsigned char *out, size_t room) {
    struct isal_zstream *z = &d->isal;
    /* ISA-L searches what earlier calls left in its tables: correct, but the output would differ from run to run. */
    memset(z, 0, sizeof *z);
    memset(d->level_buffer, 0, how.buffer);
    isal_deflate_init(z);
    z->level = how.level;
    z->hist_bits = (uint16_t)how.distance_bits;
    z->level_buf = d->level_buffer;
    z->level_buf_size = how.buffer;
    z->next_out = out;
    z->avail_out = (uint32_t)room;
    return z;
}

/* ISA-L hashes the third byte of a stream wrongly at level 1 when it reaches that byte in the same round as the first:
   it hashes the address of its own state instead, so the output would differ from run to run. Every round leaves
   ISAL_LOOK_AHEAD bytes for the next, so a first round of one more byte compresses that byte alone. */
static bool deflate_runs(struct isal_zstream *z, const unsigned char *in, size_t size, bool last) {
    const uint32_t first = ISAL_LOOK_AHEAD + 1;
    if (size < first) {
        return false;
    }
    z->next_in = (uint8_t *)in;
    z->avail_in = first;
    if (isal_deflate(z) != COMP_OK) {
        return false;
    }
    z->avail_in += (uint32_t)size - first;
    z->end_of_stream = last;
    z->flush = last ? NO_FLUSH : FULL_FLUSH;
    return isal_deflate(z) == COMP_OK && z->internal_state.state == (last ? ZSTATE_END : ZSTATE_NEW_HDR);
}

static bool deflate_matches(struct isal_zstream *z, const unsigned char *in, size_t size, bool last) {
    z->next_in = (uint8_t *)in;
    z->avail_in = (uint32_t)size;
    z->end_of_stream = last;
    z->flush = last ? NO_FLUSH : FULL_FLUSH;
    return isal_deflate_stateless(z) == COMP_OK;
}

/* Compresses with ISA-L to blocks that end at a byte, so that more blocks can follow.
   @return the size of the blocks, or 0 when they do not fit or when there are too few bytes to search for runs only. */
static size_t deflate_blocks(fc_deflater *d, search how, const unsigned char *in, size_t size, bool last,
                             unsigned char *out, size_t room) {
    struct isal_zstream *z = isal_new_stream(d, how, out, room);
    bool done = how.level == RUNS.level ? deflate_runs(z, in, size, last) : deflate_matches(z, in, size, last);
    return done && z->avail_in == 0 ? room - z->avail_out : 0;
}

/* Whether the byte values are so evenly distributed that no code is shorter. A quarter of the bytes, spread over the
   plane, is enough. The test uses the collision probability, whose negative logarithm is at most the entropy: it is
   1/256 for noise and 1/226 at 7.82 bits. */
static bool is_flat(const unsigned char *in, size_t size) {
    uint32_t counts[4][256] = {{0}};
    double squares = 0, total = 0;
    for (size_t at = 0; at + STRIPE <= size; at += 4 * STRIPE) {
        for (size_t i = at; i < at + STRIPE; i += 4) { /* four tables, so that equal adjacent bytes do not stall */
            counts[0][in[i]]++;
            counts[1][in[i + 1]]++;
            counts[2][in[i + 2]]++;
            counts[3][in[i + 3]]++;
        }
        total += STRIPE;
    }
    for (int v = 0; v < 256; v++) {
        double n = (double)counts[0][v] + counts[1][v] + counts[2][v] + counts[3][v];
        squares += n * n;
    }
    return squares * 226 < total * total;
}

static size_t anchor_slot(const unsigned char *bytes) {
    uint64_t v;
    memcpy(&v, bytes, sizeof v);
    return (size_t)(v * 0x9e3779b97f4a7c15u >> (64 - ANCHOR_BITS));
}

/* Whether some of the GLANCE bytes at `at` also occur in the window before them. Runs of one byte do not count, because
   every search finds them. */
static bool comes_again(const unsigned char *in, size_t at) {
    uint16_t anchors[1 << ANCHOR_BITS] = {0}; /* the number of the anchor, from 1; 0 means none */
    const unsigned char *from = in + (at > WINDOW - GLANCE ? at - (WINDOW - GLANCE) : 0);
    for (size_t i = 0; from + i * ANCHOR + EQUAL <= in + at; i++) {
        anchors[anchor_slot(from + i * ANCHOR)] = (uint16_t)(i + 1);
    }
    for (const unsigned char *p = in + at; p < in + at + GLANCE; p++) {
        uint16_t anchor = anchors[anchor_slot(p)];
        if (anchor > 0 && memcmp(from + (anchor - 1) * ANCHOR, p, EQUAL) == 0 && memcmp(p, p + 1, EQUAL - 1) != 0) {
            return true;
        }
    }
    return false;
}

/* @return a position where earlier bytes occur again, or 0 if a quick search finds none. */
static size_t find_repetition(const unsigned char *in, size_t size) {
    for (size_t i = 0; i < GLANCES && size >= LEAST_PLANE; i++) {
        size_t at = size / (2 * GLANCES) * (2 * i + 1);
        if (comes_again(in, at)) {
            return at;
        }
    }
    return 0;
}

/* Whether the plane is noise: evenly distributed and, as far as a sample shows, without repetitions. (A counter is
   evenly distributed, but repeats itself.)
   @param again the result of find_repetition. */
static bool is_noise(fc_deflater *d, const unsigned char *in, size_t size, size_t again, unsigned char *out,
                     size_t room) {
    if (size < LEAST_PLANE || again > 0 || !is_flat(in, size)) {
        return false;
    }
    size_t most = room < NOISE_SAMPLE - NOISE_SAMPLE / 16 ? room : NOISE_SAMPLE - NOISE_SAMPLE / 16;
    return deflate_blocks(d, MATCHES, in + size / 2, NOISE_SAMPLE, true, out, most) == 0;
}

/* @return the search that compresses a sample best. The sample is the middle of the plane, or the repetition at `again`
 * with the window before it. */
static search choose_search(fc_deflater *d, const unsigned char *in, size_t size, size_t again, unsigned char *out,
                            size_t room) {
    size_t n = size < SAMPLE ? size : SAMPLE, from = (size - n) / 2;
    if (again > 0) {
        from = again > WINDOW ? again - WINDOW : 0;
        n = size - again < SAMPLE ? size - from : again + SAMPLE - from;
    }
    size_t with_runs = deflate_blocks(d, RUNS, in + from, n, true, out, room);
    size_t with_matches = deflate_blocks(d, MATCHES, in + from, n, true, out, room);
    return with_runs > 0 && with_runs <= with_matches ? RUNS : MATCHES;
}

/* Compresses one plane with the method that suits it. */
static size_t deflate_plane(fc_deflater *d, const unsigned char *in, size_t size, bool last, unsigned char *out,
                            size_t room) {
    size_t again = find_repetition(in, size);
    if (is_noise(d, in, size, again, out, room)) {
        return zlib_blocks(d, in, size, last, out, room);
    }
    search how = choose_search(d, in, size, again, out, room);
    return deflate_blocks(d, how, in, size, last, out, room);
}

static size_t deflate_isal(fc_deflater *d, const unsigned char *in, size_t size, size_t plane, unsigned char *out,
                           size_t room) {
    size_t used = HEADER;
    if (room < HEADER + TRAILER) {
        return 0;
    }
    plane = plane < LEAST_PLANE ? 0 : plane;
    out[0] = 0x78; /* deflate with a window of 32 KiB */
    out[1] = 0x01; /* the fastest level (RFC 1950) */
    for (size_t at = 0; at < size || at == 0;) {
        size_t n = plane == 0 || size - at < 2 * plane ? size - at : plane; /* the last plane includes the remainder */
        bool last = at + n == size;
        size_t made = deflate_plane(d, in + at, n, last, out + used, room - used - TRAILER);
        if (made == 0) {
            return 0;
        }
        used += made;
        at += n;
        if (last) {
            break;
        }
    }
    uint32_t sum = isal_adler32(1, in, size);
    for (int i = 0; i < TRAILER; i++) {
        out[used++] = (unsigned char)(sum >> (24 - 8 * i));
    }
    return used;
}

#else

static size_t deflate_isal(fc_deflater *d, const unsigned char *in, size_t size, size_t plane, unsigned char *out,
                           size_t room) {
    (void)d, (void)in, (void)size, (void)plane, (void)out, (void)room;
    return 0; /* never called: see by_isal */
}

#endif

size_t fc_deflate(fc_deflater *d, const unsigned char *in, size_t size, size_t plane, unsigned char *out, size_t room) {
    room = room < MOST_AT_ONCE ? room : MOST_AT_ONCE;
    if (size > MOST_AT_ONCE || room == 0) {
        return 0;
    }
    return by_isal(d->level) ? deflate_isal(d, in, size, plane, out, room) : zlib_blocks(d, in, size, true, out, room);
}

static fc_code damaged(size_t produced, size_t out_size, fc_error *err) {
    return fc_fail(err, FC_ECORRUPT, "the compressed data is damaged after %zu of %zu bytes", produced, out_size);
}

static fc_code too_much(size_t out_size, fc_error *err) {
    return fc_fail(err, FC_ECORRUPT, "the compressed data expands to more than the %zu bytes of the chunk", out_size);
}

static fc_code inflate_zlib(const unsigned char *in, size_t in_size, unsigned char *out, size_t out_size,
                            fc_error *err) {
    z_stream z = {0};
    FC_NEED(inflateInit(&z) == Z_OK, err, NULL);
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
    FC_NEED(rc != Z_MEM_ERROR, err, NULL);
    return damaged(produced, out_size, err);
}

#ifdef FSDPCKPT_HAVE_ISAL

static fc_code inflate_isal(const unsigned char *in, size_t in_size, unsigned char *out, size_t out_size,
                            fc_error *err) {
    struct inflate_state *state = malloc(sizeof *state);
    FC_NEED(state, err, NULL);
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
