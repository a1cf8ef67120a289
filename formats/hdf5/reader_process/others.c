/*
 * In the reader process: lists the other files that are read. See others.h.
 */
#include "hdf5/reader_process/others.h"

#include "hdf5/reader_process/vfd.h"

#include <stdlib.h>
#include <string.h>

enum { FIRST_SLOTS = 64 };

static uint64_t hash(const char *name) {
    uint64_t h = UINT64_C(0xcbf29ce484222325); /* FNV-1a */
    for (; *name; name++) {
        h = (h ^ (unsigned char)*name) * UINT64_C(0x100000001b3);
    }
    return h;
}

/* @return the slot of a name, or the free one where it belongs. */
static size_t *find(const fc_h5_names *others, const char *name) {
    size_t i = (size_t)hash(name) & (others->nslots - 1);
    while (others->slots[i] && strcmp(others->names[others->slots[i] - 1], name) != 0) {
        i = (i + 1) & (others->nslots - 1);
    }
    return &others->slots[i];
}

/* Doubles the table; at most half of its slots are used. */
static void widen(fc_h5_names *others) {
    const size_t wider = others->nslots ? 2 * others->nslots : FIRST_SLOTS;
    char **names = fc_h5_child_calloc(wider / 2, sizeof *names);
    if (others->count > 0) {
        memcpy(names, others->names, others->count * sizeof *names);
    }
    free(others->names);
    free(others->slots);
    others->names = names;
    others->slots = fc_h5_child_calloc(wider, sizeof *others->slots);
    others->nslots = wider;
    others->capacity = wider / 2;
    for (size_t i = 0; i < others->count; i++) {
        *find(others, names[i]) = i + 1;
    }
}

void fc_h5_note_other(fc_h5_names *others, const char *name) {
    if (!others) {
        return;
    }
    if (others->count == others->capacity) {
        widen(others);
    }
    size_t *slot = find(others, name);
    if (*slot == 0) {
        char *copy = fc_h5_child_calloc(strlen(name) + 1, 1);
        others->names[others->count] = strcpy(copy, name);
        *slot = ++others->count;
    }
}

void fc_h5_send_others(fc_h5_sink *out, const fc_h5_names *others) {
    for (size_t i = 0; i < others->count; i++) {
        fc_h5_begin(out, FC_H5_OTHER);
        fc_h5_put_bytes(out, others->names[i], strlen(others->names[i]));
        fc_h5_end(out);
    }
}

void fc_h5_free_others(fc_h5_names *others) {
    for (size_t i = 0; i < others->count; i++) {
        free(others->names[i]);
    }
    free(others->names);
    free(others->slots);
    *others = (fc_h5_names){0};
}
