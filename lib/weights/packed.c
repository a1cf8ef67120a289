/*
 * Weights as compressed-tensors packs them: X_packed holds int32 words of integers, or pairs of four-bit floats in
 * bytes (NVFP4, MXFP4). X_shape, X_zero_point, X_g_idx and X_global_scale say what they and X_scale do not.
 */
#include "base/checked.h"
#include "fsdpckpt/format.h"
#include "fsdpckpt/read.h"
#include "fsdpckpt/try.h"
#include "plan/box_text.h"
#include "weights/dequantizer.h"

#include <string.h>

enum { MOST_BITS = 8, WORD_BITS = 32, NVFP4_BLOCK = 16, MXFP4_BLOCK = 32, SIX_BITS_BYTES = 24 };

static fc_code refuse_fit(const fc_dequantizer *d, const fc_tensor *codes, const fc_tensor *other) {
    static const int64_t start[FC_MAX_DIMS];
    const fc_box a = {codes->ndim, start, codes->shape}, b = {other->ndim, start, other->shape};
    return fc_dequantizer_refuse(d, codes, "its shape %s does not fit %.256s of type %s %s", fc_box_to_text(&a).s,
                                 other->name, fc_dtype_get(other->dtype)->torch_name, fc_box_to_text(&b).s);
}

/* Reads the shape of the weight, which is stored as a tensor. */
static fc_code read_shape(const fc_dequantizer *d, const fc_tensor *codes, size_t end, int64_t *shape) {
    static const int64_t start = 0;
    const fc_tensor *t = fc_dequantizer_near(d, codes->name, end, "_shape");
    int32_t narrow[FC_MAX_DIMS];
    if (!t) {
        return fc_dequantizer_refuse(d, codes, "there is no %.*s_shape next to it", (int)(strlen(codes->name) - end),
                                     codes->name);
    }
    if (t->object || t->ndim != 1 || t->shape[0] != codes->ndim || (t->dtype != FC_I64 && t->dtype != FC_I32)) {
        return refuse_fit(d, codes, t);
    }
    if (d->source->format->layout_only) {
        return fc_dequantizer_refuse(d, codes, "its shape is the data of %.256s, which is not here", t->name);
    }
    const fc_box box = {1, &start, t->shape};
    FC_TRY(fc_read_box(d->source, t, &box, t->dtype, t->dtype == FC_I64 ? (void *)shape : (void *)narrow, d->err));
    for (int i = 0; t->dtype == FC_I32 && i < codes->ndim; i++) {
        shape[i] = narrow[i];
    }
    return FC_OK;
}

/* @return a bit for each number of bits of integers that the configuration has, the lowest for 0; 0: it has none. */
static unsigned bits_of_config(const json_t *config) {
    json_t *groups = json_object_get(config, "config_groups");
    const char *key;
    json_t *group;
    unsigned found = 0;
    json_object_foreach(groups, key, group) {
        const json_t *weights = json_object_get(group, "weights");
        const char *type = json_string_value(json_object_get(weights, "type"));
        const json_int_t bits = json_integer_value(json_object_get(weights, "num_bits"));
        if ((!type || strcmp(type, "int") == 0) && bits > 0 && bits <= MOST_BITS) {
            found |= 1U << bits;
        }
    }
    return found;
}

/* Whether the configuration says that no integers are symmetric. */
static bool needs_zeros(const json_t *config) {
    json_t *groups = json_object_get(config, "config_groups");
    const char *key;
    json_t *group;
    bool any = false;
    json_object_foreach(groups, key, group) {
        const json_t *weights = json_object_get(group, "weights");
        if (json_object_size(weights) > 0 && !json_is_false(json_object_get(weights, "symmetric"))) {
            return false;
        }
        any = any || json_object_size(weights) > 0;
    }
    return any;
}

/* Finds the number of bits from the number of words, and from the configuration where several fit. */
static fc_code find_bits(const fc_dequantizer *d, const fc_tensor *codes, int64_t columns, int *out) {
    const unsigned configured = bits_of_config(d->config);
    const int64_t words = codes->shape[codes->ndim - 1];
    int fit = 0;
    *out = 0;
    for (int bits = 1; bits <= MOST_BITS; bits++) {
        int64_t all;
        if ((configured == 0 || (configured >> bits & 1)) && fc_mul_i64(columns, bits, &all) &&
            all / WORD_BITS + (all % WORD_BITS != 0) == words) {
            *out = bits;
            fit++;
        }
    }
    if (fit == 1) {
        return FC_OK;
    }
    return fc_dequantizer_refuse(d, codes, "%lld words for %lld columns are integers of %s", (long long)words,
                                 (long long)columns,
                                 fit > 1          ? "several sizes: the model's config.json says which"
                                 : configured > 0 ? "no size that quantization_config in the model's config.json has"
                                                  : "no size from 1 to 8 bits");
}

fc_code fc_packed_zeros(const fc_dequantizer *d, fc_scaled *w, size_t end) {
    const fc_tensor *zeros = fc_dequantizer_near(d, w->codes->name, end, "_zero_point");
    const int n = w->scales->ndim;
    w->zeros = zeros;
    if (!zeros) {
        return needs_zeros(d->config) && w->form == FC_FORM_WORDS
                   ? fc_dequantizer_refuse(d, w->codes,
                                           "it is not symmetric, and there is no %.*s_zero_point next to it",
                                           (int)(strlen(w->codes->name) - end), w->codes->name)
                   : FC_OK;
    }
    if (fc_dtype_get(zeros->dtype)->cls == FC_CLASS_FLOAT) {
        return fc_dequantizer_refuse(d, w->codes,
                                     "the zero points %.256s are of type %s, as in torchao's Int4Tensor, "
                                     "which cannot be dequantized",
                                     zeros->name, fc_dtype_get(zeros->dtype)->torch_name);
    }
    const bool packed = w->form == FC_FORM_WORDS && zeros->dtype == FC_I32;
    if (zeros->object || zeros->ndim != n || (packed ? n < 2 : zeros->dtype != FC_I8)) {
        return refuse_fit(d, w->codes, zeros);
    }
    for (int i = 0; i < n; i++) {
        int64_t want = w->scales->shape[i];
        if (packed && i == n - 2) {
            int64_t all;
            want = fc_mul_i64(want, w->bits, &all) ? all / WORD_BITS + (all % WORD_BITS != 0) : -1;
        }
        if (zeros->shape[i] != want) {
            return refuse_fit(d, w->scales, zeros);
        }
    }
    return FC_OK;
}

/* Finds which scale each column has, if that is stored. Version 0.20 stores -1 where it says nothing. */
static fc_code find_columns(const fc_dequantizer *d, fc_scaled *w, size_t end, int64_t columns) {
    const fc_tensor *t = fc_dequantizer_near(d, w->codes->name, end, "_g_idx");
    if (!t) {
        return FC_OK;
    }
    if (t->object || t->dtype != FC_I32 || t->ndim != 1 || t->shape[0] != columns ||
        w->scales->ndim != w->codes->ndim) {
        return refuse_fit(d, w->codes, t);
    }
    w->columns = t;
    return FC_OK;
}

static fc_code fit_words(const fc_dequantizer *d, fc_scaled *w, size_t end, int64_t *shape) {
    const fc_tensor *codes = w->codes;
    const int last = codes->ndim - 1;
    if (last < 1) {
        return refuse_fit(d, codes, w->scales);
    }
    FC_TRY(read_shape(d, codes, end, shape));
    for (int i = 0; i < codes->ndim; i++) {
        int64_t count;
        if (shape[i] < 0 || (i < last && shape[i] != codes->shape[i]) || !fc_numel(codes->ndim, shape, &count)) {
            return fc_dequantizer_refuse(d, codes,
                                         "the weight has %lld elements along dimension %d, and its codes %lld",
                                         (long long)shape[i], i, (long long)codes->shape[i]);
        }
    }
    w->form = FC_FORM_WORDS;
    w->equal_blocks = true;
    FC_TRY(find_bits(d, codes, shape[last], &w->bits));
    FC_TRY(find_columns(d, w, end, shape[last]));
    return fc_packed_zeros(d, w, end);
}

/* Refuses bytes that do not fit as pairs of four-bit floats. Six-bit ones have 24 bytes for each exponent. */
static fc_code refuse_bytes(const fc_dequantizer *d, const fc_tensor *codes, const fc_tensor *scales) {
    const int last = codes->ndim - 1;
    const bool six = last >= 0 && scales->ndim == codes->ndim && scales->shape[last] > 0 &&
                     codes->shape[last] % SIX_BITS_BYTES == 0 &&
                     codes->shape[last] / SIX_BITS_BYTES == scales->shape[last];
    return six ? fc_dequantizer_refuse(d, codes, "they are six-bit floats (MXFP6), which cannot be dequantized")
               : refuse_fit(d, codes, scales);
}

/* Finds the one number that all scales share. */
static fc_code find_general(const fc_dequantizer *d, fc_scaled *w, size_t end, const char *name, bool needed) {
    int64_t count;
    w->general = fc_dequantizer_near(d, w->codes->name, end, name);
    if (needed && !w->general) {
        return fc_dequantizer_refuse(d, w->codes, "there is no %.*s%s next to it", (int)(strlen(w->codes->name) - end),
                                     w->codes->name, name);
    }
    return w->general && (w->general->object || fc_dtype_get(w->general->dtype)->cls != FC_CLASS_FLOAT ||
                          !fc_numel(w->general->ndim, w->general->shape, &count) || count != 1)
               ? refuse_fit(d, w->codes, w->general)
               : FC_OK;
}

/* Four-bit floats. Blocks tell them from six-bit ones, which four of version 0.20's formats have in common. */
static fc_code fit_pairs(const fc_dequantizer *d, fc_scaled *w, size_t end, int64_t *shape) {
    const fc_tensor *codes = w->codes, *scales = w->scales;
    const int last = codes->ndim - 1;
    const bool exponents = scales->dtype == FC_U8 || scales->dtype == FC_F8_E8M0FNU;
    const int64_t block = exponents ? MXFP4_BLOCK : NVFP4_BLOCK;
    int64_t columns;
    if (last < 1 || scales->ndim != codes->ndim || !fc_mul_i64(codes->shape[last], 2, &shape[last]) ||
        !fc_mul_i64(scales->shape[last], block, &columns) || columns != shape[last]) {
        return refuse_bytes(d, codes, scales);
    }
    w->form = FC_FORM_PAIRS;
    w->equal_blocks = true;
    w->largest_is_infinite = exponents;
    w->general_divides = true;
    return find_general(d, w, end, "_global_scale", !exponents);
}

fc_code fc_modelopt_fit(const fc_dequantizer *d, fc_scaled *w, int64_t *shape) {
    const fc_tensor *codes = w->codes, *scales = w->scales;
    const int last = codes->ndim - 1;
    const bool exponents = scales->dtype == FC_U8 || scales->dtype == FC_F8_E8M0FNU;
    if (!exponents && scales->dtype != FC_F8_E4M3FN) {
        return fc_dequantizer_refuse(d, codes,
                                     "bytes with scales of type %s are four-bit integers of ModelOpt's AWQ, "
                                     "which cannot be dequantized",
                                     fc_dtype_get(scales->dtype)->torch_name);
    }
    if (last < 1 || scales->ndim != codes->ndim || !fc_mul_i64(codes->shape[last], 2, &shape[last]) ||
        scales->shape[last] < 1 || shape[last] % scales->shape[last] != 0) {
        return refuse_bytes(d, codes, scales);
    }
    const int64_t block = shape[last] / scales->shape[last];
    if (block != MXFP4_BLOCK && (exponents || block != NVFP4_BLOCK)) {
        return refuse_bytes(d, codes, scales);
    }
    w->form = FC_FORM_PAIRS;
    w->equal_blocks = true;
    w->largest_is_infinite = exponents;
    w->zero_is_positive = !exponents;
    return find_general(d, w, 0, "_scale_2", !exponents);
}

fc_code fc_packed_fit(const fc_dequantizer *d, fc_scaled *w, size_t end, int64_t *shape) {
    memcpy(shape, w->codes->shape, (size_t)w->codes->ndim * sizeof *shape);
    switch (w->codes->dtype) {
    case FC_I32:
        return fit_words(d, w, end, shape);
    case FC_U8:
        return fit_pairs(d, w, end, shape);
    default:
        return refuse_fit(d, w->codes, w->scales);
    }
}
