/*
 * Writes objects of other formats into torch.save and DCP files. An object whose bytes PyTorch cannot read (attributes
 * of an HDF5 file, metadata of a safetensors file) becomes a dict of its bytes and its JSON decoding, so that a program
 * can use it and nothing is lost.
 */
#include "torch/object/write.h"

#include "base/base64.h"
#include "fsdpckpt/flatten.h"
#include "fsdpckpt/read.h"
#include "fsdpckpt/try.h"

#include <jansson.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_BYTES = 64 << 20, MOST_LEVELS = 512 };

/* JSON that is being written. `typed`: it stands for Python values, as in docs/HDF5_SCHEMA.md, "Objects". */
typedef struct decoding {
    fc_torch_pickler *w;
    bool typed;
} decoding;

static void write_json(const decoding *d, const json_t *value, int depth);

static void write_tuple(const decoding *d, const json_t *array, int depth) {
    fc_torch_pickle_op(d->w, FC_PICKLE_MARK);
    for (size_t i = 0; i < json_array_size(array); i++) {
        write_json(d, json_array_get(array, i), depth + 1);
    }
    fc_torch_pickle_op(d->w, FC_PICKLE_TUPLE);
}

static double real_of(const json_t *number) {
    const char *text = json_string_value(json_object_get(number, "$float"));
    return !text                       ? json_number_value(number)
           : strcmp(text, "nan") == 0  ? (double)NAN
           : strcmp(text, "-inf") == 0 ? -(double)INFINITY
                                       : (double)INFINITY;
}

/* Writes an integer above INT64_MAX. */
static void write_big(const decoding *d, const char *digits) {
    unsigned char bytes[9] = {0}; /* two's complement; the last byte is the sign */
    const uint64_t value = strtoull(digits, NULL, 10);
    for (size_t i = 0; i < 8; i++) {
        bytes[i] = (unsigned char)(value >> (8 * i));
    }
    fc_torch_pickle_bigint(d->w, bytes, sizeof bytes);
}

static void write_complex(const decoding *d, const json_t *parts) {
    fc_torch_pickle_global(d->w, "__builtin__", "complex");
    for (size_t i = 0; i < 2; i++) {
        fc_torch_pickle_float(d->w, real_of(json_array_get(parts, i)));
    }
    fc_torch_pickle_tuple(d->w, 2);
    fc_torch_pickle_op(d->w, FC_PICKLE_REDUCE);
}

/* @return false: the text is not base64. */
static bool write_base64(const decoding *d, const json_t *text) {
    const size_t length = json_string_length(text);
    unsigned char *bytes = malloc(length / 4 * 3 + 3);
    size_t n = 0;
    if (!bytes) {
        d->w->failed = fc_no_memory(&d->w->error, NULL);
        return true;
    }
    const bool good = fc_base64_decode(json_string_value(text), length, bytes, &n);
    if (good) {
        fc_torch_pickle_bytes(d->w, bytes, n);
    }
    free(bytes);
    return good;
}

/* Writes an object that stands for a value that JSON does not have. @return false: it stands for itself. */
static bool write_typed(const decoding *d, const json_t *object, int depth) {
    const json_t *value = json_object_iter_value(json_object_iter((json_t *)(uintptr_t)object));
    if (!d->typed || json_object_size(object) != 1) {
        return false;
    }
    if (json_object_get(object, "$tuple")) {
        write_tuple(d, value, depth);
    } else if (json_object_get(object, "$float") && json_is_string(value)) {
        fc_torch_pickle_float(d->w, real_of(object));
    } else if (json_object_get(object, "$int") && json_is_string(value)) {
        write_big(d, json_string_value(value));
    } else if (json_object_get(object, "$complex") && json_array_size(value) == 2) {
        write_complex(d, value);
    } else {
        return json_object_get(object, "$bytes") && json_is_string(value) && write_base64(d, value);
    }
    return true;
}

static void write_members(const decoding *d, const json_t *object, int depth) {
    if (write_typed(d, object, depth)) {
        return;
    }
    fc_torch_pickle_op(d->w, FC_PICKLE_EMPTY_DICT);
    for (void *at = json_object_iter((json_t *)(uintptr_t)object); at;
         at = json_object_iter_next((json_t *)(uintptr_t)object, at)) {
        fc_torch_pickle_str(d->w, json_object_iter_key(at));
        write_json(d, json_object_iter_value(at), depth + 1);
        fc_torch_pickle_op(d->w, FC_PICKLE_SETITEM);
    }
}

static void write_elements(const decoding *d, const json_t *array, int depth) {
    fc_torch_pickle_op(d->w, FC_PICKLE_EMPTY_LIST);
    for (size_t i = 0; i < json_array_size(array); i++) {
        write_json(d, json_array_get(array, i), depth + 1);
        fc_torch_pickle_op(d->w, FC_PICKLE_APPEND);
    }
}

static void write_json(const decoding *d, const json_t *value, int depth) {
    json_type type = depth < MOST_LEVELS ? json_typeof(value) : JSON_NULL;
    switch (type) {
    case JSON_OBJECT:
        write_members(d, value, depth);
        break;
    case JSON_ARRAY:
        write_elements(d, value, depth);
        break;
    case JSON_STRING:
        fc_torch_pickle_strn(d->w, json_string_value(value), json_string_length(value));
        break;
    case JSON_INTEGER:
        fc_torch_pickle_int(d->w, json_integer_value(value));
        break;
    case JSON_REAL:
        fc_torch_pickle_float(d->w, json_real_value(value));
        break;
    case JSON_TRUE:
    case JSON_FALSE:
        fc_torch_pickle_bool(d->w, type == JSON_TRUE);
        break;
    case JSON_NULL:
        fc_torch_pickle_op(d->w, FC_PICKLE_NONE);
        break;
    }
}

/* Writes JSON that cannot be parsed here (e.g. numbers above 64 bits) as text. */
static void write_decoding(fc_torch_pickler *w, const char *text, bool typed) {
    const decoding d = {w, typed};
    json_t *value = json_loads(text, JSON_DECODE_ANY | JSON_ALLOW_NUL, NULL);
    if (value) {
        write_json(&d, value, 0);
        json_decref(value);
    } else {
        fc_torch_pickle_str(w, text);
    }
}

static fc_code read_bytes(const fc_target *target, const fc_tensor *object, unsigned char **bytes, fc_error *err) {
    if (object->shape[0] > MOST_BYTES) {
        return fc_advise(err,
                         fc_fail(err, FC_EUNSUPPORTED,
                                 "an object of %lld bytes in the encoding '%s', which PyTorch cannot read",
                                 (long long)object->shape[0], object->object->encoding),
                         FC_HINT_EXCLUDE, object->name);
    }
    return fc_read_object(target->source, object, bytes, err);
}

fc_code fc_torch_write_object(const fc_target *target, const fc_target_tensor *object, fc_torch_pickler *w,
                              fc_error *err) {
    const fc_tensor *source = object->source;
    unsigned char *bytes = NULL;
    const char *json = NULL;
    fc_arena *arena = fc_arena_new();
    fc_code rc;
    FC_TRY_GOTO(arena ? read_bytes(target, source, &bytes, err) : fc_no_memory(err, NULL), rc, out);
    FC_TRY_GOTO(fc_checkpoint_object_json(target->source, source, arena, &json, err), rc, out);
    if (strcmp(source->object->encoding, FC_OBJECT_VALUE) == 0) {
        write_decoding(w, json, true);
    } else {
        fc_torch_pickle_op(w, FC_PICKLE_EMPTY_DICT);
        fc_torch_pickle_str(w, "encoding");
        fc_torch_pickle_str(w, source->object->encoding);
        fc_torch_pickle_op(w, FC_PICKLE_SETITEM);
        fc_torch_pickle_str(w, "value");
        write_decoding(w, json, false);
        fc_torch_pickle_op(w, FC_PICKLE_SETITEM);
        fc_torch_pickle_str(w, "data");
        fc_torch_pickle_bytes(w, bytes, (size_t)source->shape[0]);
        fc_torch_pickle_op(w, FC_PICKLE_SETITEM);
    }
out:
    free(bytes);
    fc_arena_free(arena);
    return rc;
}
