/*
 * Values that are not arrays become objects with the encoding of values that come from no file: JSON, in the forms of
 * docs/HDF5_SCHEMA.md, "Objects". So other formats have them as ordinary values.
 */
#include "flax/walk.h"

#include "base/text.h"
#include "fsdpckpt/flatten.h"
#include "fsdpckpt/try.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Appends a number with as few digits as read back the same. It has a point or an exponent. */
static void append_real(fc_text *out, double value) {
    char text[40];
    if (!isfinite(value)) {
        fc_text_raw(out, isnan(value) ? "{\"$float\": \"nan\"}"
                         : value > 0  ? "{\"$float\": \"inf\"}"
                                      : "{\"$float\": \"-inf\"}");
        return;
    }
    for (int digits = 15; digits <= 17; digits++) {
        snprintf(text, sizeof text, "%.*g", digits, value);
        if (strtod(text, NULL) == value) {
            break;
        }
    }
    fc_text_raw(out, text);
    fc_text_raw(out, strpbrk(text, ".e") ? "" : ".0");
}

static void append_integer(fc_text *out, const fc_mp_head *head) {
    char text[48];
    if (head->kind == FC_MP_UINT) {
        snprintf(text, sizeof text, "{\"$int\": \"%" PRIu64 "\"}", (uint64_t)head->integer);
    } else {
        snprintf(text, sizeof text, "%" PRId64, head->integer);
    }
    fc_text_raw(out, text);
}

/* Appends a text, or bytes as {"$bytes": base64}. */
static fc_code append_bytes(fc_flax_walk *w, fc_text *out, const fc_mp_head *head) {
    const size_t n = (size_t)head->length;
    if (head->length > FC_MAX_TEXT) {
        out->failed = true;
        return fc_mp_skip(&w->r, head, w->err);
    }
    char *bytes = malloc(n + 1);
    FC_NEED(bytes, w->err, w->r.path);
    fc_code rc = fc_mp_read(&w->r, bytes, n, w->err);
    if (rc == FC_OK && head->kind == FC_MP_STR) {
        fc_text_string(out, bytes, n);
    } else if (rc == FC_OK) {
        fc_text_raw(out, "{\"$bytes\": ");
        fc_text_base64(out, (const unsigned char *)bytes, n);
        fc_text_raw(out, "}");
    }
    free(bytes);
    return rc;
}

/* Appends a complex number, whose payload is a list of two numbers. */
static fc_code append_complex(fc_flax_walk *w, fc_text *out, const fc_mp_head *head) {
    const uint64_t start = w->r.at, end = start + head->length;
    fc_mp_head part;
    FC_TRY(fc_mp_next(&w->r, &part, w->err));
    bool good = part.kind == FC_MP_ARRAY && part.length == 2;
    fc_text_raw(out, "{\"$complex\": [");
    for (int i = 0; good && i < 2; i++) {
        FC_TRY(fc_mp_next(&w->r, &part, w->err));
        good = part.kind == FC_MP_FLOAT;
        append_real(out, part.real);
        fc_text_raw(out, i == 0 ? ", " : "]}");
    }
    return good && w->r.at == end
               ? FC_OK
               : fc_mp_fail(&w->r, start, FC_ECORRUPT, "a complex number of Flax is damaged", w->err);
}

static fc_code append_value(fc_flax_walk *w, fc_text *out, const fc_mp_head *head, int depth);

static fc_code append_list(fc_flax_walk *w, fc_text *out, const fc_mp_head *head, int depth) {
    if (depth == FC_FLAX_MAX_DEPTH) {
        return fc_mp_fail(&w->r, w->r.at, FC_EUNSUPPORTED, "values are nested more than 128 levels deep", w->err);
    }
    fc_text_raw(out, "[");
    for (uint64_t i = 0; i < head->length; i++) {
        fc_mp_head item;
        FC_TRY(fc_mp_next(&w->r, &item, w->err));
        fc_text_raw(out, i > 0 ? ", " : "");
        FC_TRY(append_value(w, out, &item, depth + 1));
    }
    fc_text_raw(out, "]");
    return FC_OK;
}

/* Lists with arrays or dicts are no objects, and a dict is one only if it is empty. */
static fc_code append_value(fc_flax_walk *w, fc_text *out, const fc_mp_head *head, int depth) {
    switch (head->kind) {
    case FC_MP_NIL:
        fc_text_raw(out, "null");
        return FC_OK;
    case FC_MP_BOOL:
        fc_text_raw(out, head->integer ? "true" : "false");
        return FC_OK;
    case FC_MP_INT:
    case FC_MP_UINT:
        append_integer(out, head);
        return FC_OK;
    case FC_MP_FLOAT:
        append_real(out, head->real);
        return FC_OK;
    case FC_MP_STR:
    case FC_MP_BIN:
        return append_bytes(w, out, head);
    case FC_MP_ARRAY:
        return append_list(w, out, head, depth);
    case FC_MP_MAP:
        fc_text_raw(out, "{}");
        return FC_OK;
    case FC_MP_EXT:
        break;
    }
    return append_complex(w, out, head);
}

static fc_code keep_object(fc_flax_walk *w, const fc_text *text) {
    static const fc_object value = {.encoding = FC_OBJECT_VALUE};
    fc_tensor *t = NULL;
    FC_TRY(fc_flax_add(w, &t));
    fc_flax_object *object = fc_arena_calloc(w->arena, 1, sizeof *object);
    fc_chunk *chunk = fc_arena_calloc(w->arena, 1, sizeof *chunk);
    int64_t *dims = fc_arena_calloc(w->arena, 2, sizeof *dims);
    const char *copy = fc_arena_strndup(w->arena, text->data, text->size);
    FC_NEED(object && chunk && dims && copy, w->err, w->r.path);
    *object = (fc_flax_object){copy, text->size};
    dims[1] = (int64_t)text->size;
    *chunk = (fc_chunk){.dims = dims, .place = {.kind = FC_PLACE_FILE, .file = w->file}, .rank = FC_NO_RANK};
    t->object = &value;
    t->dtype = FC_OPAQUE;
    t->ndim = 1;
    t->shape = dims + 1;
    t->chunks = chunk;
    t->nchunks = 1;
    t->detail = object;
    return FC_OK;
}

fc_code fc_flax_add_object(fc_flax_walk *w, const fc_mp_head *head, uint64_t start) {
    fc_text text = {0};
    fc_code rc = append_value(w, &text, head, 0);
    if (rc == FC_OK && text.failed && !text.no_memory) {
        rc = fc_flax_refuse(w, "at offset %" PRIu64 ": it is longer than 64 MiB as text", start);
    } else if (rc == FC_OK) {
        rc = text.failed ? fc_no_memory(w->err, w->r.path) : keep_object(w, &text);
    }
    fc_text_free(&text);
    return rc;
}
