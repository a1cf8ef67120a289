/*
 * A model described by its layout alone: the names, dtypes and shapes that `fsdpckpt schema` prints
 * (docs/SCHEMA_JSON.md), opened as a checkpoint whose tensors have no chunks. It can be inspected and planned with;
 * there is nothing to convert. The text stays in the arena, and every name points into it.
 */
#include "fsdpckpt/format.h"

#include "core/checked.h"
#include "core/json_in.h"
#include "core/siphash.h"
#include "registry.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* The text of a million tensors is 100 MB. */
enum { SCHEMA_VERSION = 1, MAX_BYTES = 1 << 30, LEAST_ENTRY = 10 /* {"name":""} is longer */ };

typedef struct reading {
    fc_json json;
    fc_checkpoint *checkpoint;
    fc_tensor *tensors;
    size_t count, capacity;
} reading;

static bool schema_probe(const fc_probe *probe) {
    static const char mark[] = "\"fsdpckpt\"";
    const unsigned char *s = probe->head, *end = s + probe->head_size;
    if (probe->is_directory) {
        return false;
    }
    if (end - s >= 3 && memcmp(s, "\xef\xbb\xbf", 3) == 0) {
        s += 3;
    }
    while (s < end && strchr(" \t\r\n", *s) && *s) {
        s++;
    }
    return s < end && *s == '{' && memmem(s, (size_t)(end - s), mark, sizeof mark - 1);
}

static fc_code read_text(fc_checkpoint *checkpoint, char **text, size_t *size, fc_error *err) {
    int fd;
    uint64_t bytes;
    fc_code rc = fc_open_input(checkpoint->path, &fd, &bytes, err);
    if (rc != FC_OK) {
        return rc;
    }
    if (bytes > MAX_BYTES) {
        rc = fc_fail(err, FC_EUNSUPPORTED, "%s: larger than %d MiB: not a schema", checkpoint->path, MAX_BYTES >> 20);
    } else {
        *size = (size_t)bytes;
        *text = fc_arena_alloc(checkpoint->arena, *size + 1);
        rc = *text ? fc_pread_full(fd, *text, *size, 0, checkpoint->path, err)
                   : fc_fail(err, FC_ENOMEM, "%s: out of memory", checkpoint->path);
    }
    close(fd);
    if (rc == FC_OK) {
        (*text)[*size] = '\0';
    }
    return rc;
}

static fc_code no_memory(reading *r) {
    return fc_json_fail(&r->json, FC_ENOMEM, "out of memory");
}

/* Room for every tensor and object there can be: each begins with a brace, so the table never grows. */
static fc_code make_room(reading *r, const char *text, size_t size) {
    const char *end = text + size;
    for (const char *s = text; (s = memchr(s, '{', (size_t)(end - s))); s++) {
        r->capacity++;
    }
    r->capacity = r->capacity < size / LEAST_ENTRY ? r->capacity : size / LEAST_ENTRY;
    r->tensors = fc_arena_alloc(r->checkpoint->arena, (r->capacity ? r->capacity : 1) * sizeof *r->tensors);
    return r->tensors ? FC_OK : no_memory(r);
}

static void read_shape(reading *r, fc_tensor *t) {
    int64_t shape[FC_MAX_DIMS], elements;
    uint64_t bytes;
    int n = 0;
    if (!fc_json_open(&r->json, '[', "an array of sizes")) {
        return;
    }
    for (bool first = true; fc_json_more(&r->json, ']', &first); n++) {
        if (n == FC_MAX_DIMS) {
            fc_json_fail(&r->json, FC_EUNSUPPORTED, "more than %d dimensions", FC_MAX_DIMS);
            return;
        }
        if (!fc_json_count(&r->json, &shape[n], "a size: an integer of at least 0")) {
            return;
        }
    }
    if (r->json.code == FC_OK &&
        (!fc_numel(n, shape, &elements) || !fc_mul_u64((uint64_t)elements, fc_dtype_size(FC_C128), &bytes))) {
        fc_json_fail(&r->json, FC_ECORRUPT, "the product of the sizes does not fit 64 bits");
    }
    int64_t *kept = fc_arena_alloc(r->checkpoint->arena, (size_t)n * sizeof *kept);
    if (!kept) {
        no_memory(r);
        return;
    }
    memcpy(kept, shape, (size_t)n * sizeof *kept);
    t->ndim = n;
    t->shape = kept;
}

static bool read_element(reading *r, fc_path_element *out) {
    int64_t index;
    out->is_index = fc_json_peek(&r->json) == '0';
    if (!out->is_index) {
        out->key = fc_json_string(&r->json, "a key (a string) or an index (an integer)");
    } else if (fc_json_count(&r->json, &index, "an index: an integer of at least 0")) {
        out->key = fc_arena_printf(r->checkpoint->arena, "%" PRId64, index);
        if (!out->key) {
            no_memory(r);
        }
    }
    return r->json.code == FC_OK;
}

static void read_path(reading *r, fc_tensor *t) {
    enum { MAX_ELEMENTS = 256 };
    fc_path_element elements[MAX_ELEMENTS];
    size_t n = 0;
    if (!fc_json_open(&r->json, '[', "an array of keys and indexes")) {
        return;
    }
    for (bool first = true; fc_json_more(&r->json, ']', &first); n++) {
        if (n == MAX_ELEMENTS) {
            fc_json_fail(&r->json, FC_EUNSUPPORTED, "a path of more than %d elements", MAX_ELEMENTS);
            return;
        }
        if (!read_element(r, &elements[n])) {
            return;
        }
    }
    fc_path_element *kept = fc_arena_alloc(r->checkpoint->arena, n * sizeof *kept);
    if (r->json.code == FC_OK && n == 0) {
        fc_json_fail(&r->json, FC_ECORRUPT, "the path is empty");
    } else if (!kept) {
        no_memory(r);
    } else {
        memcpy(kept, elements, n * sizeof *kept);
        t->path = (fc_path){kept, n};
    }
}

static void read_dtype(reading *r, fc_tensor *t) {
    const char *name = fc_json_string(&r->json, "a dtype such as \"bfloat16\"");
    if (name && !fc_dtype_find(name, strlen(name), &t->dtype)) {
        fc_json_fail(&r->json, FC_EUNSUPPORTED, "unknown dtype '%.64s'", name);
    }
}

/* What an entry may have and must have, by the bits of what was seen. */
enum { HAS_NAME = 1, HAS_DTYPE = 2, HAS_SHAPE = 4, HAS_PATH = 8 };

static void read_member(reading *r, const char *key, bool object, fc_tensor *t, unsigned *seen) {
    unsigned bit = strcmp(key, "name") == 0               ? HAS_NAME
                   : strcmp(key, "path") == 0             ? HAS_PATH
                   : !object && strcmp(key, "dtype") == 0 ? HAS_DTYPE
                   : !object && strcmp(key, "shape") == 0 ? HAS_SHAPE
                                                          : 0;
    if (*seen & bit) {
        fc_json_fail(&r->json, FC_ECORRUPT, "the member \"%s\" is there twice", key);
        return;
    }
    *seen |= bit;
    switch (bit) {
    case HAS_NAME:
        t->name = fc_json_string(&r->json, "a name in quotation marks");
        if (t->name && !*t->name) {
            fc_json_fail(&r->json, FC_ECORRUPT, "the name is empty");
        }
        break;
    case HAS_DTYPE:
        read_dtype(r, t);
        break;
    case HAS_SHAPE:
        read_shape(r, t);
        break;
    case HAS_PATH:
        read_path(r, t);
        break;
    default: /* members are only ever added: what a later version says is none of ours */
        fc_json_skip(&r->json);
    }
}

/* One entry of "tensors" or "objects". */
static void read_entry(reading *r, bool object) {
    static const fc_object described = {"none"};
    static const int64_t no_bytes[1] = {0};
    fc_tensor t = {0};
    unsigned seen = 0;
    if (!fc_json_open(&r->json, '{', "an object with a name")) {
        return;
    }
    for (bool first = true; fc_json_more(&r->json, '}', &first);) {
        const char *key = fc_json_key(&r->json);
        if (key) {
            read_member(r, key, object, &t, &seen);
        }
    }
    if (object) {
        t.object = &described;
        t.dtype = FC_OPAQUE;
        t.ndim = 1;
        t.shape = no_bytes;
        seen |= HAS_DTYPE | HAS_SHAPE;
    }
    if (r->json.code == FC_OK && (seen & HAS_NAME) == 0) {
        fc_json_fail(&r->json, FC_ECORRUPT, "an entry without \"name\" ends here");
    } else if (r->json.code == FC_OK && (seen & (HAS_DTYPE | HAS_SHAPE)) != (HAS_DTYPE | HAS_SHAPE)) {
        fc_json_fail(&r->json, FC_ECORRUPT, "tensor '%.256s' has no \"%s\"", t.name,
                     seen & HAS_DTYPE ? "shape" : "dtype");
    }
    if (r->json.code == FC_OK && !(seen & HAS_PATH)) {
        fc_path_element *element = fc_arena_alloc(r->checkpoint->arena, sizeof *element);
        if (!element) {
            no_memory(r);
            return;
        }
        *element = (fc_path_element){t.name, false};
        t.path = (fc_path){element, 1};
    }
    if (r->json.code == FC_OK && r->count < r->capacity) {
        r->tensors[r->count++] = t;
    }
}

static void read_entries(reading *r, bool objects) {
    if (fc_json_open(&r->json, '[', "an array")) {
        for (bool first = true; fc_json_more(&r->json, ']', &first);) {
            read_entry(r, objects);
        }
    }
}

static void read_version(reading *r) {
    int64_t version = 0;
    if (fc_json_count(&r->json, &version, "a number") && version != SCHEMA_VERSION) {
        fc_json_fail(&r->json, FC_EUNSUPPORTED, "version %" PRId64 "; this fsdpckpt reads version %d: use a newer one",
                     version, SCHEMA_VERSION);
    }
}

static void read_kind(reading *r) {
    const char *kind = fc_json_string(&r->json, "\"schema\"");
    if (kind && strcmp(kind, "schema") != 0) {
        fc_json_fail(&r->json, FC_EUNSUPPORTED, "a file of the kind '%.64s', not \"schema\"", kind);
    }
}

static fc_code read_root(reading *r) {
    static const char *const names[] = {"fsdpckpt", "version", "tensors", "objects"};
    enum { KIND, VERSION, TENSORS, OBJECTS, COUNT };
    bool seen[COUNT] = {false};
    if (!fc_json_open(&r->json, '{', "'{'")) {
        return r->json.code;
    }
    for (bool first = true; fc_json_more(&r->json, '}', &first);) {
        const char *key = fc_json_key(&r->json);
        int member = 0;
        while (key && member < COUNT && strcmp(key, names[member]) != 0) {
            member++;
        }
        if (!key) {
            break;
        }
        if (member < COUNT && seen[member]) {
            return fc_json_fail(&r->json, FC_ECORRUPT, "the member \"%s\" is there twice", key);
        }
        if (member < COUNT) {
            seen[member] = true;
        }
        switch (member) {
        case KIND:
            read_kind(r);
            break;
        case VERSION:
            read_version(r);
            break;
        case TENSORS:
        case OBJECTS:
            read_entries(r, member == OBJECTS);
            break;
        default:
            fc_json_skip(&r->json);
        }
    }
    fc_json_finish(&r->json);
    for (int i = 0; i < OBJECTS; i++) {
        if (!seen[i]) {
            fc_json_fail(&r->json, FC_ECORRUPT, "the member \"%s\" is missing", names[i]);
        }
    }
    return r->json.code;
}

static fc_code check_unique(const reading *r, fc_error *err) {
    uint64_t key[2];
    size_t slots = 16;
    while (slots / 2 < r->count) {
        slots *= 2;
    }
    uint32_t *table = calloc(slots, sizeof *table);
    if (!table) {
        return fc_fail(err, FC_ENOMEM, "%s: out of memory", r->checkpoint->path);
    }
    fc_code rc = FC_OK;
    fc_siphash_key(key);
    for (size_t i = 0; i < r->count && rc == FC_OK; i++) {
        const char *name = r->tensors[i].name;
        size_t at = (size_t)fc_siphash(key, name, strlen(name)) & (slots - 1);
        for (; table[at] && rc == FC_OK; at = (at + 1) & (slots - 1)) {
            if (strcmp(r->tensors[table[at] - 1].name, name) == 0) {
                rc = fc_fail(err, FC_ECORRUPT, "%s: the name '%.256s' is there twice", r->checkpoint->path, name);
            }
        }
        table[at] = (uint32_t)i + 1;
    }
    free(table);
    return rc;
}

static fc_code schema_open(fc_checkpoint *checkpoint, const fc_open_options *options, fc_error *err) {
    reading r = {.checkpoint = checkpoint};
    char *text = NULL;
    size_t size = 0;
    (void)options;
    fc_file *file = fc_arena_calloc(checkpoint->arena, 1, sizeof *file);
    if (!file) {
        return fc_fail(err, FC_ENOMEM, "%s: out of memory", checkpoint->path);
    }
    fc_code rc = read_text(checkpoint, &text, &size, err);
    if (rc != FC_OK) {
        return rc;
    }
    const char *slash = strrchr(checkpoint->path, '/');
    *file = (fc_file){checkpoint->path, slash ? slash + 1 : checkpoint->path};
    fc_json_begin(&r.json, text, size, checkpoint->path, err);
    rc = make_room(&r, text, size);
    rc = rc == FC_OK ? read_root(&r) : rc;
    rc = rc == FC_OK ? check_unique(&r, err) : rc;
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

static const char *const extensions[] = {NULL};

const fc_format fc_format_schema = {
    .name = "schema",
    .description = "a schema: names, dtypes and shapes without data",
    .extensions = extensions,
    .layout_only = true,
    .probe = schema_probe,
    .open = schema_open,
    .extent = schema_extent,
};
