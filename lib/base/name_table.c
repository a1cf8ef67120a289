/*
 * The name table: open addressing, at most half full. See name_table.h.
 */
#include "base/name_table.h"

#include "base/checked.h"

#include <stdbool.h>
#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

typedef struct entry {
    const void *name; /* borrowed */
    size_t len;
    uint64_t parent;
    size_t value;
} entry;

typedef struct slot {
    uint32_t hash;
    uint32_t entry; /* its index plus 1; 0 marks a free slot */
} slot;

struct fc_name_table {
    fc_arena *arena;
    size_t count, capacity;
    entry *entries;
    size_t mask;
    slot *slots;
};

/* Makes room for `capacity` names. The old memory stays in the arena. */
static bool resize(fc_name_table *table, size_t capacity) {
    size_t slots = 16, least;
    if (capacity >= UINT32_MAX || !fc_mul_size(capacity, 2, &least)) {
        return false;
    }
    while (slots < least) {
        if (!fc_mul_size(slots, 2, &slots)) {
            return false;
        }
    }
    slot *moved = fc_arena_calloc(table->arena, slots, sizeof *moved);
    entry *entries = fc_arena_calloc(table->arena, capacity, sizeof *entries);
    if (!moved || !entries) {
        return false;
    }
    for (size_t i = 0; table->slots && i <= table->mask; i++) {
        if (table->slots[i].entry) {
            size_t at = table->slots[i].hash & (slots - 1);
            for (; moved[at].entry; at = (at + 1) & (slots - 1)) {
            }
            moved[at] = table->slots[i];
        }
    }
    if (table->count > 0) {
        memcpy(entries, table->entries, table->count * sizeof *entries);
    }
    table->entries = entries;
    table->capacity = capacity;
    table->slots = moved;
    table->mask = slots - 1;
    return true;
}

fc_name_table *fc_name_table_new(fc_arena *arena, size_t capacity) {
    fc_name_table *table = fc_arena_calloc(arena, 1, sizeof *table);
    if (table) {
        table->arena = arena;
    }
    return table && resize(table, capacity) ? table : NULL;
}

/* @return the slot that holds the name, or the free slot where it belongs. Nobody knows the address of the table. */
static slot *seek(const fc_name_table *table, uint64_t parent, const void *name, size_t len, uint32_t *hash) {
    *hash = (uint32_t)XXH3_64bits_withSeed(name, len, (uintptr_t)table + parent * UINT64_C(0x9e3779b97f4a7c15));
    for (size_t i = *hash & table->mask;; i = (i + 1) & table->mask) {
        slot *s = &table->slots[i];
        const entry *e = s->entry ? &table->entries[s->entry - 1] : NULL;
        if (!e || (s->hash == *hash && e->parent == parent && e->len == len &&
                   (len == 0 || memcmp(e->name, name, len) == 0))) {
            return s;
        }
    }
}

size_t fc_name_table_put_child(fc_name_table *table, uint64_t parent, const void *name, size_t len, size_t value) {
    uint32_t hash;
    slot *s = seek(table, parent, name, len, &hash);
    if (s->entry) {
        return table->entries[s->entry - 1].value;
    }
    if (table->count == table->capacity) {
        if (!resize(table, 2 * table->capacity + 8)) {
            return FC_NO_NAME;
        }
        s = seek(table, parent, name, len, &hash);
    }
    table->entries[table->count++] = (entry){name, len, parent, value};
    *s = (slot){hash, (uint32_t)table->count};
    return value;
}

size_t fc_name_table_put(fc_name_table *table, const char *name, size_t len, size_t value) {
    return fc_name_table_put_child(table, 0, name, len, value);
}

void fc_name_table_set(fc_name_table *table, const char *name, size_t len, size_t value) {
    uint32_t hash;
    const slot *s = seek(table, 0, name, len, &hash);
    if (s->entry) {
        table->entries[s->entry - 1].value = value;
    }
}

size_t fc_name_table_find_child(const fc_name_table *table, uint64_t parent, const void *name, size_t len) {
    uint32_t hash;
    const slot *s = seek(table, parent, name, len, &hash);
    return s->entry ? table->entries[s->entry - 1].value : FC_NO_NAME;
}

size_t fc_name_table_find(const fc_name_table *table, const char *name, size_t len) {
    return fc_name_table_find_child(table, 0, name, len);
}
