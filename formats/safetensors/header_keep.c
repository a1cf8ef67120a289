/*
 * Copies a header to the memory of the checkpoint. Shard files of the same checkpoint name the same tensors in the same
 * order, so strings that are equal to those of the previous file are shared with it: the manifest of thousands of files
 * is then mostly boxes.
 */
#include "safetensors/header.h"
#include "safetensors/kept.h"

#include <string.h>

/* Whether fc_st_header_apply_kept has read all that the member says. */
static bool is_applied(const char *key) {
    static const char *const applied[] = {ST_DTYPES, ST_SHARDING, ST_PATHS, ST_LAYOUT, ST_MESH, ST_DIGESTS};
    for (size_t i = 0; i < sizeof applied / sizeof *applied; i++) {
        if (strcmp(key, applied[i]) == 0) {
            return true;
        }
    }
    return false;
}

/* @param before may be NULL. @return NULL when out of memory. */
static const char *keep_text(fc_arena *arena, const char *text, const char *before) {
    return before && strcmp(text, before) == 0 ? before : fc_arena_strndup(arena, text, strlen(text));
}

static const int64_t *keep_numbers(fc_arena *arena, const int64_t *numbers, const int64_t *before, int count) {
    const bool same = before && memcmp(numbers, before, (size_t)count * sizeof *numbers) == 0;
    return same ? before : fc_arena_copy(arena, numbers, (size_t)count, sizeof *numbers);
}

static bool same_path(const fc_st_entry *a, const fc_st_entry *b) {
    bool same = b->path && a->path_count == b->path_count;
    for (size_t i = 0; same && i < a->path_count; i++) {
        const fc_path_element *x = &a->path[i], *y = &b->path[i];
        same = strcmp(x->key, y->key) == 0 && x->is_index == y->is_index && x->is_tuple == y->is_tuple &&
               x->is_number == y->is_number;
    }
    return same;
}

static const fc_path_element *keep_path(fc_arena *arena, const fc_st_entry *e, const fc_st_entry *before) {
    if (before && same_path(e, before)) {
        return before->path;
    }
    fc_path_element *copy = fc_arena_calloc(arena, e->path_count, sizeof *copy);
    for (size_t i = 0; copy && i < e->path_count; i++) {
        copy[i] = e->path[i];
        copy[i].key = fc_arena_strndup(arena, e->path[i].key, strlen(e->path[i].key));
        copy = copy[i].key ? copy : NULL;
    }
    return copy;
}

/* @param before the entry of the same tensor in the file before, or NULL. */
static bool keep_entry(fc_arena *arena, fc_st_entry *e, const fc_st_entry *before) {
    const size_t n = (size_t)e->raw_ndim;
    int64_t *dims = fc_arena_alloc(arena, 2 * n * sizeof *dims);
    e->name = keep_text(arena, e->name, before ? before->name : NULL);
    if (!dims || !e->name) {
        return false;
    }
    e->shape = memcpy(dims, e->shape, n * sizeof *dims);
    e->offsets = e->offsets ? memcpy(dims + n, e->offsets, n * sizeof *dims) : NULL;
    const bool same_global = before && before->global_ndim == e->global_ndim;
    if (e->global &&
        !(e->global = keep_numbers(arena, e->global, same_global ? before->global : NULL, e->global_ndim))) {
        return false;
    }
    if (e->placements && !(e->placements = keep_text(arena, e->placements, before ? before->placements : NULL))) {
        return false;
    }
    return !e->path || (e->path = keep_path(arena, e, before)) != NULL;
}

static bool keep_pairs(fc_arena *arena, fc_st_header *header, const fc_st_header *before) {
    size_t n = 0;
    for (size_t i = 0; i < header->npairs; i++) {
        fc_st_pair pair = header->pairs[i];
        if (is_applied(pair.key)) {
            continue;
        }
        const fc_st_pair *same = before && n < before->npairs ? &before->pairs[n] : NULL;
        pair.key = keep_text(arena, pair.key, same ? same->key : NULL);
        pair.value = keep_text(arena, pair.value, same ? same->value : NULL);
        if (!pair.key || !pair.value) {
            return false;
        }
        header->pairs[n++] = pair;
    }
    header->npairs = n;
    return true;
}

bool fc_st_header_keep(fc_arena *arena, fc_st_header *header, const fc_st_header *before) {
    for (size_t i = 0; i < header->nentries; i++) {
        fc_st_entry *e = &header->entries[i];
        const fc_st_entry *same = before && i < before->nentries ? &before->entries[i] : NULL;
        if (!keep_entry(arena, e, same && strcmp(e->name, same->name) == 0 ? same : NULL)) {
            return false;
        }
    }
    return keep_pairs(arena, header, before);
}
