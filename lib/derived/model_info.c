/*
 * Reads a JSON file that describes a model beyond its names: the classes of its modules, and which parameters are
 * frozen, ignored or shared.
 */
#include "fsdpckpt/wrap_policy.h"

#include "fsdpckpt/try.h"
#include "io/json_file.h"

#include <string.h>

/* The state of reading. */
typedef struct info_reader {
    const char *path;
    fc_arena *arena;
    fc_model_info *info;
    fc_class_rule *classes;
    fc_error *err;
} info_reader;

static fc_code read_list(const info_reader *r, const char *key, const json_t *value, const char *const **out) {
    bool malformed;
    *out = fc_json_strings(value, r->arena, &malformed);
    if (malformed) {
        return fc_fail(r->err, FC_EUSAGE, "%s: \"%s\" must be a string or an array of strings", r->path, key);
    }
    return *out ? FC_OK : fc_no_memory(r->err, r->path);
}

static fc_code read_shared(const info_reader *r, const json_t *value) {
    size_t count = json_array_size(value);
    const char *const **groups = fc_arena_calloc(r->arena, count + 1, sizeof *groups);
    FC_NEED(groups, r->err, r->path);
    bool good = json_is_array(value);
    for (size_t i = 0; i < count && good; i++) {
        const json_t *group = json_array_get(value, i);
        good = json_is_array(group) && json_array_size(group) > 1;
        if (good) {
            FC_TRY(read_list(r, "$shared", group, &groups[i]));
        }
    }
    if (!good) {
        return fc_fail(r->err, FC_EUSAGE,
                       "%s: \"$shared\" must be an array of groups of names, such as [[\"lm_head.weight\", "
                       "\"model.embed_tokens.weight\"]]",
                       r->path);
    }
    r->info->shared = groups;
    return FC_OK;
}

static fc_code read_class(const info_reader *r, const char *key, const json_t *value) {
    fc_class_rule *rule = &r->classes[r->info->nclasses];
    FC_TRY(read_list(r, key, value, &rule->classes));
    while (rule->classes[rule->nclasses]) {
        rule->nclasses++;
    }
    rule->pattern = fc_arena_strndup(r->arena, key, strlen(key));
    r->info->nclasses++;
    return rule->pattern ? FC_OK : fc_no_memory(r->err, r->path);
}

static fc_code read_member(const info_reader *r, const char *key, const json_t *value) {
    if (key[0] != '$') {
        return read_class(r, key, value);
    }
    if (strcmp(key, "$frozen") == 0) {
        return read_list(r, key, value, &r->info->frozen);
    }
    if (strcmp(key, "$ignored") == 0) {
        return read_list(r, key, value, &r->info->ignored);
    }
    if (strcmp(key, "$buffers") == 0) {
        return read_list(r, key, value, &r->info->buffers);
    }
    if (strcmp(key, "$shared") == 0) {
        return read_shared(r, value);
    }
    return fc_fail(r->err, FC_EUSAGE,
                   "%s: unknown member \"%s\"; the known ones are $frozen, $ignored, $buffers and $shared", r->path,
                   key);
}

fc_code fc_model_info_load(const char *path, fc_arena *arena, const fc_model_info **out, fc_error *err) {
    json_t *root = NULL, *value;
    const char *key;
    FC_TRY(fc_json_load(path, "a description of modules", "{\"layers.*\": \"LlamaDecoderLayer\"}", &root, err));
    info_reader r = {.path = path, .arena = arena, .err = err};
    r.info = fc_arena_calloc(arena, 1, sizeof *r.info);
    r.classes = fc_arena_calloc(arena, json_object_size(root) + 1, sizeof *r.classes);
    fc_code rc = FC_OK;
    FC_TRY_GOTO(r.info && r.classes ? FC_OK : fc_no_memory(err, path), rc, out);
    json_object_foreach(root, key, value) {
        FC_TRY_GOTO(read_member(&r, key, value), rc, out);
    }
    r.info->classes = r.classes;
    *out = r.info;
out:
    json_decref(root);
    return rc;
}
