/*
 * Frames of changed tensors. See encode.h.
 *
 * A tensor is divided into blocks that begin at the same places however its bytes come, so a frame depends only on
 * them. Nothing is compressed until the first byte differs, so a tensor that did not change costs a comparison and a
 * checksum. `overwrite` has all positions before all values, so both are kept in files until the tensor ends.
 */
#include "delta/encode.h"

#include "base/little.h"
#include "codec/changes.h"
#include "codec/zstd.h"
#include "codec/zstd_runs.h"
#include "fsdpckpt/try.h"
#include "io/file.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { BLOCK = FC_CHANGE_BLOCK, SPOOL = 256 << 10, POSITION = 4, SPILLS = 2 };

/* A file that bytes are appended to through a buffer. With a sender, the file of a frame is in a bucket, and others are
   in memory. */
typedef struct spool {
    char *path;              /* malloc'ed, for messages */
    int fd;                  /* -1: it is in a bucket */
    fc_delta_sender *sender; /* NULL: it is on the disk */
    size_t index;            /* of the tensor, for the sender */
    const char *name;        /* of a spill's tensor, for messages */
    uint64_t end;            /* bytes in the file */
    size_t filled;
    unsigned char buffer[SPOOL];
} spool;

/* The frames of one encoding. */
typedef struct sink {
    fc_zstd_runs *runs;    /* of xor; NULL: the level asks for a search, or libzstd cannot do without one */
    fc_zstd_encoder *zstd; /* NULL if there is the above */
    spool out;
    uint64_t begin; /* where the current frame begins */
} sink;

struct fc_delta_encoder {
    fc_delta_sum sum;
    fc_delta_how how;
    const char *name;
    uint64_t bytes, at; /* of the current tensor: its size, and where the current block begins */
    uint64_t changed;
    size_t filled;                   /* bytes of the current block */
    sink *sinks[FC_DELTA_ENCODINGS]; /* NULL: the encoding is not wanted */
    spool *spills[SPILLS];           /* of overwrite: positions, and values */
    bool too_large;                  /* for the positions of overwrite */
    fc_change changes[FC_MOST_CHANGES];
    unsigned char difference[BLOCK], made[BLOCK]; /* the current block; overwrite: its new bytes */
};

static const unsigned char zeros[BLOCK];

/* ---- files ---- */

static fc_code spool_open(spool *s, const fc_delta_how *how, const char *kind, int number, fc_error *err) {
    s->fd = -1;
    s->sender = how->sender;
    if (asprintf(&s->path, "%s/%s-%d", how->sender ? "" : how->directory, kind, number) < 0) {
        s->path = NULL;
        return fc_no_memory(err, kind);
    }
    if (s->sender) {
        return FC_OK;
    }
    s->fd = open(s->path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    return s->fd < 0 ? fc_fail_errno(err, errno, "%s: the file cannot be created", s->path) : FC_OK;
}

/* Opens a file that is needed only until the tensor ends. */
static fc_code spool_open_spill(spool *s, const fc_delta_how *how, const char *kind, int number, fc_error *err) {
    FC_TRY(spool_open(s, how, kind, number, err));
    if (s->sender) {
        s->fd = memfd_create("fsdpckpt-spill", MFD_CLOEXEC);
        return s->fd < 0 ? fc_fail_errno(err, errno, "%s: memory cannot be reserved", kind) : FC_OK;
    }
    return FC_OK;
}

static void spool_close(spool *s) {
    if (s->path && s->fd >= 0) {
        close(s->fd);
    }
    free(s->path);
}

static fc_code spool_flush(spool *s, fc_error *err) {
    if (s->sender && s->fd < 0) {
        FC_TRY(fc_delta_sender_put(s->sender, s->index, s->buffer, s->filled, err));
    } else {
        FC_TRY(s->sender ? fc_delta_sender_hold(s->sender, s->index, s->name, s->filled, err) : FC_OK);
        FC_TRY(fc_pwrite_full(s->fd, s->buffer, s->filled, s->end, s->path, err));
    }
    s->end += s->filled;
    s->filled = 0;
    return FC_OK;
}

/* Empties a spill. @param index, name of the tensor that it is for next */
static fc_code spool_empty(spool *s, size_t index, const char *name, fc_error *err) {
    s->index = index;
    s->name = name;
    s->filled = 0;
    const bool frees = s->sender && s->end > 0;
    s->end = 0;
    return frees && ftruncate(s->fd, 0) != 0 ? fc_fail_errno(err, errno, "%s: memory cannot be freed", s->path) : FC_OK;
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
    if (k->runs) {
        unsigned char header[FC_ZSTD_RUNS_HEADER];
        fc_zstd_runs_begin(bytes, header);
        return spool_put(&k->out, header, sizeof header, err);
    }
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

/* Puts the next block of a tensor. @param changes what of it is not 0. */
static fc_code sink_put_block(sink *k, const unsigned char *block, size_t size, const fc_change *changes, size_t count,
                              bool last, fc_error *err) {
    size_t made;
    if (!k->runs) {
        return sink_put(k, block, size, last, err);
    }
    FC_TRY(sizeof k->out.buffer - k->out.filled < FC_ZSTD_RUNS_MOST ? spool_flush(&k->out, err) : FC_OK);
    FC_TRY(fc_zstd_runs_block(k->runs, block, size, changes, count, last, k->out.buffer + k->out.filled, &made, err));
    k->out.filled += made;
    return FC_OK;
}

/* Puts whole blocks that did not change. */
static fc_code sink_put_zeros(sink *k, uint64_t size, fc_error *err) {
    for (; size > 0; size -= BLOCK) {
        FC_TRY(sink_put_block(k, zeros, BLOCK, NULL, 0, false, err));
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
    return spool_empty(s, s->index, s->name, err);
}

static fc_delta_frame sink_frame(const sink *k, const fc_delta_encoder *e) {
    return (fc_delta_frame){e, k->begin, k->out.end + k->out.filled - k->begin};
}

/* Whether frames of an encoding need no search. */
static bool goes_by_runs(const fc_delta_how *how, fc_delta_encoding encoding) {
    return encoding == FC_DELTA_XOR && how->level == 1 && fc_zstd_runs_is_built_in();
}

static fc_code sink_new(const fc_delta_how *how, fc_delta_encoding encoding, int number, sink **out, fc_error *err) {
    sink *k = *out = calloc(1, sizeof *k);
    FC_NEED(k, err, NULL);
    FC_TRY(spool_open(&k->out, how, fc_delta_encoding_name(encoding), number, err));
    return goes_by_runs(how, encoding) ? fc_zstd_runs_new(&k->runs, err)
                                       : fc_zstd_encoder_new(how->level, &k->zstd, err);
}

static void sink_free(sink *k) {
    if (k) {
        fc_zstd_runs_free(k->runs);
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
        FC_TRY(spool_open_spill(e->spills[i], how, spills[i], number, err));
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
    size_t memory = sizeof(fc_delta_encoder) + (how->encoding == FC_DELTA_XOR ? 0 : SPILLS * sizeof(spool));
    for (int i = 0; i < FC_DELTA_ENCODINGS; i++) {
        if (how->encoding == (fc_delta_encoding)i || how->encoding == FC_DELTA_AUTO) {
            memory += sizeof(sink) + (goes_by_runs(how, (fc_delta_encoding)i) ? fc_zstd_runs_memory()
                                                                              : fc_zstd_encoder_memory(how->level));
        }
    }
    return memory;
}

fc_code fc_delta_encoder_begin(fc_delta_encoder *e, size_t index, const char *name, uint64_t bytes, fc_error *err) {
    e->name = name;
    e->bytes = bytes;
    e->at = e->changed = e->filled = 0;
    e->too_large = bytes > UINT32_MAX;
    fc_delta_sum_begin(&e->sum, e->how.checksum);
    for (int i = 0; i < FC_DELTA_ENCODINGS && e->how.sender; i++) {
        if (e->sinks[i]) {
            e->sinks[i]->out.index = index;
        }
    }
    for (int i = 0; i < SPILLS && e->spills[i]; i++) {
        FC_TRY(spool_empty(e->spills[i], index, name, err));
    }
    return FC_OK;
}

static fc_code spill_byte(fc_delta_encoder *e, uint64_t position, unsigned char value, fc_error *err) {
    unsigned char stored[POSITION];
    fc_store_little(stored, position, POSITION);
    FC_TRY(spool_put(e->spills[0], stored, POSITION, err));
    return spool_put(e->spills[1], &value, 1, err);
}

/* Keeps the positions and the values of the bytes of a block that differ. */
static fc_code spill_block(fc_delta_encoder *e, size_t count, fc_error *err) {
    for (size_t i = 0; i < count; i++) {
        for (size_t j = e->changes[i].begin; j < e->changes[i].end; j++) {
            FC_TRY(e->difference[j] != 0 ? spill_byte(e, e->at + j, e->made[j], err) : FC_OK);
        }
    }
    return FC_OK;
}

/* Adds a block that differs, or one that follows it. */
static fc_code add_block(fc_delta_encoder *e, size_t count, bool last, fc_error *err) {
    sink * xor = e->sinks[FC_DELTA_XOR];
    FC_TRY(xor? sink_put_block(xor, e->difference, e->filled, e->changes, count, last, err) : FC_OK);
    if (!e->sinks[FC_DELTA_OVERWRITE] || e->too_large) {
        return xor? FC_OK
                  : fc_fail(err, FC_EUNSUPPORTED,
                            "tensor %.256s: it has %" PRIu64 " bytes, and overwrite stores positions in 4 bytes, up to "
                            "4 GiB; use the encoding xor",
                            e->name, e->bytes);
    }
    return spill_block(e, count, err);
}

/* Ends the current block. */
static fc_code end_block(fc_delta_encoder *e, bool last, fc_error *err) {
    sink * xor = e->sinks[FC_DELTA_XOR];
    size_t bytes;
    const size_t count = fc_find_changes(NULL, e->difference, e->filled, e->changes, &bytes);
    if (xor&&e->changed == 0 && bytes > 0) {
        FC_TRY(sink_begin(xor, e->bytes, err));
        FC_TRY(sink_put_zeros(xor, e->at, err));
    }
    e->changed += bytes;
    FC_TRY(e->changed > 0 ? add_block(e, count, last, err) : FC_OK);
    e->at += e->filled;
    e->filled = 0;
    return FC_OK;
}

fc_code fc_delta_encoder_add(fc_delta_encoder *e, const unsigned char *old, const unsigned char *changed, size_t size,
                             fc_error *err) {
    while (size > 0) {
        const size_t room = BLOCK - e->filled, some = size < room ? size : room;
        if (!e->how.no_checksum) {
            fc_delta_sum_add(&e->sum, changed, some);
        }
        fc_difference(e->difference + e->filled, old, changed, some);
        if (e->sinks[FC_DELTA_OVERWRITE]) {
            memcpy(e->made + e->filled, changed, some);
        }
        e->filled += some;
        const bool last = e->at + e->filled == e->bytes;
        FC_TRY(e->filled == BLOCK || last ? end_block(e, last, err) : FC_OK);
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
    FC_TRY(sink_put(k, NULL, 0, true, err));
    *frame = sink_frame(k, e);
    return FC_OK;
}

/* Sends what is left of the frame, so that the next one can follow. */
static fc_code send_rest(fc_delta_encoder *e, fc_error *err) {
    size_t index = 0;
    for (int i = 0; i < FC_DELTA_ENCODINGS; i++) {
        if (e->sinks[i]) {
            spool *s = &e->sinks[i]->out;
            index = s->index;
            FC_TRY(s->filled > 0 ? spool_flush(s, err) : FC_OK);
        }
    }
    return fc_delta_sender_end(e->how.sender, index, err);
}

fc_code fc_delta_encoder_end(fc_delta_encoder *e, fc_delta_found *found, fc_error *err) {
    *found = (fc_delta_found){.changed_bytes = e->changed};
    if (!e->how.no_checksum) {
        fc_delta_sum_end(&e->sum, found->checksum);
    }
    if (e->changed > 0 && e->sinks[FC_DELTA_XOR]) {
        found->frames[FC_DELTA_XOR] = sink_frame(e->sinks[FC_DELTA_XOR], e);
    }
    if (e->changed > 0 && e->sinks[FC_DELTA_OVERWRITE] && !e->too_large) {
        FC_TRY(end_overwrite(e, &found->frames[FC_DELTA_OVERWRITE], err));
    }
    return e->how.sender ? send_rest(e, err) : FC_OK;
}

fc_code fc_delta_frame_read(const fc_delta_frame *frame, fc_delta_encoding encoding, uint64_t at, unsigned char *out,
                            size_t size, fc_error *err) {
    spool *s = &frame->in->sinks[encoding]->out;
    if (s->filled > 0) {
        FC_TRY(spool_flush(s, err));
    }
    return fc_pread_full(s->fd, out, size, frame->offset + at, s->path, err);
}
