/*
 * Grows lists by half, so that filling a long list copies it only a few times. See grow.h.
 */
#include "base/grow.h"

#include "base/checked.h"

#include <stdlib.h>
#include <string.h>

enum { LEAST = 16 };

bool fc_grow(void *list, size_t *capacity, size_t needed, size_t size) {
    if (needed <= *capacity) {
        return true;
    }
    size_t want = *capacity + *capacity / 2, bytes;
    want = want < needed ? needed : want;
    want = want < LEAST ? LEAST : want;
    void *old;
    memcpy(&old, list, sizeof old); /* the pointer may have any type, so reading it as void * would break aliasing */
    void *grown = fc_mul_size(want, size, &bytes) ? realloc(old, bytes) : NULL;
    if (!grown) {
        return false;
    }
    memcpy(list, &grown, sizeof grown);
    *capacity = want;
    return true;
}

bool fc_arena_grow(fc_arena *arena, void *list, size_t *capacity, size_t count, size_t needed, size_t size) {
    if (needed <= *capacity) {
        return true;
    }
    const size_t want = *capacity > needed / 2 ? 2 * *capacity : needed;
    void *grown = fc_arena_calloc(arena, want, size), *old;
    if (!grown) {
        return false;
    }
    memcpy(&old, list, sizeof old); /* see fc_grow */
    if (count > 0) {
        memcpy(grown, old, count * size);
    }
    memcpy(list, &grown, sizeof grown);
    *capacity = want;
    return true;
}

bool fc_notes_add(fc_notes *notes, const void *bytes, size_t size) {
    size_t end;
    if (!fc_add_size(notes->size, size, &end) || !fc_grow(&notes->data, &notes->capacity, end, 1)) {
        return false;
    }
    if (size > 0) {
        memcpy(notes->data + notes->size, bytes, size);
    }
    notes->size = end;
    return true;
}
