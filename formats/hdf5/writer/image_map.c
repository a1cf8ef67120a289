/*
 * Lists of mappings: which boxes of a virtual dataset are in which other files. A list is an object of the global heap
 * ("Disk Format: Global Heap Block for Virtual Datasets"). Selections are encoded in their first versions, which every
 * libhdf5 since 1.10 reads.
 */
#include "hdf5/writer/image_map.h"

#include "hdf5/object_header.h"

#include <stdlib.h>

enum { SELECT_HYPERSLAB = 2, SELECT_ALL = 3 };

void fc_h5_list_begin(fc_h5_list *list) {
    list->bytes.size = 0;
    list->count = 0;
    fc_h5_add_zeros(&list->bytes, 1 + 8); /* version, and the number of mappings */
}

static void add_all(fc_h5_buffer *to) {
    fc_h5_add_number(to, SELECT_ALL, 4);
    fc_h5_add_number(to, 1, 4); /* version */
    fc_h5_add_zeros(to, 8);
}

/* Whether version 1, with numbers of 4 bytes, can express the box. */
static bool is_small(int ndim, const int64_t *offsets, const int64_t *sizes) {
    for (int k = 0; k < ndim; k++) {
        if (offsets[k] > UINT32_MAX - sizes[k]) {
            return false;
        }
    }
    return true;
}

/* Version 1: a list of blocks, each as its first and last elements. Here there is one. */
static void add_small_box(fc_h5_buffer *to, int ndim, const int64_t *offsets, const int64_t *sizes) {
    const size_t n = (size_t)ndim;
    fc_h5_add_number(to, SELECT_HYPERSLAB, 4);
    fc_h5_add_number(to, 1, 4); /* version */
    fc_h5_add_zeros(to, 4);
    fc_h5_add_number(to, 8 + 8 * n, 4);
    fc_h5_add_number(to, n, 4);
    fc_h5_add_number(to, 1, 4); /* blocks */
    for (size_t k = 0; k < n; k++) {
        fc_h5_add_number(to, (uint64_t)offsets[k], 4);
    }
    for (size_t k = 0; k < n; k++) {
        fc_h5_add_number(to, (uint64_t)(offsets[k] + sizes[k] - 1), 4);
    }
}

/* Version 2: blocks at equal distances. */
static void begin_regular(fc_h5_buffer *to, int ndim) {
    fc_h5_add_number(to, SELECT_HYPERSLAB, 4);
    fc_h5_add_number(to, 2, 4); /* version */
    fc_h5_add_number(to, 1, 1); /* regular */
    fc_h5_add_number(to, 4 + 32 * (uint64_t)ndim, 4);
    fc_h5_add_number(to, (uint64_t)ndim, 4);
}

static void add_regular(fc_h5_buffer *to, int64_t start, int64_t stride, int64_t count, int64_t block) {
    fc_h5_add_number(to, (uint64_t)start, 8);
    fc_h5_add_number(to, (uint64_t)stride, 8);
    fc_h5_add_number(to, (uint64_t)count, 8);
    fc_h5_add_number(to, (uint64_t)block, 8);
}

static void add_box(fc_h5_buffer *to, int ndim, const int64_t *offsets, const int64_t *sizes) {
    if (is_small(ndim, offsets, sizes)) {
        add_small_box(to, ndim, offsets, sizes);
        return;
    }
    begin_regular(to, ndim);
    for (int k = 0; k < ndim; k++) {
        add_regular(to, offsets[k], 1, 1, sizes[k]);
    }
}

static void add_source(fc_h5_buffer *to, const fc_h5_run *run) {
    if (!run) {
        add_all(to);
    } else if (run->count == 1) {
        add_box(to, 1, &run->start, &run->block);
    } else {
        begin_regular(to, 1);
        add_regular(to, run->start, run->stride, run->count, run->block);
    }
}

/* Escapes percent signs as "%%", because "%b" stands for a block number there. */
static void add_path(fc_h5_buffer *to, const char *path) {
    for (const char *p = path;;) {
        const size_t length = strcspn(p, "%");
        fc_h5_add_bytes(to, p, length);
        p += length;
        if (*p == '\0') {
            break;
        }
        fc_h5_add_bytes(to, "%%", 2);
        p++;
    }
    fc_h5_add_number(to, 0, 1);
}

void fc_h5_list_add(fc_h5_list *list, const char *file, const char *source, const fc_h5_run *run, int ndim,
                    const int64_t *offsets, const int64_t *sizes) {
    list->count++;
    fc_h5_add_bytes(&list->bytes, file, strlen(file) + 1);
    add_path(&list->bytes, source);
    add_source(&list->bytes, run);
    if (ndim == 0) {
        add_all(&list->bytes);
    } else {
        add_box(&list->bytes, ndim, offsets, sizes);
    }
}

fc_h5_heap_id fc_h5_list_end(fc_h5_list *list, fc_h5_image *image) {
    fc_h5_buffer *b = &list->bytes;
    if (!b->failed) {
        fc_store_little(b->data + 1, list->count, 8);
        fc_h5_add_number(b, fc_h5_checksum(b->data, b->size), 4);
    }
    if (b->failed) {
        image->heap.failed = true;
        return (fc_h5_heap_id){0, 0, 0};
    }
    return fc_h5_image_heap_add(image, b->data, b->size);
}

void fc_h5_list_free(fc_h5_list *list) {
    free(list->bytes.data);
    *list = (fc_h5_list){0};
}
