/*
 * Deflate blocks (RFC 1951) without matches: Huffman codes alone, or bytes as they are. What the planes of
 * floating-point numbers need, several times as fast as a search for repetitions that are not there.
 */
#ifndef FSDPCKPT_MOVE_LITERALS_H
#define FSDPCKPT_MOVE_LITERALS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    FC_LITERALS_BLOCK = 128 << 10, /**< bytes that share one set of codes */
    FC_LITERALS_HEADER = 160       /**< bytes that the codes take at most */
};

/** A stream being written. `full` stays set when something did not fit; what is then in `out` is worthless. */
typedef struct fc_bits {
    unsigned char *out;
    size_t size, room; /**< whole bytes written, and how many fit */
    uint64_t pending;  /**< bits below a byte, the first one lowest */
    int count;         /**< of them, below 8 between calls */
    bool full;
} fc_bits;

/** How often each byte occurs. */
void fc_count_bytes(const unsigned char *in, size_t size, uint32_t counts[256]);

/** Bytes that Huffman codes of `counts` take, about (their entropy; a lower bound). */
double fc_entropy_bytes(const uint32_t counts[256]);

/** Appends blocks of Huffman codes for `in`, none of them the last of the stream. */
void fc_put_literals(fc_bits *bits, const unsigned char *in, size_t size);

/** Appends blocks of the bytes themselves. */
void fc_put_stored(fc_bits *bits, const unsigned char *in, size_t size);

/** Makes the stream end at a byte, with an empty block where it does not. */
void fc_put_alignment(fc_bits *bits);

/** Appends an empty last block and fills up the byte. */
void fc_put_end(fc_bits *bits);

/** Appends `n` bytes behind an aligned stream. */
void fc_put_bytes(fc_bits *bits, const void *bytes, size_t n);

#endif
