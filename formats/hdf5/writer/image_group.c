/*
 * Makes groups of an image. Up to 8 members are links in the group's object header; more are in a fractal heap, with
 * two B-trees of version 2 that find them by name and by creation order. libhdf5 stores groups with tracked and indexed
 * creation order in the same way. Here they are made in one step, with one block (or one row of large blocks) in the
 * heap and trees of one or two levels.
 */
#include "hdf5/writer/image.h"

#include "fsdpckpt/order.h"
#include "fsdpckpt/try.h"
#include "hdf5/object_header.h"

#include <stdlib.h>

enum {
    COMPACT = 8,
    HEAP_ID = 7, /* 1 byte of flags, 4 of the offset, 2 of the length */
    OFFSET = 4,
    BLOCK_HEAD = 4 + 1 + 8 + OFFSET + 4,
    SMALLEST_BLOCK = 512,
    LARGEST_BLOCK = 1 << 16, /* libhdf5 reads a whole block to find one link */
    LEAST_ROW = 4,
    MOST_BLOCKS = 1 << 15,
    USUAL_LARGEST = 4096, /* the largest object in a heap, as libhdf5 sets it for links */
    LONGEST_LINK = 60000, /* so that one message can contain it */
    NODE_HEAD = 6,        /* signature, version, type */
    LEAF = 512,           /* the fewest records in a leaf of a tree of two levels */
    CHILD = 8 + 2,        /* bytes per child in an inner node: its address and its number of records */
    BY_NAME = 5,          /* types of B-trees */
    BY_ORDER = 6,
    LEAST_NODE = 512
};

/* Adds a link message. */
static void add_link(fc_h5_buffer *to, const fc_h5_member *member, uint64_t order) {
    const size_t length = strlen(member->link);
    const int width = length > UINT8_MAX ? 1 : 0;     /* the length has 1 << width bytes */
    fc_h5_add_number(to, 1, 1);                       /* version */
    fc_h5_add_number(to, 0x14u | (unsigned)width, 1); /* flags: has creation order and character set */
    fc_h5_add_number(to, order, 8);
    fc_h5_add_number(to, 1, 1); /* UTF-8 */
    fc_h5_add_number(to, length, 1 << width);
    fc_h5_add_bytes(to, member->link, length);
    fc_h5_add_number(to, member->address, 8);
}

/* Appends the checksum of the bytes from `start` on. */
static void add_checksum(fc_h5_buffer *to, size_t start) {
    fc_h5_add_number(to, to->failed ? 0 : fc_h5_checksum(to->data + start, to->size - start), 4);
}

/* ---- the fractal heap ---- */

/* A link in the heap. */
typedef struct record {
    uint32_t hash;
    uint32_t order;
    const char *link;
    unsigned char id[HEAP_ID];
} record;

typedef struct links {
    fc_h5_image *image;
    record *records;
    size_t count;
    uint64_t heap; /* address of the heap's header */
} links;

static uint64_t address_of(const fc_h5_image *image, size_t at) {
    return image->objects_at + at;
}

static size_t link_size(const char *link) {
    const size_t length = strlen(link);
    return 1 + 1 + 8 + 1 + (length > UINT8_MAX ? 2 : 1) + length + 8;
}

/* Adds one direct block with as many members from `first` on as fit. @return the first that does not fit. */
static size_t add_block(links *l, const fc_h5_group *group, size_t first, size_t block, uint64_t offset) {
    fc_h5_buffer *to = &l->image->objects;
    const size_t start = to->size;
    fc_h5_add_bytes(to, "FHDB\0", 5);
    fc_h5_add_number(to, l->heap, 8);
    fc_h5_add_number(to, offset, OFFSET);
    const size_t check = to->size;
    fc_h5_add_zeros(to, 4);
    size_t i = first;
    for (; i < group->count && to->size - start + link_size(group->members[i].link) <= block; i++) {
        const size_t at = to->size;
        add_link(to, &group->members[i], i);
        record *r = &l->records[i];
        const char *link = group->members[i].link;
        *r = (record){fc_h5_checksum((const unsigned char *)link, strlen(link)), (uint32_t)i, link, {0}};
        fc_store_little(r->id + 1, offset + (at - start), OFFSET);
        fc_store_little(r->id + 1 + OFFSET, to->size - at, 2);
    }
    fc_h5_add_zeros(to, block - (to->size - start));
    if (!to->failed) {
        fc_store_little(to->data + check, fc_h5_checksum(to->data + start, block), 4);
    }
    return i;
}

/* The blocks of the links, of `size` bytes each. */
typedef struct blocks {
    size_t size, count;
    size_t row;     /* entries in the list of blocks */
    uint64_t used;  /* bytes of links */
    size_t longest; /* bytes of the longest link */
    uint64_t root;  /* address of the block, or of the list of blocks */
} blocks;

static blocks plan_blocks(const fc_h5_group *group) {
    blocks b = {.size = SMALLEST_BLOCK, .count = 1};
    size_t in_block = BLOCK_HEAD;
    for (size_t i = 0; i < group->count; i++) {
        const size_t size = link_size(group->members[i].link);
        b.used += size;
        b.longest = size > b.longest ? size : b.longest;
    }
    while (b.size < b.used + BLOCK_HEAD && b.size < LARGEST_BLOCK) {
        b.size *= 2;
    }
    for (size_t i = 0; i < group->count; i++) {
        const size_t size = link_size(group->members[i].link);
        if (in_block + size > b.size) {
            b.count++;
            in_block = BLOCK_HEAD;
        }
        in_block += size;
    }
    for (b.row = LEAST_ROW; b.row < b.count; b.row *= 2) {
    }
    return b;
}

/*
 * libhdf5 counts all blocks that a list has entries for as managed space, and the room in them as free, whether or not
 * they are allocated. It looks for a place for a new link there, so it destroys the group if they are not counted. It
 * begins to use the offset of the next block when there is a list.
 */
static size_t heap_header(fc_h5_buffer *to, const fc_h5_group *group, const blocks *b) {
    const bool listed = b->count > 1;
    const uint64_t managed = listed ? b->row : 1, allocated = (uint64_t)b->size * b->count;
    const size_t start = to->size;
    fc_h5_add_bytes(to, "FRHP\0", 5);
    fc_h5_add_number(to, HEAP_ID, 2);
    fc_h5_add_number(to, 0, 2); /* no filters */
    fc_h5_add_number(to, 2, 1); /* direct blocks have checksums */
    fc_h5_add_number(to, b->longest > USUAL_LARGEST ? LARGEST_BLOCK - BLOCK_HEAD : USUAL_LARGEST, 4); /* an object */
    fc_h5_add_number(to, 0, 8);
    fc_h5_add_number(to, FC_H5_UNDEFINED, 8);                            /* no huge objects */
    fc_h5_add_number(to, managed * (b->size - BLOCK_HEAD) - b->used, 8); /* free bytes in managed blocks */
    fc_h5_add_number(to, FC_H5_UNDEFINED, 8);                            /* no free-space manager */
    fc_h5_add_number(to, managed * b->size, 8);
    fc_h5_add_number(to, allocated, 8);
    fc_h5_add_number(to, listed ? allocated : 0, 8); /* offset of the next block */
    fc_h5_add_number(to, group->count, 8);
    fc_h5_add_zeros(to, 4 * 8); /* huge and tiny objects */
    fc_h5_add_number(to, b->row, 2);
    fc_h5_add_number(to, b->size, 8);
    fc_h5_add_number(to, LARGEST_BLOCK, 8);
    fc_h5_add_number(to, 32, 2); /* bits of an offset */
    fc_h5_add_number(to, 1, 2);  /* rows to start with */
    fc_h5_add_number(to, b->root, 8);
    fc_h5_add_number(to, listed, 2); /* current number of rows */
    add_checksum(to, start);
    return start;
}

enum { HEAP_HEADER = 5 + 2 + 2 + 1 + 4 + 12 * 8 + 2 + 8 + 8 + 2 + 2 + 8 + 2 + 4 };

/* Adds the heap: its header, then the list of blocks if there are several, then the blocks. */
static void add_heap(links *l, const fc_h5_group *group) {
    fc_h5_buffer *to = &l->image->objects;
    blocks b = plan_blocks(group);
    to->failed |= b.count > MOST_BLOCKS;
    fc_h5_pad(to, 8);
    l->heap = address_of(l->image, to->size);
    size_t root = to->size + HEAP_HEADER;
    root += (8 - root % 8) % 8;
    b.root = address_of(l->image, root);
    heap_header(to, group, &b);
    fc_h5_pad(to, 8);
    if (b.count > 1 && !to->failed) {
        const size_t start = to->size;
        const size_t list = 5 + 8 + OFFSET + 8 * b.row + 4;
        const size_t first = start + list + (8 - (start + list) % 8) % 8;
        fc_h5_add_bytes(to, "FHIB\0", 5);
        fc_h5_add_number(to, l->heap, 8);
        fc_h5_add_number(to, 0, OFFSET);
        for (size_t i = 0; i < b.row; i++) {
            fc_h5_add_number(to, i < b.count ? address_of(l->image, first + i * b.size) : FC_H5_UNDEFINED, 8);
        }
        add_checksum(to, start);
        fc_h5_pad(to, 8);
    }
    for (size_t i = 0, next = 0; i < b.count && !to->failed; i++) {
        next = add_block(l, group, next, b.size, (uint64_t)i * b.size);
    }
}

/* ---- B-trees ---- */

static int compare_record_hashes(const void *a, const void *b) {
    const record *x = a, *y = b;
    return x->hash != y->hash ? (x->hash > y->hash) - (x->hash < y->hash) : strcmp(x->link, y->link);
}

static void add_records(fc_h5_buffer *to, int type, const record *records, size_t count) {
    for (size_t i = 0; i < count; i++) {
        if (type == BY_NAME) {
            fc_h5_add_number(to, records[i].hash, 4);
        } else {
            fc_h5_add_number(to, records[i].order, 8);
        }
        fc_h5_add_bytes(to, records[i].id, HEAP_ID);
    }
}

/* Starts a leaf, or the part of an inner node with its records. */
static size_t begin_node(fc_h5_buffer *to, const char *signature, int type, const record *records, size_t count) {
    fc_h5_pad(to, 8);
    const size_t start = to->size;
    fc_h5_add_bytes(to, signature, 4);
    fc_h5_add_number(to, 0, 1);
    fc_h5_add_number(to, (uint64_t)type, 1);
    add_records(to, type, records, count);
    return start;
}

static size_t add_leaf(fc_h5_buffer *to, int type, const record *records, size_t count, size_t node) {
    const size_t start = begin_node(to, "BTLF", type, records, count);
    add_checksum(to, start);
    fc_h5_add_zeros(to, node - (to->size - start));
    return start;
}

/* Adds a tree of two levels. The root contains one record between each pair of leaves. */
static size_t add_two_levels(links *l, int type, size_t leaf, size_t node, size_t *in_root) {
    fc_h5_buffer *to = &l->image->objects;
    const size_t children = l->count / (leaf + 1) + 1, in_leaves = l->count - (children - 1);
    struct {
        uint64_t address;
        size_t count;
    } *child = calloc(children, sizeof *child);
    record *between = calloc(children, sizeof *between);
    size_t start = 0, at = 0;
    if (!child || !between) {
        to->failed = true;
        goto out;
    }
    for (size_t i = 0; i < children; i++) {
        child[i].count = in_leaves / children + (i < in_leaves % children);
        child[i].address = address_of(l->image, add_leaf(to, type, l->records + at, child[i].count, node));
        at += child[i].count;
        if (i + 1 < children) {
            between[i] = l->records[at++];
        }
    }
    start = begin_node(to, "BTIN", type, between, children - 1);
    for (size_t i = 0; i < children; i++) {
        fc_h5_add_number(to, child[i].address, 8);
        fc_h5_add_number(to, child[i].count, 2);
    }
    add_checksum(to, start);
    fc_h5_add_zeros(to, node - (to->size - start));
    *in_root = children - 1;
out:
    free(child);
    free(between);
    return start;
}

/* @return the number of records per leaf at which the root has room for all leaves. */
static size_t choose_leaf(size_t count, size_t width) {
    size_t leaf = LEAF;
    while (count / (leaf + 1) * (width + CHILD) + CHILD > leaf * width) {
        leaf *= 2;
    }
    return leaf;
}

/* @return the address of the tree's header. */
static uint64_t add_tree(links *l, int type) {
    fc_h5_buffer *to = &l->image->objects;
    const size_t width = (type == BY_NAME ? 4 : 8) + HEAP_ID;
    const bool deep = l->count > LEAF;
    const size_t leaf = choose_leaf(l->count, width);
    size_t node = NODE_HEAD + 4 + (deep ? leaf : l->count) * width, in_root = l->count;
    node = node < LEAST_NODE ? LEAST_NODE : node;
    const size_t root =
        deep ? add_two_levels(l, type, leaf, node, &in_root) : add_leaf(to, type, l->records, l->count, node);
    fc_h5_pad(to, 8);
    const size_t start = to->size;
    fc_h5_add_bytes(to, "BTHD\0", 5);
    fc_h5_add_number(to, (uint64_t)type, 1);
    fc_h5_add_number(to, node, 4);
    fc_h5_add_number(to, width, 2);
    fc_h5_add_number(to, deep, 2); /* number of levels below the root */
    fc_h5_add_number(to, 100, 1);  /* percentages at which a node is split and merged */
    fc_h5_add_number(to, 40, 1);
    fc_h5_add_number(to, address_of(l->image, root), 8);
    fc_h5_add_number(to, in_root, 2);
    fc_h5_add_number(to, l->count, 8);
    add_checksum(to, start);
    return address_of(l->image, start);
}

/* ---- the group ---- */

typedef struct storage {
    uint64_t heap, names, orders;
} storage;

static fc_code store_links(fc_h5_image *image, const fc_h5_group *group, storage *out, fc_error *err) {
    links l = {.image = image, .count = group->count};
    l.records = calloc(group->count, sizeof *l.records);
    if (!l.records || group->count > UINT32_MAX) {
        free(l.records);
        return fc_no_memory(err, image->path);
    }
    add_heap(&l, group);
    if (image->objects.failed) { /* some records are missing */
        free(l.records);
        return fc_no_memory(err, image->path);
    }
    out->heap = l.heap;
    out->orders = add_tree(&l, BY_ORDER);
    fc_sort_items(l.records, l.count, sizeof *l.records, compare_record_hashes);
    out->names = add_tree(&l, BY_NAME);
    free(l.records);
    return FC_OK;
}

fc_code fc_h5_image_group(fc_h5_image *image, fc_h5_group *group, fc_error *err) {
    fc_h5_buffer *to = &image->objects;
    storage s = {FC_H5_UNDEFINED, FC_H5_UNDEFINED, FC_H5_UNDEFINED};
    for (size_t i = 0; i < group->count; i++) {
        if (strlen(group->members[i].link) > LONGEST_LINK) {
            return fc_fail(err, FC_EUNSUPPORTED, "%s: a name of more than %d bytes does not fit into an HDF5 group",
                           image->path, LONGEST_LINK);
        }
    }
    FC_TRY(group->count > COMPACT ? store_links(image, group, &s, err) : FC_OK);
    const size_t start = fc_h5_object_begin(image);
    size_t message = fc_h5_message_begin(to, FC_H5_M_LINK_INFO);
    fc_h5_add_number(to, 0, 1);
    fc_h5_add_number(to, 3, 1); /* order of creation: tracked and indexed */
    fc_h5_add_number(to, group->count, 8);
    fc_h5_add_number(to, s.heap, 8);
    fc_h5_add_number(to, s.names, 8);
    fc_h5_add_number(to, s.orders, 8);
    fc_h5_message_end(to, message);
    message = fc_h5_message_begin(to, FC_H5_M_GROUP_INFO);
    fc_h5_add_zeros(to, 2);
    fc_h5_message_end(to, message);
    for (size_t i = 0; i < group->count && group->count <= COMPACT; i++) {
        message = fc_h5_message_begin(to, FC_H5_M_LINK);
        add_link(to, &group->members[i], i);
        fc_h5_message_end(to, message);
    }
    if (group->size > 0) {
        fc_h5_attributes_begin(to);
    }
    group->messages_at = to->size;
    fc_h5_add_bytes(to, group->messages, group->size);
    fc_h5_object_end(image, start);
    group->address = address_of(image, start);
    return FC_OK;
}
