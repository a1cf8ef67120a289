/*
 * Builds bytes of a file in memory, with little-endian numbers like HDF5. Running out of memory is recorded, and
 * checked once at the end.
 */
#pragma once

#include "base/grow.h"
#include "base/little.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef struct fc_h5_buffer {
    unsigned char *data; /**< malloc'ed; freed by the owner of the buffer */
    size_t size, capacity;
    bool failed; /**< out of memory, so the content is incomplete */
} fc_h5_buffer;

/** @return room for `size` more bytes, uninitialised; NULL when out of memory. */
static inline unsigned char *fc_h5_more(fc_h5_buffer *b, size_t size) {
    if (b->failed || size > SIZE_MAX - b->size ||
        (b->capacity - b->size < size && !fc_grow(&b->data, &b->capacity, b->size + size, 1))) {
        b->failed = true;
        return NULL;
    }
    b->size += size;
    return b->data + b->size - size;
}

static inline void fc_h5_add_number(fc_h5_buffer *b, uint64_t value, int bytes) {
    unsigned char *at = fc_h5_more(b, (size_t)bytes);
    if (at) {
        fc_store_little(at, value, bytes);
    }
}

static inline void fc_h5_add_bytes(fc_h5_buffer *b, const void *bytes, size_t size) {
    unsigned char *at = size > 0 ? fc_h5_more(b, size) : NULL;
    if (at) {
        memcpy(at, bytes, size);
    }
}

static inline void fc_h5_add_zeros(fc_h5_buffer *b, size_t size) {
    unsigned char *at = size > 0 ? fc_h5_more(b, size) : NULL;
    if (at) {
        memset(at, 0, size);
    }
}

/** Appends zeros up to the next multiple of `to`. */
static inline void fc_h5_pad(fc_h5_buffer *b, size_t to) {
    fc_h5_add_zeros(b, (to - b->size % to) % to);
}
