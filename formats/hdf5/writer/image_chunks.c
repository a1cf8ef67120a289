/*
 * Chunk indexes of an image; see image_chunks.h. Keys and nodes are those of "Version 1 B-trees", node type 1.
 *
 * All nodes of a file have room for the same number of children. With the default of libhdf5, 64, even an index of one
 * chunk takes 2.6 KB, more than the rest of the dataset's headers. So the number is chosen for each file and stored in
 * the superblock extension.
 */
#include "hdf5/writer/image_chunks.h"

#include <errno.h>

enum {
    NODE_HEAD = 24,      /* signature, type, level, entries, siblings */
    USUAL_CHILDREN = 64, /* of a node, if the file has no superblock extension */
    MOST_LEVELS = 64,
    INCREMENTAL_NEVER = 0x07 /* when space is allocated and fill values are written, as libhdf5 encodes it */
};

/* ---- sizes ---- */

/* A key: size and filter mask of a chunk, and where it begins. */
static size_t key_size(int ndim) {
    return 4 + 4 + 8 * ((size_t)ndim + 1);
}

static size_t node_size(unsigned children, int ndim) {
    return NODE_HEAD + (size_t)children * 8 + ((size_t)children + 1) * key_size(ndim);
}

static uint64_t divide_up(uint64_t n, uint64_t by) {
    return (n - 1) / by + 1;
}

/* Nodes of all levels, leaves first. @return how many levels */
static int count_nodes(uint64_t chunks, unsigned children, uint64_t nodes[MOST_LEVELS]) {
    int levels = 0;
    do {
        chunks = nodes[levels++] = divide_up(chunks, children);
    } while (chunks > 1 && levels < MOST_LEVELS);
    return levels;
}

static uint64_t chunks_of(const fc_h5_grid *grid) {
    uint64_t chunks = 1;
    for (int k = 0; k < grid->ndim; k++) {
        chunks *= divide_up((uint64_t)grid->shape[k], (uint64_t)grid->chunk[k]); /* at most the elements */
    }
    return chunks;
}

static uint64_t index_size(const fc_h5_grid *grid, unsigned children) {
    uint64_t nodes[MOST_LEVELS], total = 0;
    const int levels = count_nodes(chunks_of(grid), children, nodes);
    for (int i = 0; i < levels; i++) {
        total += nodes[i];
    }
    return total * node_size(children, grid->ndim);
}

/* The smallest total size, of those with at most two levels: a reader reads one node for each level. */
void fc_h5_image_choose_nodes(fc_h5_image *image, const fc_h5_grid *grids, size_t count) {
    uint64_t best = UINT64_MAX, most = 0;
    for (size_t i = 0; i < count; i++) {
        const uint64_t chunks = chunks_of(&grids[i]);
        most = chunks > most ? chunks : most;
    }
    image->children = USUAL_CHILDREN;
    for (unsigned children = USUAL_CHILDREN; children >= 2 && (uint64_t)children * children >= most; children /= 2) {
        uint64_t total = 0;
        for (size_t i = 0; i < count; i++) {
            total += index_size(&grids[i], children);
        }
        if (total < best) {
            best = total;
            image->children = children;
        }
    }
    if (image->children == USUAL_CHILDREN) {
        return;
    }
    image->extension = fc_h5_object_begin(image) + 1;
    const size_t message = fc_h5_message_begin(&image->objects, FC_H5_M_BTREE_K);
    fc_h5_add_number(&image->objects, 0, 1);                   /* version */
    fc_h5_add_number(&image->objects, image->children / 2, 2); /* nodes of chunk indexes */
    fc_h5_add_number(&image->objects, 16, 2);                  /* of groups in the old format: the default */
    fc_h5_add_number(&image->objects, 4, 2);
    fc_h5_message_end(&image->objects, message);
    fc_h5_object_end(image, image->extension - 1);
}

/* ---- headers ---- */

size_t fc_h5_image_add_index(fc_h5_image *image, const fc_h5_grid *grid) {
    if (!fc_grow(&image->indexes, &image->indexes_capacity, image->nindexes + 1, sizeof *image->indexes)) {
        image->objects.failed = true;
        return 0;
    }
    fc_h5_pad(&image->objects, 8);
    image->indexes[image->nindexes] = (fc_h5_chunk_index){*grid, image->objects.size, chunks_of(grid), 0};
    fc_h5_add_zeros(&image->objects, index_size(grid, image->children));
    return image->nindexes++;
}

static void add_filter(fc_h5_buffer *to, int filter, uint32_t value) {
    fc_h5_add_number(to, (uint64_t)filter, 2);
    fc_h5_add_number(to, 1, 2); /* may be skipped */
    fc_h5_add_number(to, 1, 2); /* values */
    fc_h5_add_number(to, value, 4);
}

static void add_pipeline(fc_h5_buffer *to, uint32_t element, int level) {
    const size_t message = fc_h5_message_begin(to, FC_H5_M_FILTERS);
    fc_h5_add_number(to, 2, 1); /* version */
    fc_h5_add_number(to, (uint64_t)fc_h5_filters(element), 1);
    if (element > 1) {
        add_filter(to, H5Z_FILTER_SHUFFLE, element);
    }
    add_filter(to, H5Z_FILTER_DEFLATE, (uint32_t)level);
    fc_h5_message_end(to, message);
}

/* @return the offset of the root of an index in `objects`. It follows all other nodes. */
static size_t root_of(const fc_h5_image *image, const fc_h5_chunk_index *index) {
    return index->at + index_size(&index->grid, image->children) - node_size(image->children, index->grid.ndim);
}

void fc_h5_image_chunked(fc_h5_image *image, size_t number, int level) {
    fc_h5_buffer *to = &image->objects;
    if (to->failed) {
        return;
    }
    const fc_h5_chunk_index *index = &image->indexes[number];
    const fc_h5_grid *grid = &index->grid;
    fc_h5_image_fill(to, INCREMENTAL_NEVER, NULL, 0);
    add_pipeline(to, grid->element, level);
    const size_t message = fc_h5_message_begin(to, FC_H5_M_LAYOUT);
    fc_h5_add_number(to, 3, 1); /* version */
    fc_h5_add_number(to, 2, 1); /* chunked */
    fc_h5_add_number(to, (uint64_t)grid->ndim + 1, 1);
    fc_h5_image_add_inner(image, root_of(image, index));
    for (int k = 0; k < grid->ndim; k++) {
        fc_h5_add_number(to, (uint64_t)grid->chunk[k], 4);
    }
    fc_h5_add_number(to, grid->element, 4);
    fc_h5_message_end(to, message);
}

/* ---- chunks ---- */

/* @return entry `entry` of level `level`, which begins at `at`: the key, followed by the child. */
static unsigned char *entry_at(const fc_h5_image *image, const fc_h5_chunk_index *index, size_t at, uint64_t entry) {
    const size_t node = node_size(image->children, index->grid.ndim);
    return image->objects.data + at + entry / image->children * node + NODE_HEAD +
           entry % image->children * (key_size(index->grid.ndim) + 8);
}

fc_code fc_h5_image_place(fc_h5_image *image, size_t number, const int64_t *start, bool raw, uint64_t size,
                          uint64_t *offset, fc_error *err) {
    fc_h5_chunk_index *index = &image->indexes[number];
    const fc_h5_grid *grid = &index->grid;
    const uint64_t align = size >= FC_H5_LARGE ? FC_H5_LARGE_ALIGN : FC_H5_SMALL_ALIGN;
    const uint64_t at = (image->file_size + align - 1) / align * align;
    uint64_t chunk = 0;
    if (size > UINT32_MAX || at > INT64_MAX - size) {
        return fc_fail_errno(err, EFBIG, "%s: reserving space at offset %llu", image->path, (unsigned long long)at);
    }
    for (int k = 0; k < grid->ndim; k++) {
        chunk = chunk * divide_up((uint64_t)grid->shape[k], (uint64_t)grid->chunk[k]) +
                (uint64_t)(start[k] / grid->chunk[k]);
    }
    unsigned char *entry = entry_at(image, index, index->at, chunk);
    fc_store_little(entry, size, 4);
    fc_store_little(entry + 4, raw ? (1u << fc_h5_filters(grid->element)) - 1 : 0, 4);
    for (int k = 0; k < grid->ndim; k++) {
        fc_store_little(entry + 8 + 8 * (size_t)k, (uint64_t)start[k], 8);
    }
    fc_store_little(entry + key_size(grid->ndim), at, 8);
    index->placed++;
    image->file_size = at + size;
    *offset = at;
    return FC_OK;
}

fc_h5_chunk_row fc_h5_image_placed(const fc_h5_image *image, size_t number, uint64_t chunk) {
    const fc_h5_chunk_index *index = &image->indexes[number];
    const unsigned char *entry = entry_at(image, index, index->at, chunk);
    return (fc_h5_chunk_row){.offset = fc_load_little(entry + key_size(index->grid.ndim), 8),
                             .length = (uint32_t)fc_load_little(entry, 4),
                             .mask = (uint32_t)fc_load_little(entry + 4, 4)};
}

/* ---- nodes ---- */

/* Makes the last key of each level, which is greater than the last chunk's. */
static void end_key(const fc_h5_image *image, const fc_h5_chunk_index *index, unsigned char *key) {
    const fc_h5_grid *grid = &index->grid;
    const unsigned char *last = entry_at(image, index, index->at, index->chunks - 1);
    const size_t place = 8 + 8 * (size_t)(grid->ndim - 1);
    memcpy(key + 8, last + 8, 8 * (size_t)grid->ndim);
    fc_store_little(key + place, fc_load_little(last + place, 8) + (uint64_t)grid->chunk[grid->ndim - 1], 8);
    fc_store_little(key + 8 + 8 * (size_t)grid->ndim, grid->element, 8);
}

/* Completes the nodes of a level, which has `entries` keys and children. */
static void finish_level(fc_h5_image *image, const fc_h5_chunk_index *index, size_t at, int level, uint64_t entries) {
    static const unsigned char signature[] = {'T', 'R', 'E', 'E', 1};
    const size_t node = node_size(image->children, index->grid.ndim), key = key_size(index->grid.ndim);
    const uint64_t nodes = divide_up(entries, image->children), address = image->objects_at + at;
    for (uint64_t i = 0; i < nodes; i++) {
        unsigned char *start = image->objects.data + at + i * node;
        const bool last = i + 1 == nodes;
        const uint64_t used = last ? entries - i * image->children : image->children;
        memcpy(start, signature, sizeof signature);
        fc_store_little(start + 5, (uint64_t)level, 1);
        fc_store_little(start + 6, used, 2);
        fc_store_little(start + 8, i > 0 ? address + (i - 1) * node : FC_H5_UNDEFINED, 8);
        fc_store_little(start + 16, last ? FC_H5_UNDEFINED : address + (i + 1) * node, 8);
        unsigned char *behind = start + NODE_HEAD + used * (key + 8);
        if (last) {
            end_key(image, index, behind);
        } else {
            memcpy(behind, start + node + NODE_HEAD, key);
        }
    }
}

/* Adds the entries for the nodes of the level at `below`. */
static void add_parents(fc_h5_image *image, const fc_h5_chunk_index *index, size_t below, uint64_t nodes, size_t at) {
    const size_t node = node_size(image->children, index->grid.ndim), key = key_size(index->grid.ndim);
    for (uint64_t i = 0; i < nodes; i++) {
        unsigned char *entry = entry_at(image, index, at, i);
        memcpy(entry, image->objects.data + below + i * node + NODE_HEAD, key);
        fc_store_little(entry + key, image->objects_at + below + i * node, 8);
    }
}

static void finish_index(fc_h5_image *image, const fc_h5_chunk_index *index) {
    uint64_t nodes[MOST_LEVELS], entries = index->chunks;
    const int levels = count_nodes(index->chunks, image->children, nodes);
    size_t at = index->at;
    for (int level = 0; level < levels; level++) {
        const size_t next = at + nodes[level] * node_size(image->children, index->grid.ndim);
        finish_level(image, index, at, level, entries);
        if (level + 1 < levels) {
            add_parents(image, index, at, nodes[level], next);
        }
        entries = nodes[level];
        at = next;
    }
}

fc_code fc_h5_image_finish_indexes(fc_h5_image *image, fc_error *err) {
    for (size_t i = 0; i < image->nindexes; i++) {
        if (image->indexes[i].placed != image->indexes[i].chunks) {
            return fc_fail(err, FC_EIO, "%s: not all chunks of a dataset were written", image->path);
        }
        finish_index(image, &image->indexes[i]);
    }
    return FC_OK;
}
