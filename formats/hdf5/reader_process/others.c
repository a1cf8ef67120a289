/*
 * In the reader process: lists the other files that are read. See others.h.
 */
#include "hdf5/reader_process/others.h"

#include "hdf5/reader_process/child.h"
#include "hdf5/reader_process/vfd.h"

#include <string.h>

enum { FIRST_NAMES = 32 };

static void *need(void *memory) {
    if (!memory) {
        fc_h5_child_no_memory();
    }
    return memory;
}

/* Doubles the capacity. The smaller arrays stay in the arena. */
static void widen(fc_h5_names *others) {
    others->capacity = others->capacity ? 2 * others->capacity : FIRST_NAMES;
    if (!others->arena) {
        others->arena = need(fc_arena_new());
    }
    const char **names = need(fc_arena_calloc(others->arena, others->capacity, sizeof *names));
    if (others->count > 0) {
        memcpy(names, others->names, others->count * sizeof *names);
    }
    others->names = names;
    others->table = need(fc_name_table_new(others->arena, others->capacity));
    for (size_t i = 0; i < others->count; i++) {
        fc_name_table_put(others->table, names[i], strlen(names[i]), i);
    }
}

void fc_h5_note_other(fc_h5_names *others, const char *name) {
    const size_t length = strlen(name);
    if (!others || (others->table && fc_name_table_find(others->table, name, length) != FC_NO_NAME)) {
        return;
    }
    if (others->count == others->capacity) {
        widen(others);
    }
    const char *copy = need(fc_arena_strndup(others->arena, name, length));
    fc_name_table_put(others->table, copy, length, others->count);
    others->names[others->count++] = copy;
}

void fc_h5_send_others(fc_h5_sink *out, const fc_h5_names *others) {
    for (size_t i = 0; i < others->count; i++) {
        fc_h5_begin(out, FC_H5_OTHER);
        fc_h5_put_bytes(out, others->names[i], strlen(others->names[i]));
        fc_h5_end(out);
    }
}

void fc_h5_free_others(fc_h5_names *others) {
    fc_arena_free(others->arena);
    *others = (fc_h5_names){0};
}
