/*
 * Reads object headers of version 2 as bytes (HDF5 File Format Specification 3.0, IV.A.1.b): their messages, and the
 * value of an attribute by its name. The file may be damaged, so every number is checked.
 */
#include "hdf5/object_header.h"
#include "base/checked.h"
#include "base/little.h"

#include <string.h>

enum {
    TIMES = 0x20,      /* flag of an object header: it has times */
    PHASES = 0x10,     /* flag: it has limits for the storage of attributes */
    ORDERED = 0x04,    /* flag: each message has a creation order */
    CONTINUATION = 16, /* message types */
    CHECKSUM = 4,
    MOST_CHUNKS = 64
};

static uint32_t rotate(uint32_t x, int by) {
    return x << by | x >> (32 - by);
}

uint32_t fc_h5_checksum(const unsigned char *p, size_t size) {
    uint32_t a, b, c;
    a = b = c = 0xdeadbeefu + (uint32_t)size;
    for (; size > 12; size -= 12, p += 12) {
        a += (uint32_t)fc_load_little(p, 4);
        b += (uint32_t)fc_load_little(p + 4, 4);
        c += (uint32_t)fc_load_little(p + 8, 4);
        a = (a - c) ^ rotate(c, 4), c += b;
        b = (b - a) ^ rotate(a, 6), a += c;
        c = (c - b) ^ rotate(b, 8), b += a;
        a = (a - c) ^ rotate(c, 16), c += b;
        b = (b - a) ^ rotate(a, 19), a += c;
        c = (c - b) ^ rotate(b, 4), b += a;
    }
    if (size == 0) {
        return c;
    }
    unsigned char last[12] = {0};
    memcpy(last, p, size);
    a += (uint32_t)fc_load_little(last, 4);
    b += (uint32_t)fc_load_little(last + 4, 4);
    c += (uint32_t)fc_load_little(last + 8, 4);
    c = (c ^ b) - rotate(b, 14);
    a = (a ^ c) - rotate(c, 11);
    b = (b ^ a) - rotate(a, 25);
    c = (c ^ b) - rotate(b, 16);
    a = (a ^ c) - rotate(c, 4);
    b = (b ^ a) - rotate(a, 14);
    c = (c ^ b) - rotate(b, 24);
    return c;
}

/* A chunk of an object header: from its signature to its checksum. */
typedef struct chunk {
    uint64_t start, messages, check;
    int message_head; /* bytes before the data of a message */
} chunk;

static bool first_chunk(const fc_h5_view *view, uint64_t object, chunk *out) {
    const unsigned char *p = view->bytes(view->context, object, 6);
    if (!p || memcmp(p, "OHDR", 4) != 0 || p[4] != 2) {
        return false;
    }
    const int flags = p[5], width = 1 << (flags & 3);
    const uint64_t before = 6 + (flags & TIMES ? 16 : 0) + (flags & PHASES ? 4 : 0);
    p = view->bytes(view->context, object, before + (uint64_t)width);
    if (!p) {
        return false;
    }
    out->start = object;
    out->messages = object + before + (uint64_t)width;
    out->message_head = flags & ORDERED ? 6 : 4;
    return fc_add_u64(out->messages, fc_load_little(p + before, width), &out->check);
}

static bool next_chunk(uint64_t at, uint64_t length, int message_head, chunk *out) {
    uint64_t end;
    if (length < 4 + CHECKSUM || !fc_add_u64(at, length, &end)) {
        return false;
    }
    *out = (chunk){at, at + 4, end - CHECKSUM, message_head};
    return true;
}

/*
 * Whether the `size` bytes at `p` are the attribute `name` with a value of 8 bytes; if so, also returns the value's
 * offset.
 */
static bool is_attribute(const unsigned char *p, uint64_t size, const char *name, uint64_t *value) {
    if (size < 9 || p[0] != 3) {
        return false;
    }
    const uint64_t name_size = fc_load_little(p + 2, 2);
    *value = 9 + name_size + fc_load_little(p + 4, 2) + fc_load_little(p + 6, 2);
    return name_size == strlen(name) + 1 && *value + 8 == size && memcmp(p + 9, name, name_size) == 0;
}

/* The chunks of an object header. Continuations are added when they are found. */
typedef struct chunks {
    chunk items[MOST_CHUNKS];
    int count;
} chunks;

/* Visits the messages of chunk `index`. @return false if the walk is over. */
static bool visit_chunk(const fc_h5_view *view, chunks *all, int index, fc_h5_message_fn visit, void *context) {
    const chunk c = all->items[index];
    const uint64_t head = (uint64_t)c.message_head;
    uint64_t at = c.messages;
    while (c.check >= head && at <= c.check - head) { /* the rest is a gap */
        const unsigned char *p = view->bytes(view->context, at, head);
        if (!p) {
            return false;
        }
        fc_h5_message m = {.type = p[0], .flags = p[3], .at = at + head, .start = c.start, .check = c.check};
        m.size = fc_load_little(p + 1, 2);
        if (!fc_range_within(m.at, m.size, c.check) || !(m.bytes = view->bytes(view->context, m.at, m.size))) {
            return false;
        }
        if (m.type == CONTINUATION && m.size >= 16 && all->count < MOST_CHUNKS) {
            all->count += next_chunk(fc_load_little(m.bytes, 8), fc_load_little(m.bytes + 8, 8), c.message_head,
                                     &all->items[all->count]);
        } else if (!visit(context, &m)) {
            return false;
        }
        at += head + m.size;
    }
    return true;
}

void fc_h5_each_message(const fc_h5_view *view, uint64_t object, fc_h5_message_fn visit, void *context) {
    chunks all = {.count = 1};
    if (first_chunk(view, object, &all.items[0])) {
        for (int i = 0; i < all.count && visit_chunk(view, &all, i, visit, context); i++) {
        }
    }
}

/* An attribute that is searched for. */
typedef struct wanted {
    const char *name;
    fc_h5_field *out;
    bool found;
} wanted;

static bool is_wanted(void *context, const fc_h5_message *m) {
    wanted *w = context;
    uint64_t value;
    if (m->type != FC_H5_ATTRIBUTE_MESSAGE || !is_attribute(m->bytes, m->size, w->name, &value)) {
        return true;
    }
    *w->out = (fc_h5_field){m->at + value, m->start, m->check};
    w->found = true;
    return false;
}

bool fc_h5_find_field(const fc_h5_view *view, uint64_t object, const char *name, fc_h5_field *out) {
    wanted w = {name, out, false};
    fc_h5_each_message(view, object, is_wanted, &w);
    return w.found;
}

bool fc_h5_find_root(const fc_h5_view *view, uint64_t *object) {
    static const unsigned char signature[8] = {0x89, 'H', 'D', 'F', '\r', '\n', 0x1a, '\n'};
    const unsigned char *p = view->bytes(view->context, 0, 48);
    if (!p || memcmp(p, signature, sizeof signature) != 0 || (p[8] != 2 && p[8] != 3) || p[9] != 8 ||
        fc_load_little(p + 12, 8) != 0) {
        return false;
    }
    *object = fc_load_little(p + 36, 8);
    return true;
}
