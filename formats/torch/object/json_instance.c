/*
 * Instances of harmless classes as JSON: NumPy's scalars and arrays, dates, OmegaConf's configurations, and any other
 * class by its fields. docs/HDF5_SCHEMA.md lists the forms.
 */
#include "torch/object/json.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* @return the arguments of a call, or NULL if they are not `n` values. */
static const fc_pv *arguments_of(const fc_pickle *p, fc_pv call, size_t n) {
    size_t found;
    const fc_pv *items = fc_pickle_call_items(p, call, &found);
    return found == n ? items : NULL;
}

static const fc_pv *tuple_of(const fc_pickle *p, fc_pv v, size_t n) {
    size_t found = 0;
    const fc_pv *items = fc_pv_typeof(v) == FC_PV_TUPLE ? fc_pickle_tuple(p, v, &found) : NULL;
    return items && found == n ? items : NULL;
}

/* ---- NumPy ---- */

typedef struct number_type {
    char code[3];     /* NumPy's name: kind and bytes */
    const char *name; /* PyTorch's */
    unsigned char size;
} number_type;

static const number_type number_types[] = {
    {"b1", "bool", 1},    {"i1", "int8", 1},    {"i2", "int16", 2},     {"i4", "int32", 4},  {"i8", "int64", 8},
    {"u1", "uint8", 1},   {"u2", "uint16", 2},  {"u4", "uint32", 4},    {"u8", "uint64", 8}, {"f2", "float16", 2},
    {"f4", "float32", 4}, {"f8", "float64", 8}, {"c8", "complex64", 8},
};

/* @return the type of numbers of a little-endian numpy.dtype, or NULL. Its state is (version, byte order, …). */
static const number_type *number_type_of(const fc_pickle *p, fc_pv v) {
    size_t length, n = 0;
    if (fc_pv_typeof(v) != FC_PV_CALL || !fc_pickle_is_global(p, fc_pickle_callee(p, v), "numpy", "dtype")) {
        return NULL;
    }
    const fc_pv *args = arguments_of(p, v, 3), state = fc_pickle_state(p, v);
    const fc_pv *fields = fc_pv_typeof(state) == FC_PV_TUPLE ? fc_pickle_tuple(p, state, &n) : NULL;
    if (!args || fc_pv_typeof(args[0]) != FC_PV_STR || n < 2 || fc_pv_typeof(fields[1]) != FC_PV_STR ||
        fc_pickle_is_str(p, fields[1], ">")) {
        return NULL;
    }
    const char *code = fc_pickle_bytes(p, args[0], &length);
    for (size_t i = 0; i < sizeof number_types / sizeof *number_types; i++) {
        if (strcmp(code, number_types[i].code) == 0) {
            return &number_types[i];
        }
    }
    return NULL;
}

static double half_of(uint64_t bits) {
    const int exponent = (int)(bits >> 10 & 31);
    const double fraction = (double)(bits & 1023);
    double value = exponent == 0    ? ldexp(fraction, -24)
                   : exponent == 31 ? (fraction > 0 ? NAN : INFINITY)
                                    : ldexp(1024 + fraction, exponent - 25);
    return bits >> 15 & 1 ? -value : value;
}

static double single_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static json_t *json_of_float(const number_type *type, uint64_t bits) {
    double value;
    if (type->size < 8) {
        return fc_torch_json_real(type->size == 2 ? half_of(bits) : single_of((uint32_t)bits));
    }
    memcpy(&value, &bits, sizeof value);
    return fc_torch_json_real(value);
}

static json_int_t signed_of(unsigned char size, uint64_t bits) {
    return size == 1 ? (int8_t)bits : size == 2 ? (int16_t)bits : size == 4 ? (int32_t)bits : (int64_t)bits;
}

static json_t *json_of_number(const number_type *type, const unsigned char *bytes) {
    uint64_t bits = 0;
    for (int i = type->size; i-- > 0;) {
        bits = bits << 8 | bytes[i];
    }
    char text[24];
    switch (type->code[0]) {
    case 'b':
        return json_boolean(bits != 0);
    case 'i':
        return json_integer(signed_of(type->size, bits));
    case 'u':
        snprintf(text, sizeof text, "%llu", (unsigned long long)bits);
        return bits <= INT64_MAX ? json_integer((json_int_t)bits) : fc_torch_json_tagged("$int", json_string(text));
    case 'f':
        return json_of_float(type, bits);
    default:
        return json_pack("{s:[o, o]}", "$complex", fc_torch_json_real(single_of((uint32_t)bits)),
                         fc_torch_json_real(single_of((uint32_t)(bits >> 32))));
    }
}

/* numpy.core.multiarray.scalar(dtype, bytes). @return false if it is something else; `*out` is NULL without memory. */
static bool json_of_scalar(const fc_pickle *p, fc_pv v, json_t **out) {
    size_t n;
    const fc_pv *args = arguments_of(p, v, 2), callee = fc_pickle_callee(p, v);
    if (!args || !(fc_pickle_is_global(p, callee, "numpy.core.multiarray", "scalar") ||
                   fc_pickle_is_global(p, callee, "numpy._core.multiarray", "scalar"))) {
        return false;
    }
    const number_type *type = number_type_of(p, args[0]);
    if (!type || fc_pv_typeof(args[1]) != FC_PV_BYTES) {
        return false;
    }
    const char *bytes = fc_pickle_bytes(p, args[1], &n);
    if (n != type->size) {
        return false;
    }
    *out = json_pack("{s:{s:s, s:o}}", "$scalar", "dtype", type->name, "value",
                     json_of_number(type, (const unsigned char *)bytes));
    return true;
}

/* numpy.core.multiarray._reconstruct(ndarray, …) with the state (version, shape, dtype, Fortran order, bytes). */
static bool json_of_array(fc_torch_json_writer *w, fc_pv v, json_t **out) {
    const fc_pickle *p = w->p;
    size_t n, length;
    const fc_pv *args = arguments_of(p, v, 3), callee = fc_pickle_callee(p, v);
    const fc_pv *state = tuple_of(p, fc_pickle_state(p, v), 5);
    if (!args || !state || !fc_pickle_is_global(p, args[0], "numpy", "ndarray") ||
        !(fc_pickle_is_global(p, callee, "numpy.core.multiarray", "_reconstruct") ||
          fc_pickle_is_global(p, callee, "numpy._core.multiarray", "_reconstruct"))) {
        return false;
    }
    const number_type *type = number_type_of(p, state[2]);
    if (!type || fc_pv_typeof(state[1]) != FC_PV_TUPLE || fc_pv_typeof(state[4]) != FC_PV_BYTES) {
        return false;
    }
    const fc_pv *shape = fc_pickle_tuple(p, state[1], &n);
    const char *bytes = fc_pickle_bytes(p, state[4], &length);
    json_t *fields = fc_torch_json_base64(w, "data", bytes, length);
    if (fields && (json_object_set_new(fields, "dtype", json_string(type->name)) != 0 ||
                   json_object_set_new(fields, "shape", fc_torch_json_array(w, shape, n)) != 0 ||
                   json_object_set_new(fields, "order", json_string(fc_pv_is_true(state[3]) ? "F" : "C")) != 0)) {
        json_decref(fields);
        fields = NULL;
    }
    *out = fc_torch_json_tagged("$array", fields);
    return true;
}

/* ---- datetime ---- */

/* @return whether it is timedelta(days, seconds, microseconds). */
static bool is_timedelta(const fc_pickle *p, fc_pv v, int64_t out[3]) {
    if (fc_pv_typeof(v) != FC_PV_CALL || !fc_pickle_is_global(p, fc_pickle_callee(p, v), "datetime", "timedelta")) {
        return false;
    }
    const fc_pv *args = arguments_of(p, v, 3);
    return args && fc_pickle_int(p, args[0], &out[0]) && fc_pickle_int(p, args[1], &out[1]) &&
           fc_pickle_int(p, args[2], &out[2]);
}

/* Writes "+02:00" for timezone(timedelta[, name]). */
static bool utc_offset(const fc_pickle *p, fc_pv v, char *out, size_t size) {
    int64_t t[3];
    if (fc_pv_typeof(v) != FC_PV_CALL || !fc_pickle_is_global(p, fc_pickle_callee(p, v), "datetime", "timezone")) {
        return false;
    }
    const fc_pv *args = arguments_of(p, v, 1);
    args = args ? args : arguments_of(p, v, 2);
    if (!args || !is_timedelta(p, args[0], t) || t[0] < -1 || t[0] > 0 || t[1] < 0 || t[1] >= 86400 || t[1] % 60 != 0 ||
        t[2] != 0) {
        return false;
    }
    const int minutes = (int)(t[0] * 1440 + t[1] / 60), magnitude = minutes < 0 ? -minutes : minutes;
    snprintf(out, size, "%c%02d:%02d", minutes < 0 ? '-' : '+', magnitude / 60, magnitude % 60);
    return true;
}

/* The bytes of a date are year (2), month, day; those of a time hour, minute, second, microsecond (3). */
static size_t put_date(const unsigned char *b, char *out, size_t size) {
    return (size_t)snprintf(out, size, "%04d-%02d-%02d", b[0] << 8 | b[1], b[2] & 0x7f, b[3]);
}

static size_t put_time(const unsigned char *b, char *out, size_t size) {
    const int micro = b[3] << 16 | b[4] << 8 | b[5];
    return micro ? (size_t)snprintf(out, size, "%02d:%02d:%02d.%06d", b[0] & 0x7f, b[1], b[2], micro)
                 : (size_t)snprintf(out, size, "%02d:%02d:%02d", b[0] & 0x7f, b[1], b[2]);
}

static bool json_of_moment(const char *tag, size_t dates, size_t times, const fc_pickle *p, fc_pv v, json_t **out) {
    char text[64];
    size_t n, at = 0;
    const fc_pv *one = arguments_of(p, v, 1), *args = one ? one : arguments_of(p, v, 2);
    if (!args || fc_pv_typeof(args[0]) != FC_PV_BYTES) {
        return false;
    }
    const unsigned char *bytes = (const unsigned char *)fc_pickle_bytes(p, args[0], &n);
    if (n != dates + times) {
        return false;
    }
    at += dates ? put_date(bytes, text, sizeof text) : 0;
    at += dates && times ? (size_t)snprintf(text + at, sizeof text - at, "T") : 0;
    at += times ? put_time(bytes + dates, text + at, sizeof text - at) : 0;
    if (!one && !utc_offset(p, args[1], text + at, sizeof text - at)) {
        return false;
    }
    *out = fc_torch_json_tagged(tag, json_string(text));
    return true;
}

static bool date_or_time(const fc_pickle *p, fc_pv v, json_t **out) {
    const fc_pv callee = fc_pickle_callee(p, v);
    int64_t t[3];
    if (is_timedelta(p, v, t)) {
        *out = json_pack("{s:[I, I, I]}", "$timedelta", (json_int_t)t[0], (json_int_t)t[1], (json_int_t)t[2]);
        return true;
    }
    return (fc_pickle_is_global(p, callee, "datetime", "date") && json_of_moment("$date", 4, 0, p, v, out)) ||
           (fc_pickle_is_global(p, callee, "datetime", "time") && json_of_moment("$time", 0, 6, p, v, out)) ||
           (fc_pickle_is_global(p, callee, "datetime", "datetime") && json_of_moment("$datetime", 4, 6, p, v, out));
}

/* ---- OmegaConf ---- */

/* @return the content of a configuration or one of its nodes, or FC_PV_ABSENT. */
static fc_pv config_content(const fc_pickle *p, fc_pv v) {
    static const char before[] = "omegaconf.";
    size_t n = 0;
    const fc_pv state = fc_pickle_state(p, v);
    const char *module = fc_pickle_module(p, fc_pickle_callee(p, v));
    if (strncmp(module, before, sizeof before - 1) != 0 || fc_pv_typeof(state) != FC_PV_DICT) {
        return 0;
    }
    const fc_pv *pairs = fc_pickle_items(p, state, &n);
    for (size_t i = 0; i + 1 < n; i += 2) {
        if (fc_pickle_is_str(p, pairs[i], "_content") || fc_pickle_is_str(p, pairs[i], "_val")) {
            return pairs[i + 1];
        }
    }
    return 0;
}

/* A configuration is {"$object": class, "value": …}. Those within it, and its leaves, are plain values. */
static json_t *json_of_config(fc_torch_json_writer *w, fc_pv v, fc_pv content) {
    if (w->in_config) {
        return fc_torch_json_value(w, content);
    }
    json_t *out = fc_torch_json_named(w->p, "$object", fc_pickle_callee(w->p, v));
    w->in_config = true;
    if (out && json_object_set_new(out, "value", fc_torch_json_value(w, content)) != 0) {
        json_decref(out);
        out = NULL;
    }
    w->in_config = false;
    return out;
}

/* ---- any other class ---- */

static bool add_member(json_t *out, const char *key, json_t *value) {
    return json_object_set_new(out, key, value) == 0;
}

static json_t *json_of_fields(fc_torch_json_writer *w, fc_pv v) {
    const fc_pickle *p = w->p;
    size_t n;
    uint32_t aux;
    const fc_pv state = fc_pickle_state(p, v);
    const fc_pv list = fc_pickle_list_items(p, v), dict = fc_pickle_dict_items(p, v);
    const fc_pv *items = fc_pickle_call_items(p, v, &n);
    fc_pv class = fc_pickle_callee(p, v);
    if (n == 2 && fc_pickle_global(p, class, &aux) == FC_GLOBAL_GETATTR) { /* a member of an enumeration, by its name */
        class = items[0];
        items++;
        n--;
    }
    json_t *out = fc_torch_json_named(p, "$object", class);
    bool good = out && (n == 0 || add_member(out, "arguments", fc_torch_json_array(w, items, n)));
    good = good && (!state || add_member(out, "state", fc_torch_json_value(w, state)));
    items = list ? fc_pickle_items(p, list, &n) : NULL;
    good = good && (!items || add_member(out, "items", fc_torch_json_array(w, items, n)));
    items = dict ? fc_pickle_items(p, dict, &n) : NULL;
    good = good && (!items || add_member(out, "entries", fc_torch_json_dict(w, items, n)));
    if (!good) {
        json_decref(out);
        return NULL;
    }
    return out;
}

static json_t *open_instance(fc_torch_json_writer *w, fc_pv v) {
    const fc_pv content = config_content(w->p, v);
    if (content) {
        return json_of_config(w, v, content);
    }
    json_t *known = NULL;
    return json_of_scalar(w->p, v, &known) || date_or_time(w->p, v, &known) || json_of_array(w, v, &known)
               ? known
               : json_of_fields(w, v);
}

json_t *fc_torch_json_instance(fc_torch_json_writer *w, fc_pv v) {
    for (int i = 0; i < w->nopen; i++) {
        if (w->open[i] == v) {
            return fc_torch_json_tagged("$omitted", json_string("cycle"));
        }
    }
    if (w->nopen == FC_TORCH_JSON_DEPTH) {
        return fc_torch_json_tagged("$omitted", json_string("too deep"));
    }
    w->open[w->nopen++] = v;
    json_t *out = open_instance(w, v);
    w->nopen--;
    return out;
}
