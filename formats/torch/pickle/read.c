/*
 * The input of the pickle machine: a window over the bytes, the decoding of opcodes and their arguments, and the first
 * pass, which finds the memo entries that are ever fetched. Pickles memoize nearly everything and fetch little of it,
 * so this saves most of the memory.
 */
#include "base/grow.h"
#include "base/little.h"
#include "fsdpckpt/try.h"
#include "io/file.h"
#include "torch/pickle/machine.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { A_NONE = 1, A_SIGNED = FC_PICKLE_ARG_SIGNED, A_LENGTH = FC_PICKLE_ARG_LENGTH, A_PLAIN = FC_PICKLE_NO_SCAN };
#define ARG(n) (A_NONE + (n))

const unsigned char fc_pickle_shapes[256] = {
    [FC_PICKLE_MARK] = A_NONE | A_PLAIN,
    [FC_PICKLE_STOP] = A_NONE,
    [FC_PICKLE_POP] = A_NONE | A_PLAIN,
    [FC_PICKLE_POP_MARK] = A_NONE | A_PLAIN,
    [FC_PICKLE_BINFLOAT] = ARG(8) | A_PLAIN,
    [FC_PICKLE_BININT] = ARG(4) | A_SIGNED | A_PLAIN,
    [FC_PICKLE_BININT1] = ARG(1) | A_PLAIN,
    [FC_PICKLE_BININT2] = ARG(2) | A_PLAIN,
    [FC_PICKLE_NONE] = A_NONE | A_PLAIN,
    [FC_PICKLE_BINPERSID] = A_NONE | A_PLAIN,
    [FC_PICKLE_REDUCE] = A_NONE | A_PLAIN,
    [FC_PICKLE_BINSTRING] = ARG(4) | A_SIGNED | A_LENGTH,
    [FC_PICKLE_SHORT_BINSTRING] = ARG(1) | A_LENGTH,
    [FC_PICKLE_BINUNICODE] = ARG(4) | A_LENGTH,
    [FC_PICKLE_APPEND] = A_NONE | A_PLAIN,
    [FC_PICKLE_BUILD] = A_NONE | A_PLAIN,
    [FC_PICKLE_GLOBAL] = A_NONE,
    [FC_PICKLE_EMPTY_DICT] = A_NONE | A_PLAIN,
    [FC_PICKLE_APPENDS] = A_NONE | A_PLAIN,
    [FC_PICKLE_BINGET] = ARG(1),
    [FC_PICKLE_LONG_BINGET] = ARG(4),
    [FC_PICKLE_EMPTY_LIST] = A_NONE | A_PLAIN,
    [FC_PICKLE_BINPUT] = ARG(1) | A_PLAIN,
    [FC_PICKLE_LONG_BINPUT] = ARG(4) | A_PLAIN,
    [FC_PICKLE_SETITEM] = A_NONE | A_PLAIN,
    [FC_PICKLE_TUPLE] = A_NONE | A_PLAIN,
    [FC_PICKLE_EMPTY_TUPLE] = A_NONE | A_PLAIN,
    [FC_PICKLE_SETITEMS] = A_NONE | A_PLAIN,
    [FC_PICKLE_PROTO] = ARG(1),
    [FC_PICKLE_NEWOBJ] = A_NONE | A_PLAIN,
    [FC_PICKLE_TUPLE1] = A_NONE | A_PLAIN,
    [FC_PICKLE_TUPLE2] = A_NONE | A_PLAIN,
    [FC_PICKLE_TUPLE3] = A_NONE | A_PLAIN,
    [FC_PICKLE_NEWTRUE] = A_NONE | A_PLAIN,
    [FC_PICKLE_NEWFALSE] = A_NONE | A_PLAIN,
    [FC_PICKLE_LONG1] = ARG(1) | A_LENGTH,
    [FC_PICKLE_LONG4] = ARG(4) | A_SIGNED | A_LENGTH,
    [FC_PICKLE_BINBYTES] = ARG(4) | A_LENGTH,
    [FC_PICKLE_SHORT_BINBYTES] = ARG(1) | A_LENGTH,
    [FC_PICKLE_SHORT_BINUNICODE] = ARG(1) | A_LENGTH,
    [FC_PICKLE_BINUNICODE8] = ARG(8) | A_LENGTH,
    [FC_PICKLE_BINBYTES8] = ARG(8) | A_LENGTH,
    [FC_PICKLE_EMPTY_SET] = A_NONE | A_PLAIN,
    [FC_PICKLE_ADDITEMS] = A_NONE | A_PLAIN,
    [FC_PICKLE_FROZENSET] = A_NONE | A_PLAIN,
    [FC_PICKLE_NEWOBJ_EX] = A_NONE | A_PLAIN,
    [FC_PICKLE_STACK_GLOBAL] = A_NONE | A_PLAIN,
    [FC_PICKLE_MEMOIZE] = A_NONE | A_PLAIN,
    [FC_PICKLE_FRAME] = ARG(8) | A_PLAIN,
    [FC_PICKLE_BYTEARRAY8] = ARG(8) | A_LENGTH,
};

fc_code fc_pickle_fail(fc_pickle_reader *r, fc_code code, const char *fmt, ...) {
    char text[512];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    return fc_fail(r->err, code, "%s: offset %" PRIu64 ": %s", r->source->name, r->source->offset + r->op_position,
                   text);
}

void fc_pickle_rewind(fc_pickle_reader *r) {
    r->op_position = 0;
    if (r->source->bytes) {
        r->at = r->source->bytes;
        r->end = r->at + r->source->size;
        r->end_position = r->source->size;
    } else {
        r->at = r->end = r->buffer;
        r->end_position = 0;
    }
}

static fc_code truncated_pickle(fc_pickle_reader *r, uint64_t wanted) {
    uint64_t left = r->source->size - fc_pickle_position(r);
    return fc_pickle_fail(r, FC_ECORRUPT,
                          "the pickle is cut off: %" PRIu64 " more bytes are expected, %" PRIu64 " are left", wanted,
                          left);
}

fc_code fc_pickle_need_slow(fc_pickle_reader *r, size_t n) {
    uint64_t left = r->source->size - fc_pickle_position(r);
    if (n > left) {
        return truncated_pickle(r, n);
    }
    size_t have = (size_t)(r->end - r->at);
    memmove(r->buffer, r->at, have);
    uint64_t unread = r->source->size - r->end_position;
    size_t more = FC_PICKLE_WINDOW - have < unread ? FC_PICKLE_WINDOW - have : (size_t)unread;
    r->at = r->buffer;
    r->end = r->buffer + have;
    FC_TRY(fc_pread_full(r->source->fd, r->buffer + have, more, r->source->offset + r->end_position, r->source->name,
                         r->err));
    r->end += more;
    r->end_position += more;
    return FC_OK;
}

/*
 * Opcodes that Python executes, but that no pickler of protocol 2 to 5 writes: those of protocols 0 and 1 and the
 * registered extensions. Some call code themselves (INST, OBJ), others could hide a name. torch.save writes none.
 */
static bool is_old_opcode(int op) {
    static const char old[] = "FILSVPgpldio2\x82\x83\x84";
    return op != 0 && strchr(old, op);
}

static fc_code unknown_opcode(fc_pickle_reader *r) {
    const int c = r->op;
    const char *why = is_old_opcode(c) ? ": this file may be hostile" : "";
    if (c >= 0x20 && c < 0x7f) {
        return fc_pickle_fail(r, FC_ECORRUPT, "pickle opcode '%c' (0x%02x) is not allowed here%s", c, (unsigned)c, why);
    }
    return fc_pickle_fail(r, FC_ECORRUPT, "pickle opcode 0x%02x is not allowed here%s", (unsigned)c, why);
}

fc_code fc_pickle_next_slow(fc_pickle_reader *r, uint64_t *argument) {
    r->op_position = fc_pickle_position(r);
    FC_TRY(fc_pickle_need(r, 1));
    r->op = *r->at++;
    unsigned shape = fc_pickle_shapes[r->op];
    int n = (int)(shape & FC_PICKLE_ARG_SIZE) - 1;
    if (n == 0) {
        return FC_OK;
    }
    if (n < 0) {
        return unknown_opcode(r);
    }
    FC_TRY(fc_pickle_need(r, (size_t)n));
    *argument = n == 1 ? *r->at : fc_load_little(r->at, n);
    if (shape & A_SIGNED) {
        *argument = (uint64_t)(int64_t)(int32_t)(uint32_t)*argument;
    }
    r->at += n;
    if ((shape & A_LENGTH) && *argument > r->source->size - fc_pickle_position(r)) {
        return truncated_pickle(r, *argument);
    }
    return FC_OK;
}

fc_code fc_pickle_payload(fc_pickle_reader *r, void *dst, uint64_t n) {
    size_t have = (size_t)(r->end - r->at);
    size_t now = n < have ? (size_t)n : have;
    if (dst) {
        memcpy(dst, r->at, now);
    }
    r->at += now;
    n -= now;
    if (n == 0) {
        return FC_OK;
    }
    /* The window is empty, so the rest is read past it. */
    if (n > r->source->size - r->end_position) {
        return truncated_pickle(r, n);
    }
    if (dst) {
        FC_TRY(fc_pread_full(r->source->fd, (unsigned char *)dst + now, (size_t)n, r->source->offset + r->end_position,
                             r->source->name, r->err));
    }
    r->end_position += n;
    return FC_OK;
}

fc_code fc_pickle_lines(fc_pickle_reader *r, const char *lines[2], size_t lengths[2]) {
    uint64_t left = r->source->size - fc_pickle_position(r);
    size_t n = left < 2 * FC_PICKLE_LINE ? (size_t)left : 2 * FC_PICKLE_LINE;
    FC_TRY(fc_pickle_need(r, n));
    for (int i = 0; i < 2; i++) {
        size_t here = (size_t)(r->end - r->at);
        const unsigned char *nl = memchr(r->at, '\n', here < FC_PICKLE_LINE ? here : FC_PICKLE_LINE);
        if (!nl) {
            return fc_pickle_fail(r, FC_ECORRUPT, "the pickle is damaged: a global's name does not end");
        }
        lines[i] = (const char *)r->at;
        lengths[i] = (size_t)(nl - r->at);
        r->at = nl + 1;
    }
    return FC_OK;
}

/* Marks memo index `index` as fetched. */
static fc_code mark_used(fc_pickle_reader *r, fc_pickle_memo *memo, uint64_t index, size_t *capacity) {
    /* A PUT takes at least one byte, so a pickler that counts cannot have reached a larger index. */
    if (index > r->op_position) {
        return fc_pickle_fail(
            r, FC_ECORRUPT, "the pickle is damaged: it fetches memo entry %" PRIu64 ", which was never stored", index);
    }
    size_t word = (size_t)(index / 64);
    size_t words = r->op_position > UINT8_MAX && word < 4 ? 4 : word + 1; /* four: see skip_common */
    if (words > memo->words) {
        size_t old = memo->words;
        if (!fc_grow(&memo->used, capacity, words, sizeof *memo->used)) {
            return fc_pickle_fail(r, FC_ENOMEM, "out of memory");
        }
        memset(memo->used + old, 0, (words - old) * sizeof *memo->used);
        memo->words = words;
    }
    memo->used[word] |= UINT64_C(1) << (index % 64);
    return FC_OK;
}

static fc_code index_memo(fc_pickle_reader *r, fc_pickle_memo *memo) {
    memo->before = malloc((memo->words + 1) * sizeof *memo->before);
    if (!memo->before) {
        return fc_pickle_fail(r, FC_ENOMEM, "out of memory");
    }
    for (size_t i = 0; i < memo->words; i++) {
        if (memo->count > UINT32_MAX) {
            return fc_pickle_fail(r, FC_EUNSUPPORTED, "the pickle has more than 2^32 shared values");
        }
        memo->before[i] = (uint32_t)memo->count;
        memo->count += (uint64_t)__builtin_popcountll(memo->used[i]);
    }
    memo->values = calloc(memo->count + 1, sizeof *memo->values);
    return memo->values ? FC_OK : fc_pickle_fail(r, FC_ENOMEM, "out of memory");
}

/* Skips the most common opcodes while they are completely in the window. */
static void skip_common(fc_pickle_reader *r, const fc_pickle_memo *memo) {
    const unsigned char *at = r->at;
    while (r->end - at > 2 + UINT8_MAX) {
        unsigned shape = fc_pickle_shapes[*at];
        if (shape & A_PLAIN) {
            at += shape & FC_PICKLE_ARG_SIZE;
        } else if (*at == FC_PICKLE_SHORT_BINUNICODE) {
            at += 2 + at[1];
        } else if (*at == FC_PICKLE_BINGET) {
            memo->used[at[1] / 64] |= UINT64_C(1) << (at[1] % 64);
            at += 2;
        } else {
            break;
        }
    }
    r->at = at;
}

static fc_code scan_opcode(fc_pickle_reader *r, fc_pickle_memo *memo, uint64_t argument, size_t *capacity) {
    const char *lines[2];
    size_t lengths[2];
    if (fc_pickle_has_payload(r->op)) {
        return fc_pickle_payload(r, NULL, argument);
    }
    switch (r->op) {
    case FC_PICKLE_BINGET:
    case FC_PICKLE_LONG_BINGET:
        return mark_used(r, memo, argument, capacity);
    case FC_PICKLE_GLOBAL:
        return fc_pickle_lines(r, lines, lengths);
    default:
        return FC_OK;
    }
}

fc_code fc_pickle_scan(fc_pickle_reader *r, fc_pickle_memo *memo) {
    size_t capacity = 0;
    for (;;) {
        uint64_t argument = 0;
        FC_TRY(fc_pickle_next(r, &argument));
        if (r->op_position == 0 && r->op != FC_PICKLE_PROTO) {
            return fc_pickle_fail(
                r, FC_ECORRUPT, "not a pickle of protocol 2 to 5, the only ones that are examined: it may be hostile");
        }
        if (r->op == FC_PICKLE_STOP) {
            return index_memo(r, memo);
        }
        FC_TRY(scan_opcode(r, memo, argument, &capacity));
        if (memo->words >= 4) { /* 256 entries, as many as BINGET can name */
            skip_common(r, memo);
        }
    }
}

fc_pv *fc_pickle_memo_slot(const fc_pickle_memo *memo, uint64_t index) {
    uint64_t word = index / 64;
    if (word >= memo->words || !(memo->used[word] >> (index % 64) & 1)) {
        return NULL;
    }
    uint64_t below = memo->used[word] & ((UINT64_C(1) << (index % 64)) - 1);
    return &memo->values[memo->before[word] + (uint64_t)__builtin_popcountll(below)];
}
