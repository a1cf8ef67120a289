/*
 * Deflate blocks without matches. From bytes to Huffman-coded or stored blocks; see literals.h.
 */
#include "move/literals.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum {
    SYMBOLS = 257, /* the bytes and the end of a block */
    END = 256,
    /* Four codes and what is left of a byte fit into 56 bits. Deflate allows 15; the difference is below a thousandth.
     */
    MOST_BITS = 12,
    STORED_MOST = 65535,
    /* Behind what is written up to 8 bytes are clobbered, which must be within `room`. */
    SLACK = 8,
    STORED = 0, /* kinds of blocks */
    FIXED = 1,
    DYNAMIC = 2
};

void fc_count_bytes(const unsigned char *in, size_t size, uint32_t counts[256]) {
    uint32_t lanes[4][256] = {{0}}; /* several, so that equal neighbours do not wait for each other */
    size_t i = 0;
    for (; i + 4 <= size; i += 4) {
        lanes[0][in[i]]++;
        lanes[1][in[i + 1]]++;
        lanes[2][in[i + 2]]++;
        lanes[3][in[i + 3]]++;
    }
    for (; i < size; i++) {
        lanes[0][in[i]]++;
    }
    for (int s = 0; s < 256; s++) {
        counts[s] = lanes[0][s] + lanes[1][s] + lanes[2][s] + lanes[3][s];
    }
}

double fc_entropy_bytes(const uint32_t counts[256]) {
    double total = 0, bits = 0;
    for (int s = 0; s < 256; s++) {
        total += counts[s];
    }
    for (int s = 0; s < 256; s++) {
        bits += counts[s] ? counts[s] * log2(total / counts[s]) : 0;
    }
    return bits / 8;
}

static bool has_room(fc_bits *b, size_t bytes) {
    b->full |= bytes > b->room || b->size > b->room - bytes || b->room - bytes - b->size < SLACK;
    return !b->full;
}

static void put(fc_bits *b, uint64_t value, int count) {
    b->pending |= value << b->count;
    b->count += count;
    while (b->count >= 8) {
        b->out[b->size++] = (unsigned char)b->pending;
        b->pending >>= 8;
        b->count -= 8;
    }
}

/* A symbol and how often it occurs; later, its place in the tree. */
typedef struct leaf {
    uint32_t count;
    uint16_t symbol;
} leaf;

static int by_count(const void *a, const void *b) {
    const leaf *x = a, *y = b;
    return x->count != y->count ? (x->count > y->count) - (x->count < y->count) : x->symbol - y->symbol;
}

/* How many leaves of the Huffman tree are at each depth. Leaves come in ascending order of their counts; joined nodes
   are made in ascending order too, so the two smallest are always at the heads of two queues. */
static void tree_depths(const leaf *leaves, int n, uint32_t at_depth[SYMBOLS]) {
    uint64_t weight[SYMBOLS];
    int parent_of_leaf[SYMBOLS] = {0}, parent[SYMBOLS] = {0}, depth[SYMBOLS] = {0};
    int next_leaf = 0, next_node = 0, made = 0;
    memset(at_depth, 0, SYMBOLS * sizeof *at_depth);
    while (made < n - 1) {
        weight[made] = 0;
        for (int k = 0; k < 2; k++) {
            bool take_leaf = next_node == made || (next_leaf < n && leaves[next_leaf].count <= weight[next_node]);
            weight[made] += take_leaf ? leaves[next_leaf].count : weight[next_node];
            *(take_leaf ? &parent_of_leaf[next_leaf++] : &parent[next_node++]) = made;
        }
        made++;
    }
    depth[made - 1] = 0;
    for (int i = made - 2; i >= 0; i--) {
        depth[i] = depth[parent[i]] + 1;
    }
    for (int i = 0; i < n; i++) {
        at_depth[depth[parent_of_leaf[i]] + 1]++;
    }
}

/* Lifts leaves that are too deep to MOST_BITS, and pays for it by pushing others down until the code is complete. */
static void limit_depths(uint32_t at_depth[SYMBOLS]) {
    uint32_t used = 0; /* of the 2^MOST_BITS codes of full length */
    for (int d = MOST_BITS + 1; d < SYMBOLS; d++) {
        at_depth[MOST_BITS] += at_depth[d];
        at_depth[d] = 0;
    }
    for (int d = 1; d <= MOST_BITS; d++) {
        used += at_depth[d] << (MOST_BITS - d);
    }
    for (; used > 1u << MOST_BITS; used--) {
        int d = MOST_BITS - 1;
        while (at_depth[d] == 0) {
            d--;
        }
        at_depth[d]--;
        at_depth[d + 1] += 2;
        at_depth[MOST_BITS]--;
    }
}

/* Lengths of the codes of the symbols that occur (0: does not), by how often they do. At least two symbols do. */
static void code_lengths(const uint32_t counts[256], uint8_t lengths[SYMBOLS]) {
    leaf leaves[SYMBOLS];
    uint32_t at_depth[SYMBOLS];
    int n = 0;
    memset(lengths, 0, SYMBOLS);
    for (int s = 0; s < SYMBOLS; s++) {
        uint32_t count = s == END ? 1 : counts[s];
        if (count) {
            leaves[n++] = (leaf){count, (uint16_t)s};
        }
    }
    qsort(leaves, (size_t)n, sizeof *leaves, by_count);
    tree_depths(leaves, n, at_depth);
    limit_depths(at_depth);
    for (int d = MOST_BITS, at = 0; d > 0; d--) {
        for (uint32_t k = 0; k < at_depth[d]; k++) {
            lengths[leaves[at++].symbol] = (uint8_t)d;
        }
    }
}

static uint32_t reversed(uint32_t code, int length) {
    uint32_t r = 0;
    for (; length > 0; length--, code >>= 1) {
        r = r << 1 | (code & 1);
    }
    return r;
}

/* A code, first bit lowest, and its length above it. */
typedef uint32_t code;
enum { LENGTH_AT = 16 };

/* Canonical codes: in the order of lengths, then of symbols. */
static void make_codes(const uint8_t lengths[SYMBOLS], code codes[SYMBOLS]) {
    uint32_t next = 0;
    memset(codes, 0, SYMBOLS * sizeof *codes);
    for (int length = 1; length <= MOST_BITS; length++, next <<= 1) {
        for (int s = 0; s < SYMBOLS; s++) {
            if (lengths[s] == length) {
                codes[s] = reversed(next++, length) | (uint32_t)length << LENGTH_AT;
            }
        }
    }
}

/* The header of a dynamic block. The lengths themselves are sent with 4 bits each: simple, and 130 bytes a block. The
   two distance codes are never used; there must be some, and two make a complete code, which every inflater takes. */
static void put_header(fc_bits *b, const uint8_t lengths[SYMBOLS]) {
    enum { LENGTH_CODES = 19, RUNS = 3, DISTANCES = 2 };
    put(b, 0, 1);
    put(b, DYNAMIC, 2);
    put(b, SYMBOLS - 257, 5);
    put(b, DISTANCES - 1, 5);
    put(b, LENGTH_CODES - 4, 4);
    for (int i = 0; i < LENGTH_CODES; i++) {
        put(b, i < RUNS ? 0 : 4, 3); /* the codes of runs come first: none; those of lengths 0 … 15 have 4 bits */
    }
    for (int s = 0; s < SYMBOLS; s++) {
        put(b, reversed(lengths[s], 4), 4);
    }
    for (int i = 0; i < DISTANCES; i++) {
        put(b, reversed(1, 4), 4);
    }
}

static void store_le64(unsigned char *to, uint64_t value) {
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    memcpy(to, &value, sizeof value);
#else
    for (int i = 0; i < 8; i++) {
        to[i] = (unsigned char)(value >> 8 * i);
    }
#endif
}

static void put_codes(fc_bits *b, const unsigned char *in, size_t size, const code codes[SYMBOLS]) {
    const uint32_t bits = (1u << LENGTH_AT) - 1;
    unsigned char *out = b->out + b->size;
    uint64_t pending = b->pending;
    unsigned count = (unsigned)b->count;
    size_t i = 0;
    for (; i + 4 <= size; i += 4) {
        const code c0 = codes[in[i]], c1 = codes[in[i + 1]], c2 = codes[in[i + 2]], c3 = codes[in[i + 3]];
        const unsigned n0 = c0 >> LENGTH_AT, n2 = c2 >> LENGTH_AT;
        const unsigned n01 = n0 + (c1 >> LENGTH_AT), n23 = n2 + (c3 >> LENGTH_AT);
        const uint64_t low = (c0 & bits) | (uint64_t)(c1 & bits) << n0;
        const uint64_t high = (c2 & bits) | (uint64_t)(c3 & bits) << n2;
        pending |= (low | high << n01) << count;
        count += n01 + n23;
        store_le64(out, pending);
        out += count >> 3;
        pending >>= count & ~7u;
        count &= 7;
    }
    b->size = (size_t)(out - b->out);
    b->pending = pending;
    b->count = (int)count;
    for (; i < size; i++) {
        put(b, codes[in[i]] & bits, (int)(codes[in[i]] >> LENGTH_AT));
    }
    put(b, codes[END] & bits, (int)(codes[END] >> LENGTH_AT));
}

void fc_put_literals(fc_bits *b, const unsigned char *in, size_t size) {
    for (size_t n; size > 0 && !b->full; in += n, size -= n) {
        uint32_t counts[256];
        uint8_t lengths[SYMBOLS];
        code codes[SYMBOLS];
        n = size < FC_LITERALS_BLOCK ? size : FC_LITERALS_BLOCK;
        fc_count_bytes(in, n, counts);
        code_lengths(counts, lengths);
        uint64_t total = lengths[END];
        for (int s = 0; s < 256; s++) {
            total += (uint64_t)counts[s] * lengths[s];
        }
        if (has_room(b, FC_LITERALS_HEADER + (size_t)(total / 8 + 1))) {
            make_codes(lengths, codes);
            put_header(b, lengths);
            put_codes(b, in, n, codes);
        }
    }
}

void fc_put_bytes(fc_bits *b, const void *bytes, size_t n) {
    if (has_room(b, n)) {
        memcpy(b->out + b->size, bytes, n);
        b->size += n;
    }
}

static void put_stored_header(fc_bits *b, size_t n) {
    put(b, 0, 1);
    put(b, STORED, 2);
    put(b, 0, (8 - b->count) & 7);
    put(b, n | (~n & 0xffff) << 16, 32);
}

void fc_put_stored(fc_bits *b, const unsigned char *in, size_t size) {
    enum { HEADER = 6 };
    for (size_t n; size > 0 && !b->full; in += n, size -= n) {
        n = size < STORED_MOST ? size : STORED_MOST;
        if (has_room(b, HEADER + n)) {
            put_stored_header(b, n);
            fc_put_bytes(b, in, n);
        }
    }
}

void fc_put_alignment(fc_bits *b) {
    if (b->count > 0 && has_room(b, 8)) {
        put_stored_header(b, 0);
    }
}

void fc_put_end(fc_bits *b) {
    if (has_room(b, 4)) {
        put(b, 1, 1);
        put(b, FIXED, 2);
        put(b, 0, 7); /* the end of a block */
        put(b, 0, (8 - b->count) & 7);
    }
}
