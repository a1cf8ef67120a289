/*
 * Asks ahead for headers: see ahead.h. HDF5 file format specification, II.A (superblock), III.A.1 (B-trees, version 1),
 * III.B (nodes of symbols), IV.A.1.a (object headers, version 1). What it finds is only a hint: libhdf5 reads the same
 * bytes again, from the blocks that are kept.
 */
#include "hdf5/reader_process/ahead.h"

#include "base/checked.h"
#include "base/grow.h"
#include "base/little.h"
#include "hdf5/reader_process/ask.h"
#include "hdf5/reader_process/child.h"

#include <stdlib.h>
#include <string.h>

enum {
    MOST_PLACES = 200000, /* damaged headers may refer to each other in circles */
    MOST_LEVELS = 64,
    MOST_BYTES = 64 << 10, /* of one header */
    NODE_HEAD = 24,
    SYMBOL = 40,
    OBJECT_HEAD = 16,
    MESSAGE_HEAD = 8,
    LAYOUT = 8, /* types of messages */
    CONTINUATION = 16,
    SYMBOL_TABLE = 17
};

typedef enum place_kind { GROUP_NODE, SYMBOLS, OBJECT, CHUNK_NODE, ONLY_FETCHED } place_kind;

/* Something in the file that headers refer to. */
typedef struct place {
    uint64_t at;
    place_kind kind;
    size_t key; /* of CHUNK_NODE: bytes of a key */
} place;

typedef struct looking {
    const fc_h5_source *source;
    place *items;
    size_t count, capacity;
    unsigned char bytes[MOST_BYTES];
} looking;

static void add(looking *l, uint64_t at, place_kind kind, size_t key) {
    if (at >= (uint64_t)l->source->st->st_size || l->count == MOST_PLACES) {
        return;
    }
    if (!fc_grow(&l->items, &l->capacity, l->count + 1, sizeof *l->items)) {
        fc_h5_child_no_memory();
    }
    l->items[l->count++] = (place){at, kind, key};
}

static uint64_t number(const unsigned char *bytes) {
    return fc_load_little(bytes, 8);
}

/* Reads to l->bytes. @return false if the file has no such bytes, or they are too many */
static bool read_at(looking *l, uint64_t at, size_t size) {
    return size <= sizeof l->bytes && fc_h5_vfd_read(l->source, at, size, l->bytes);
}

/* A node of a B-tree: after its head, keys and children in turn. */
static void look_at_node(looking *l, const place *p, int type, size_t key) {
    if (!read_at(l, p->at, NODE_HEAD) || memcmp(l->bytes, "TREE", 4) != 0 || l->bytes[4] != type) {
        return;
    }
    const int level = l->bytes[5];
    const size_t count = (size_t)fc_load_little(l->bytes + 6, 2), step = key + 8;
    if ((type == 1 && level == 0) || !read_at(l, p->at + NODE_HEAD, count * step)) {
        return; /* the children are data */
    }
    for (size_t i = 0; i < count; i++) {
        add(l, number(l->bytes + i * step + key), level > 0 ? p->kind : SYMBOLS, key);
    }
}

/* The names in a group, with the headers of their objects. */
static void look_at_symbols(looking *l, const place *p) {
    if (!read_at(l, p->at, 8) || memcmp(l->bytes, "SNOD", 4) != 0) {
        return;
    }
    const size_t count = (size_t)fc_load_little(l->bytes + 6, 2);
    if (!read_at(l, p->at + 8, count * SYMBOL)) {
        return;
    }
    for (size_t i = 0; i < count; i++) {
        const unsigned char *symbol = l->bytes + i * SYMBOL;
        add(l, number(symbol + 8), OBJECT, 0);
        if (fc_load_little(symbol + 16, 4) == 1) { /* a group, whose parts are known here */
            add(l, number(symbol + 24), GROUP_NODE, 8);
            add(l, number(symbol + 32), ONLY_FETCHED, 0);
        }
    }
}

/* What the messages of an object header refer to. */
static void look_at_object(looking *l, const place *p) {
    if (!read_at(l, p->at, OBJECT_HEAD) || l->bytes[0] != 1) {
        return;
    }
    const size_t size = (size_t)fc_load_little(l->bytes + 8, 4);
    if (!read_at(l, p->at + OBJECT_HEAD, size)) {
        return;
    }
    for (size_t at = 0; size - at >= MESSAGE_HEAD;) {
        const unsigned char *message = l->bytes + at, *data = message + MESSAGE_HEAD;
        const size_t bytes = (size_t)fc_load_little(message + 2, 2);
        if (bytes > size - at - MESSAGE_HEAD) {
            return;
        }
        const uint64_t type = fc_load_little(message, 2);
        if (type == LAYOUT && bytes >= 11 && data[0] == 3 && data[1] == 2) {
            add(l, number(data + 3), CHUNK_NODE, 8 + 8 * (size_t)data[2]);
        } else if (type == CONTINUATION && bytes >= 16) {
            add(l, number(data), ONLY_FETCHED, 0);
        } else if (type == SYMBOL_TABLE && bytes >= 16) {
            add(l, number(data + 8), ONLY_FETCHED, 0);
        }
        at += MESSAGE_HEAD + bytes;
    }
}

static void look_at(looking *l, const place *p) {
    switch (p->kind) {
    case GROUP_NODE:
        look_at_node(l, p, 0, p->key);
        return;
    case CHUNK_NODE:
        look_at_node(l, p, 1, p->key);
        return;
    case SYMBOLS:
        look_at_symbols(l, p);
        return;
    case OBJECT:
        look_at_object(l, p);
        return;
    case ONLY_FETCHED:
        return;
    }
}

/* Asks for the blocks of the places from number `from` to `end`. */
static bool ask_for(const looking *l, size_t from, size_t end) {
    uint64_t places[FC_H5_MOST_PARTS];
    while (from < end) {
        const size_t n = end - from < FC_H5_MOST_PARTS ? end - from : FC_H5_MOST_PARTS;
        for (size_t i = 0; i < n; i++) {
            places[i] = l->source->base + l->items[from + i].at;
        }
        if (!fc_h5_ask_ahead(l->source->asking, places, n)) {
            return false;
        }
        from += n;
    }
    return true;
}

/* Finds the root group in the superblock, which must be at the start of the file. */
static bool add_root(looking *l) {
    enum { FIRST = 24, ENTRY = 32, SUPERBLOCK = FIRST + 4 + ENTRY + SYMBOL };
    static const unsigned char signature[8] = {0x89, 'H', 'D', 'F', '\r', '\n', 0x1a, '\n'};
    const unsigned char *b = l->bytes;
    if (!read_at(l, 0, SUPERBLOCK) || memcmp(b, signature, sizeof signature) != 0 || b[8] > 1 || b[13] != 8 ||
        b[14] != 8) {
        return false;
    }
    const unsigned char *rest = b + FIRST + (b[8] == 1 ? 4 : 0), *entry = rest + ENTRY;
    if (number(rest) != 0) {
        return false; /* addresses are relative to somewhere else */
    }
    add(l, number(entry + 8), OBJECT, 0);
    add(l, number(entry + 24), GROUP_NODE, 8);
    add(l, number(entry + 32), ONLY_FETCHED, 0);
    return true;
}

void fc_h5_look_ahead(const fc_h5_source *source) {
    looking *l = fc_h5_child_calloc(1, sizeof *l);
    l->source = source;
    if (add_root(l)) {
        size_t from = 0;
        for (int level = 0; level < MOST_LEVELS && from < l->count && l->count < MOST_PLACES; level++) {
            const size_t end = l->count;
            if (!ask_for(l, from, end)) {
                break;
            }
            for (; from < end && l->count < MOST_PLACES; from++) {
                const place p = l->items[from]; /* the list may move */
                look_at(l, &p);
            }
        }
    }
    free(l->items);
    free(l);
}
