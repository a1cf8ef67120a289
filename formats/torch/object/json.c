/*
 * Decodes pickled values as JSON, for the `json` attribute of objects and for inspect, without executing anything.
 *
 *   None, bool, str, list            null, true/false, string, array
 *   int                              number, all digits; beyond 64 bits {"$int": "decimal"}; beyond 1024 bytes
 *                                    {"$int": "0x…"}
 *   float                            number; {"$float": "nan" | "inf" | "-inf"}
 *   complex                          {"$complex": [real, imaginary]}
 *   dict, OrderedDict, defaultdict,  object; if a key is not a string, begins with "$", contains NUL, or is not
 *   Counter                          UTF-8: {"$dict": [[key, value], …]}
 *   tuple                            {"$tuple": [...]}
 *   set, frozenset                   {"$set": [...]}, {"$frozenset": [...]}
 *   bytes, bytearray                 {"$bytes": "base64"}, {"$bytearray": "base64"}
 *   str that is not UTF-8            {"$surrogates": "base64 of Python's surrogatepass encoding"}
 *   torch.Size                       {"$size": [...]}
 *   torch.dtype, layout, device      {"$dtype": "float32"}, {"$layout": "torch.strided"}, {"$device": "cuda:0"}
 *   tensor                           {"$tensor": {"dtype": …, "shape": [...]}} ({"$tensor": null}: not a dense one)
 *   pathlib paths                    {"$path": "a/b"}
 *   a class or function              {"$global": "module.name"}
 *   an instance of a harmless class  {"$object": "module.name", …}; json_instance.c has these forms
 *   an instance of anything else     {"$opaque": "module.name"}: its content has a meaning only in its program
 *   a call that runs code or commands  {"$unsafe": "os.system"}
 *   cut off                          {"$omitted": "too deep" | "too large"}
 *
 * Values may be shared and may contain themselves, so depth and size are bounded. The text is in the caller's arena.
 */
#include "torch/object/json.h"
#include "fsdpckpt/try.h"
#include "torch/object/item.h"

#include "base/base64.h"

#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_DECIMAL_BYTES = 1024 };

typedef fc_torch_json_writer writer;

/* These functions own their arguments, and return NULL when out of memory. */
json_t *fc_torch_json_tagged(const char *tag, json_t *value) {
    json_t *object = json_object();
    if (!object || !value || json_object_set_new(object, tag, value) != 0) {
        if (!object) {
            json_decref(value);
        }
        json_decref(object);
        return NULL;
    }
    return object;
}

static bool spend_budget(writer *w, uint64_t bytes) {
    if (bytes > w->budget) {
        w->budget = 0;
        return false;
    }
    w->budget -= bytes;
    return true;
}

static json_t *json_omitted(const char *why) {
    return fc_torch_json_tagged("$omitted", json_string(why));
}

json_t *fc_torch_json_base64(writer *w, const char *tag, const char *bytes, size_t n) {
    size_t length = fc_base64_length(n);
    if (length == SIZE_MAX || !spend_budget(w, length)) {
        return json_omitted("too large");
    }
    char *text = malloc(length + 1);
    if (!text) {
        return NULL;
    }
    fc_base64_encode(bytes, n, text);
    json_t *value = json_stringn(text, length);
    free(text);
    return fc_torch_json_tagged(tag, value);
}

static json_t *json_of_string(writer *w, fc_pv v) {
    size_t n;
    const char *s = fc_pickle_bytes(w->p, v, &n);
    if (!spend_budget(w, n)) {
        return json_omitted("too large");
    }
    json_t *value = json_stringn(s, n); /* NULL if it is not UTF-8 */
    return value ? value : fc_torch_json_base64(w, "$surrogates", s, n);
}

/* @return the decimal digits of the magnitude in `limbs` (least significant first), which is destroyed. */
static char *decimal_text(uint32_t *limbs, size_t n, bool negative) {
    size_t size = n * 10 + 3, at = size;
    char *text = malloc(size);
    if (!text) {
        return NULL;
    }
    text[--at] = '\0';
    while (n > 0) {
        uint64_t rest = 0;
        for (size_t i = n; i-- > 0;) {
            uint64_t value = rest << 32 | limbs[i];
            limbs[i] = (uint32_t)(value / 1000000000);
            rest = value % 1000000000;
        }
        while (n > 0 && limbs[n - 1] == 0) {
            n--;
        }
        for (int digit = 0; digit < 9 && (rest > 0 || n > 0); digit++) {
            text[--at] = (char)('0' + rest % 10);
            rest /= 10;
        }
    }
    if (negative) {
        text[--at] = '-';
    }
    memmove(text, text + at, size - at);
    return text;
}

static json_t *json_of_integer(writer *w, fc_pv v) {
    size_t n;
    int64_t small;
    if (fc_pickle_int(w->p, v, &small)) {
        return json_integer(small);
    }
    const unsigned char *bytes = (const unsigned char *)fc_pickle_bytes(w->p, v, &n);
    bool negative = n > 0 && bytes[n - 1] & 0x80;
    size_t nlimbs = n / 4 + 1;
    if (!spend_budget(w, (uint64_t)n * 3)) {
        return json_omitted("too large");
    }
    uint32_t *limbs = calloc(nlimbs, sizeof *limbs);
    if (!limbs) {
        return NULL;
    }
    unsigned carry = 1;
    for (size_t i = 0; i < nlimbs * 4; i++) {
        unsigned byte = i < n ? bytes[i] : negative ? 0xff : 0;
        if (negative) { /* two's complement */
            byte = (~byte & 0xff) + carry;
            carry = byte >> 8;
            byte &= 0xff;
        }
        limbs[i / 4] |= (uint32_t)byte << (i % 4 * 8);
    }
    char *text;
    if (n <= MAX_DECIMAL_BYTES) {
        text = decimal_text(limbs, nlimbs, negative);
    } else { /* decimal takes quadratic time */
        size_t size = nlimbs * 8 + 4;
        text = malloc(size);
        size_t at = text ? (size_t)snprintf(text, size, "%s0x", negative ? "-" : "") : 0;
        for (size_t i = nlimbs; text && i-- > 0;) {
            at += (size_t)snprintf(text + at, size - at, "%08x", (unsigned)limbs[i]);
        }
    }
    free(limbs);
    json_t *value = text ? json_string(text) : NULL;
    free(text);
    return fc_torch_json_tagged("$int", value);
}

json_t *fc_torch_json_real(double value) {
    if (isnan(value) || isinf(value)) {
        return fc_torch_json_tagged("$float", json_string(isnan(value) ? "nan" : value > 0 ? "inf" : "-inf"));
    }
    return json_real(value);
}

json_t *fc_torch_json_array(writer *w, const fc_pv *items, size_t n) {
    json_t *list = json_array();
    for (size_t i = 0; list && i < n; i++) {
        if (w->budget == 0) { /* one mark for all remaining items */
            if (json_array_append_new(list, json_omitted("too large")) != 0) {
                json_decref(list);
                return NULL;
            }
            break;
        }
        if (json_array_append_new(list, fc_torch_json_value(w, items[i])) != 0) {
            json_decref(list);
            return NULL;
        }
    }
    return list;
}

/* Whether the dict can become a JSON object without loss or ambiguity. */
static bool has_plain_keys(const fc_pickle *p, const fc_pv *pairs, size_t n) {
    for (size_t i = 0; i < n; i += 2) {
        size_t length;
        if (fc_pv_typeof(pairs[i]) != FC_PV_STR) {
            return false;
        }
        const char *key = fc_pickle_bytes(p, pairs[i], &length);
        json_t *probe = key[0] != '$' && strlen(key) == length ? json_stringn(key, length) : NULL;
        if (!probe) {
            return false;
        }
        json_decref(probe);
    }
    return true;
}

json_t *fc_torch_json_dict(writer *w, const fc_pv *pairs, size_t n) {
    bool plain = has_plain_keys(w->p, pairs, n);
    json_t *out = plain ? json_object() : json_array();
    for (size_t i = 0; out && i < n; i += 2) {
        int failed;
        size_t length;
        if (w->budget == 0) {
            failed = plain ? json_object_set_new(out, "$omitted", json_string("too large"))
                           : json_array_append_new(out, json_omitted("too large"));
            i = n;
        } else if (plain) {
            const char *key = fc_pickle_bytes(w->p, pairs[i], &length);
            failed = json_object_set_new(
                out, key, spend_budget(w, length) ? fc_torch_json_value(w, pairs[i + 1]) : json_omitted("too large"));
        } else {
            failed = json_array_append_new(out, fc_torch_json_array(w, pairs + i, 2));
        }
        if (failed) {
            json_decref(out);
            return NULL;
        }
    }
    return plain ? out : fc_torch_json_tagged("$dict", out);
}

json_t *fc_torch_json_named(const fc_pickle *p, const char *tag, fc_pv global) {
    char name[1024];
    fc_pickle_global_name(p, global, name, sizeof name);
    json_t *text = json_string(name);
    return fc_torch_json_tagged(tag, text ? text : json_string("(not UTF-8)"));
}

static json_t *json_of_global(const fc_pickle *p, fc_pv v) {
    uint32_t aux;
    if (fc_pickle_global(p, v, &aux) == FC_GLOBAL_DTYPE) {
        return fc_torch_json_tagged("$dtype", json_string(fc_pickle_name(p, v)));
    }
    return fc_torch_json_named(p, "$global", v);
}

static json_t *json_of_tensor(const fc_pickle *p, fc_pv v) {
    fc_torch_tensor t;
    if (fc_torch_tensor_decode(p, v, &t, NULL) != FC_OK) {
        return fc_torch_json_tagged("$tensor", json_null());
    }
    json_t *shape = json_array();
    for (int i = 0; shape && i < t.ndim; i++) {
        json_array_append_new(shape, json_integer(t.sizes[i]));
    }
    return fc_torch_json_tagged("$tensor",
                                json_pack("{s:s, s:o}", "dtype", fc_dtype_get(t.dtype)->torch_name, "shape", shape));
}

/* Joins the parts of a path like pathlib. */
static json_t *json_of_path(writer *w, const fc_pv *parts, size_t n) {
    json_t *text = json_string("");
    for (size_t i = 0; text && i < n; i++) {
        size_t length;
        const char *part = fc_pickle_bytes(w->p, parts[i], &length);
        const char *before = json_string_value(text);
        size_t old = strlen(before);
        json_t *longer = NULL;
        if (spend_budget(w, old + length)) { /* limits the time, which is quadratic in the number of parts */
            longer = json_sprintf("%s%s%s", before, old == 0 || before[old - 1] == '/' ? "" : "/", part);
        }
        json_decref(text);
        text = longer;
    }
    return fc_torch_json_tagged("$path", text ? text : json_string("(too large or not UTF-8)"));
}

static bool all_strings(const fc_pv *items, size_t n) {
    for (size_t i = 0; i < n; i++) {
        if (fc_pv_typeof(items[i]) != FC_PV_STR) {
            return false;
        }
    }
    return true;
}

static json_t *json_of_call(writer *w, fc_pv v) {
    const fc_pickle *p = w->p;
    const fc_pv callee = fc_pickle_callee(p, v);
    uint32_t aux;
    size_t n, length;
    int64_t index;
    const bool runs = fc_pickle_risk_of(p, v) == FC_RISK_RUNS;
    if (fc_pv_typeof(callee) != FC_PV_GLOBAL) {
        return fc_torch_json_tagged(runs ? "$unsafe" : "$opaque", json_string("?"));
    }
    if (runs) {
        return fc_torch_json_named(p, "$unsafe", callee);
    }
    fc_global_kind kind = fc_pickle_global(p, callee, &aux);
    if (kind == FC_GLOBAL_REBUILD) {
        return json_of_tensor(p, v);
    }
    if ((kind == FC_GLOBAL_INERT || kind == FC_GLOBAL_GETATTR || kind == FC_GLOBAL_UNKNOWN) &&
        fc_pickle_risk_of(p, v) == FC_RISK_NONE) {
        return fc_torch_json_instance(w, v);
    }
    const fc_pv *args = fc_pickle_call_items(p, v, &n);
    if (kind == FC_GLOBAL_COMPLEX && n == 2) {
        return fc_torch_json_tagged("$complex", fc_torch_json_array(w, args, n));
    }
    if (kind == FC_GLOBAL_PATH && all_strings(args, n)) {
        return json_of_path(w, args, n);
    }
    if (kind == FC_GLOBAL_LAYOUT && n == 1) {
        return fc_torch_json_tagged("$layout", fc_torch_json_value(w, args[0]));
    }
    if (kind == FC_GLOBAL_DEVICE && n == 1) {
        return fc_torch_json_tagged("$device", fc_torch_json_value(w, args[0]));
    }
    if (kind == FC_GLOBAL_DEVICE && n == 2 && fc_pv_typeof(args[0]) == FC_PV_STR && fc_pickle_int(p, args[1], &index)) {
        json_t *text =
            json_sprintf("%s:%" JSON_INTEGER_FORMAT, fc_pickle_bytes(p, args[0], &length), (json_int_t)index);
        return fc_torch_json_tagged("$device", text ? text : json_string("(not UTF-8)"));
    }
    return fc_torch_json_named(p, "$opaque", callee);
}

static json_t *json_of_container(writer *w, fc_pv v) {
    static const char *const tags[] = {
        [FC_PV_TUPLE] = "$tuple", [FC_PV_SIZE] = "$size", [FC_PV_SET] = "$set", [FC_PV_FROZENSET] = "$frozenset"};
    const fc_pv_type type = fc_pv_typeof(v);
    if (type == FC_PV_CALL) {
        return json_of_call(w, v);
    }
    size_t n;
    const fc_pv *items = fc_pickle_sequence(w->p, v, &n);
    if (type == FC_PV_DICT) {
        return fc_torch_json_dict(w, items, n);
    }
    json_t *list = fc_torch_json_array(w, items, n);
    return type == FC_PV_LIST ? list : fc_torch_json_tagged(tags[type], list);
}

json_t *fc_torch_json_value(writer *w, fc_pv v) {
    int64_t integer = 0;
    size_t n;
    const char *bytes;
    if (!spend_budget(w, 4)) {
        return json_omitted("too large");
    }
    switch (fc_pv_typeof(v)) {
    case FC_PV_ABSENT:
    case FC_PV_NONE:
        return json_null();
    case FC_PV_BOOL:
        return json_boolean(fc_pv_is_true(v));
    case FC_PV_INT:
        fc_pickle_int(w->p, v, &integer);
        return json_integer(integer);
    case FC_PV_BIGINT:
        return json_of_integer(w, v);
    case FC_PV_FLOAT:
        return fc_torch_json_real(fc_pickle_float(w->p, v));
    case FC_PV_STR:
        return json_of_string(w, v);
    case FC_PV_BYTES:
    case FC_PV_BYTEARRAY:
        bytes = fc_pickle_bytes(w->p, v, &n);
        return fc_torch_json_base64(w, fc_pv_typeof(v) == FC_PV_BYTES ? "$bytes" : "$bytearray", bytes, n);
    case FC_PV_GLOBAL:
        return json_of_global(w->p, v);
    case FC_PV_OBJECT:
        return fc_torch_json_named(w->p, "$opaque", fc_pickle_callee(w->p, v));
    case FC_PV_PERSID:
        return fc_torch_json_tagged("$opaque", json_string("torch.storage"));
    default:
        break;
    }
    if (w->depth == FC_TORCH_JSON_DEPTH) {
        return json_omitted("too deep");
    }
    w->depth++;
    json_t *value = json_of_container(w, v);
    w->depth--;
    return value;
}

/* Formats with the lowest precision at which every number reads back unchanged: 0.9, not 0.90000000000000002. */
static char *dump_json(const json_t *value) {
    for (size_t digits = 15; digits < 17; digits++) {
        char *text = json_dumps(value, JSON_COMPACT | JSON_ENCODE_ANY | JSON_REAL_PRECISION(digits));
        json_t *again = text ? json_loads(text, JSON_DECODE_ANY, NULL) : NULL;
        bool same = again && json_equal(value, again);
        json_decref(again);
        if (same) {
            return text;
        }
        free(text);
    }
    return json_dumps(value, JSON_COMPACT | JSON_ENCODE_ANY);
}

fc_code fc_torch_json(const fc_pickle *p, fc_pv v, uint64_t budget, fc_arena *arena, const char **json, fc_error *err) {
    writer w = {.p = p, .budget = budget};
    json_t *value = fc_torch_json_value(&w, v);
    char *text = value ? dump_json(value) : NULL;
    char *copy = text ? fc_arena_strndup(arena, text, strlen(text)) : NULL;
    free(text);
    json_decref(value);
    FC_NEED(copy, err, NULL);
    *json = copy;
    return FC_OK;
}

/* The JSON is only for people and scripts, so its size is limited; the object itself stays complete. */
fc_code fc_torch_json_root(const fc_pickle *p, uint64_t size, fc_arena *arena, const char **json, fc_error *err) {
    enum { SMALL = 64 << 10, RATIO = 16, LARGE = 4 << 20 };
    return fc_torch_json(p, p->root, size < LARGE / RATIO ? SMALL + RATIO * size : LARGE, arena, json, err);
}

/*
 * For the value of an archive, which it closes. `opened` is the result of opening it: a pickle that was too large
 * becomes {"$omitted": "too large"}.
 */
static fc_code json_of_item(fc_torch_item *item, fc_code opened, fc_arena *arena, const char **json, fc_error *err) {
    static const char omitted[] = "{\"$omitted\":\"too large\"}";
    if (opened == FC_EUNSUPPORTED && item->pickle_size > FC_TORCH_MAX_PICKLE) {
        *json = fc_arena_strndup(arena, omitted, strlen(omitted));
        return *json ? FC_OK : fc_no_memory(err, NULL);
    }
    FC_TRY(opened);
    fc_code rc = fc_torch_json_root(item->pickle, item->pickle_size, arena, json, err);
    fc_torch_item_close(item);
    return rc;
}

fc_code fc_torch_json_memory(unsigned char *bytes, uint64_t length, const char *path, fc_arena *arena,
                             const char **json, fc_error *err) {
    fc_torch_item item;
    fc_code rc = fc_torch_item_open_memory(bytes, length, path, &item, err);
    return json_of_item(&item, rc, arena, json, err);
}

fc_code fc_torch_json_range(int fd, const char *path, uint64_t offset, uint64_t length, fc_arena *arena,
                            const char **json, fc_error *err) {
    fc_torch_item item;
    fc_code rc = fc_torch_item_open(fd, path, offset, length, &item, err);
    return json_of_item(&item, rc, arena, json, err);
}
