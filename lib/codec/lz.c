/*
 * Decoders of LZF, LZ4 and BloscLZ: see lz.h.
 *
 * Each block is a row of literals (bytes to copy) and matches (bytes to repeat from `distance` before). A match may
 * reach into the bytes that it makes itself.
 */
#include "codec/lz.h"

#include <stdint.h>
#include <string.h>

enum { STEP = 16, RUN = 255 /* a byte of a length that another one follows */ };

/* A block and what was made of it so far. */
typedef struct block {
    const unsigned char *in, *in_end;
    unsigned char *start, *at, *end;
} block;

static block block_of(const unsigned char *in, size_t in_size, unsigned char *out, size_t out_size) {
    return (block){in, in + in_size, out, out, out + out_size};
}

static bool has_input(const block *b) {
    return b->in < b->in_end;
}

static bool is_done(const block *b) {
    return !has_input(b) && b->at == b->end;
}

static bool put_literals(block *b, size_t size) {
    if (size > (size_t)(b->in_end - b->in) || size > (size_t)(b->end - b->at)) {
        return false;
    }
    /* Most are short, and a copy of a constant size costs less than a call. */
    if (size <= STEP && b->in_end - b->in >= STEP && b->end - b->at >= STEP) {
        memcpy(b->at, b->in, STEP);
    } else {
        memcpy(b->at, b->in, size);
    }
    b->in += size;
    b->at += size;
    return true;
}

static bool put_match(block *b, size_t distance, size_t size) {
    if (distance == 0 || distance > (size_t)(b->at - b->start) || size > (size_t)(b->end - b->at)) {
        return false;
    }
    unsigned char *to = b->at, *end = b->at + size;
    const unsigned char *from = to - distance;
    b->at = end;
    if (distance >= STEP && (size_t)(b->end - to) >= size + STEP) {
        for (; to < end; to += STEP, from += STEP) { /* writes up to STEP bytes more, which come later */
            memcpy(to, from, STEP);
        }
    } else if (distance == 1) {
        memset(to, *from, size);
    } else {
        while (to < end) {
            *to++ = *from++;
        }
    }
    return true;
}

/* Adds a length that continues in the next bytes, while they are 255. */
static bool add_length(block *b, size_t *length) {
    unsigned char byte;
    do {
        if (!has_input(b)) {
            return false;
        }
        byte = *b->in++;
        *length += byte;
    } while (byte == RUN);
    return true;
}

/*
 * LZF: a byte below 32 is a number of literals less 1. Otherwise its top three bits are the length of a match less 2
 * (7: add the next byte), and its other bits and the next byte are the distance less 1.
 */
bool fc_lzf_decode(const unsigned char *in, size_t in_size, unsigned char *out, size_t out_size) {
    block b = block_of(in, in_size, out, out_size);
    while (has_input(&b)) {
        const unsigned head = *b.in++;
        if (head < 32) {
            if (!put_literals(&b, head + 1)) {
                return false;
            }
            continue;
        }
        size_t length = head >> 5;
        if (b.in_end - b.in < (length == 7 ? 2 : 1)) {
            return false;
        }
        length += length == 7 ? *b.in++ : 0;
        const size_t distance = ((size_t)(head & 31) << 8 | *b.in++) + 1;
        if (!put_match(&b, distance, length + 2)) {
            return false;
        }
    }
    return is_done(&b);
}

/*
 * LZ4: a byte has the number of literals and the length of a match less 4, both in four bits (15: continued). The
 * literals follow, then the distance in two bytes. The last literals have no match.
 */
bool fc_lz4_decode(const unsigned char *in, size_t in_size, unsigned char *out, size_t out_size) {
    block b = block_of(in, in_size, out, out_size);
    while (has_input(&b)) {
        const unsigned head = *b.in++;
        size_t literals = head >> 4, length = head & 15;
        if ((literals == 15 && !add_length(&b, &literals)) || !put_literals(&b, literals)) {
            return false;
        }
        if (!has_input(&b)) {
            break;
        }
        if (b.in_end - b.in < 2) {
            return false;
        }
        const size_t distance = b.in[0] | (size_t)b.in[1] << 8;
        b.in += 2;
        if ((length == 15 && !add_length(&b, &length)) || !put_match(&b, distance, length + 4)) {
            return false;
        }
    }
    return is_done(&b);
}

/*
 * BloscLZ: like LZF, but the length continues while a byte is 255, it is one longer, and the largest distance means
 * that two more bytes follow, which are added to it. Only literals can be first, so the top bits of the first byte say
 * something else.
 */
bool fc_blosclz_decode(const unsigned char *in, size_t in_size, unsigned char *out, size_t out_size) {
    enum { FAR = 8191 };
    block b = block_of(in, in_size, out, out_size);
    unsigned mask = 31;
    while (has_input(&b)) {
        const unsigned head = *b.in++ & mask;
        mask = 255;
        if (head < 32) {
            if (!put_literals(&b, head + 1)) {
                return false;
            }
            continue;
        }
        size_t length = (head >> 5) + 2, distance = (size_t)(head & 31) << 8;
        if ((head >> 5 == 7 && !add_length(&b, &length)) || !has_input(&b)) {
            return false;
        }
        distance += *b.in++;
        if (distance == FAR) {
            if (b.in_end - b.in < 2) {
                return false;
            }
            distance += (size_t)b.in[0] << 8 | b.in[1];
            b.in += 2;
        }
        if (!put_match(&b, distance + 1, length)) {
            return false;
        }
    }
    return is_done(&b);
}
