/*
 * The name table: open addressing, at most half full. See name_table.h.
 */
#include "base/name_table.h"

#include "base/checked.h"

#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

typedef struct slot {
    const char *name; /* borrowed; NULL marks a free slot */
    size_t len, value;
} slot;

struct fc_name_table {
    size_t mask, left;
    slot *slots;
};

fc_name_table *fc_name_table_new(fc_arena *arena, size_t capacity) {
    size_t slots = 16, least;
    if (!fc_mul_size(capacity, 2, &least)) {
        return NULL;
    }
    while (slots < least) {
        if (!fc_mul_size(slots, 2, &slots)) {
            return NULL;
        }
    }
    fc_name_table *table = fc_arena_alloc(arena, sizeof *table);
    slot *all = fc_arena_calloc(arena, slots, sizeof *all);
    if (!table || !all) {
        return NULL;
    }
    *table = (fc_name_table){slots - 1, capacity, all};
    return table;
}

/* @return the slot that holds the name, or the free slot where it belongs. The seed keeps a hostile file from choosing
 * names that collide. */
static slot *seek(const fc_name_table *table, const char *name, size_t len) {
    size_t i = (size_t)XXH3_64bits_withSeed(name, len, (uintptr_t)table) & table->mask;
    while (table->slots[i].name && (table->slots[i].len != len || memcmp(table->slots[i].name, name, len) != 0)) {
        i = (i + 1) & table->mask;
    }
    return &table->slots[i];
}

size_t fc_name_table_put(fc_name_table *table, const char *name, size_t len, size_t value) {
    slot *s = seek(table, name, len);
    if (!s->name) {
        if (table->left == 0) {
            return FC_NO_NAME;
        }
        table->left--;
        *s = (slot){name, len, value};
    }
    return s->value;
}

void fc_name_table_set(fc_name_table *table, const char *name, size_t len, size_t value) {
    slot *s = seek(table, name, len);
    if (s->name) {
        s->value = value;
    }
}

size_t fc_name_table_find(const fc_name_table *table, const char *name, size_t len) {
    const slot *s = seek(table, name, len);
    return s->name ? s->value : FC_NO_NAME;
}
