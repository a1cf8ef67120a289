/*
 * Builds objects from `__metadata__`: those that fsdpckpt stored there, and one that carries all members that other
 * programs wrote, so that a conversion keeps them.
 */
#include "base/base64.h"
#include "base/text.h"
#include "checkpoint/same_name.h"
#include "fsdpckpt/order.h"
#include "fsdpckpt/try.h"
#include "safetensors/json.h"
#include "safetensors/kept.h"
#include "safetensors/safetensors.h"

#include <stdlib.h>
#include <string.h>

/* A member of `__metadata__` and its file. */
typedef struct member {
    const fc_st_pair *pair;
    uint32_t file;
} member;

static bool starts_with(const char *s, const char *start) {
    return strncmp(s, start, strlen(start)) == 0;
}

static bool is_object(const fc_st_pair *pair) {
    return starts_with(pair->key, ST_OBJECT);
}

/* Whether another program wrote the member, and writers do not create it anyway. */
static bool is_foreign(const fc_st_pair *pair) {
    return !starts_with(pair->key, ST_OURS) && strcmp(pair->key, ST_SHARDING) != 0 &&
           strcmp(pair->key, ST_DCP_VERSION) != 0 &&
           !(strcmp(pair->key, ST_FRAMEWORK) == 0 && strcmp(pair->value, "pt") == 0);
}

static int compare_member_keys(const void *a, const void *b) {
    const member *x = a, *y = b;
    int order = strcmp(x->pair->key, y->pair->key);
    return order ? order : (x->file > y->file) - (x->file < y->file);
}

/* Collects the members of all files that `wanted` accepts, sorted by key. @param out malloc'ed; owned by the caller. */
static bool gather(const fc_st_reader *o, bool (*wanted)(const fc_st_pair *), member **out, size_t *count) {
    size_t total = 0;
    *count = 0;
    for (size_t f = 0; f < o->files.nfiles; f++) {
        total += o->headers[f].npairs;
    }
    *out = calloc(total + 1, sizeof **out);
    for (size_t f = 0; *out && f < o->files.nfiles; f++) {
        for (size_t i = 0; i < o->headers[f].npairs; i++) {
            if (wanted(&o->headers[f].pairs[i])) {
                (*out)[(*count)++] = (member){&o->headers[f].pairs[i], (uint32_t)f};
            }
        }
    }
    if (*count > 1) {
        fc_sort_items(*out, *count, sizeof **out, compare_member_keys);
    }
    return *out != NULL;
}

size_t fc_st_count_objects(const fc_st_reader *o) {
    size_t count = 1;
    for (size_t f = 0; f < o->files.nfiles; f++) {
        count += o->headers[f].npairs;
    }
    return count;
}

/* ---- one object ---- */

/* Appends an object to the tensors. */
static fc_code list_object(fc_st_reader *o, const char *name, const char *encoding, const fc_st_object *content,
                           uint32_t file, const fc_path *path, fc_error *err) {
    fc_arena *arena = o->checkpoint->arena;
    fc_object *object = fc_arena_calloc(arena, 1, sizeof *object);
    fc_st_object *kept = fc_arena_calloc(arena, 1, sizeof *kept);
    fc_chunk *chunk = fc_arena_calloc(arena, 1, sizeof *chunk);
    int64_t *dims = fc_arena_calloc(arena, 2, sizeof *dims);
    fc_path_element *flat = fc_arena_calloc(arena, 1, sizeof *flat);
    FC_NEED(object && kept && chunk && dims && flat, err, o->checkpoint->path);
    *kept = *content;
    *flat = (fc_path_element){name, false};
    object->encoding = encoding;
    dims[1] = (int64_t)content->size;
    *chunk = (fc_chunk){.dims = dims,
                        .place = {.kind = FC_PLACE_FILE, .file = file},
                        .rank = o->files.ranks ? o->files.ranks[file] : FC_NO_RANK};
    o->tensors[o->ntensors++] = (fc_tensor){.name = name,
                                            .path = path->count ? *path : (fc_path){flat, 1},
                                            .dtype = FC_OPAQUE,
                                            .ndim = 1,
                                            .shape = dims + 1,
                                            .chunks = chunk,
                                            .nchunks = content->size > 0,
                                            .object = object,
                                            .detail = kept};
    return FC_OK;
}

/* An object while its JSON text is read. */
typedef struct object_parser {
    fc_arena *arena;
    const char *file, *key; /* for messages */
    const char *encoding;
    fc_path path;
    fc_st_object content;
    bool has_data;
} object_parser;

/* `*out` is NULL if the value is not a string. */
static fc_code copy_string(const object_parser *p, const json_t *value, const char **out, fc_error *err) {
    *out =
        json_is_string(value) ? fc_arena_strndup(p->arena, json_string_value(value), json_string_length(value)) : NULL;
    return *out || !json_is_string(value) ? FC_OK : fc_no_memory(err, p->file);
}

static fc_code decode(object_parser *p, const json_t *value, fc_error *err) {
    size_t length = json_string_length(value);
    if (!json_is_string(value)) {
        return FC_OK;
    }
    unsigned char *bytes = fc_arena_alloc(p->arena, length / 4 * 3 + 1);
    FC_NEED(bytes, err, p->file);
    p->content.bytes = bytes;
    p->has_data = fc_base64_decode(json_string_value(value), length, bytes, &p->content.size);
    return FC_OK;
}

static fc_code parse_member(void *context, const char *key, json_t *value, fc_error *err) {
    object_parser *p = context;
    bool good = true;
    if (strcmp(key, "encoding") == 0) {
        FC_TRY(copy_string(p, value, &p->encoding, err));
        good = p->encoding;
    } else if (strcmp(key, "json") == 0) {
        FC_TRY(copy_string(p, value, &p->content.json, err));
        good = p->content.json;
    } else if (strcmp(key, "path") == 0) {
        FC_TRY(fc_st_object_path(p->arena, p->file, value, &p->path, err));
        good = p->path.elements;
    } else if (strcmp(key, "data") == 0) {
        FC_TRY(decode(p, value, err));
        good = p->has_data;
    }
    if (!good) {
        return fc_fail(err, FC_ECORRUPT, "%s: __metadata__: %.128s: the value of %.32s is invalid", p->file, p->key,
                       key);
    }
    return FC_OK;
}

static fc_code read_object(fc_st_reader *o, const member *m, fc_error *err) {
    const char *path = o->files.files[m->file].path, *text = m->pair->value;
    object_parser p = {.arena = o->checkpoint->arena, .file = path, .key = m->pair->key};
    fc_st_json json = {.text = text, .size = strlen(text), .path = path, .where = m->pair->key};
    FC_TRY(fc_st_json_members(&json, parse_member, &p, err));
    if (!p.encoding || !p.has_data || !p.content.json || !fc_is_json(p.content.json, strlen(p.content.json))) {
        return fc_fail(err, FC_ECORRUPT, "%s: __metadata__: %.128s: encoding, data or json is missing or invalid", path,
                       m->pair->key);
    }
    return list_object(o, m->pair->key + strlen(ST_OBJECT), p.encoding, &p.content, m->file, &p.path, err);
}

static fc_code read_objects(fc_st_reader *o, fc_error *err) {
    member *members;
    size_t n;
    fc_code rc;
    FC_TRY_GOTO(gather(o, is_object, &members, &n) ? FC_OK : fc_no_memory(err, o->checkpoint->path), rc, out);
    for (size_t i = 0; i < n; i++) {
        if (i == 0 || strcmp(members[i].pair->key, members[i - 1].pair->key) != 0) {
            FC_TRY_GOTO(read_object(o, &members[i], err), rc, out);
        } else if (strcmp(members[i].pair->value, members[i - 1].pair->value) != 0) {
            rc = fc_fail(err, FC_ECORRUPT, "%s: __metadata__: %.128s: the object differs from that in %s",
                         o->files.files[members[i].file].path, members[i].pair->key,
                         o->files.files[members[i - 1].file].name);
            goto out;
        }
    }
out:
    free(members);
    return rc;
}

/* ---- members of other programs ---- */

/* The value of one key: one string, or an object with one string per file if the files differ. */
static json_t *join_members(const fc_st_reader *o, const member *members, size_t n) {
    bool same = true;
    for (size_t i = 1; i < n; i++) {
        same = same && strcmp(members[i].pair->value, members[0].pair->value) == 0;
    }
    if (same && strcmp(members[0].pair->key, ST_INDEX_METADATA) == 0) {
        json_error_t at;
        json_t *value = json_loads(members[0].pair->value, JSON_REJECT_DUPLICATES, &at);
        return value ? value : json_string(members[0].pair->value);
    }
    if (same) {
        return json_string(members[0].pair->value);
    }
    json_t *all = json_object();
    for (size_t i = 0; all && i < n; i++) {
        if (json_object_set_new(all, o->files.files[members[i].file].name, json_string(members[i].pair->value)) != 0) {
            json_decref(all);
            all = NULL;
        }
    }
    return all;
}

static json_t *join_all(const fc_st_reader *o, const member *members, size_t n) {
    json_t *root = json_object();
    bool good = root != NULL;
    for (size_t i = 0, end; good && i < n; i = end) {
        for (end = i + 1; end < n && strcmp(members[end].pair->key, members[i].pair->key) == 0; end++) {
        }
        good = json_object_set_new(root, members[i].pair->key, join_members(o, &members[i], end - i)) == 0;
    }
    if (good && o->files.index_metadata) {
        json_error_t at;
        good = json_object_set_new(root, ST_INDEX_METADATA, json_loads(o->files.index_metadata, 0, &at)) == 0;
    }
    if (!good) {
        json_decref(root);
        root = NULL;
    }
    return root;
}

static fc_code read_foreign(fc_st_reader *o, fc_error *err) {
    member *members;
    size_t n;
    char *text = NULL;
    const fc_path flat = {NULL, 0};
    FC_NEED(gather(o, is_foreign, &members, &n), err, o->checkpoint->path);
    fc_code rc = FC_OK;
    if (n > 0 || o->files.index_metadata) {
        json_t *root = join_all(o, members, n);
        text = root ? json_dumps(root, JSON_COMPACT | JSON_SORT_KEYS) : NULL;
        json_decref(root);
        const char *copy = text ? fc_arena_strndup(o->checkpoint->arena, text, strlen(text)) : NULL;
        fc_st_object content = {(const unsigned char *)copy, copy ? strlen(copy) : 0, copy};
        rc = copy
                 ? list_object(o, ST_METADATA_NAME, ST_METADATA_ENCODING, &content, n ? members[0].file : 0, &flat, err)
                 : fc_no_memory(err, o->checkpoint->path);
    }
    free(text);
    free(members);
    return rc;
}

/* The names of the tensors are unique, but an object may have the name of a tensor. */
static fc_code check_unique(const fc_st_reader *o, fc_error *err) {
    const char *twice;
    FC_TRY(fc_find_same_name(o->tensors, o->ntensors, &twice, err));
    if (twice) {
        return fc_fail(err, FC_ECORRUPT, "%s: the name %.256s appears twice, for a tensor and an object",
                       o->checkpoint->path, twice);
    }
    return FC_OK;
}

fc_code fc_st_build_objects(fc_st_reader *o, fc_error *err) {
    size_t tensors = o->ntensors;
    FC_TRY(read_foreign(o, err));
    FC_TRY(read_objects(o, err));
    return o->ntensors > tensors ? check_unique(o, err) : FC_OK;
}
