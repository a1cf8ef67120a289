/*
 * Frames of changed tensors. See encode.h.
 *
 * Nothing is compressed until the first byte differs, so a tensor that did not change costs a comparison and a
 * checksum. `overwrite` has all positions before all values, so both are kept in files until the tensor ends.
 */
#include "delta/encode.h"

#include "base/little.h"
#include "codec/zstd.h"
#include "fsdpckpt/try.h"
#include "io/file.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { BLOCK = 64 << 10, POSITION = 4, SPILLS = 2 };

/* A file that bytes are appended to through a buffer. */
typedef struct spool {
    char *path; /* malloc'ed, for messages */
    int fd;
    uint64_t end; /* bytes in the file */
    size_t filled;
    unsigned char buffer[BLOCK];
} spool;

/* The frames of one encoding. */
typedef struct sink {
    fc_zstd_encoder *zstd;
    spool out;
    uint64_t begin; /* where the current frame begins */
} sink;

struct fc_delta_encoder {
    fc_delta_sum sum;
    fc_delta_how how;
    const char *name;
    uint64_t bytes, at; /* of the current tensor: its size, and what was added */
    uint64_t changed;
    sink *sinks[FC_DELTA_ENCODINGS]; /* NULL: the encoding is not wanted */
    spool *spills[SPILLS];           /* of overwrite: positions, and values */
    bool too_large;                  /* for the positions of overwrite */
    unsigned char difference[BLOCK];
};

static const unsigned char zeros[BLOCK];

/* ---- files ---- */

static fc_code spool_open(spool *s, const char *directory, const char *kind, int number, fc_error *err) {
    s->fd = -1;
    if (asprintf(&s->path, "%s/%s-%d", directory, kind, number) < 0) {
        s->path = NULL;
        return fc_no_memory(err, directory);
    }
    s->fd = open(s->path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    return s->fd < 0 ? fc_fail_errno(err, errno, "%s: the file cannot be created", s->path) : FC_OK;
}

static void spool_close(spool *s) {
    if (s->path && s->fd >= 0) {
        close(s->fd);
    }
    free(s->path);
}

static fc_code spool_flush(spool *s, fc_error *err) {
    FC_TRY(fc_pwrite_full(s->fd, s->buffer, s->filled, s->end, s->path, err));
    s->end += s->filled;
    s->filled = 0;
    return FC_OK;
}

static fc_code spool_put(spool *s, const unsigned char *bytes, size_t size, fc_error *err) {
    if (sizeof s->buffer - s->filled < size) {
        FC_TRY(spool_flush(s, err));
    }
    memcpy(s->buffer + s->filled, bytes, size);
    s->filled += size;
    return FC_OK;
}

/* ---- frames ---- */

static fc_code sink_begin(sink *k, uint64_t bytes, fc_error *err) {
    k->begin = k->out.end + k->out.filled;
    return fc_zstd_encoder_begin(k->zstd, bytes, err);
}

static fc_code sink_put(sink *k, const unsigned char *bytes, size_t size, bool last, fc_error *err) {
    fc_zstd_step step = {0};
    for (size_t at = 0; at < size || (last && !step.finished); at += step.taken) {
        if (k->out.filled == sizeof k->out.buffer) {
            FC_TRY(spool_flush(&k->out, err));
        }
        FC_TRY(fc_zstd_encode_step(k->zstd, bytes + at, size - at, last, k->out.buffer + k->out.filled,
                                   sizeof k->out.buffer - k->out.filled, &step, err));
        k->out.filled += step.made;
    }
    return FC_OK;
}

static fc_code sink_put_zeros(sink *k, uint64_t size, fc_error *err) {
    while (size > 0) {
        const size_t some = size < BLOCK ? (size_t)size : BLOCK;
        FC_TRY(sink_put(k, zeros, some, false, err));
        size -= some;
    }
    return FC_OK;
}

/* Puts everything that a spill has, and empties it. */
static fc_code sink_put_spill(sink *k, spool *s, unsigned char *buffer, fc_error *err) {
    FC_TRY(spool_flush(s, err));
    for (uint64_t at = 0; at < s->end;) {
        const size_t some = s->end - at < BLOCK ? (size_t)(s->end - at) : BLOCK;
        FC_TRY(fc_pread_full(s->fd, buffer, some, at, s->path, err));
        FC_TRY(sink_put(k, buffer, some, false, err));
        at += some;
    }
    s->end = 0;
    return FC_OK;
}

static fc_code sink_end(sink *k, const fc_delta_encoder *e, fc_delta_frame *frame, fc_error *err) {
    FC_TRY(sink_put(k, NULL, 0, true, err));
    *frame = (fc_delta_frame){e, k->begin, k->out.end + k->out.filled - k->begin};
    return FC_OK;
}

static fc_code sink_new(const fc_delta_how *how, fc_delta_encoding encoding, int number, sink **out, fc_error *err) {
    sink *k = *out = calloc(1, sizeof *k);
    FC_NEED(k, err, NULL);
    FC_TRY(spool_open(&k->out, how->directory, fc_delta_encoding_name(encoding), number, err));
    return fc_zstd_encoder_new(how->level, &k->zstd, err);
}

static void sink_free(sink *k) {
    if (k) {
        fc_zstd_encoder_free(k->zstd);
        spool_close(&k->out);
        free(k);
    }
}

/* ---- encoders ---- */

fc_code fc_delta_encoder_new(const fc_delta_how *how, int number, fc_delta_encoder **out, fc_error *err) {
    static const char *const spills[SPILLS] = {"positions", "values"};
    fc_delta_encoder *e = aligned_alloc(_Alignof(fc_delta_encoder), sizeof *e);
    *out = e;
    FC_NEED(e, err, NULL);
    memset(e, 0, sizeof *e);
    e->how = *how;
    for (int i = 0; i < FC_DELTA_ENCODINGS; i++) {
        if (how->encoding == (fc_delta_encoding)i || how->encoding == FC_DELTA_AUTO) {
            FC_TRY(sink_new(how, (fc_delta_encoding)i, number, &e->sinks[i], err));
        }
    }
    for (int i = 0; i < SPILLS && e->sinks[FC_DELTA_OVERWRITE]; i++) {
        e->spills[i] = calloc(1, sizeof *e->spills[i]);
        FC_NEED(e->spills[i], err, NULL);
        FC_TRY(spool_open(e->spills[i], how->directory, spills[i], number, err));
    }
    return FC_OK;
}

void fc_delta_encoder_free(fc_delta_encoder *e) {
    for (int i = 0; e && i < FC_DELTA_ENCODINGS; i++) {
        sink_free(e->sinks[i]);
    }
    for (int i = 0; e && i < SPILLS && e->spills[i]; i++) {
        spool_close(e->spills[i]);
        free(e->spills[i]);
    }
    free(e);
}

size_t fc_delta_encoder_memory(const fc_delta_how *how) {
    const size_t frames = fc_zstd_encoder_memory(how->level) + sizeof(sink), spills = SPILLS * sizeof(spool);
    const size_t both = how->encoding == FC_DELTA_AUTO ? 2 : 1;
    return sizeof(fc_delta_encoder) + both * frames + (how->encoding == FC_DELTA_XOR ? 0 : spills);
}

void fc_delta_encoder_begin(fc_delta_encoder *e, const char *name, uint64_t bytes) {
    e->name = name;
    e->bytes = bytes;
    e->at = e->changed = 0;
    e->too_large = bytes > UINT32_MAX;
    for (int i = 0; i < SPILLS && e->spills[i]; i++) {
        e->spills[i]->end = 0;
        e->spills[i]->filled = 0;
    }
    fc_delta_sum_begin(&e->sum, e->how.checksum);
}

/* Returns how many bytes of a word are not 0. */
static size_t count_bytes(uint64_t word) {
    const uint64_t low = UINT64_C(0x7f7f7f7f7f7f7f7f), each = UINT64_C(0x0101010101010101);
    const uint64_t marks = ((((word & low) + low) | word) & ~low) >> 7; /* 1 in each such byte */
    return (size_t)((marks * each) >> 56);
}

/* Stores old ^ changed in e->difference. @return how many bytes differ. */
static size_t find_difference(fc_delta_encoder *e, const unsigned char *old, const unsigned char *changed,
                              size_t size) {
    size_t count = 0;
    for (size_t i = 0; i < size; i += sizeof(uint64_t)) {
        const size_t some = size - i < sizeof(uint64_t) ? size - i : sizeof(uint64_t);
        uint64_t a = 0, b = 0;
        if (some == sizeof a) {
            memcpy(&a, old + i, sizeof a);
            memcpy(&b, changed + i, sizeof b);
        } else {
            memcpy(&a, old + i, some);
            memcpy(&b, changed + i, some);
        }
        a ^= b;
        memcpy(e->difference + i, &a, sizeof a); /* the buffer is a multiple of words */
        count += count_bytes(a);
    }
    return count;
}

static fc_code spill_byte(fc_delta_encoder *e, uint64_t position, unsigned char value, fc_error *err) {
    unsigned char stored[POSITION];
    fc_store_little(stored, position, POSITION);
    FC_TRY(spool_put(e->spills[0], stored, POSITION, err));
    return spool_put(e->spills[1], &value, 1, err);
}

/* Keeps the positions and the values of the bytes of a block that differ. */
static fc_code spill_block(fc_delta_encoder *e, const unsigned char *changed, size_t size, fc_error *err) {
    for (size_t i = 0; i < size;) {
        uint64_t word = 0;
        memcpy(&word, e->difference + i, size - i < sizeof word ? size - i : sizeof word);
        for (size_t j = i; word != 0; j++, word >>= 8) {
            if (word & 0xff) {
                FC_TRY(spill_byte(e, e->at + j, changed[j], err));
            }
        }
        i += sizeof word;
    }
    return FC_OK;
}

/* Adds a block that differs. */
static fc_code add_changed(fc_delta_encoder *e, const unsigned char *old, const unsigned char *changed, size_t size,
                           fc_error *err) {
    sink * xor = e->sinks[FC_DELTA_XOR];
    const bool first = e->changed == 0;
    e->changed += find_difference(e, old, changed, size);
    if (xor&&first) {
        FC_TRY(sink_begin(xor, e->bytes, err));
        FC_TRY(sink_put_zeros(xor, e->at, err));
    }
    FC_TRY(xor? sink_put(xor, e->difference, size, false, err) : FC_OK);
    if (!e->sinks[FC_DELTA_OVERWRITE] || e->too_large) {
        return xor? FC_OK
                  : fc_fail(err, FC_EUNSUPPORTED,
                            "tensor %.256s: it has %" PRIu64 " bytes, and overwrite stores positions in 4 bytes, up to "
                            "4 GiB; use the encoding xor",
                            e->name, e->bytes);
    }
    return spill_block(e, changed, size, err);
}

fc_code fc_delta_encoder_add(fc_delta_encoder *e, const unsigned char *old, const unsigned char *changed, size_t size,
                             fc_error *err) {
    while (size > 0) {
        const size_t some = size < BLOCK ? size : BLOCK;
        if (!e->how.no_checksum) {
            fc_delta_sum_add(&e->sum, changed, some);
        }
        if (memcmp(old, changed, some) != 0) {
            FC_TRY(add_changed(e, old, changed, some, err));
        } else if (e->changed > 0 && e->sinks[FC_DELTA_XOR]) {
            FC_TRY(sink_put_zeros(e->sinks[FC_DELTA_XOR], some, err));
        }
        e->at += some;
        old += some;
        changed += some;
        size -= some;
    }
    return FC_OK;
}

/* Keeps the new bytes that a map of 0 and 1 marks. */
static fc_code spill_marked(fc_delta_encoder *e, const unsigned char *bytes, const unsigned char *marks, size_t size,
                            fc_error *err) {
    const unsigned char *end = marks + size;
    for (const unsigned char *at = marks; (at = memchr(at, 1, (size_t)(end - at))) != NULL; at++) {
        FC_TRY(spill_byte(e, e->at + (uint64_t)(at - marks), bytes[at - marks], err));
        e->changed++;
    }
    e->at += size;
    return FC_OK;
}

fc_code fc_delta_encoder_add_known(fc_delta_encoder *e, const unsigned char *changes, const unsigned char *changed,
                                   size_t size, fc_error *err) {
    while (size > 0) {
        const size_t some = size < BLOCK ? size : BLOCK;
        FC_TRY(changed ? spill_marked(e, changes, changed, some, err)
                       : fc_delta_encoder_add(e, zeros, changes, some, err));
        changes += some;
        changed = changed ? changed + some : NULL;
        size -= some;
    }
    return FC_OK;
}

static fc_code end_overwrite(fc_delta_encoder *e, fc_delta_frame *frame, fc_error *err) {
    sink *k = e->sinks[FC_DELTA_OVERWRITE];
    unsigned char count[POSITION];
    fc_store_little(count, e->changed, POSITION);
    FC_TRY(sink_begin(k, POSITION + e->changed * (POSITION + 1), err));
    FC_TRY(sink_put(k, count, POSITION, false, err));
    for (int i = 0; i < SPILLS; i++) {
        FC_TRY(sink_put_spill(k, e->spills[i], e->difference, err));
    }
    return sink_end(k, e, frame, err);
}

fc_code fc_delta_encoder_end(fc_delta_encoder *e, fc_delta_found *found, fc_error *err) {
    *found = (fc_delta_found){.changed_bytes = e->changed};
    if (!e->how.no_checksum) {
        fc_delta_sum_end(&e->sum, found->checksum);
    }
    if (e->changed > 0 && e->sinks[FC_DELTA_XOR]) {
        FC_TRY(sink_end(e->sinks[FC_DELTA_XOR], e, &found->frames[FC_DELTA_XOR], err));
    }
    if (e->changed > 0 && e->sinks[FC_DELTA_OVERWRITE] && !e->too_large) {
        FC_TRY(end_overwrite(e, &found->frames[FC_DELTA_OVERWRITE], err));
    }
    return FC_OK;
}

fc_code fc_delta_frame_read(const fc_delta_frame *frame, fc_delta_encoding encoding, uint64_t at, unsigned char *out,
                            size_t size, fc_error *err) {
    spool *s = &frame->in->sinks[encoding]->out;
    if (s->filled > 0) {
        FC_TRY(spool_flush(s, err));
    }
    return fc_pread_full(s->fd, out, size, frame->offset + at, s->path, err);
}
