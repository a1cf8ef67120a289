/*
 * Frames of changed tensors, read as a stream. See decode.h.
 *
 * `overwrite` has all positions before all values, so two streams read one frame: one gives the positions, the other
 * one has skipped them and gives the values.
 */
#include "delta/decode.h"

#include "base/little.h"
#include "codec/changes.h"
#include "codec/zstd.h"
#include "fsdpckpt/try.h"
#include "io/file.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

enum { INPUT = 64 << 10, BLOCK = 64 << 10, POSITION = 4, STREAMS = 2 };

/* One pass over a frame. */
typedef struct stream {
    fc_zstd_decoder *zstd;
    uint64_t at, end; /* what was not read yet of the file */
    size_t taken, filled;
    bool finished; /* the frame has ended */
    unsigned char input[INPUT];
} stream;

struct fc_delta_decoder {
    fc_delta_sum sum;
    const fc_delta_tensor *tensor;
    fc_delta_encoding encoding;
    bool no_checksum;
    uint64_t bytes, at;         /* the size of the tensor, and where its next byte is */
    int fd;                     /* of `path`; -1: none is open */
    const char *path;           /* borrowed */
    stream *streams[STREAMS];   /* xor: the differences; overwrite: positions, and values; NULL until they are needed */
    uint64_t left, next;        /* overwrite: positions that were not taken yet, and the first of them */
    size_t buffered;            /* positions in `block` from `used` on */
    size_t used;                /* of them */
    unsigned char block[BLOCK]; /* differences, or positions */
    unsigned char values[BLOCK]; /* overwrite */
};

/* ---- streams ---- */

static fc_code frame_fail(const fc_delta_decoder *d, const char *what, fc_error *err) {
    return fc_fail(err, FC_ECORRUPT, "%s: tensor %.256s: %s", d->path, d->tensor->name, what);
}

static fc_code stream_begin(const fc_delta_decoder *d, stream **out, const fc_delta_tensor *tensor, fc_error *err) {
    stream *s = *out;
    if (!s) {
        s = *out = calloc(1, sizeof *s);
        FC_NEED(s, err, tensor->path);
        FC_TRY(fc_zstd_decoder_new(&s->zstd, err));
    }
    fc_zstd_decoder_reset(s->zstd);
    s->at = tensor->offset;
    s->end = tensor->offset + tensor->size;
    s->taken = s->filled = 0;
    s->finished = false;
    fc_pread_expect(d->fd, tensor->path, tensor->size,
                    tensor->offset); /* one request for the frame, not for each piece */
    return FC_OK;
}

static void stream_free(stream *s) {
    if (s) {
        fc_zstd_decoder_free(s->zstd);
        free(s);
    }
}

static fc_code stream_fill(const fc_delta_decoder *d, stream *s, fc_error *err) {
    if (s->taken < s->filled || s->at == s->end) {
        return FC_OK;
    }
    s->taken = 0;
    s->filled = s->end - s->at < INPUT ? (size_t)(s->end - s->at) : INPUT;
    FC_TRY(fc_pread_full(d->fd, s->input, s->filled, s->at, d->path, err));
    s->at += s->filled;
    return FC_OK;
}

/* Decodes up to `size` bytes; fewer only where the frame ends. */
static fc_code stream_get(const fc_delta_decoder *d, stream *s, unsigned char *out, size_t size, size_t *got,
                          fc_error *err) {
    *got = 0;
    while (*got < size && !s->finished) {
        fc_zstd_step step;
        FC_TRY(stream_fill(d, s, err));
        const size_t before = s->filled - s->taken;
        FC_TRY_CONTEXT(fc_zstd_decode_step(s->zstd, s->input + s->taken, before, out + *got, size - *got, &step, err),
                       err, "%s: tensor %.256s", d->path, d->tensor->name);
        s->taken += step.taken;
        *got += step.made;
        s->finished = step.finished;
        if (step.taken == 0 && step.made == 0 && !step.finished) {
            return frame_fail(d, "the zstd frame is truncated", err);
        }
    }
    return FC_OK;
}

static fc_code stream_need(const fc_delta_decoder *d, stream *s, unsigned char *out, size_t size, fc_error *err) {
    size_t got;
    FC_TRY(stream_get(d, s, out, size, &got, err));
    return got == size ? FC_OK : frame_fail(d, "the frame is shorter than what it says or changes", err);
}

/* The frame must end here, and so must what is stored. */
static fc_code stream_end(const fc_delta_decoder *d, stream *s, fc_error *err) {
    unsigned char more;
    size_t got;
    FC_TRY(stream_get(d, s, &more, 1, &got, err));
    if (got > 0) {
        return frame_fail(d, "the frame is longer than what it says or changes", err);
    }
    return s->taken == s->filled && s->at == s->end ? FC_OK : frame_fail(d, "bytes follow its zstd frame", err);
}

/* ---- decoders ---- */

fc_code fc_delta_decoder_new(fc_delta_decoder **out, fc_error *err) {
    fc_delta_decoder *d = aligned_alloc(_Alignof(fc_delta_decoder), sizeof *d);
    *out = d;
    FC_NEED(d, err, NULL);
    memset(d, 0, sizeof *d);
    d->fd = -1;
    return FC_OK;
}

void fc_delta_decoder_free(fc_delta_decoder *d) {
    for (int i = 0; d && i < STREAMS; i++) {
        stream_free(d->streams[i]);
    }
    if (d && d->fd >= 0) {
        close(d->fd);
    }
    free(d);
}

size_t fc_delta_decoder_memory(fc_delta_encoding encoding, size_t window) {
    enum {
        ZSTD_CONTEXT = 160 << 10,
        ZSTD_BLOCKS = 384 << 10
    }; /* ZSTD_estimateDStreamSize of libzstd 1.5, less the
          window */
    const size_t one = sizeof(stream) + window + ZSTD_CONTEXT + ZSTD_BLOCKS;
    return sizeof(fc_delta_decoder) + (encoding == FC_DELTA_OVERWRITE ? 2 : 1) * one;
}

static fc_code open_delta_file(fc_delta_decoder *d, const char *path, fc_error *err) {
    uint64_t size;
    if (d->fd >= 0 && strcmp(d->path, path) == 0) {
        return FC_OK;
    }
    if (d->fd >= 0) {
        close(d->fd);
        d->fd = -1;
    }
    d->path = path;
    return fc_open_input(path, &d->fd, &size, err);
}

static fc_code read_head(const fc_delta_tensor *tensor, unsigned char head[FC_DELTA_HEAD], size_t some, fc_error *err) {
    uint64_t size;
    int fd;
    if (tensor->head_size == some) {
        memcpy(head, tensor->head, some);
        return FC_OK;
    }
    FC_TRY(fc_open_input(tensor->path, &fd, &size, err));
    const fc_code rc = fc_pread_full(fd, head, some, tensor->offset, tensor->path, err);
    close(fd);
    return rc;
}

fc_code fc_delta_window(const fc_delta_tensor *tensor, size_t *window, uint64_t *content, fc_error *err) {
    unsigned char head[FC_DELTA_HEAD];
    const size_t some = tensor->size < sizeof head ? (size_t)tensor->size : sizeof head;
    uint64_t size;
    FC_TRY(read_head(tensor, head, some, err));
    if (!fc_zstd_frame(head, some, &size, content)) {
        return fc_fail(err, FC_ECORRUPT, "%s: tensor %.256s: this is no zstd frame", tensor->path, tensor->name);
    }
    *window = (size_t)size;
    return size <= FC_DELTA_MOST_WINDOW
               ? FC_OK
               : fc_fail(err, FC_EUNSUPPORTED,
                         "%s: tensor %.256s: the zstd frame asks for a window of %" PRIu64 " bytes, and a delta may "
                         "ask for %d MiB, which level 19 needs",
                         tensor->path, tensor->name, size, FC_DELTA_MOST_WINDOW >> 20);
}

/* Reads how many positions there are, and lets the other stream skip them. */
static fc_code begin_overwrite(fc_delta_decoder *d, fc_error *err) {
    unsigned char count[POSITION];
    FC_TRY(stream_begin(d, &d->streams[1], d->tensor, err));
    FC_TRY(stream_need(d, d->streams[0], count, POSITION, err));
    d->left = fc_load_little(count, POSITION);
    d->buffered = d->used = 0;
    d->next = 0;
    if (d->left > d->bytes) {
        return fc_fail(err, FC_ECORRUPT,
                       "%s: tensor %.256s: the frame changes %" PRIu64 " bytes, but the tensor has %" PRIu64, d->path,
                       d->tensor->name, d->left, d->bytes);
    }
    for (uint64_t skip = POSITION + POSITION * d->left; skip > 0;) {
        const size_t some = skip < BLOCK ? (size_t)skip : BLOCK;
        FC_TRY(stream_need(d, d->streams[1], d->values, some, err));
        skip -= some;
    }
    return FC_OK;
}

fc_code fc_delta_decoder_begin(fc_delta_decoder *d, const fc_delta_version *version, const fc_delta_tensor *tensor,
                               uint64_t bytes, fc_error *err) {
    FC_TRY(open_delta_file(d, tensor->path, err));
    d->tensor = tensor;
    d->encoding = version->encoding;
    d->bytes = bytes;
    d->at = 0;
    d->no_checksum = false;
    fc_delta_sum_begin(&d->sum, version->checksum);
    FC_TRY(stream_begin(d, &d->streams[0], tensor, err));
    return d->encoding == FC_DELTA_OVERWRITE ? begin_overwrite(d, err) : FC_OK;
}

/* Sets each byte to 1 whose difference is not 0. */
static void mark_changed(unsigned char *restrict changed, const unsigned char *restrict difference, size_t size) {
    const uint64_t low =
        UINT64_C(0x7f7f7f7f7f7f7f7f); /* a byte of 7 bits carries into its highest one unless it is 0 */
    size_t i = 0;
    for (uint64_t a, b; i + sizeof a <= size; i += sizeof a) {
        memcpy(&a, changed + i, sizeof a);
        memcpy(&b, difference + i, sizeof b);
        a |= ((((b & low) + low) | b) & ~low) >> 7;
        memcpy(changed + i, &a, sizeof a);
    }
    for (; i < size; i++) {
        changed[i] |= difference[i] != 0;
    }
}

void fc_delta_decoder_skip_checksum(fc_delta_decoder *d) {
    d->no_checksum = true;
}

static fc_code decode_xor(fc_delta_decoder *d, const unsigned char *old, unsigned char *bytes, unsigned char *changed,
                          size_t size, fc_error *err) {
    unsigned char *difference = old ? d->block : bytes;
    FC_TRY(stream_need(d, d->streams[0], difference, size, err));
    if (changed) {
        mark_changed(changed, difference, size);
    }
    if (old) {
        fc_difference(bytes, old, difference, size);
    }
    return FC_OK;
}

/* Makes sure that d->block has the next position, if there is one, and checks it. */
static fc_code peek_position(fc_delta_decoder *d, bool *there, uint64_t *position, fc_error *err) {
    *there = d->left > 0;
    if (!*there) {
        return FC_OK;
    }
    if (d->used == d->buffered) {
        d->buffered = d->left < BLOCK / POSITION ? (size_t)d->left : BLOCK / POSITION;
        d->used = 0;
        FC_TRY(stream_need(d, d->streams[0], d->block, d->buffered * POSITION, err));
    }
    *position = fc_load_little(d->block + d->used * POSITION, POSITION);
    if (*position < d->next) {
        return frame_fail(d, "the positions of the frame are not in ascending order", err);
    }
    return FC_OK;
}

static fc_code decode_overwrite(fc_delta_decoder *d, unsigned char *bytes, unsigned char *changed, size_t size,
                                fc_error *err) {
    const uint64_t end = d->at + size;
    for (;;) {
        bool there;
        uint64_t position;
        FC_TRY(peek_position(d, &there, &position, err));
        if (!there || position >= end) {
            return FC_OK;
        }
        /* All positions of the block that are within, then their values at once. */
        size_t count = 0;
        uint64_t least = d->next;
        const size_t first = d->used;
        while (first + count < d->buffered) {
            const uint64_t p = fc_load_little(d->block + (first + count) * POSITION, POSITION);
            if (p < least || p >= end) {
                break;
            }
            least = p + 1;
            count++;
        }
        FC_TRY(stream_need(d, d->streams[1], d->values, count, err));
        for (size_t i = 0; i < count; i++) {
            const size_t at = (size_t)(fc_load_little(d->block + (first + i) * POSITION, POSITION) - d->at);
            bytes[at] = d->values[i];
            if (changed) {
                changed[at] = 1;
            }
        }
        d->next = least;
        d->used += count;
        d->left -= count;
    }
}

/* Gives bytes that a frame of overwrite does not store their old values. */
static void copy_old(const unsigned char *old, unsigned char *bytes, size_t size) {
    if (!old) {
        memset(bytes, 0, size);
    } else if (old != bytes) {
        memcpy(bytes, old, size);
    }
}

fc_code fc_delta_decode(fc_delta_decoder *d, const unsigned char *old, unsigned char *bytes, unsigned char *changed,
                        size_t size, fc_error *err) {
    while (size > 0) {
        const size_t some = size < BLOCK ? size : BLOCK;
        if (d->encoding == FC_DELTA_XOR) {
            FC_TRY(decode_xor(d, old, bytes, changed, some, err));
        } else {
            copy_old(old, bytes, some);
            FC_TRY(decode_overwrite(d, bytes, changed, some, err));
        }
        if (!d->no_checksum) {
            fc_delta_sum_add(&d->sum, bytes, some);
        }
        d->at += some;
        old = old ? old + some : NULL;
        bytes += some;
        changed = changed ? changed + some : NULL;
        size -= some;
    }
    return FC_OK;
}

fc_code fc_delta_next_position(fc_delta_decoder *d, uint64_t *position, fc_error *err) {
    bool there;
    *position = UINT64_MAX;
    return peek_position(d, &there, position, err);
}

void fc_delta_decoder_skip_to(fc_delta_decoder *d, uint64_t at) {
    d->at = at;
}

fc_code fc_delta_decoder_end(fc_delta_decoder *d, bool check, fc_error *err) {
    char digits[FC_DELTA_DIGITS];
    bool there = false;
    uint64_t position;
    if (d->encoding == FC_DELTA_OVERWRITE) {
        FC_TRY(peek_position(d, &there, &position, err));
    }
    if (there) {
        return fc_fail(err, FC_ECORRUPT,
                       "%s: tensor %.256s: the frame changes the byte at position %" PRIu64
                       ", but the tensor has %" PRIu64,
                       d->path, d->tensor->name, position, d->bytes);
    }
    FC_TRY(stream_end(d, d->streams[d->encoding == FC_DELTA_OVERWRITE ? 1 : 0], err));
    fc_delta_sum_end(&d->sum, digits);
    if (check && strcasecmp(digits, d->tensor->checksum) != 0) {
        return fc_fail(err, FC_ECORRUPT,
                       "%s: tensor %.256s: the checksum of the new bytes is %s, but the delta says %.40s: it was made "
                       "for another base, or the bytes of one of the two are damaged",
                       d->path, d->tensor->name, digits, d->tensor->checksum);
    }
    return FC_OK;
}
