/*
 * Reads the chunk indexes of HDF5 2.0: see chunk_index.h. Every block has a signature and a checksum, and every number
 * is checked, because the file may be damaged on purpose.
 */
#include "hdf5/reader_process/chunk_index.h"

#include "base/checked.h"
#include "base/little.h"
#include "hdf5/object_header.h"
#include "hdf5/reader_process/child.h"

#include <stdlib.h>
#include <string.h>

enum {
    ELEMENT = 20, /* bytes of an element: an address, a size, a filter mask */
    PREFIX = 6,   /* a signature, a version, the kind of what is indexed */
    ADDRESS = 8,
    CHECKSUM = 4,
    MOST_BLOCK = 1 << 30,
    MOST_DEPTH = 32
};

typedef struct walk {
    const fc_h5_source *source;
    const fc_h5_chunk_grid *grid;
    int slowest; /* the dimension that an extensible array counts first; -1: they are in order */
    fc_h5_indexed_fn visit;
    void *context;
} walk;

/* ---- blocks ---- */

/* Reads `size` bytes that end in a checksum. @return them, which the caller frees; NULL if they are damaged. */
static unsigned char *read_checked(const walk *w, uint64_t at, uint64_t size) {
    if (size < CHECKSUM || size > MOST_BLOCK || !fc_range_within(at, size, (uint64_t)w->source->st->st_size)) {
        return NULL;
    }
    unsigned char *bytes = fc_h5_child_calloc((size_t)size, 1);
    if (!fc_h5_vfd_read(w->source, at, (size_t)size, bytes) ||
        fc_h5_checksum(bytes, (size_t)size - CHECKSUM) != fc_load_little(bytes + size - CHECKSUM, CHECKSUM)) {
        free(bytes);
        return NULL;
    }
    return bytes;
}

/* The same for a block with a signature. `kind` is what it indexes: of arrays 1 is filtered chunks, of trees 11. */
static unsigned char *read_block(const walk *w, uint64_t at, uint64_t size, const char *signature, int kind) {
    unsigned char *bytes = read_checked(w, at, size);
    if (bytes && (memcmp(bytes, signature, 4) != 0 || bytes[4] != 0 || bytes[5] != kind)) {
        free(bytes);
        bytes = NULL;
    }
    return bytes;
}

/* ---- chunks ---- */

/* Visits a chunk if it is stored and within the shape. `scaled` has its place in the grid. */
static bool visit_scaled(const walk *w, const unsigned char *element, const uint64_t *scaled) {
    const fc_h5_chunk_grid *g = w->grid;
    hsize_t at[H5S_MAX_RANK];
    fc_h5_indexed_chunk c = {fc_load_little(element, 8), fc_load_little(element + 8, 8),
                             (uint32_t)fc_load_little(element + 16, 4), at};
    if (c.address == UINT64_MAX) {
        return true;
    }
    for (int k = 0; k < g->ndim; k++) {
        uint64_t first;
        if (!fc_mul_u64(scaled[k], g->chunk[k], &first) || first >= g->dims[k]) {
            return true;
        }
        at[k] = first;
    }
    return w->visit(w->context, &c);
}

/* Visits the element with a number of an array: arrays count the chunks of the largest shape in row-major order. */
static bool visit_numbered(const walk *w, const unsigned char *element, uint64_t number) {
    const fc_h5_chunk_grid *g = w->grid;
    uint64_t scaled[H5S_MAX_RANK];
    for (int i = g->ndim - 1; i >= 0; i--) {
        /* The slowest dimension is counted first, then the others in order. */
        const int k = w->slowest < 0 ? i : i == 0 ? w->slowest : i <= w->slowest ? i - 1 : i;
        const bool last = i == 0;
        const uint64_t count = last ? UINT64_MAX : (g->most[k] - 1) / g->chunk[k] + 1;
        scaled[k] = last ? number : number % count;
        number = last ? 0 : number / count;
    }
    return visit_scaled(w, element, scaled);
}

static bool visit_run(const walk *w, const unsigned char *elements, uint64_t count, uint64_t first) {
    bool ok = true;
    for (uint64_t i = 0; i < count && ok; i++) {
        ok = visit_numbered(w, elements + i * ELEMENT, first + i);
    }
    return ok;
}

/* Visits `count` elements that are stored in pages, each with a checksum. `bits` says which pages exist, from bit
   `bit` on; the first bit of a byte is its highest. */
static bool visit_pages(const walk *w, uint64_t at, uint64_t count, uint64_t page, uint64_t first,
                        const unsigned char *bits, uint64_t bit) {
    bool ok = true;
    for (uint64_t done = 0; done < count && ok; done += page, bit++) {
        const uint64_t n = count - done < page ? count - done : page;
        const uint64_t size = n * ELEMENT + CHECKSUM;
        if (bits[bit / 8] & 0x80 >> bit % 8) {
            unsigned char *elements = read_checked(w, at, size);
            ok = elements && visit_run(w, elements, n, first + done);
            free(elements);
        }
        ok = ok && fc_add_u64(at, size, &at);
    }
    return ok;
}

/* ---- fixed arrays ---- */

static bool walk_fixed(const walk *w, uint64_t address) {
    enum { SIZE = PREFIX + 2 + 8 + ADDRESS + CHECKSUM, BLOCK_PREFIX = PREFIX + ADDRESS, MOST_BITS = 32 };
    unsigned char *head = read_block(w, address, SIZE, "FAHD", 1), *block = NULL;
    if (!head) {
        return false;
    }
    const int bits = head[PREFIX + 1];
    const uint64_t count = fc_load_little(head + PREFIX + 2, 8), at = fc_load_little(head + PREFIX + 10, ADDRESS);
    bool ok = head[PREFIX] == ELEMENT && bits <= MOST_BITS;
    free(head);
    if (!ok || at == UINT64_MAX) {
        return ok;
    }
    const uint64_t page = UINT64_C(1) << bits;
    if (count <= page) {
        block = read_block(w, at, BLOCK_PREFIX + count * ELEMENT + CHECKSUM, "FADB", 1);
        ok = block && visit_run(w, block + BLOCK_PREFIX, count, 0);
    } else if (count <= MOST_BLOCK) {
        const uint64_t pages = (count - 1) / page + 1, size = BLOCK_PREFIX + (pages + 7) / 8 + CHECKSUM;
        block = read_block(w, at, size, "FADB", 1);
        ok = block && visit_pages(w, at + size, count, page, 0, block + BLOCK_PREFIX, 0);
    } else {
        ok = false;
    }
    free(block);
    return ok;
}

/* ---- extensible arrays ---- */

/* The parameters of an extensible array. */
typedef struct array {
    int bits, offset;        /* bits of a number of an element, and the bytes of such a number */
    uint64_t direct, least;  /* elements in the index block; in the smallest data block */
    uint64_t pointers, page; /* least pointers of a secondary block; elements of a page */
} array;

/* Reads a block that records its place in the array as `offset`, or as the number of its first
   element. So no block can be used at many places, which would take forever. */
static unsigned char *read_part(const walk *w, const array *a, uint64_t at, uint64_t size, const char *signature,
                                uint64_t offset, uint64_t first) {
    unsigned char *block = read_block(w, at, size, signature, 1);
    const uint64_t found = block ? fc_load_little(block + PREFIX + ADDRESS, a->offset) : 0;
    if (block && found != offset && found != first - a->direct) {
        free(block);
        block = NULL;
    }
    return block;
}

/* Visits the elements of a data block. `bits` and `bit` are those of its pages. */
static bool walk_data_block(const walk *w, const array *a, uint64_t at, uint64_t offset, uint64_t count, uint64_t first,
                            const unsigned char *bits, uint64_t bit) {
    const uint64_t prefix = PREFIX + ADDRESS + (uint64_t)a->offset;
    const bool paged = count > a->page;
    if (at == UINT64_MAX) {
        return true;
    }
    if (count > MOST_BLOCK || (paged && !bits)) {
        return false;
    }
    const uint64_t size = prefix + (paged ? 0 : count * ELEMENT) + CHECKSUM;
    unsigned char *block = read_part(w, a, at, size, "EADB", offset, first);
    const bool ok = block && (paged ? visit_pages(w, at + size, count, a->page, first, bits, bit)
                                    : visit_run(w, block + prefix, count, first));
    free(block);
    return ok;
}

/* Group `u` of data blocks has 2^(u/2) of them, each with 2^((u+1)/2) times the least elements. */
static uint64_t blocks_of(int u) {
    return UINT64_C(1) << u / 2;
}

static uint64_t elements_of(const array *a, int u) {
    return a->least << (u + 1) / 2;
}

/* A secondary block has the addresses of a group of data blocks, after the bits of their pages. */
static bool walk_secondary(const walk *w, const array *a, uint64_t at, int u, uint64_t first) {
    const uint64_t blocks = blocks_of(u), count = elements_of(a, u);
    const uint64_t pages = count > a->page ? count / a->page : 0, bitmap = blocks * ((pages + 7) / 8);
    const uint64_t prefix = PREFIX + ADDRESS + (uint64_t)a->offset;
    if (at == UINT64_MAX) {
        return true;
    }
    unsigned char *block =
        read_part(w, a, at, prefix + bitmap + blocks * ADDRESS + CHECKSUM, "EASB", first - a->direct, first);
    bool ok = block != NULL;
    for (uint64_t i = 0; i < blocks && ok; i++) {
        const uint64_t data = fc_load_little(block + prefix + bitmap + i * ADDRESS, ADDRESS);
        ok = walk_data_block(w, a, data, first - a->direct + i * count, count, first + i * count, block + prefix,
                             i * pages);
    }
    free(block);
    return ok;
}

/* The index block has the first elements, then the addresses of data blocks, then those of secondary blocks. */
static bool walk_index_block(const walk *w, const array *a, uint64_t at) {
    const int groups = 1 + a->bits - (63 - __builtin_clzll(a->least));
    const int direct = 2 * (63 - __builtin_clzll(a->pointers)); /* groups whose data blocks are listed here */
    const uint64_t blocks = 2 * (a->pointers - 1), prefix = PREFIX + ADDRESS;
    if (direct > groups) {
        return false;
    }
    const uint64_t size = prefix + a->direct * ELEMENT + (blocks + (uint64_t)(groups - direct)) * ADDRESS + CHECKSUM;
    unsigned char *block = read_block(w, at, size, "EAIB", 1);
    bool ok = block && visit_run(w, block + prefix, a->direct, 0);
    const unsigned char *next = block ? block + prefix + a->direct * ELEMENT : NULL;
    uint64_t first = a->direct, number = 0;
    for (int u = 0; u < groups && ok; u++) {
        const uint64_t count = elements_of(a, u);
        for (uint64_t i = 0; i < blocks_of(u) && u < direct && ok; i++, number++, next += ADDRESS) {
            /* libhdf5 counts the blocks of the earlier groups twice. */
            const uint64_t offset = first - a->direct + number * count;
            ok = walk_data_block(w, a, fc_load_little(next, ADDRESS), offset, count, first + i * count, NULL, 0);
        }
        if (u >= direct && ok) {
            ok = walk_secondary(w, a, fc_load_little(next, ADDRESS), u, first);
            next += ADDRESS;
        }
        first += blocks_of(u) * count;
    }
    free(block);
    return ok;
}

static bool is_power_of_two(uint64_t x) {
    return x > 0 && (x & (x - 1)) == 0;
}

static bool walk_extensible(const walk *w, uint64_t address) {
    enum { STATISTICS = 48, SIZE = PREFIX + 6 + STATISTICS + ADDRESS + CHECKSUM, MOST_BITS = 40 };
    unsigned char *head = read_block(w, address, SIZE, "EAHD", 1);
    if (!head) {
        return false;
    }
    const unsigned char *p = head + PREFIX;
    const array a = {.bits = p[1],
                     .offset = (p[1] + 7) / 8,
                     .direct = p[2],
                     .least = p[3],
                     .pointers = p[4],
                     .page = UINT64_C(1) << (p[5] & 31)};
    const uint64_t at = fc_load_little(p + 6 + STATISTICS, ADDRESS);
    const bool ok =
        p[0] == ELEMENT && a.bits <= MOST_BITS && p[5] < 32 && is_power_of_two(a.least) && is_power_of_two(a.pointers);
    free(head);
    return ok && (at == UINT64_MAX || walk_index_block(w, &a, at));
}

/* ---- trees ---- */

/* The numbers of records in a node of a depth, and what their counts need in a pointer. */
typedef struct level {
    uint64_t most, total; /* in a node; in a node and below it */
    int width;            /* bytes of a total */
} level;

typedef struct tree {
    uint64_t node, record; /* sizes in bytes */
    level levels[MOST_DEPTH + 1];
    int count; /* bytes of a number of records of a node */
} tree;

static int width_of(uint64_t number) {
    int width = 1;
    while (number >>= 8) {
        width++;
    }
    return width;
}

static uint64_t pointer_size(const tree *t, int depth) {
    return ADDRESS + (uint64_t)t->count + (depth > 1 ? (uint64_t)t->levels[depth - 1].width : 0);
}

/* Computes the levels up to `depth`. @return false if the numbers are invalid. */
static bool set_levels(tree *t, int depth) {
    enum { EMPTY = PREFIX + CHECKSUM };
    if (t->node < EMPTY + t->record || depth > MOST_DEPTH) {
        return false;
    }
    const uint64_t leaf = (t->node - EMPTY) / t->record;
    t->levels[0] = (level){leaf, leaf, 0};
    t->count = width_of(leaf);
    for (int u = 1; u <= depth; u++) {
        const uint64_t pointer = pointer_size(t, u);
        level *l = &t->levels[u];
        if (t->node < EMPTY + pointer + t->record + pointer) {
            return false;
        }
        l->most = (t->node - EMPTY - pointer) / (t->record + pointer);
        if (!fc_mul_u64(l->most + 1, t->levels[u - 1].total, &l->total) || !fc_add_u64(l->total, l->most, &l->total)) {
            return false;
        }
        l->width = width_of(l->total);
    }
    return true;
}

static bool visit_record(const walk *w, const unsigned char *record) {
    uint64_t scaled[H5S_MAX_RANK];
    for (int k = 0; k < w->grid->ndim; k++) {
        scaled[k] = fc_load_little(record + ELEMENT + 8 * k, 8);
    }
    return visit_scaled(w, record, scaled);
}

/* Recursion ends because each level is one depth lower, and nodes that are used twice repeat chunks, which the parent
   refuses; `left` bounds the number of nodes until then. */
static bool walk_node(const walk *w, const tree *t, uint64_t at, uint64_t records, int depth, uint64_t *left) {
    if (records > t->levels[depth].most || *left == 0) {
        return false;
    }
    --*left;
    const uint64_t pointers = depth > 0 ? records + 1 : 0, pointer = depth > 0 ? pointer_size(t, depth) : 0;
    unsigned char *node = read_block(w, at, PREFIX + records * t->record + pointers * pointer + CHECKSUM,
                                     depth > 0 ? "BTIN" : "BTLF", 11);
    bool ok = node != NULL;
    for (uint64_t i = 0; i < records && ok; i++) {
        ok = visit_record(w, node + PREFIX + i * t->record);
    }
    for (uint64_t i = 0; i < pointers && ok; i++) {
        const unsigned char *p = node + PREFIX + records * t->record + i * pointer;
        ok = walk_node(w, t, fc_load_little(p, ADDRESS), fc_load_little(p + ADDRESS, t->count), depth - 1, left);
    }
    free(node);
    return ok;
}

static bool walk_tree(const walk *w, uint64_t address) {
    enum { SIZE = PREFIX + 4 + 2 + 2 + 2 + ADDRESS + 2 + 8 + CHECKSUM, LEAST_NODE = 64 };
    unsigned char *head = read_block(w, address, SIZE, "BTHD", 11);
    if (!head) {
        return false;
    }
    const unsigned char *p = head + PREFIX;
    tree t = {.node = fc_load_little(p, 4), .record = fc_load_little(p + 4, 2)};
    const int depth = (int)fc_load_little(p + 6, 2);
    const uint64_t root = fc_load_little(p + 10, ADDRESS), records = fc_load_little(p + 18, 2);
    bool ok = t.record == ELEMENT + 8 * (uint64_t)w->grid->ndim && set_levels(&t, depth);
    uint64_t left = (uint64_t)w->source->st->st_size / LEAST_NODE;
    free(head);
    return ok && (root == UINT64_MAX || walk_node(w, &t, root, records, depth, &left));
}

bool fc_h5_index_walk(const fc_h5_source *source, const fc_h5_chunk_index *index, const fc_h5_chunk_grid *grid,
                      fc_h5_indexed_fn visit, void *context) {
    walk w = {source, grid, -1, visit, context};
    if (index->address == UINT64_MAX) {
        return true;
    }
    for (int k = 0; k < grid->ndim && index->kind == FC_H5_EXTENSIBLE_ARRAY; k++) {
        w.slowest = grid->most[k] == H5S_UNLIMITED ? k : w.slowest;
    }
    for (int k = 0; k < grid->ndim && index->kind != FC_H5_TREE; k++) {
        if (grid->most[k] == 0 || (grid->most[k] == H5S_UNLIMITED && k != w.slowest)) {
            return false;
        }
    }
    return index->kind == FC_H5_FIXED_ARRAY        ? walk_fixed(&w, index->address)
           : index->kind == FC_H5_EXTENSIBLE_ARRAY ? walk_extensible(&w, index->address)
                                                   : walk_tree(&w, index->address);
}
