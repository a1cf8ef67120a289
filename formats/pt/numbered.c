/*
 * Files of ranks whose names have nothing but a number: model_0.pt, model_1.pt, ... of torch_checkpointing,
 * checkpoint_0.pt of torch's _experimental checkpointer, and those of many scripts. Such a number may also be that of a
 * step, so the names alone do not make one checkpoint. The files of a folder are one if a file has shards of a mesh of
 * several ranks. Otherwise only a pattern that the caller gives, such as "model_*.pt", makes them one.
 */
#include "base/file_name.h"
#include "base/grow.h"
#include "base/name_table.h"
#include "checkpoint/folder.h"
#include "fsdpckpt/order.h"
#include "fsdpckpt/try.h"
#include "io/directory.h"
#include "io/path.h"
#include "pt/ranks.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum { MAX_JSON = 1 << 20 /* a larger file is not a small item of a checkpoint */ };

/* The sets of a folder. */
typedef struct found_sets {
    const char *directory;
    fc_arena *arena;
    fc_name_table *patterns; /* from "model_*.pt" to the index of its set */
    fc_pt_set *sets;         /* malloc'ed */
    const char **spelled;    /* malloc'ed; their patterns */
    size_t count, capacity, spelled_capacity;
    fc_error *err;
} found_sets;

static bool is_pickled(const char *tail) {
    return !fc_ends_with(tail, ".json") && !fc_ends_with(tail, ".safetensors");
}

static fc_code new_set(found_sets *s, const char *file, const fc_pt_rank_name *name, const char *pattern) {
    FC_NEED(fc_grow(&s->sets, &s->capacity, s->count + 1, sizeof *s->sets) &&
                fc_grow(&s->spelled, &s->spelled_capacity, s->count + 1, sizeof *s->spelled),
            s->err, s->directory);
    const fc_pt_set set = {.name = fc_arena_strndup(s->arena, file, name->name),
                           .head = fc_arena_strndup(s->arena, file, name->head),
                           .tail = fc_arena_strndup(s->arena, name->tail, strlen(name->tail)),
                           .width = 1,
                           .numbered = true};
    FC_NEED(set.name && set.head && set.tail &&
                fc_name_table_put(s->patterns, pattern, strlen(pattern), s->count) != FC_NO_NAME,
            s->err, s->directory);
    s->spelled[s->count] = pattern;
    s->sets[s->count++] = set;
    return FC_OK;
}

static fc_code add_numbered(found_sets *s, const char *file) {
    fc_pt_rank_name name;
    if (!fc_pt_parse_numbered(file, &name)) {
        return FC_OK;
    }
    const char *pattern = fc_arena_printf(s->arena, "%.*s*%s", (int)name.head, file, name.tail);
    FC_NEED(pattern, s->err, s->directory);
    const size_t at = fc_name_table_find(s->patterns, pattern, strlen(pattern));
    FC_TRY(at == FC_NO_NAME ? new_set(s, file, &name, pattern) : FC_OK);
    FC_NEED(s->sets, s->err, s->directory);
    fc_pt_set *set = &s->sets[at == FC_NO_NAME ? s->count - 1 : at];
    set->found++;
    set->first = set->first || name.rank == 0;
    set->counted = set->counted || name.ranks > 0;
    set->ranks = name.ranks > 0 ? name.ranks : name.rank >= set->ranks ? name.rank + 1 : set->ranks;
    set->width = name.width > set->width ? name.width : set->width;
    return FC_OK;
}

/* Finds the sets of a folder, in the order of their patterns, so that nothing depends on the file system. */
static fc_code find_all(found_sets *s) {
    fc_dir dir;
    fc_code rc;
    s->patterns = fc_name_table_new(s->arena, 0);
    FC_NEED(s->patterns, s->err, s->directory);
    FC_TRY_GOTO(fc_dir_open(&dir, s->directory, s->err), rc, out);
    for (const char *file; rc == FC_OK && (file = fc_dir_next(&dir)) != NULL;) {
        rc = add_numbered(s, file);
    }
out:
    rc = fc_dir_close(&dir, rc, s->err);
    fc_sort_texts(s->spelled, s->count);
    return rc;
}

static void free_found(found_sets *s) {
    free(s->sets);
    free(s->spelled);
}

/* @return the set with the i-th pattern. */
static fc_pt_set *set_at(const found_sets *s, size_t i) {
    return &s->sets[fc_name_table_find(s->patterns, s->spelled[i], strlen(s->spelled[i]))];
}

/* Whether the numbers can be those of ranks: from 0, and most of them are there. */
static bool may_be_ranks(const fc_pt_set *set) {
    return set->first && set->ranks > 1 && set->found * 2 >= (size_t)set->ranks;
}

/* @return the path of the file of rank 0, or NULL. */
static const char *first_file(const found_sets *s, const fc_pt_set *set) {
    return fc_arena_printf(s->arena, "%s/%s%0*d%s", s->directory, set->head, set->width, 0, set->tail);
}

/* Whether a set may have large files of another kind: lines of a log, not an item. */
static bool is_large_json(const found_sets *s, const fc_pt_set *set) {
    struct stat st;
    const char *path = fc_ends_with(set->tail, ".json") ? first_file(s, set) : NULL;
    return path && fc_stat(path, &st) == 0 && st.st_size > MAX_JSON;
}

static bool is_member(const found_sets *s, const fc_pt_set *set, const fc_pt_set *evidence) {
    return may_be_ranks(set) && (set->ranks == evidence->ranks || fc_pt_has_tensors(set->name)) &&
           !is_large_json(s, set);
}

/* Lists all sets that belong to the one with the evidence as one checkpoint: "model_*.pt,optimizer_*.pt". */
static fc_code list_together(found_sets *s, const fc_pt_set *evidence, fc_listing *out) {
    const char *group = "";
    for (size_t i = 0; i < s->count; i++) {
        if (is_member(s, set_at(s, i), evidence)) {
            group = fc_arena_printf(s->arena, "%s%s%s", group, group[0] ? "," : "", s->spelled[i]);
            FC_NEED(group, s->err, s->directory);
        }
    }
    const char *file = first_file(s, evidence);
    FC_NEED(file, s->err, s->directory);
    return fc_listing_add(out, group, fc_base_name(file), FC_LISTED_TRAINING, s->err);
}

/* Lists what the caller's pattern names. */
static fc_code list_wanted(found_sets *s, fc_listing *out) {
    for (size_t i = 0; out->wanted && i < s->count; i++) {
        const fc_pt_set *set = set_at(s, i);
        const char *file = first_file(s, set);
        FC_NEED(file, s->err, s->directory);
        if (strcmp(s->spelled[i], out->wanted) == 0 && is_pickled(set->tail)) {
            FC_TRY(fc_listing_add(out, out->wanted, fc_base_name(file), FC_LISTED_OTHER, s->err));
        }
    }
    return FC_OK;
}

fc_code fc_pt_list_numbered(const char *directory, fc_listing *out, fc_error *err) {
    found_sets s = {.directory = directory, .arena = out->arena, .err = err};
    bool is = false;
    fc_code rc;
    FC_TRY_GOTO(find_all(&s), rc, out);
    for (size_t i = 0; i < s.count && !is; i++) {
        const fc_pt_set *set = set_at(&s, i);
        if (may_be_ranks(set) && is_pickled(set->tail)) {
            const char *file = first_file(&s, set);
            FC_TRY_GOTO(file ? FC_OK : fc_no_memory(err, directory), rc, out);
            is = fc_pt_holds_shards(file);
            FC_TRY_GOTO(is ? list_together(&s, set, out) : FC_OK, rc, out);
        }
    }
    rc = list_wanted(&s, out);
out:
    free_found(&s);
    return rc;
}

/* Whether `pattern` is in the list `group`, which is separated by commas. */
static bool is_in_list(const char *group, const char *pattern) {
    const size_t n = strlen(pattern);
    for (const char *at = group; (at = strstr(at, pattern)) != NULL; at++) {
        if ((at == group || at[-1] == ',') && (at[n] == '\0' || at[n] == ',')) {
            return true;
        }
    }
    return false;
}

fc_code fc_pt_find_numbered(const char *directory, const char *group, fc_arena *arena, fc_pt_set **out, size_t *count,
                            fc_error *err) {
    found_sets s = {.directory = directory, .arena = arena, .err = err};
    fc_code rc;
    *count = 0;
    FC_TRY_GOTO(find_all(&s), rc, out);
    *out = fc_arena_calloc(arena, s.count + 1, sizeof **out);
    FC_TRY_GOTO(*out ? FC_OK : fc_no_memory(err, directory), rc, out);
    for (size_t i = 0; i < s.count; i++) {
        if (!group || is_in_list(group, s.spelled[i])) {
            (*out)[(*count)++] = *set_at(&s, i);
        }
    }
out:
    free_found(&s);
    return rc;
}
