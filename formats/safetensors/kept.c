/*
 * Applies the members of `__metadata__` to the entries: torch's offsets of shards, and fsdpckpt's own members (kept.h).
 * Everything is checked against the entries, because any program can write it.
 */
#include "safetensors/kept.h"

#include "base/checked.h"
#include "fsdpckpt/try.h"
#include "safetensors/header.h"
#include "safetensors/json.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

enum { MAX_ELEMENTS = 256 };

typedef struct kept_reader {
    fc_arena *arena;
    const char *path;
    fc_st_header *header;
    const char *what; /* the key of the member that is applied, for messages */
} kept_reader;

static fc_code fail_kept(const kept_reader *a, const char *name, const char *what, fc_error *err) {
    return fc_fail(err, FC_ECORRUPT, "%s: __metadata__: %s: tensor %.256s: %s", a->path, a->what, name, what);
}

static fc_code find_entry(const kept_reader *a, const char *name, fc_st_entry **out, fc_error *err) {
    *out = fc_st_header_find(a->header, name);
    return *out ? FC_OK : fail_kept(a, name, "the file has no tensor of that name", err);
}

/* Reads `count` integers of at least 0. `*out` is NULL if the value is anything else. */
static fc_code read_numbers(const kept_reader *a, const json_t *list, size_t count, int64_t **out, fc_error *err) {
    *out = NULL;
    if (!json_is_array(list) || json_array_size(list) != count) {
        return FC_OK;
    }
    int64_t *numbers = fc_arena_alloc(a->arena, (count + 1) * sizeof *numbers);
    FC_NEED(numbers, err, a->path);
    for (size_t i = 0; i < count; i++) {
        const json_t *item = json_array_get(list, i);
        numbers[i] = (int64_t)json_integer_value(item);
        if (!json_is_integer(item) || numbers[i] < 0) {
            return FC_OK;
        }
    }
    *out = numbers;
    return FC_OK;
}

static const char *copy_string(const kept_reader *a, const json_t *string) {
    return fc_arena_strndup(a->arena, json_string_value(string), json_string_length(string));
}

static fc_code apply_offsets(void *context, const char *name, json_t *value, fc_error *err) {
    kept_reader *a = context;
    fc_st_entry *e;
    FC_TRY(find_entry(a, name, &e, err));
    FC_TRY(read_numbers(a, json_object_get(value, "saved_offsets"), (size_t)e->raw_ndim, &e->offsets, err));
    return e->offsets ? FC_OK : fail_kept(a, name, "saved_offsets should have one number for each dimension", err);
}

static fc_code apply_dtype(void *context, const char *name, json_t *value, fc_error *err) {
    kept_reader *a = context;
    fc_st_entry *e;
    const char *dtype = json_string_value(value);
    FC_TRY(find_entry(a, name, &e, err));
    if (!dtype || !fc_dtype_find(dtype, strlen(dtype), &e->dtype)) {
        return fail_kept(a, name, "the dtype is unknown", err);
    }
    fc_st_stored as = fc_st_stored_as(e->dtype, 0);
    bool fits = as.remembered && as.as == e->stored && as.append > 0 && e->raw_ndim > 0 &&
                e->shape[e->raw_ndim - 1] == as.append;
    e->remembered = true;
    return fits ? FC_OK : fail_kept(a, name, "the dtype does not fit the one in the header", err);
}

/* See ST_PATHS. The key is NULL if the item is not an element. */
static fc_code read_element(const kept_reader *a, const json_t *item, fc_path_element *out, fc_error *err) {
    const json_t *tuple = json_object_get(item, "tuple"), *number = json_object_get(item, "number");
    const json_t *value = tuple ? tuple : number ? number : item;
    char text[32];
    *out = (fc_path_element){.is_index = !number && json_is_integer(value), .is_tuple = tuple, .is_number = number};
    if (json_is_string(item)) {
        out->key = copy_string(a, item);
    } else if (json_is_integer(value) && (number || json_integer_value(value) >= 0)) {
        int n = snprintf(text, sizeof text, "%" JSON_INTEGER_FORMAT, json_integer_value(value));
        out->key = fc_arena_strndup(a->arena, text, (size_t)n);
    } else {
        return FC_OK;
    }
    return out->key ? FC_OK : fc_no_memory(err, a->path);
}

/* `*out` is NULL if the list is not a path. */
static fc_code read_path(const kept_reader *a, const json_t *list, const fc_path_element **out, size_t *count,
                         fc_error *err) {
    *out = NULL;
    *count = json_array_size(list);
    if (*count == 0 || *count > MAX_ELEMENTS) {
        return FC_OK;
    }
    fc_path_element *elements = fc_arena_calloc(a->arena, *count, sizeof *elements);
    FC_NEED(elements, err, a->path);
    for (size_t i = 0; i < *count; i++) {
        FC_TRY(read_element(a, json_array_get(list, i), &elements[i], err));
        if (!elements[i].key) {
            return FC_OK;
        }
    }
    *out = elements;
    return FC_OK;
}

static fc_code apply_path(void *context, const char *name, json_t *value, fc_error *err) {
    kept_reader *a = context;
    fc_st_entry *e;
    FC_TRY(find_entry(a, name, &e, err));
    FC_TRY(read_path(a, value, &e->path, &e->path_count, err));
    return e->path ? FC_OK : fail_kept(a, name, "the path should be a list of keys and indexes", err);
}

static fc_code apply_layout(void *context, const char *name, json_t *value, fc_error *err) {
    kept_reader *a = context;
    fc_st_entry *e;
    const json_t *placements = json_object_get(value, "placements");
    FC_TRY(find_entry(a, name, &e, err));
    const json_t *shape = json_object_get(value, "shape");
    int64_t *sizes;
    e->global_ndim = (int)json_array_size(shape);
    FC_TRY(read_numbers(a, shape, (size_t)e->global_ndim, &sizes, err));
    if (!sizes || !json_is_string(placements)) {
        return fail_kept(a, name, "its shape or its placements are missing", err);
    }
    e->global = sizes;
    e->placements = copy_string(a, placements);
    return e->placements ? FC_OK : fc_no_memory(err, a->path);
}

/* Calls `member` for each member of the JSON object stored under `key`, if there is one. */
static fc_code apply(kept_reader *a, const char *key, fc_st_json_member *member, fc_error *err) {
    const char *text = fc_st_header_value(a->header, key);
    if (!text) {
        return FC_OK;
    }
    fc_st_json json = {.text = text, .size = strlen(text), .path = a->path, .where = key};
    a->what = key;
    return fc_st_json_members(&json, member, a, err);
}

static fc_code apply_mesh(kept_reader *a, fc_error *err) {
    const char *text = fc_st_header_value(a->header, ST_MESH);
    fc_mesh *mesh = &a->header->mesh;
    json_error_t at;
    if (!text) {
        return FC_OK;
    }
    json_t *root = strlen(text) <= ST_JSON_VALUE ? json_loads(text, JSON_REJECT_DUPLICATES, &at) : NULL;
    const json_t *names = json_object_get(root, "names"), *rank = json_object_get(root, "rank");
    size_t n = json_array_size(names);
    int64_t *sizes, ranks = 1;
    const fc_code rc = read_numbers(a, json_object_get(root, "shape"), n, &sizes, err);
    bool good = sizes && n > 0 && n <= FC_MAX_MESH_DIMS && json_is_integer(rank);
    for (size_t i = 0; good && i < n; i++) {
        const char *name = json_string_value(json_array_get(names, i));
        good = name && strlen(name) < sizeof mesh->names[i] && sizes[i] > 0 && fc_mul_i64(ranks, sizes[i], &ranks) &&
               ranks < FC_NO_RANK;
        if (good) {
            strcpy(mesh->names[i], name);
            mesh->sizes[i] = sizes[i];
        }
    }
    mesh->ndim = good ? (int)n : 0;
    a->header->rank = (int64_t)json_integer_value(rank);
    good = good && a->header->rank >= 0 && a->header->rank < ranks;
    json_decref(root);
    FC_TRY(rc);
    if (!good) {
        return fc_fail(err, FC_ECORRUPT, "%s: __metadata__: %s should be a mesh and a rank in it", a->path, ST_MESH);
    }
    return FC_OK;
}

static fc_code apply_digests(kept_reader *a, fc_error *err) {
    const char *text = fc_st_header_value(a->header, ST_DIGESTS);
    fc_st_header *h = a->header;
    if (!text) {
        return FC_OK;
    }
    bool good = strlen(text) == h->nentries * ST_DIGITS;
    for (size_t i = 0; good && i < h->nentries; i++) {
        good = fc_st_read_digits(text + i * ST_DIGITS, &h->entries[h->by_offset[i]].crc64) == 0;
    }
    h->has_digests = good;
    /* If another program rewrote the header, the digests may describe the tensors of the old one. */
    if (!good && h->state != ST_HEADER_REWRITTEN && h->state != ST_HEADER_BARE) {
        return fc_fail(err, FC_ECORRUPT,
                       "%s: __metadata__: %s should have 16 hexadecimal digits for each of %zu tensors", a->path,
                       ST_DIGESTS, h->nentries);
    }
    return FC_OK;
}

/* Converts the shape and the offsets from the header's units to those of torch. */
static fc_code finish_kept_entry(const kept_reader *a, fc_st_entry *e, fc_error *err) {
    fc_st_stored as = fc_st_stored_as(e->dtype, e->remembered ? 0 : e->raw_ndim);
    int last = e->raw_ndim - 1;
    e->ndim = e->raw_ndim - (as.append > 0);
    if (e->ndim > FC_MAX_DIMS) {
        return fc_fail(err, FC_EUNSUPPORTED, "%s: tensor %.256s: more than %d dimensions", a->path, e->name,
                       FC_MAX_DIMS);
    }
    if (as.append > 0 && e->offsets && e->offsets[last] != 0) {
        return fail_kept(a, e->name, "the sharding splits complex numbers", err);
    }
    if (as.widen > 1 && (e->shape[last] % as.widen != 0 || (e->offsets && e->offsets[last] % as.widen != 0))) {
        return fc_fail(err, FC_EUNSUPPORTED,
                       "%s: tensor %.256s: its rows of %" PRId64 " 4-bit numbers do not fill whole bytes", a->path,
                       e->name, e->shape[last]);
    }
    if (as.widen > 1) {
        e->shape[last] /= as.widen;
        if (e->offsets) {
            e->offsets[last] /= as.widen;
        }
    }
    if (e->global && e->global_ndim != e->ndim) {
        return fail_kept(a, e->name, "the global shape has another number of dimensions", err);
    }
    return FC_OK;
}

fc_code fc_st_header_apply_kept(fc_arena *arena, const char *path, fc_st_header *header, fc_error *err) {
    kept_reader a = {arena, path, header, ""};
    header->is_shard = fc_st_header_value(header, ST_SHARDING) != NULL;
    FC_TRY(apply(&a, ST_DTYPES, apply_dtype, err));
    FC_TRY(apply(&a, ST_SHARDING, apply_offsets, err));
    FC_TRY(apply(&a, ST_PATHS, apply_path, err));
    FC_TRY(apply(&a, ST_LAYOUT, apply_layout, err));
    FC_TRY(apply_mesh(&a, err));
    FC_TRY(apply_digests(&a, err));
    for (size_t i = 0; i < header->nentries; i++) {
        FC_TRY(finish_kept_entry(&a, &header->entries[i], err));
    }
    return FC_OK;
}

fc_code fc_st_object_path(fc_arena *arena, const char *path, const json_t *list, fc_path *out, fc_error *err) {
    const kept_reader a = {.arena = arena, .path = path};
    *out = (fc_path){0};
    return read_path(&a, list, &out->elements, &out->count, err);
}
