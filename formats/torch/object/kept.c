/*
 * Finds objects of other formats in a pickle: see kept.h. The bytes are what counts. The decoded value next to them is
 * compared with them, because a program may have changed it.
 */
#include "torch/object/kept.h"

#include "base/text.h"
#include "fsdpckpt/flatten.h"
#include "fsdpckpt/format.h"
#include "fsdpckpt/try.h"

#include <jansson.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_LEVELS = 512 };

/* A value while it is turned into the JSON that write.c made it of. */
typedef struct decoding {
    const fc_pickle *p;
    uint64_t left; /* values that may still be visited; a pickle has a byte for each, unless they are shared */
    bool no_memory;
} decoding;

static json_t *json_of(decoding *d, fc_pv v, int depth);

/* Returns `made`. NULL: out of memory. */
static json_t *check_made(decoding *d, json_t *made) {
    d->no_memory = d->no_memory || !made;
    return made;
}

static json_t *json_of_text(decoding *d, fc_pv v) {
    size_t n;
    const char *text = fc_pickle_bytes(d->p, v, &n);
    return fc_is_utf8(text, n) ? check_made(d, json_stringn(text, n)) : NULL;
}

static json_t *json_of_list(decoding *d, fc_pv v, int depth) {
    size_t n;
    const fc_pv *items = fc_pickle_items(d->p, v, &n);
    json_t *array = check_made(d, json_array());
    for (size_t i = 0; array && i < n; i++) {
        json_t *item = json_of(d, items[i], depth + 1);
        if (!item || json_array_append_new(array, item) != 0) {
            d->no_memory = d->no_memory || item;
            json_decref(array);
            return NULL;
        }
    }
    return array;
}

static json_t *json_of_dict(decoding *d, fc_pv v, int depth) {
    size_t n, length = 0;
    const fc_pv *pairs = fc_pickle_items(d->p, v, &n);
    json_t *object = check_made(d, json_object());
    for (size_t i = 0; object && i + 1 < n; i += 2) {
        const char *key = fc_pv_typeof(pairs[i]) == FC_PV_STR ? fc_pickle_bytes(d->p, pairs[i], &length) : NULL;
        json_t *item = key && fc_is_plain_text(key, length) ? json_of(d, pairs[i + 1], depth + 1) : NULL;
        if (!item || json_object_set_new(object, key, item) != 0) {
            d->no_memory = d->no_memory || item;
            json_decref(object);
            return NULL;
        }
    }
    return object;
}

/* @return NULL: no JSON becomes such a value, or out of memory. */
static json_t *json_of(decoding *d, fc_pv v, int depth) {
    int64_t number;
    if (d->left == 0 || depth > MOST_LEVELS) {
        return NULL;
    }
    d->left--;
    switch (fc_pv_typeof(v)) {
    case FC_PV_NONE:
        return json_null();
    case FC_PV_BOOL:
        return json_boolean(fc_pv_is_true(v));
    case FC_PV_INT:
    case FC_PV_BIGINT:
        return fc_pickle_int(d->p, v, &number) ? check_made(d, json_integer(number)) : NULL;
    case FC_PV_FLOAT:
        return isfinite(fc_pickle_float(d->p, v)) ? check_made(d, json_real(fc_pickle_float(d->p, v))) : NULL;
    case FC_PV_STR:
        return json_of_text(d, v);
    case FC_PV_LIST:
        return json_of_list(d, v, depth);
    case FC_PV_DICT:
        return fc_pickle_container_of(d->p, v)->cls ? NULL : json_of_dict(d, v, depth);
    default:
        return NULL;
    }
}

/* Whether the value is what write.c makes of these bytes. Of JSON that it could not parse, it makes a string. */
static fc_code is_value_of(const fc_torch_kept *kept, const json_t *value, bool *is, fc_error *err) {
    const char *text = (const char *)kept->bytes;
    json_error_t why;
    json_t *decoded = json_loadb(text, kept->size, JSON_DECODE_ANY | JSON_ALLOW_NUL, &why);
    FC_NEED(decoded || json_error_code(&why) != json_error_out_of_memory, err, NULL);
    const bool is_text = !decoded && json_is_string(value) && json_string_length(value) == kept->size &&
                         memcmp(json_string_value(value), text, kept->size) == 0;
    *is = fc_is_json(text, kept->size) && (is_text || json_equal(decoded, value));
    json_decref(decoded);
    return FC_OK;
}

/* Whether the value only describes the type of bytes that nothing decodes. Keeps it as text. */
static fc_code keep_type(const json_t *value, fc_arena *arena, fc_torch_kept *kept, bool *is, fc_error *err) {
    *is = json_object_size(value) == 1 && json_object_get(value, "$hdf5");
    if (!*is) {
        return FC_OK;
    }
    char *text = json_dumps(value, 0);
    kept->json = text ? fc_arena_strndup(arena, text, strlen(text)) : NULL;
    free(text);
    FC_NEED(kept->json, err, NULL);
    return FC_OK;
}

/* @return the encoding of an object that PyTorch cannot read, by its name; NULL: there is none. */
static const fc_object_encoding *find_encoding(const fc_pickle *p, fc_pv name) {
    size_t n;
    const char *text = fc_pv_typeof(name) == FC_PV_STR ? fc_pickle_bytes(p, name, &n) : NULL;
    const fc_object_encoding *encoding = text && strlen(text) == n ? fc_object_encoding_find(text) : NULL;
    return encoding && !encoding->examine && strcmp(text, FC_OBJECT_VALUE) != 0 ? encoding : NULL;
}

/* @return the items of a dict {"encoding": …, "value": …, "data": bytes}; NULL: it is another value. */
static const fc_pv *find_members(const fc_pickle *p, fc_pv v) {
    size_t n = 0;
    const fc_pv *pairs = fc_pv_typeof(v) == FC_PV_DICT ? fc_pickle_items(p, v, &n) : NULL;
    return n == 6 && fc_pickle_is_str(p, pairs[0], "encoding") && fc_pickle_is_str(p, pairs[2], "value") &&
                   fc_pickle_is_str(p, pairs[4], "data") && fc_pv_typeof(pairs[5]) == FC_PV_BYTES
               ? pairs
               : NULL;
}

fc_code fc_torch_find_kept(const fc_pickle *p, fc_pv v, fc_arena *arena, fc_torch_kept *out, uint64_t *spent,
                           fc_error *err) {
    const fc_pv *members = find_members(p, v);
    const fc_object_encoding *encoding = members ? find_encoding(p, members[1]) : NULL;
    decoding d = {.p = p, .left = p->size};
    *out = (fc_torch_kept){0};
    *spent = 0;
    if (!encoding) {
        return FC_OK;
    }
    bool is = false;
    out->bytes = (const unsigned char *)fc_pickle_bytes(p, members[5], &out->size);
    json_t *value = json_of(&d, members[3], 0);
    fc_code rc = d.no_memory ? fc_no_memory(err, NULL) : FC_OK;
    if (value && rc == FC_OK) {
        rc = encoding->json_memory ? is_value_of(out, value, &is, err) : keep_type(value, arena, out, &is, err);
    }
    json_decref(value);
    *spent = p->size - d.left + out->size;
    out->encoding = is ? encoding->name : NULL;
    return rc;
}
