/*
 * Growable lists in malloc'ed memory, for callers that do not know the length in advance.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>

/**
 * Makes room for `needed` elements of `size` bytes each.
 * @param list the address of the pointer to the first element. The pointer is NULL or comes from malloc.
 * @param capacity the number of elements that fit; updated when the list grows.
 * @return false when out of memory; the list is then unchanged.
 */
bool fc_grow(void *list, size_t *capacity, size_t needed, size_t size);

/** Bytes that are sent to another process. */
typedef struct fc_notes {
    unsigned char *data; /**< malloc'ed */
    size_t size, capacity;
} fc_notes;

/** Appends bytes. @return false when out of memory. */
bool fc_notes_add(fc_notes *notes, const void *bytes, size_t size);
