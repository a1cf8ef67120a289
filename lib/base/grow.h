/*
 * Growable lists in malloc'ed memory or in an arena, for callers that do not know the length in advance.
 */
#pragma once

#include "fsdpckpt/arena.h"

#include <stdbool.h>
#include <stddef.h>

/**
 * Makes room for `needed` elements of `size` bytes each.
 * @param list the address of the pointer to the first element. The pointer is NULL or comes from malloc.
 * @param capacity the number of elements that fit; updated when the list grows.
 * @return false when out of memory; the list is then unchanged.
 */
bool fc_grow(void *list, size_t *capacity, size_t needed, size_t size);

/**
 * Makes room for `needed` elements in a list of an arena that has `count`: at least twice as many as before. The others
 * are zeros. Old copies stay in the arena, and together are no larger than the new one.
 * @return false when out of memory; the list is then unchanged.
 */
bool fc_arena_grow(fc_arena *arena, void *list, size_t *capacity, size_t count, size_t needed, size_t size);

/** Bytes that are sent to another process. */
typedef struct fc_notes {
    unsigned char *data; /**< malloc'ed */
    size_t size, capacity;
} fc_notes;

/** Appends bytes. @return false when out of memory. */
bool fc_notes_add(fc_notes *notes, const void *bytes, size_t size);
