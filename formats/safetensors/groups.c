/*
 * Finds the checkpoints among the safetensors files of a directory. Files belong together if an index or their names
 * say so: shard-*-model-*-of-N, <stem>-*-of-N, or numbers that count from 0 or 1.
 */
#include "safetensors/groups.h"

#include "base/file_name.h"
#include "base/name_table.h"
#include "checkpoint/folder.h"
#include "fsdpckpt/order.h"
#include "fsdpckpt/try.h"
#include "io/directory.h"

#include <string.h>

/* ---- names ---- */

static bool take_number(const char **s, uint32_t *out) {
    const int64_t number = fc_take_number(s, FC_NO_RANK);
    *out = (uint32_t)number;
    return number >= 0;
}

bool fc_st_parse_shard_name(const char *name, uint32_t *shard, uint32_t *model, uint32_t *models) {
    const char *s = name;
    return fc_take_text(&s, "shard-") && take_number(&s, shard) && fc_take_text(&s, "-model-") &&
           take_number(&s, model) && fc_take_text(&s, "-of-") && take_number(&s, models) &&
           strcmp(s, ST_EXTENSION) == 0 && *shard > 0 && *model > 0 && *model <= *models;
}

bool fc_st_parse_rank_name(const char *name, uint32_t *rank, uint32_t *part) {
    const char *s = name, *t = name;
    *part = 0;
    return (fc_take_text(&s, "model-rank-") && take_number(&s, rank) && fc_take_text(&s, "-part-") &&
            take_number(&s, part) && strcmp(s, ST_EXTENSION) == 0) ||
           (fc_take_text(&t, "rank") && take_number(&t, rank) && strcmp(t, ST_EXTENSION) == 0);
}

bool fc_st_parse_numbered_name(const char *name, size_t *stem, uint32_t *number, uint32_t *count) {
    for (const char *at = strchr(name, '-'); at; at = strchr(at + 1, '-')) {
        const char *s = at + 1;
        if (take_number(&s, number) && fc_take_text(&s, "-of-") && take_number(&s, count) &&
            strcmp(s, ST_EXTENSION) == 0) {
            *stem = (size_t)(at - name);
            return *number > 0 && *number <= *count;
        }
    }
    return false;
}

/* ---- groups ---- */

/* The files whose names differ in one number only. */
typedef struct numbers {
    const char *pattern; /* their names with "*" for the number; NULL: the name has none */
    uint32_t least, most;
    size_t count;
} numbers;

/* Sets `*out` to the name with "*" for the last number before its extension, or to NULL if it has none.
 * @return false: out of memory. */
static bool star_number(fc_arena *arena, const char *name, uint32_t *number, const char **out) {
    size_t end = strlen(name) - strlen(ST_EXTENSION);
    while (end > 0 && !(name[end - 1] >= '0' && name[end - 1] <= '9')) {
        end--;
    }
    size_t start = end;
    while (start > 0 && name[start - 1] >= '0' && name[start - 1] <= '9') {
        start--;
    }
    const char *s = name + start;
    *out = NULL;
    if (!take_number(&s, number)) {
        return true;
    }
    *out = fc_arena_printf(arena, "%.*s*%s", (int)start, name, name + end);
    return *out != NULL;
}

/* Sets `*out` to the group of a name that says how many files there are, or to NULL if it does not.
 * @return false: out of memory. */
static bool counted_group(fc_arena *arena, const char *name, const char **out) {
    uint32_t shard, model, models;
    size_t stem;
    *out = NULL;
    if (fc_st_parse_shard_name(name, &shard, &model, &models)) {
        *out = fc_arena_printf(arena, "shard-*-model-*%s", strstr(name, "-of-"));
    } else if (fc_st_parse_rank_name(name, &shard, &model)) {
        *out = name[0] == 'm' ? "model-rank-*-part-*.safetensors" : "rank*.safetensors";
    } else if (fc_st_parse_numbered_name(name, &stem, &model, &models)) {
        *out = fc_arena_printf(arena, "%.*s-*%s", (int)stem, name, strstr(name + stem, "-of-"));
    } else {
        return true;
    }
    return *out != NULL;
}

/* Counts the files of each pattern, in the entry of its first file. */
static bool count_numbers(fc_arena *arena, const fc_st_names *l, numbers *all, fc_name_table *patterns) {
    for (size_t i = 0; i < l->count; i++) {
        uint32_t number = 0;
        const char *pattern = NULL;
        if (!l->groups[i] && !star_number(arena, l->names[i], &number, &pattern)) {
            return false;
        }
        all[i].pattern = pattern;
        if (!pattern) {
            continue;
        }
        const size_t first = fc_name_table_put(patterns, pattern, strlen(pattern), i);
        if (first == FC_NO_NAME) {
            return false;
        }
        numbers *n = &all[first];
        n->least = n->count == 0 || number < n->least ? number : n->least;
        n->most = number > n->most ? number : n->most;
        n->count++;
    }
    return true;
}

static fc_code set_groups(fc_arena *arena, fc_st_names *l, const char *directory, fc_error *err) {
    numbers *all = fc_arena_calloc(arena, l->count + 1, sizeof *all);
    fc_name_table *patterns = fc_name_table_new(arena, l->count + 1);
    l->groups = fc_arena_calloc(arena, l->count + 1, sizeof *l->groups);
    bool grouped = l->groups != NULL;
    for (size_t i = 0; grouped && i < l->count; i++) {
        grouped = counted_group(arena, l->names[i], &l->groups[i]);
    }
    FC_NEED(all && patterns && grouped && count_numbers(arena, l, all, patterns), err, directory);
    for (size_t i = 0; i < l->count; i++) {
        const char *pattern = all[i].pattern;
        const numbers *n = pattern ? &all[fc_name_table_find(patterns, pattern, strlen(pattern))] : NULL;
        const bool counts = n && n->count > 1 && n->least <= 1 && (size_t)n->most - n->least + 1 == n->count;
        l->groups[i] = l->groups[i] ? l->groups[i] : counts ? pattern : l->names[i];
    }
    return FC_OK;
}

/* ---- the directory ---- */

static bool is_index(const char *name, const void *context) {
    (void)context;
    return name[0] != '.' && fc_is_index_of(name, ST_EXTENSION);
}

static bool is_data_file(const char *name, const void *context) {
    return name[0] != '.' && fc_ends_with(name, ST_EXTENSION) && !is_index(name, context);
}

fc_code fc_st_list_names(fc_arena *arena, const char *directory, fc_st_names *out, fc_error *err) {
    *out = (fc_st_names){.count = 0};
    FC_TRY(fc_dir_list(directory, is_data_file, NULL, arena, &out->names, &out->count, err));
    FC_TRY(fc_dir_list(directory, is_index, NULL, arena, &out->indexes, &out->nindexes, err));
    return set_groups(arena, out, directory, err);
}

/* ---- the checkpoints ---- */

/* The checkpoints of a directory while they are listed. */
typedef struct lister {
    const char *directory;
    fc_st_names names;
    bool *indexed; /* per name: an index has it */
    fc_listing *out;
    fc_error *err;
} lister;

/* The length of a name without what follows the stem: "-00001-of-00002.safetensors", ".safetensors.index.json". */
static size_t stem_of(const char *name) {
    size_t stem;
    uint32_t number, count;
    return fc_st_parse_numbered_name(name, &stem, &number, &count) ? stem : (size_t)(strstr(name, ST_EXTENSION) - name);
}

/* Whether an index is that of a variant, such as model.safetensors.index.fp16.json, whose files have another stem. */
static bool is_variant(const char *name) {
    return !fc_ends_with(name, ST_EXTENSION) && !fc_ends_with(name, ST_INDEX_EXTENSION);
}

static bool is_stem(const char *name, size_t stem, const char *text) {
    const size_t n = strlen(text);
    return stem == n && strncmp(name, text, n) == 0;
}

/*
 * The names that transformers and diffusers load go before all others, such as "model.fp16" and Mistral's
 * "consolidated". Adapters are another model, and shards of a mesh another layout: neither is left for a model.
 */
static fc_listed_role role_of(const char *name) {
    static const char *const models[] = {"model", "diffusion_pytorch_model"};
    static const char *const others[] = {"adapter_model", "adapters", "adapter", "pytorch_lora_weights"};
    const size_t stem = stem_of(name);
    uint32_t shard, model, count;
    for (size_t i = 0; i < sizeof models / sizeof *models; i++) {
        if (is_stem(name, stem, models[i]) && !is_variant(name)) {
            return FC_LISTED_MODEL;
        }
    }
    bool other = fc_st_parse_shard_name(name, &shard, &model, &count);
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
        other = other || is_stem(name, stem, others[i]);
    }
    return other ? FC_LISTED_OTHER : FC_LISTED_COPY;
}

/* Marks all files: they have the stem of the index, or it cannot be read, and opening it says what is wrong. */
static void mark_all(const lister *l) {
    for (size_t i = 0; i < l->names.count; i++) {
        l->indexed[i] = true;
    }
}

/* Whether all files are numbered ones with the stem of the only index, so that it need not be read yet. */
static bool is_plain_index(const lister *l, const char *index) {
    const size_t stem = stem_of(index);
    bool is = l->names.nindexes == 1 && l->names.count > 0 && !is_variant(index);
    for (size_t i = 0; i < l->names.count && is; i++) {
        const char *name = l->names.names[i];
        is = stem_of(name) == stem && strncmp(name, index, stem) == 0 && name[stem] == '-' &&
             strcmp(l->names.groups[i], l->names.groups[0]) == 0;
    }
    return is;
}

/* Marks the files of an index, and adds it. */
static fc_code add_index(const lister *l, const char *index) {
    fc_arena *arena = l->out->arena;
    fc_st_files files = {.directory = l->directory};
    fc_error ignored;
    const char *path = fc_arena_printf(arena, "%s/%s", l->directory, index), *first = index;
    FC_NEED(path, l->err, l->directory);
    if (is_plain_index(l, index)) {
        mark_all(l);
        return fc_listing_add(l->out, index, l->names.names[0], role_of(index), l->err);
    }
    const fc_code rc = fc_st_index_read(arena, path, &files, &ignored);
    if (rc != FC_OK) {
        mark_all(l);
    }
    for (size_t f = 0; rc == FC_OK && f < files.nfiles; f++) {
        const size_t i = fc_find_text(l->names.names, l->names.count, files.files[f].name);
        if (i < l->names.count) {
            l->indexed[i] = true;
            first = l->names.names[i];
        }
    }
    fc_st_files_free(&files);
    return rc == FC_ENOMEM ? fc_no_memory(l->err, l->directory)
                           : fc_listing_add(l->out, index, first, role_of(index), l->err);
}

/* Whether an index has the same stem: the file was left over from an earlier save. */
static bool is_left_over(const lister *l, const char *name) {
    const size_t stem = stem_of(name);
    bool is = false;
    for (size_t i = 0; i < l->names.nindexes && !is && strstr(name, "-of-"); i++) {
        const char *index = l->names.indexes[i];
        is = stem_of(index) == stem && strncmp(index, name, stem) == 0 && !is_variant(index);
    }
    return is;
}

static fc_code list_all(const lister *l) {
    for (size_t i = 0; i < l->names.nindexes; i++) {
        FC_TRY(add_index(l, l->names.indexes[i]));
    }
    for (size_t i = 0; i < l->names.count; i++) {
        const char *name = l->names.names[i];
        const bool again = i > 0 && !l->indexed[i - 1] && strcmp(l->names.groups[i], l->names.groups[i - 1]) == 0;
        if (!l->indexed[i] && !again) {
            FC_TRY(fc_listing_add(l->out, l->names.groups[i], name,
                                  is_left_over(l, name) ? FC_LISTED_COPY : role_of(name), l->err));
        }
    }
    return FC_OK;
}

fc_code fc_st_list(const char *directory, fc_listing *out, fc_error *err) {
    lister l = {.directory = directory, .out = out, .err = err};
    FC_TRY(fc_st_list_names(out->arena, directory, &l.names, err));
    l.indexed = fc_arena_calloc(out->arena, l.names.count + 1, sizeof *l.indexed);
    FC_NEED(l.indexed, err, directory);
    return list_all(&l);
}
