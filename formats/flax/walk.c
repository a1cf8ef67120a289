/*
 * Takes the nested dicts of a file apart into tensors and objects. Lists are taken apart if they contain an array or a
 * dict, as in torch.save files.
 */
#include "flax/walk.h"

#include "base/grow.h"
#include "base/text.h"
#include "checkpoint/path.h"
#include "fsdpckpt/try.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

enum { MAX_KEY = 1 << 16 };

static const char chunked_key[] = "__msgpack_chunked_array__";

fc_code fc_flax_add(fc_flax_walk *w, fc_tensor **out) {
    static const char alone[] = "tensor";
    const size_t n = w->depth;
    FC_NEED(fc_arena_grow(w->arena, &w->tensors, &w->capacity, w->count, w->count + 1, sizeof *w->tensors), w->err,
            w->r.path);
    fc_path_element *elements = fc_arena_calloc(w->arena, n + 1, sizeof *elements);
    FC_NEED(elements, w->err, w->r.path);
    memcpy(elements, w->path, n * sizeof *elements);
    elements[n].key = n == 0 ? alone : NULL;
    fc_tensor *t = &w->tensors[w->count++];
    *t = (fc_tensor){.path = {elements, n ? n : 1}};
    t->name = fc_path_spell(w->arena, &t->path, '.');
    FC_NEED(t->name, w->err, w->r.path);
    *out = t;
    return FC_OK;
}

fc_code fc_flax_refuse(fc_flax_walk *w, const char *fmt, ...) {
    char reason[256];
    va_list args;
    fc_tensor *t = NULL;
    va_start(args, fmt);
    vsnprintf(reason, sizeof reason, fmt, args);
    va_end(args);
    FC_TRY(fc_flax_add(w, &t));
    fc_object *object = fc_arena_calloc(w->arena, 1, sizeof *object);
    fc_chunk *chunk = fc_arena_calloc(w->arena, 1, sizeof *chunk);
    int64_t *dims = fc_arena_calloc(w->arena, 2, sizeof *dims);
    const char *copy = fc_arena_strndup(w->arena, reason, strlen(reason));
    FC_NEED(object && chunk && dims && copy, w->err, w->r.path);
    *object = (fc_object){.encoding = "msgpack", .refusal = copy};
    dims[1] = 1; /* not empty, so that reading it reports the reason */
    *chunk = (fc_chunk){.dims = dims, .place = {.kind = FC_PLACE_FILE, .file = w->file}, .rank = FC_NO_RANK};
    t->object = object;
    t->dtype = FC_OPAQUE;
    t->ndim = 1;
    t->shape = dims + 1;
    t->chunks = chunk;
    t->nchunks = 1;
    return FC_OK;
}

/* Reads a text key into `key`, or makes one of a number. */
static fc_code read_key(fc_flax_walk *w, fc_path_element *key) {
    const uint64_t start = w->r.at;
    fc_mp_head head;
    FC_TRY(fc_mp_next(&w->r, &head, w->err));
    if (head.kind == FC_MP_INT) {
        *key = (fc_path_element){.is_number = true, .key = fc_arena_printf(w->arena, "%" PRId64, head.integer)};
        FC_NEED(key->key, w->err, w->r.path);
        return FC_OK;
    }
    if (head.kind != FC_MP_STR || head.length > MAX_KEY) {
        return fc_mp_fail(&w->r, start, FC_EUNSUPPORTED,
                          "a dict has a key that is neither a text of at most 64 KiB nor an integer", w->err);
    }
    char *text = fc_arena_alloc(w->arena, (size_t)head.length + 1);
    FC_NEED(text, w->err, w->r.path);
    FC_TRY(fc_mp_read(&w->r, text, (size_t)head.length, w->err));
    text[head.length] = '\0';
    *key = (fc_path_element){.key = text};
    return fc_is_plain_text(text, (size_t)head.length)
               ? FC_OK
               : fc_mp_fail(&w->r, start, FC_EUNSUPPORTED, "a key of a dict is not UTF-8 without NUL", w->err);
}

fc_code fc_flax_expect_key(fc_flax_walk *w, const char *wanted) {
    const uint64_t start = w->r.at;
    fc_path_element key = {.key = ""};
    FC_TRY(read_key(w, &key));
    return !key.is_number && strcmp(key.key, wanted) == 0
               ? FC_OK
               : fc_mp_fail(&w->r, start, FC_ECORRUPT, "an array in several chunks lacks one, or its shape", w->err);
}

static fc_code walk_value(fc_flax_walk *w);

static fc_code walk_below(fc_flax_walk *w, const fc_path_element *element) {
    if (w->depth == FC_FLAX_MAX_DEPTH) {
        return fc_mp_fail(&w->r, w->r.at, FC_EUNSUPPORTED, "values are nested more than 128 levels deep", w->err);
    }
    w->path[w->depth++] = *element;
    fc_code rc = walk_value(w);
    w->depth--;
    return rc;
}

static fc_code walk_map(fc_flax_walk *w, const fc_mp_head *head) {
    for (uint64_t i = 0; i < head->length; i++) {
        const uint64_t start = w->r.at;
        fc_path_element key = {.key = ""};
        FC_TRY(read_key(w, &key));
        if (!key.is_number && strcmp(key.key, chunked_key) == 0) {
            return i == 0 ? fc_flax_add_chunked(w, head->length)
                          : fc_mp_fail(&w->r, start, FC_ECORRUPT,
                                       "an array in several chunks does not begin as Flax writes it", w->err);
        }
        FC_TRY(walk_below(w, &key));
    }
    return FC_OK;
}

/* Whether a list contains an array or a dict. The position stays as it is. */
static fc_code looks_into(fc_flax_walk *w, const fc_mp_head *list, bool *found) {
    const uint64_t start = w->r.at;
    uint64_t pending = list->length;
    *found = false;
    while (pending > 0 && !*found) {
        fc_mp_head head;
        FC_TRY(fc_mp_next(&w->r, &head, w->err));
        pending--;
        *found = head.kind == FC_MP_MAP || (head.kind == FC_MP_EXT && head.extension != FC_FLAX_COMPLEX);
        if (head.kind == FC_MP_ARRAY) {
            pending += head.length;
        } else if (!*found) {
            FC_TRY(fc_mp_skip(&w->r, &head, w->err));
        }
        if (pending > w->r.end - w->r.at) {
            return fc_mp_fail(&w->r, start, FC_ECORRUPT, "the msgpack is damaged: a list is longer than the file",
                              w->err);
        }
    }
    w->r.at = start;
    return FC_OK;
}

static fc_code walk_list(fc_flax_walk *w, const fc_mp_head *head, uint64_t start) {
    bool apart = false;
    FC_TRY(looks_into(w, head, &apart));
    if (!apart) {
        return fc_flax_add_object(w, head, start);
    }
    for (uint64_t i = 0; i < head->length; i++) {
        const fc_path_element element = {.key = fc_arena_printf(w->arena, "%" PRIu64, i), .is_index = true};
        FC_NEED(element.key, w->err, w->r.path);
        FC_TRY(walk_below(w, &element));
    }
    return FC_OK;
}

/* The recursion is as deep as the path. */
static fc_code walk_value(fc_flax_walk *w) {
    const uint64_t start = w->r.at;
    fc_mp_head head;
    FC_TRY(fc_mp_next(&w->r, &head, w->err));
    if (head.kind == FC_MP_MAP && (head.length > 0 || w->depth == 0)) {
        return walk_map(w, &head);
    }
    if (head.kind == FC_MP_ARRAY) {
        return walk_list(w, &head, start);
    }
    if (head.kind == FC_MP_EXT && head.extension != FC_FLAX_COMPLEX) {
        return fc_flax_add_array(w, &head);
    }
    return fc_flax_add_object(w, &head, start);
}

fc_code fc_flax_walk_file(fc_flax_walk *w) {
    FC_TRY(walk_value(w));
    return w->r.at == w->r.end
               ? FC_OK
               : fc_mp_fail(&w->r, w->r.at, FC_ECORRUPT, "the msgpack is damaged: it ends before the file", w->err);
}
