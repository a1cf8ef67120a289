/*
 * Transposes a matrix of elements in memory. Interleaving some vectors, and the opposite, are transposes of a matrix of
 * few rows or few columns.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

/** A matrix and its transpose. The elements of a row are contiguous in both. */
typedef struct fc_transpose {
    int64_t rows, columns; /**< of the source */
    int64_t src, dst;      /**< bytes from one row to the next; in the destination a row has `rows` elements */
} fc_transpose;

/** Transposes elements of `size` bytes. @return false, and does nothing, unless `size` is 1, 2, 4 or 8. */
bool fc_transpose_run(const fc_transpose *t, int64_t size, const unsigned char *src, unsigned char *dst);
