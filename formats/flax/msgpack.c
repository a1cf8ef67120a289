/*
 * The headers of msgpack: see msgpack.h.
 */
#include "flax/msgpack.h"

#include "base/checked.h"
#include "fsdpckpt/try.h"
#include "io/file.h"

#include <inttypes.h>
#include <string.h>

fc_code fc_mp_fail(const fc_mp_reader *r, uint64_t at, fc_code code, const char *what, fc_error *err) {
    return fc_fail(err, code, "%s: offset %" PRIu64 ": %s", r->path, at, what);
}

static fc_code fail_short(const fc_mp_reader *r, uint64_t at, fc_error *err) {
    return fc_mp_fail(r, at, FC_ECORRUPT, "the msgpack is damaged or truncated: a value is longer than what is left",
                      err);
}

/* Reads the window that begins at the next byte. */
static fc_code fill_window(fc_mp_reader *r, fc_error *err) {
    const uint64_t left = r->end - r->at;
    const size_t n = left < sizeof r->window ? (size_t)left : sizeof r->window;
    r->window_size = 0;
    FC_TRY(fc_pread_full(r->fd, r->window, n, r->at, r->path, err));
    r->window_at = r->at;
    r->window_size = n;
    return FC_OK;
}

fc_code fc_mp_read(fc_mp_reader *r, void *out, size_t n, fc_error *err) {
    if (n > r->end - r->at) {
        return fail_short(r, r->at, err);
    }
    if (n > sizeof r->window) {
        FC_TRY(fc_pread_full(r->fd, out, n, r->at, r->path, err));
        r->at += n;
        return FC_OK;
    }
    if (n > 0 && (r->at < r->window_at || r->at + n > r->window_at + r->window_size)) {
        FC_TRY(fill_window(r, err));
    }
    if (n > 0) {
        memcpy(out, r->window + (r->at - r->window_at), n);
    }
    r->at += n;
    return FC_OK;
}

/* Reads a big-endian number of 1, 2, 4 or 8 bytes. */
static fc_code read_number(fc_mp_reader *r, size_t bytes, uint64_t *out, fc_error *err) {
    unsigned char raw[8];
    *out = 0;
    FC_TRY(fc_mp_read(r, raw, bytes, err));
    for (size_t i = 0; i < bytes; i++) {
        *out = *out << 8 | raw[i];
    }
    return FC_OK;
}

static fc_code read_float(fc_mp_reader *r, size_t bytes, double *out, fc_error *err) {
    uint64_t bits = 0;
    FC_TRY(read_number(r, bytes, &bits, err));
    if (bytes == 4) {
        float single;
        const uint32_t half = (uint32_t)bits;
        memcpy(&single, &half, sizeof single);
        *out = (double)single;
        return FC_OK;
    }
    memcpy(out, &bits, sizeof *out);
    return FC_OK;
}

static fc_code read_extension(fc_mp_reader *r, fc_mp_head *out, fc_error *err) {
    uint64_t type = 0;
    FC_TRY(read_number(r, 1, &type, err));
    out->extension = type < 128 ? (int)type : (int)type - 256;
    return FC_OK;
}

/* How a first byte continues: with a number of `bytes` bytes, which is the value or the length. */
typedef struct opcode {
    unsigned char first, last;
    fc_mp_kind kind;
    unsigned char bytes; /* of the number of the first opcode; each further one has twice as many */
} opcode;

static const opcode opcodes[] = {
    {0xc4, 0xc6, FC_MP_BIN, 1}, {0xc7, 0xc9, FC_MP_EXT, 1}, {0xca, 0xcb, FC_MP_FLOAT, 4}, {0xcc, 0xcf, FC_MP_UINT, 1},
    {0xd0, 0xd3, FC_MP_INT, 1}, {0xd9, 0xdb, FC_MP_STR, 1}, {0xdc, 0xdd, FC_MP_ARRAY, 2}, {0xde, 0xdf, FC_MP_MAP, 2},
};

/* The values whose first byte says everything. @return false: it is another byte. */
static bool is_short(unsigned char byte, fc_mp_head *out) {
    if (byte < 0x80 || byte >= 0xe0) {
        out->kind = FC_MP_INT;
        out->integer = byte < 0x80 ? byte : (int)byte - 256;
    } else if (byte < 0xa0) {
        out->kind = byte < 0x90 ? FC_MP_MAP : FC_MP_ARRAY;
        out->length = byte & 0xf;
    } else if (byte < 0xc0) {
        out->kind = FC_MP_STR;
        out->length = byte & 0x1f;
    } else if (byte == 0xc0 || byte == 0xc2 || byte == 0xc3) {
        out->kind = byte == 0xc0 ? FC_MP_NIL : FC_MP_BOOL;
        out->integer = byte == 0xc3;
    } else {
        return false;
    }
    return true;
}

/* Sign-extends a number of `bytes` bytes. */
static int64_t signed_of(uint64_t number, size_t bytes) {
    const uint64_t sign = UINT64_C(1) << ((8 * bytes - 1) & 63);
    return (int64_t)((number ^ sign) - sign);
}

static fc_code read_long(fc_mp_reader *r, const opcode *op, unsigned char byte, fc_mp_head *out, fc_error *err) {
    const size_t bytes = (size_t)op->bytes << (byte - op->first);
    uint64_t number = 0;
    out->kind = op->kind;
    if (op->kind == FC_MP_FLOAT) {
        return read_float(r, bytes, &out->real, err);
    }
    FC_TRY(read_number(r, bytes, &number, err));
    if (op->kind == FC_MP_INT || op->kind == FC_MP_UINT) {
        out->integer = op->kind == FC_MP_INT ? signed_of(number, bytes) : (int64_t)number;
        out->kind = op->kind == FC_MP_UINT && number > INT64_MAX ? FC_MP_UINT : FC_MP_INT;
        return FC_OK;
    }
    out->length = number;
    return op->kind == FC_MP_EXT ? read_extension(r, out, err) : FC_OK;
}

static fc_code read_head(fc_mp_reader *r, uint64_t start, fc_mp_head *out, fc_error *err) {
    unsigned char byte = 0;
    FC_TRY(fc_mp_read(r, &byte, 1, err));
    if (is_short(byte, out)) {
        return FC_OK;
    }
    if (byte >= 0xd4 && byte <= 0xd8) {
        out->kind = FC_MP_EXT;
        out->length = UINT64_C(1) << (byte - 0xd4);
        return read_extension(r, out, err);
    }
    for (size_t i = 0; i < sizeof opcodes / sizeof *opcodes; i++) {
        if (byte >= opcodes[i].first && byte <= opcodes[i].last) {
            return read_long(r, &opcodes[i], byte, out, err);
        }
    }
    return fc_mp_fail(r, start, FC_ECORRUPT, "the msgpack is damaged: no value begins with the byte 0xc1", err);
}

/* The fewest bytes that must follow a header. */
static uint64_t least_after(const fc_mp_head *head) {
    return head->kind == FC_MP_MAP ? 2 * head->length : head->length;
}

fc_code fc_mp_next(fc_mp_reader *r, fc_mp_head *out, fc_error *err) {
    const uint64_t start = r->at;
    *out = (fc_mp_head){0};
    FC_TRY(read_head(r, start, out, err));
    return least_after(out) <= r->end - r->at ? FC_OK : fail_short(r, start, err);
}

/* The values that a container has. */
static uint64_t members_of(const fc_mp_head *head) {
    return head->kind == FC_MP_ARRAY || head->kind == FC_MP_MAP ? least_after(head) : 0;
}

fc_code fc_mp_skip(fc_mp_reader *r, const fc_mp_head *head, fc_error *err) {
    uint64_t pending = members_of(head);
    fc_mp_head next = *head;
    for (;;) {
        if (members_of(&next) == 0) {
            r->at += next.length; /* checked by fc_mp_next; 0 for numbers and empty containers */
        }
        if (pending == 0) {
            return FC_OK;
        }
        FC_TRY(fc_mp_next(r, &next, err));
        pending = pending - 1 + members_of(&next);
        if (pending > r->end - r->at) { /* each takes a byte at least */
            return fail_short(r, r->at, err);
        }
    }
}
