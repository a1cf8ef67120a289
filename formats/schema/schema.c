/*
 * Opens a schema, which holds the names, dtypes and shapes of a model (docs/schemas/schema.json), as a checkpoint whose
 * tensors have no chunks. It can be inspected, compared and planned with, but not converted. jansson parses the text;
 * names and shapes are copied into the arena.
 */
#include "fsdpckpt/format.h"

#include "base/checked.h"
#include "fsdpckpt/order.h"
#include "fsdpckpt/try.h"
#include "io/file.h"
#include "registry.h"

#include <inttypes.h>
#include <jansson.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* MAX_BYTES suffices for half a million tensors. jansson's tree takes up to 75 times the text, so hostile files must be
   limited. */
enum { SCHEMA_VERSION = 1, MAX_BYTES = 64 << 20, MAX_ELEMENTS = 256 };

/* A schema while it is read. `list` and `at`, the current array and the index in it, are for messages. */
typedef struct schema_reader {
    fc_checkpoint *checkpoint;
    fc_error *err;
    fc_tensor *tensors;
    size_t count;
    const char *list;
    size_t at;
} schema_reader;

static bool schema_probe(const fc_probe *probe) {
    static const char mark[] = "\"fsdpckpt\"";
    const unsigned char *s = probe->head, *end = s + probe->head_size;
    if (end - s >= 3 && memcmp(s, "\xef\xbb\xbf", 3) == 0) {
        s += 3;
    }
    while (s < end && strchr(" \t\r\n", *s) && *s) {
        s++;
    }
    return s < end && *s == '{' && memmem(s, (size_t)(end - s), mark, sizeof mark - 1);
}

static fc_code syntax_fail(const char *path, const json_error_t *wrong, fc_error *err) {
    enum json_error_code what = json_error_code(wrong);
    if (wrong->text[0] == '\0') { /* jansson reports a failed allocation without a text */
        return fc_no_memory(err, path);
    }
    return fc_fail(err, what == json_error_stack_overflow ? FC_EUNSUPPORTED : FC_ECORRUPT, "%s:%d:%d: %s", path,
                   wrong->line, wrong->column,
                   what == json_error_null_character || what == json_error_null_byte_in_key
                       ? "\\u0000 cannot be part of a name"
                       : wrong->text);
}

static fc_code parse(const char *path, json_t **root, fc_error *err) {
    char *text = NULL;
    size_t size = 0;
    json_error_t wrong;
    fc_code rc;
    FC_TRY_GOTO(fc_read_whole(path, "a schema", MAX_BYTES, &text, &size, err), rc, out);
    size_t mark = size >= 3 && memcmp(text, "\xef\xbb\xbf", 3) == 0 ? 3 : 0;
    *root = json_loadb(text + mark, size - mark, JSON_REJECT_DUPLICATES, &wrong);
    FC_TRY_GOTO(*root ? FC_OK : syntax_fail(path, &wrong, err), rc, out);
out:
    free(text);
    return rc;
}

/* Fails with the name of the entry, or with its index if it has no name, followed by the formatted text. */
static fc_code entry_fail(const schema_reader *r, const char *name, fc_code code, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));

static fc_code entry_fail(const schema_reader *r, const char *name, fc_code code, const char *fmt, ...) {
    char text[512];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    if (!name) {
        return fc_fail(r->err, code, "%s: %s[%zu]%s", r->checkpoint->path, r->list, r->at, text);
    }
    return fc_fail(r->err, code, "%s: %s '%.256s'%s", r->checkpoint->path,
                   strcmp(r->list, "objects") == 0 ? "object" : "tensor", name, text);
}

/* A value as messages show it: its text if it is short, else its kind. */
typedef struct shown {
    char text[64];
} shown;

static shown show(const json_t *value) {
    shown s = {"an object"};
    if (json_is_array(value)) {
        strcpy(s.text, "an array");
    } else if (!json_is_object(value)) {
        memset(s.text, 0, sizeof s.text);
        if (json_dumpb(value, s.text, sizeof s.text - 1, JSON_ENCODE_ANY) >= sizeof s.text) {
            strcpy(s.text, "a long string"); /* numbers and words all fit */
        }
    }
    return s;
}

static bool read_count(const json_t *value, int64_t *out) {
    *out = json_is_integer(value) ? (int64_t)json_integer_value(value) : -1;
    return *out >= 0;
}

/* @return a copy in the arena; NULL when out of memory. */
static const char *keep_string(const schema_reader *r, const json_t *string) {
    return fc_arena_strndup(r->checkpoint->arena, json_string_value(string), json_string_length(string));
}

static fc_code read_dtype(const schema_reader *r, const json_t *value, fc_tensor *t) {
    const char *name = json_string_value(value);
    if (!name) {
        return entry_fail(r, t->name, FC_ECORRUPT, ": \"dtype\" should be a dtype such as \"bfloat16\", not %s",
                          show(value).text);
    }
    if (!fc_dtype_find(name, strlen(name), &t->dtype)) {
        return entry_fail(r, t->name, FC_EUNSUPPORTED, ": unknown dtype '%.64s'", name);
    }
    return FC_OK;
}

static fc_code read_shape(const schema_reader *r, const json_t *value, fc_tensor *t) {
    size_t n = json_array_size(value);
    int64_t elements;
    uint64_t bytes;
    if (!json_is_array(value)) {
        return entry_fail(r, t->name, FC_ECORRUPT, ": \"shape\" should be an array of sizes, not %s", show(value).text);
    }
    if (n > FC_MAX_DIMS) {
        return entry_fail(r, t->name, FC_EUNSUPPORTED, ": more than %d dimensions", FC_MAX_DIMS);
    }
    int64_t *shape = fc_arena_alloc(r->checkpoint->arena, n * sizeof *shape);
    FC_NEED(shape, r->err, r->checkpoint->path);
    for (size_t i = 0; i < n; i++) {
        if (!read_count(json_array_get(value, i), &shape[i])) {
            return entry_fail(r, t->name, FC_ECORRUPT,
                              ": shape[%zu] should be a size: an integer of at least 0, not %s", i,
                              show(json_array_get(value, i)).text);
        }
    }
    if (!fc_numel((int)n, shape, &elements) || !fc_mul_u64((uint64_t)elements, fc_dtype_size(FC_C128), &bytes)) {
        return entry_fail(r, t->name, FC_ECORRUPT, ": the product of the sizes exceeds 64 bits");
    }
    t->ndim = (int)n;
    t->shape = shape;
    return FC_OK;
}

static fc_code read_element(const schema_reader *r, const json_t *path, size_t i, const fc_tensor *t,
                            fc_path_element *out) {
    const json_t *value = json_array_get(path, i);
    int64_t index;
    if (json_is_string(value)) {
        *out = (fc_path_element){.key = keep_string(r, value)};
    } else if (read_count(value, &index)) {
        *out = (fc_path_element){.key = fc_arena_printf(r->checkpoint->arena, "%" PRId64, index), .is_index = true};
    } else {
        return entry_fail(r, t->name, FC_ECORRUPT,
                          ": path[%zu] should be a key (a string) or an index (an integer of at least 0), not %s", i,
                          show(value).text);
    }
    return out->key ? FC_OK : fc_no_memory(r->err, r->checkpoint->path);
}

/* Without a path, the name is the only element. */
static fc_code read_path(const schema_reader *r, const json_t *value, fc_tensor *t) {
    size_t n = value ? json_array_size(value) : 1;
    if (value && !json_is_array(value)) {
        return entry_fail(r, t->name, FC_ECORRUPT, ": \"path\" should be an array of keys and indexes, not %s",
                          show(value).text);
    }
    if (n == 0) {
        return entry_fail(r, t->name, FC_ECORRUPT, ": the path is empty");
    }
    if (n > MAX_ELEMENTS) {
        return entry_fail(r, t->name, FC_EUNSUPPORTED, ": the path has more than %d elements", MAX_ELEMENTS);
    }
    fc_path_element *elements = fc_arena_alloc(r->checkpoint->arena, n * sizeof *elements);
    FC_NEED(elements, r->err, r->checkpoint->path);
    elements[0] = (fc_path_element){.key = t->name};
    for (size_t i = 0; value && i < n; i++) {
        FC_TRY(read_element(r, value, i, t, &elements[i]));
    }
    t->path = (fc_path){elements, n};
    return FC_OK;
}

static fc_code read_tie(const schema_reader *r, const json_t *value, fc_tensor *t) {
    if (value && !json_is_string(value)) {
        return entry_fail(r, t->name, FC_ECORRUPT, ": \"same_as\" should be the name of a tensor, not %s",
                          show(value).text);
    }
    t->tied_to = value ? keep_string(r, value) : NULL;
    return t->tied_to || !value ? FC_OK : fc_no_memory(r->err, r->checkpoint->path);
}

static fc_code read_name(const schema_reader *r, const json_t *entry, fc_tensor *t) {
    const json_t *name = json_object_get(entry, "name");
    if (!json_is_object(entry)) {
        return entry_fail(r, NULL, FC_ECORRUPT, " should be an object with a name, not %s", show(entry).text);
    }
    if (!name) {
        return entry_fail(r, NULL, FC_ECORRUPT, " has no \"name\"");
    }
    if (!json_is_string(name)) {
        return entry_fail(r, NULL, FC_ECORRUPT, ": \"name\" should be a name in quotation marks, not %s",
                          show(name).text);
    }
    if (json_string_length(name) == 0) {
        return entry_fail(r, NULL, FC_ECORRUPT, ": the name is empty");
    }
    t->name = keep_string(r, name);
    return t->name ? FC_OK : fc_no_memory(r->err, r->checkpoint->path);
}

/* Unknown members are ignored: later versions of the format only add members. */
static fc_code read_tensor(const schema_reader *r, const json_t *entry, fc_tensor *t) {
    const json_t *dtype = json_object_get(entry, "dtype"), *shape = json_object_get(entry, "shape");
    FC_TRY(read_name(r, entry, t));
    if (!(dtype && shape)) {
        return entry_fail(r, t->name, FC_ECORRUPT, " has no \"%s\"", dtype ? "shape" : "dtype");
    }
    FC_TRY(read_dtype(r, dtype, t));
    FC_TRY(read_shape(r, shape, t));
    FC_TRY(read_tie(r, json_object_get(entry, "same_as"), t));
    return read_path(r, json_object_get(entry, "path"), t);
}

static fc_code read_object(const schema_reader *r, const json_t *entry, fc_tensor *t) {
    static const fc_object described = {.encoding = "none"};
    static const int64_t no_bytes[1] = {0};
    t->object = &described;
    t->dtype = FC_OPAQUE;
    t->ndim = 1;
    t->shape = no_bytes;
    FC_TRY(read_name(r, entry, t));
    return read_path(r, json_object_get(entry, "path"), t);
}

static fc_code read_entries(schema_reader *r, const char *list, const json_t *entries) {
    bool objects = strcmp(list, "objects") == 0;
    r->list = list;
    for (r->at = 0; r->at < json_array_size(entries); r->at++) {
        fc_tensor t = {0};
        const json_t *entry = json_array_get(entries, r->at);
        if (objects) {
            FC_TRY(read_object(r, entry, &t));
        } else {
            FC_TRY(read_tensor(r, entry, &t));
        }
        r->tensors[r->count++] = t;
    }
    return FC_OK;
}

/* Fails unless the document is a schema of a version that is supported. */
static fc_code check_root(const schema_reader *r, const json_t *root) {
    static const char *const lists[] = {"tensors", "objects"};
    const char *path = r->checkpoint->path;
    const json_t *kind = json_object_get(root, "fsdpckpt"), *version = json_object_get(root, "schema");
    const char *member = "schema";
    if (!version && json_object_get(root, "version")) { /* its name in earlier builds */
        version = json_object_get(root, member = "version");
    }
    if (!kind) {
        return fc_fail(r->err, FC_ECORRUPT, "%s: the member \"fsdpckpt\" is missing", path);
    }
    if (!json_is_string(kind) || strcmp(json_string_value(kind), "schema") != 0) {
        return fc_fail(r->err, json_is_string(kind) ? FC_EUNSUPPORTED : FC_ECORRUPT,
                       "%s: \"fsdpckpt\" should be \"schema\", not %s", path, show(kind).text);
    }
    if (!version) {
        return fc_fail(r->err, FC_ECORRUPT, "%s: the member \"schema\" is missing", path);
    }
    if (!json_is_integer(version)) {
        return fc_fail(r->err, FC_ECORRUPT, "%s: \"%s\" should be a number, not %s", path, member, show(version).text);
    }
    if (json_integer_value(version) != SCHEMA_VERSION) {
        return fc_fail(r->err, FC_EUNSUPPORTED,
                       "%s: version %s is not supported, only version %d; use a newer fsdpckpt", path,
                       show(version).text, SCHEMA_VERSION);
    }
    if (!json_object_get(root, "tensors")) {
        return fc_fail(r->err, FC_ECORRUPT, "%s: the member \"tensors\" is missing", path);
    }
    const json_t *order = json_object_get(root, "order");
    if (order && (!json_is_string(order) || strcmp(json_string_value(order), "model") != 0)) {
        return fc_fail(r->err, FC_ECORRUPT, "%s: \"order\" should be \"model\" or absent, not %s", path,
                       show(order).text);
    }
    for (size_t i = 0; i < sizeof lists / sizeof *lists; i++) {
        const json_t *list = json_object_get(root, lists[i]);
        if (list && !json_is_array(list)) {
            return fc_fail(r->err, FC_ECORRUPT, "%s: \"%s\" should be an array, not %s", path, lists[i],
                           show(list).text);
        }
    }
    return FC_OK;
}

/* Reads tensors and objects in the order of the file. */
static fc_code read_root(schema_reader *r, json_t *root) {
    const char *key;
    json_t *value;
    FC_TRY(check_root(r, root));
    r->checkpoint->keeps_order = json_object_get(root, "order") != NULL;
    size_t capacity =
        json_array_size(json_object_get(root, "tensors")) + json_array_size(json_object_get(root, "objects"));
    r->tensors = fc_arena_calloc(r->checkpoint->arena, capacity ? capacity : 1, sizeof *r->tensors);
    FC_NEED(r->tensors, r->err, r->checkpoint->path);
    json_object_foreach(root, key, value) {
        if (strcmp(key, "tensors") == 0 || strcmp(key, "objects") == 0) {
            FC_TRY(read_entries(r, key, value));
        }
    }
    return FC_OK;
}

/* Sorting takes n log n for any names; a hash table can be slowed down by hostile ones. */
static fc_code check_unique(const schema_reader *r) {
    const char **names = malloc((r->count ? r->count : 1) * sizeof *names);
    FC_NEED(names, r->err, r->checkpoint->path);
    for (size_t i = 0; i < r->count; i++) {
        names[i] = r->tensors[i].name;
    }
    fc_sort_texts(names, r->count);
    fc_code rc = FC_OK;
    for (size_t i = 1; i < r->count && rc == FC_OK; i++) {
        if (strcmp(names[i - 1], names[i]) == 0) {
            rc = fc_fail(r->err, FC_ECORRUPT, "%s: the name '%.256s' appears twice", r->checkpoint->path, names[i]);
        }
    }
    free(names);
    return rc;
}

static fc_code schema_open(fc_checkpoint *checkpoint, const fc_open_options *options, fc_error *err) {
    schema_reader r = {.checkpoint = checkpoint, .err = err};
    json_t *root = NULL;
    (void)options;
    fc_file *file = fc_arena_calloc(checkpoint->arena, 1, sizeof *file);
    FC_NEED(file, r.err, r.checkpoint->path);
    const char *slash = strrchr(checkpoint->path, '/');
    *file = (fc_file){checkpoint->path, slash ? slash + 1 : checkpoint->path};
    fc_code rc;
    FC_TRY_GOTO(parse(checkpoint->path, &root, err), rc, out);
    FC_TRY_GOTO(read_root(&r, root), rc, out);
    rc = check_unique(&r);
out:
    json_decref(root);
    checkpoint->files = file;
    checkpoint->nfiles = 1;
    checkpoint->tensors = r.tensors;
    checkpoint->ntensors = rc == FC_OK ? r.count : 0;
    return rc;
}

static fc_code schema_extent(const fc_checkpoint *checkpoint, const fc_tensor *tensor, size_t index, fc_extent *out,
                             fc_error *err) {
    (void)index;
    (void)out;
    return fc_fail(err, FC_EUSAGE, "%s: tensor %.256s: a schema holds no data", checkpoint->path, tensor->name);
}

const fc_format fc_format_schema = {
    .name = "schema",
    .description = "a schema: names, dtypes and shapes without data",
    .file_sign = "a schema (JSON)",
    .extensions = (const char *const[]){NULL},
    .layout_only = true,
    .reader =
        {
            .probe = schema_probe,
            .open = schema_open,
            .extent = schema_extent,
        },
};
