/*
 * Finds the values of quantized weights: see quantized_values.h.
 *
 * A name gets a key: the name without the words that say what part of a quantized weight a tensor is. Codes and their
 * scales have the same key, as "q_proj.weight._data" and "q_proj.weight._scale", "q_proj._weight_qdata" and
 * "q_proj._weight_scale"; or the scales' key is the module of the codes, as that of "q_proj.scales".
 */
#include "plan/quantized_values.h"

#include "fsdpckpt/try.h"
#include "plan/quantized.h"
#include "plan/quantized_config.h"

#include <ctype.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>

/* What a word of a name says. */
typedef enum word_kind {
    WORD_OTHER,
    WORD_DETAIL,    /* of which kind codes or scales are */
    WORD_COMPANION, /* belongs to codes that have scales */
    WORD_SCALE
} word_kind;

static const struct {
    const char *word;
    word_kind kind;
} words[] = {
    {"scale", WORD_SCALE},      {"scales", WORD_SCALE},   {"qscale", WORD_SCALE},       {"qscales", WORD_SCALE},
    {"scb", WORD_SCALE},        {"absmax", WORD_SCALE},   {"zero", WORD_COMPANION},     {"zeros", WORD_COMPANION},
    {"qzeros", WORD_COMPANION}, {"zp", WORD_COMPANION},   {"shift", WORD_COMPANION},    {"biases", WORD_COMPANION},
    {"map", WORD_COMPANION},    {"qmap", WORD_COMPANION}, {"codebook", WORD_COMPANION}, {"codebooks", WORD_COMPANION},
    {"tables", WORD_COMPANION}, {"point", WORD_DETAIL},   {"points", WORD_DETAIL},      {"inv", WORD_DETAIL},
    {"quant", WORD_DETAIL},     {"nested", WORD_DETAIL},  {"global", WORD_DETAIL},      {"per", WORD_DETAIL},
    {"tensor", WORD_DETAIL},    {"act", WORD_DETAIL},     {"q", WORD_DETAIL},           {"qdata", WORD_DETAIL},
    {"data", WORD_DETAIL},      {"codes", WORD_DETAIL},   {"packed", WORD_DETAIL},      {"blocks", WORD_DETAIL},
    {"state", WORD_DETAIL},     {"", WORD_DETAIL},
};

/* Words of integers that are not codes, though their module may have a parameter called "scale". */
static const char *const plain_integers[] = {"mask",      "index",  "indices", "idx",    "ids",     "position",
                                             "positions", "offset", "offsets", "bias",   "step",    "initialized",
                                             "enabled",   "num",    "count",   "length", "lengths", "shape"};

/* The most components that are left out of a key. */
enum { MOST_REMOVED = 3 };

/* The key of a name, and what the words that it lacks say. */
typedef struct key {
    const char *text;
    size_t len;
    size_t module;  /* length of the module before the last component of the key; `len` if that was removed */
    word_kind kind; /* the highest */
} key;

typedef struct finder {
    const fc_checkpoint *source;
    fc_arena *arena;
    key *keys;             /* one per value */
    fc_name_table *scales; /* keys of scales, with the index of the first */
    fc_name_table *codes;  /* keys that codes share with their companions, with the index of the codes */
    fc_quantized_values *out;
} finder;

/* ---- keys ---- */

/* Says what a word means. Digits at its end only count: "absmax1", "scale_2". */
static word_kind kind_of(const char *word, size_t len) {
    while (len > 0 && isdigit((unsigned char)word[len - 1])) {
        len--;
    }
    for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
        if (strlen(words[i].word) == len && strncasecmp(words[i].word, word, len) == 0) {
            return words[i].kind;
        }
    }
    return WORD_OTHER;
}

/* Appends the words of a component that are part of the key. @return the end of the text. */
static char *put_component(const char *at, size_t len, char *out, word_kind *kind) {
    const char *end = at + len;
    bool first = true;
    while (at <= end) {
        const char *under = memchr(at, '_', (size_t)(end - at));
        const char *stop = under ? under : end;
        const word_kind is = kind_of(at, (size_t)(stop - at));
        if (is == WORD_OTHER) {
            if (!first) {
                *out++ = '_';
            }
            memcpy(out, at, (size_t)(stop - at));
            out += stop - at;
            first = false;
        } else if (is > *kind) {
            *kind = is;
        }
        at = stop + 1;
    }
    return out;
}

/* Makes the key of a name. Components such as "_data" and "_data._data" are left out as a whole. */
static bool make_key(const char *name, fc_arena *arena, key *out) {
    size_t len = strlen(name);
    char *text = fc_arena_alloc(arena, len + 1);
    *out = (key){.text = text};
    if (!text) {
        return false;
    }
    for (int removed_before = 0; len > 0; removed_before++) {
        size_t start = len;
        while (start > 0 && name[start - 1] != '.') {
            start--;
        }
        memcpy(text, name, start);
        char *end = put_component(name + start, len - start, text + start, &out->kind);
        const bool removed = end == text + start;
        const bool more =
            removed && start > 1 && out->kind == WORD_DETAIL && name[start] == '_' && removed_before < MOST_REMOVED;
        const size_t module = start > 0 ? start - 1 : 0;
        *end = '\0';
        out->len = removed ? module : (size_t)(end - text);
        out->module = module;
        if (!more) {
            return true;
        }
        len = module;
    }
    return true;
}

/* ---- codes ---- */

static bool has_word(const char *name, const char *const *list, size_t count) {
    const char *dot = strrchr(name, '.'), *at = dot ? dot + 1 : name;
    while (*at) {
        const size_t len = strcspn(at, "_");
        for (size_t i = 0; i < count; i++) {
            if (strlen(list[i]) == len && strncasecmp(list[i], at, len) == 0) {
                return true;
            }
        }
        at += len + (at[len] == '_');
    }
    return false;
}

static bool is_plain(const fc_tensor *t) {
    return has_word(t->name, plain_integers, sizeof plain_integers / sizeof *plain_integers);
}

/* Codes have few bits, or are packed into integers. One number is a flag or a count. */
static bool can_be_codes(const fc_tensor *t, const key *k) {
    const fc_dtype_class cls = fc_dtype_get(t->dtype)->cls;
    const fc_box whole = {t->ndim, NULL, t->shape};
    if (t->object || k->kind >= WORD_COMPANION) {
        return false;
    }
    if (cls == FC_CLASS_FLOAT) {
        return fc_dtype_size(t->dtype) == 1;
    }
    return cls == FC_CLASS_PACKED ||
           ((cls == FC_CLASS_SIGNED || cls == FC_CLASS_UNSIGNED) && t->ndim > 0 && fc_box_volume(&whole) > 1);
}

/* Finds the scales of possible codes. @param len receives the length of the key that they share. */
static size_t scales_of(const finder *f, size_t index, size_t *len) {
    const fc_tensor *t = &f->source->tensors[index];
    const key *k = &f->keys[index];
    *len = k->len;
    size_t at = fc_name_table_find(f->scales, k->text, k->len);
    if (at == FC_NO_NAME && k->module < k->len && fc_dtype_size(t->dtype) < 8 && !is_plain(t)) {
        *len = k->module;
        at = fc_name_table_find(f->scales, k->text, k->module);
    }
    return at;
}

static fc_code find_codes(finder *f, fc_error *err) {
    const size_t count = f->source->ntensors;
    for (size_t i = 0; i < count; i++) {
        FC_NEED(make_key(f->source->tensors[i].name, f->arena, &f->keys[i]), err, f->source->path);
        if (f->keys[i].kind == WORD_SCALE && !f->source->tensors[i].object) {
            fc_name_table_put(f->scales, f->keys[i].text, f->keys[i].len, i);
        }
    }
    for (size_t i = 0; i < count; i++) {
        size_t len;
        const size_t scales = can_be_codes(&f->source->tensors[i], &f->keys[i]) ? scales_of(f, i, &len) : FC_NO_NAME;
        if (scales != FC_NO_NAME) {
            f->out->of[i] = (fc_quantized_value){i, scales};
            fc_name_table_put(f->codes, f->keys[i].text, len, i);
        }
    }
    return FC_OK;
}

/* Marks what belongs to codes: scales, zero points, tables. */
static void find_companions(finder *f) {
    for (size_t i = 0; i < f->source->ntensors; i++) {
        const key *k = &f->keys[i];
        const size_t codes = k->kind >= WORD_COMPANION && !f->source->tensors[i].object
                                 ? fc_name_table_find(f->codes, k->text, k->len)
                                 : FC_NO_NAME;
        if (codes != FC_NO_NAME) {
            f->out->of[i] = f->out->of[codes];
        }
    }
}

/* ---- a configuration that says so ---- */

static size_t module_of(const char *name) {
    const char *dot = strrchr(name, '.');
    return dot ? (size_t)(dot - name) : 0;
}

/* Takes all that could be codes as such, and everything next to them as theirs. Their names say nothing. */
static void trust_config(finder *f, fc_name_table *modules) {
    const fc_tensor *tensors = f->source->tensors;
    for (size_t i = 0; i < f->source->ntensors; i++) {
        const bool known = f->out->of[i].codes != FC_NO_NAME;
        const bool integer = fc_dtype_get(tensors[i].dtype)->cls != FC_CLASS_FLOAT;
        if (!known && can_be_codes(&tensors[i], &f->keys[i]) &&
            !(integer && (fc_dtype_size(tensors[i].dtype) == 8 || is_plain(&tensors[i])))) {
            f->out->of[i] = (fc_quantized_value){i, FC_NO_NAME};
            fc_name_table_put(modules, tensors[i].name, module_of(tensors[i].name), i);
        }
    }
    for (size_t i = 0; i < f->source->ntensors; i++) {
        const size_t at = f->out->of[i].codes == FC_NO_NAME && !tensors[i].object
                              ? fc_name_table_find(modules, tensors[i].name, module_of(tensors[i].name))
                              : FC_NO_NAME;
        if (at != FC_NO_NAME) {
            f->out->of[i] = f->out->of[at];
        }
    }
}

fc_code fc_quantized_values_find(const fc_checkpoint *source, fc_arena *arena, fc_quantized_values *out,
                                 fc_error *err) {
    const size_t count = source->ntensors;
    finder f = {.source = source, .arena = arena, .out = out};
    *out = (fc_quantized_values){.of = fc_arena_calloc(arena, count + 1, sizeof *out->of)};
    f.keys = fc_arena_calloc(arena, count + 1, sizeof *f.keys);
    f.scales = fc_name_table_new(arena, count);
    f.codes = fc_name_table_new(arena, count);
    fc_name_table *modules = fc_name_table_new(arena, count);
    FC_NEED(out->of && f.keys && f.scales && f.codes && modules, err, source->path);
    for (size_t i = 0; i < count; i++) {
        out->of[i] = (fc_quantized_value){FC_NO_NAME, FC_NO_NAME};
    }
    FC_TRY(find_codes(&f, err));
    find_companions(&f);
    FC_TRY(fc_quantized_config_find(source, arena, &out->config, err));
    if (out->config) {
        trust_config(&f, modules);
    }
    return FC_OK;
}

bool fc_quantized_can_be_computed(const fc_checkpoint *source, const fc_quantized_values *values, fc_arena *arena) {
    const fc_name_table *names = fc_names_of(source, arena);
    for (size_t i = 0; names && i < source->ntensors; i++) {
        const fc_quantizer *q = values->of[i].codes == i ? fc_quantized_find(source, names, i).quantizer : NULL;
        if (values->of[i].codes == i && (!q || q->kind == FC_CODES_OTHER)) {
            return false;
        }
    }
    return names != NULL;
}

fc_code fc_quantized_refuse(const fc_checkpoint *source, const fc_quantized_values *values, size_t index,
                            const char *why, fc_error *err) {
    const fc_quantized_value *v = &values->of[index];
    const fc_tensor *codes = &source->tensors[v->codes];
    if (v->scales == FC_NO_NAME) {
        return fc_fail(err, FC_EUNSUPPORTED,
                       "%s: tensor %.256s holds quantized codes of type %s, because %.256s says that the weights are "
                       "quantized: %s",
                       source->path, codes->name, fc_dtype_get(codes->dtype)->torch_name, values->config, why);
    }
    return fc_fail(err, FC_EUNSUPPORTED, "%s: tensor %.256s holds quantized codes, and %.256s their scales: %s",
                   source->path, codes->name, source->tensors[v->scales].name, why);
}

fc_code fc_quantized_refuse_undequantized(const fc_checkpoint *source, const fc_quantized_values *values, size_t index,
                                          const char *why, fc_arena *arena, fc_error *err) {
    char more[256];
    if (fc_quantized_can_be_computed(source, values, arena)) {
        return fc_advise(err, fc_quantized_refuse(source, values, index, why, err), FC_HINT_DEQUANTIZE, NULL);
    }
    snprintf(more, sizeof more, "%s; first " FC_DEQUANTIZE_ELSEWHERE, why);
    return fc_quantized_refuse(source, values, index, more, err);
}
