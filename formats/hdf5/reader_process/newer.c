/*
 * In the reader process: patches object headers of HDF5 2.0 for an older libhdf5. See newer.h.
 */
#include "hdf5/reader_process/newer.h"

#include "base/checked.h"
#include "base/grow.h"
#include "base/little.h"
#include "hdf5/object_header.h"
#include "hdf5/reader_process/child.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    NEW_LAYOUT = 5,
    OLD_LAYOUT = 4,
    NEW_TYPE = 5,
    OLD_TYPE = 3,
    SHARED = 2, /* flag of a message: it is stored elsewhere */
    CHUNKED = 2,
    MOST_HEADER = 1 << 20, /* bytes of a chunk of an object header */
    WINDOW = 1024,
    MOST_NESTED = 32
};

/* ---- the bytes of the file ---- */

/* Bytes of the file. Headers are small, so one read gives most of them. */
typedef struct file_view {
    const fc_h5_source *source;
    unsigned char *bytes;
    size_t cap;
    uint64_t at, filled;
} file_view;

static const unsigned char *view_bytes(void *context, uint64_t at, uint64_t size) {
    file_view *v = context;
    const uint64_t end = (uint64_t)v->source->st->st_size;
    if (size > MOST_HEADER || !fc_range_within(at, size, end)) {
        return NULL;
    }
    if (at >= v->at && fc_range_within(at - v->at, size, v->filled)) {
        return v->bytes + (at - v->at);
    }
    const uint64_t least = size < WINDOW ? WINDOW : size, wanted = least < end - at ? least : end - at;
    if (!fc_grow(&v->bytes, &v->cap, (size_t)wanted + 1, 1)) {
        fc_h5_child_no_memory();
    }
    v->at = at;
    v->filled = fc_h5_vfd_read(v->source, at, (size_t)wanted, v->bytes) ? wanted : 0;
    return v->filled > 0 || size == 0 ? v->bytes : NULL;
}

/* ---- patches ---- */

static void add_patch(const fc_h5_source *source, uint64_t at, const unsigned char *bytes, size_t size) {
    fc_h5_patches *p = source->patches;
    if (!fc_grow(&p->items, &p->cap, p->count + 1, sizeof *p->items)) {
        fc_h5_child_no_memory();
    }
    fc_h5_patch *patch = &p->items[p->count++];
    *patch = (fc_h5_patch){.at = at, .size = (uint32_t)size};
    memcpy(patch->bytes, bytes, size);
}

/* An object header that is patched. Its chunk with `start` is in memory until the next one is needed. */
typedef struct patching {
    const fc_h5_source *source;
    fc_h5_newer *out;
    uint64_t start, check;
    unsigned char *bytes; /* with the patches; NULL: there are none in it */
} patching;

/* Adds the checksum of the chunk in memory, and forgets it. */
static void end_chunk(patching *p) {
    if (p->bytes) {
        unsigned char sum[4];
        fc_store_little(sum, fc_h5_checksum(p->bytes, (size_t)(p->check - p->start)), 4);
        add_patch(p->source, p->check, sum, sizeof sum);
    }
    free(p->bytes);
    p->bytes = NULL;
}

/* Takes the chunk of a message into memory. @return whether its own checksum is right, and it can be patched. */
static bool begin_chunk(patching *p, const fc_h5_message *m) {
    const size_t size = (size_t)(m->check - m->start);
    if (p->bytes && p->start == m->start) {
        return true;
    }
    end_chunk(p);
    if (size > MOST_HEADER) {
        return false;
    }
    p->start = m->start;
    p->check = m->check;
    p->bytes = fc_h5_child_calloc(size + 4, 1);
    if (fc_h5_vfd_read(p->source, m->start, size + 4, p->bytes) &&
        fc_h5_checksum(p->bytes, size) == fc_load_little(p->bytes + size, 4)) {
        return true;
    }
    free(p->bytes);
    p->bytes = NULL;
    return false;
}

/* Changes the byte at `at` of the file. */
static void change(patching *p, uint64_t at, unsigned char byte) {
    p->bytes[at - p->start] = byte;
    add_patch(p->source, at, &byte, 1);
    p->out->is_newer = true;
}

/* ---- datatypes ---- */

/* A datatype, and those in it. */
typedef struct type_walk {
    const unsigned char *bytes;
    size_t size, at;
    size_t newer[256]; /* offsets of the first bytes of new datatypes */
    size_t count;
} type_walk;

static bool skip(type_walk *t, uint64_t size) {
    const bool fits = size <= t->size - t->at;
    t->at += fits ? (size_t)size : 0;
    return fits;
}

static bool skip_name(type_walk *t) {
    const unsigned char *end = memchr(t->bytes + t->at, 0, t->size - t->at);
    return end && skip(t, (uint64_t)(end - (t->bytes + t->at)) + 1);
}

static bool walk_type(type_walk *t, int depth);

/* The members of a compound: a name, an offset in as few bytes as the size needs, a datatype. */
static bool walk_members(type_walk *t, uint64_t count, uint64_t size, int depth) {
    int width = 1;
    while (size >>= 8) {
        width++;
    }
    bool ok = true;
    for (uint64_t i = 0; i < count && ok; i++) {
        ok = skip_name(t) && skip(t, (uint64_t)width) && walk_type(t, depth);
    }
    return ok;
}

/* A type of integers, names, values. */
static bool walk_enum(type_walk *t, uint64_t count, uint64_t size, int depth) {
    bool ok = walk_type(t, depth);
    for (uint64_t i = 0; i < count && ok; i++) {
        ok = skip_name(t);
    }
    return ok && skip(t, count * size);
}

/*
 * Walks a datatype and notes which are new. @return false if one cannot be shown as an old one. Old compounds have
 * another form, and are not in new ones.
 */
static bool walk_type(type_walk *t, int depth) {
    static const unsigned char properties[] = {4, 12, 2, 0, 4}; /* bytes after the head, by class */
    enum { HEAD = 8, OPAQUE = 5, COMPOUND, REFERENCE, ENUM, LIST, ARRAY };
    const size_t start = t->at;
    if (depth >= MOST_NESTED || !skip(t, HEAD) || t->count == sizeof t->newer / sizeof *t->newer) {
        return false;
    }
    const unsigned char *head = t->bytes + start;
    const int class = head[0] & 15, version = head[0] >> 4;
    const uint64_t count = fc_load_little(head + 1, 2), size = fc_load_little(head + 4, 4);
    if (version == NEW_TYPE) {
        t->newer[t->count++] = start;
    } else if (version != OLD_TYPE && (class == COMPOUND || class == ENUM || class == ARRAY)) {
        return false;
    }
    switch (class) {
    case OPAQUE:
        return skip(t, head[1]);
    case COMPOUND:
        return walk_members(t, count, size, depth + 1);
    case REFERENCE:
        return version <= OLD_TYPE;
    case ENUM:
        return walk_enum(t, count, size, depth + 1);
    case LIST:
        return walk_type(t, depth + 1);
    case ARRAY: {
        const uint64_t dimensions = t->at < t->size ? t->bytes[t->at] : 0;
        return skip(t, 1 + 4 * dimensions) && walk_type(t, depth + 1);
    }
    default:
        return class < OPAQUE && skip(t, properties[class]);
    }
}

/* Patches the datatype at `from` of the message. */
static void patch_type(patching *p, const fc_h5_message *m, size_t from, size_t size) {
    type_walk t = {.bytes = m->bytes + from, .size = size};
    if (walk_type(&t, 0) && t.count > 0 && begin_chunk(p, m)) {
        for (size_t i = 0; i < t.count; i++) {
            const uint64_t at = m->at + from + t.newer[i];
            change(p, at, (unsigned char)(OLD_TYPE << 4 | (p->bytes[at - p->start] & 15)));
        }
    }
}

/* An attribute has two sizes, its name, then its datatype. */
static void patch_attribute(patching *p, const fc_h5_message *m) {
    enum { HEAD = 9 };
    if (m->size < HEAD || m->bytes[0] != 3 || m->bytes[1] & 1) {
        return;
    }
    const uint64_t name = fc_load_little(m->bytes + 2, 2), size = fc_load_little(m->bytes + 4, 2);
    if (fc_range_within(HEAD + name, size, m->size)) {
        patch_type(p, m, (size_t)(HEAD + name), (size_t)size);
    }
}

/* ---- layouts ---- */

/* Finds the index of a layout with chunks: flags, the number of dimensions, the bytes of each, they, the kind of the
   index, its parameters, its address. @return false if it is damaged. */
static bool find_index(const fc_h5_message *m, fc_h5_chunk_index *out) {
    static const unsigned char parameters[] = {[FC_H5_FIXED_ARRAY] = 1, [FC_H5_EXTENSIBLE_ARRAY] = 5, [FC_H5_TREE] = 6};
    enum { HEAD = 5 };
    if (m->size < HEAD) {
        return false;
    }
    const uint64_t kind_at = HEAD + (uint64_t)m->bytes[3] * m->bytes[4];
    if (kind_at >= m->size) {
        return false;
    }
    const int kind = m->bytes[kind_at];
    if (kind < FC_H5_FIXED_ARRAY) {
        return true; /* one chunk, whose size libhdf5 reads correctly, or chunks without filters */
    }
    const uint64_t at = kind_at + 1 + (kind <= FC_H5_TREE ? parameters[kind] : 0);
    if (kind > FC_H5_TREE || !fc_range_within(at, 8, m->size)) {
        return false;
    }
    *out = (fc_h5_chunk_index){kind, fc_load_little(m->bytes + at, 8)};
    return true;
}

static void patch_layout(patching *p, const fc_h5_message *m) {
    fc_h5_chunk_index index = {0};
    if (m->size < 2 || m->bytes[0] != NEW_LAYOUT || (m->bytes[1] == CHUNKED && !find_index(m, &index)) ||
        !begin_chunk(p, m)) {
        return;
    }
    p->out->index = index;
    change(p, m->at, OLD_LAYOUT);
}

/* ---- objects ---- */

static bool patch_message(void *context, const fc_h5_message *m) {
    patching *p = context;
    if (m->flags & SHARED) {
        return true;
    }
    switch (m->type) {
    case FC_H5_LAYOUT_MESSAGE:
        patch_layout(p, m);
        break;
    case FC_H5_TYPE_MESSAGE:
        patch_type(p, m, 0, (size_t)m->size);
        break;
    case FC_H5_ATTRIBUTE_MESSAGE:
        patch_attribute(p, m);
        break;
    default:
        break;
    }
    return true;
}

void fc_h5_newer_patch(const fc_h5_source *source, uint64_t object, fc_h5_newer *out) {
    file_view file = {.source = source};
    const fc_h5_view view = {view_bytes, &file};
    patching p = {.source = source, .out = out};
    *out = (fc_h5_newer){0};
#if !H5_VERSION_GE(2, 0, 0)
    fc_h5_each_message(&view, object, patch_message, &p);
    end_chunk(&p);
#else
    (void)view, (void)p, (void)patch_message;
#endif
    free(file.bytes);
}

bool fc_h5_newer_root(const fc_h5_source *source, uint64_t *object) {
    file_view file = {.source = source};
    const fc_h5_view view = {view_bytes, &file};
    const bool found = fc_h5_find_root(&view, object);
    free(file.bytes);
    return found;
}
