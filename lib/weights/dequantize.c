/*
 * Dequantizes: finds codes and scales, and computes blocks of weights from them.
 */
#include "base/checked.h"
#include "derived/derived.h"
#include "fsdpckpt/cast.h"
#include "fsdpckpt/format.h"
#include "fsdpckpt/try.h"
#include "fsdpckpt/weights.h"
#include "io/json_file.h"
#include "plan/quantized_values.h"
#include "read/box.h"
#include "weights/scales.h"

#include <string.h>

/* Elements that are computed at once, in the first-level cache. */
enum { PIECE = 2048 };

/* ---- computing a block ---- */

/* Turns codes into floats. @param at the first code, in elements of the weight. */
static void codes_as_floats(const fc_scaled *w, const unsigned char *codes, size_t at, size_t count, float *out) {
    if (w->pairs) {
        for (size_t i = 0; i < count; i++) {
            const unsigned char both = codes[(at + i) / 2];
            out[i] = fc_four_bit_floats[(at + i) % 2 == 0 ? both & 15 : both >> 4];
        }
    } else if (w->codes->dtype == FC_I8) {
        for (size_t i = 0; i < count; i++) {
            out[i] = (float)(signed char)codes[at + i];
        }
    } else {
        fc_cast(w->codes->dtype, codes + at, FC_F32, out, count);
    }
}

/* Multiplies `count` elements from column `column` on with their scales, which begin at scales[0]. */
static void multiply(float *values, size_t count, const float *scales, int64_t first, int64_t column, int64_t block) {
    for (size_t i = 0; i < count;) {
        const int64_t at = column + (int64_t)i, end = (at / block + 1) * block;
        const size_t stop = (size_t)(end - column) < count ? (size_t)(end - column) : count;
        const float scale = scales[at / block - first];
        for (; i < stop; i++) {
            values[i] *= scale;
        }
    }
}

/* Computes one row of a block. @param scales the first scale of the row. */
static void compute_row(const fc_computed_block *b, const fc_scale_box *all, const float *scales, size_t row,
                        const unsigned char *codes) {
    const fc_scaled *w = b->what;
    const int last = b->box.ndim - 1;
    const int64_t width = last >= 0 ? b->box.sizes[last] : 1, from = last >= 0 ? b->box.offsets[last] : 0;
    const bool per_column = last >= 0 && w->ndim == b->box.ndim;
    const int64_t block = per_column ? w->block[last] : INT64_MAX, first = per_column ? all->offsets[last] : 0;
    const size_t element = fc_dtype_size(b->tensor->dtype);
    unsigned char *out = (unsigned char *)b->out + row * (size_t)width * element;
    float values[PIECE];
    for (int64_t i = 0; i < width; i += PIECE) {
        const size_t count = width - i < PIECE ? (size_t)(width - i) : PIECE;
        codes_as_floats(w, codes, row * (size_t)width + (size_t)i, count, values);
        multiply(values, count, scales, first, per_column ? from + i : 0, block);
        fc_cast(FC_F32, values, b->tensor->dtype, out + (size_t)i * element, count);
    }
}

/* Goes through the rows of the block, each with its scales. */
static void compute_rows(const fc_computed_block *b, const fc_scale_box *scales, const unsigned char *codes) {
    const fc_scaled *w = b->what;
    const int outer = b->box.ndim > 0 ? b->box.ndim - 1 : 0;
    int64_t at[FC_MAX_DIMS] = {0}, rows = 1;
    for (int d = 0; d < outer; d++) {
        rows *= b->box.sizes[d];
    }
    for (int64_t row = 0; row < rows; row++) {
        int64_t first = 0;
        for (int d = 0; d < outer && d < w->ndim; d++) {
            first += ((b->box.offsets[d] + at[d]) / w->block[d] - scales->offsets[d]) * scales->strides[d];
        }
        compute_row(b, scales, scales->values + first, (size_t)row, codes);
        for (int d = outer - 1; d >= 0 && ++at[d] == b->box.sizes[d]; d--) {
            at[d] = 0;
        }
    }
}

/* Reads the codes of the block. */
static fc_code read_codes(const fc_computed_block *b, unsigned char **out, fc_error *err) {
    const fc_scaled *w = b->what;
    int64_t offsets[FC_MAX_DIMS], sizes[FC_MAX_DIMS];
    const fc_box box = {b->box.ndim, offsets, sizes};
    for (int d = 0; d < box.ndim; d++) {
        const int64_t shared = w->pairs && d == box.ndim - 1 ? 2 : 1;
        offsets[d] = b->box.offsets[d] / shared;
        sizes[d] = b->box.sizes[d] / shared;
    }
    *out = fc_work_buffer(b->work, 0, (size_t)fc_box_volume(&box));
    return *out ? fc_read_box_crc(b->sources[0], w->codes, &box, w->codes->dtype, *out, b->crcs[0], err)
                : fc_no_memory(err, b->sources[0]->path);
}

static fc_code compute(const fc_computed_block *b, fc_error *err) {
    fc_scale_box scales;
    unsigned char *codes = NULL;
    FC_TRY(fc_scales_read(b, b->what, &scales, err));
    FC_TRY(read_codes(b, &codes, err));
    compute_rows(b, &scales, codes);
    return FC_OK;
}

/* ---- which tensors ---- */

typedef struct finder {
    fc_checkpoint *source, *out;
    fc_arena *scratch;
    fc_name_table *names;
    fc_dtype dtype;
    int64_t blocks[2];   /* of the configuration; 0: unknown */
    fc_quantized *found; /* one per value of the source */
    bool *dropped;       /* one per value of the source */
    size_t count;
    fc_error *err;
} finder;

/* The size of blocks, if the model's configuration has it: {"quantization_config": {"weight_block_size": [128, 128]}}.
 */
static fc_code read_config(finder *f, const char *path) {
    json_t *root = NULL;
    FC_TRY(fc_json_load_config(path, f->scratch, &path, &root, f->err));
    const json_t *sizes = json_object_get(json_object_get(root, "quantization_config"), "weight_block_size");
    for (size_t i = 0; json_array_size(sizes) == 2 && i < 2; i++) {
        f->blocks[i] = (int64_t)json_integer_value(json_array_get(sizes, i));
    }
    json_decref(root);
    return FC_OK;
}

/* Finds the value called `name` without `less` bytes at its end, but with `more`. */
static size_t find_near(const finder *f, const char *name, size_t less, const char *more) {
    const char *near = fc_arena_printf(f->scratch, "%.*s%s", (int)(strlen(name) - less), name, more);
    return near ? fc_name_table_find(f->names, near, strlen(near)) : FC_NO_NAME;
}

/* Codes that have more than scales. */
static fc_code check_more(const finder *f, const fc_tensor *codes) {
    static const char *const others[] = {"_zero_point", "_scale_2", "_global_scale"};
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
        const size_t at = find_near(f, codes->name, 0, others[i]);
        if (at != FC_NO_NAME) {
            return fc_fail(f->err, FC_EUNSUPPORTED,
                           "%s: tensor %.256s has %.256s besides its scales, which cannot be dequantized",
                           f->source->path, codes->name, f->source->tensors[at].name);
        }
    }
    return FC_OK;
}

static fc_code refuse_codes(const finder *f, const fc_tensor *codes, const fc_quantizer *q) {
    return fc_fail(f->err, FC_EUNSUPPORTED,
                   "%s: tensor %.256s holds codes of type %s as %s stores them, which cannot be "
                   "dequantized",
                   f->source->path, codes->name, fc_dtype_get(codes->dtype)->torch_name, q->by);
}

/* Finds all pairs of codes and scales, and the scales of activations next to them. */
static fc_code find_pairs(finder *f) {
    static const char *const activations[] = {".input_scale", ".output_scale", ".input_scale_ub", ".activation_scale"};
    for (size_t i = 0; i < f->source->ntensors; i++) {
        const char *name = f->source->tensors[i].name;
        const size_t len = strlen(name);
        f->found[i] = fc_quantized_find(f->source, f->names, i);
        if (!f->found[i].quantizer) {
            continue;
        }
        f->count++;
        f->dropped[f->found[i].scales] = true;
        FC_TRY(check_more(f, &f->source->tensors[i]));
        for (size_t k = 0; k < sizeof activations / sizeof *activations; k++) {
            const bool module = len > 7 && strcmp(name + len - 7, ".weight") == 0;
            const size_t at = module ? find_near(f, name, 7, activations[k]) : FC_NO_NAME;
            if (at != FC_NO_NAME) {
                f->dropped[at] = true;
            }
        }
    }
    return FC_OK;
}

/* Fails if there are codes in a layout that is not known. */
static fc_code check_others(const finder *f) {
    fc_quantized_values values;
    FC_TRY(fc_quantized_values_find(f->source, f->scratch, &values, f->err));
    for (size_t i = 0; i < f->source->ntensors; i++) {
        if (values.of[i].codes == i && !f->found[i].quantizer) {
            return fc_quantized_refuse(f->source, &values, i, "this layout cannot be dequantized", f->err);
        }
    }
    return f->count > 0 ? FC_OK
                        : fc_fail(f->err, FC_EUSAGE, "%s: has no quantized weights: there are no scales next to codes",
                                  f->source->path);
}

/* Whether each byte of these codes holds two. int8 with inverse scales is what Transformers reads as such pairs. */
static bool are_pairs(const fc_tensor *codes, const fc_quantizer *q) {
    return codes->dtype == FC_F4_E2M1FN_X2 || (codes->dtype == FC_I8 && strcmp(q->scales, "_scale") != 0);
}

/* Adds a weight whose elements are in the order of its codes. */
static fc_code add_scaled(const finder *f, const fc_tensor *codes, const fc_quantized *q, fc_scaled *w) {
    int64_t shape[FC_MAX_DIMS], block[FC_MAX_DIMS];
    fc_tensor like = *codes;
    w->pairs = are_pairs(codes, q->quantizer);
    const bool floats = fc_dtype_get(codes->dtype)->cls == FC_CLASS_FLOAT;
    if (!floats && !w->pairs && codes->dtype != FC_I8) {
        return refuse_codes(f, codes, q->quantizer);
    }
    for (int d = 0; d < codes->ndim; d++) {
        shape[d] = codes->shape[d];
    }
    if (w->pairs && (codes->ndim == 0 || !fc_mul_i64(shape[codes->ndim - 1], 2, &shape[codes->ndim - 1]))) {
        return refuse_codes(f, codes, q->quantizer);
    }
    FC_TRY_CONTEXT(fc_scaled_fit(w, shape, f->blocks, f->err), f->err, "%s", f->source->path);
    like.shape = shape;
    like.dtype = f->dtype;
    fc_computed_run(&like, block);
    return fc_computed_add(f->out, &like, NULL, block, compute, w, f->err);
}

/* Adds a weight of blocks of 32 four-bit floats, with the last two dimensions exchanged. */
static fc_code add_transposed(const finder *f, const fc_tensor *codes, const fc_quantized *q, const fc_scaled *w) {
    const int n = codes->ndim - 1;
    int64_t shape[FC_MAX_DIMS], block[FC_MAX_DIMS];
    const bool fits = codes->dtype == FC_U8 && n >= 2 && codes->shape[n] == 16 && w->scales->ndim == n &&
                      memcmp(codes->shape, w->scales->shape, (size_t)n * sizeof *shape) == 0;
    if (!fits || (w->scales->dtype != FC_U8 && w->scales->dtype != FC_F8_E8M0FNU)) {
        return refuse_codes(f, codes, q->quantizer);
    }
    for (int d = 0; d < n; d++) {
        shape[d] = codes->shape[d];
        block[d] = 1;
    }
    shape[n - 1] = codes->shape[n - 2];
    if (!fc_mul_i64(codes->shape[n - 1], 32, &shape[n - 2])) {
        return refuse_codes(f, codes, q->quantizer);
    }
    for (int d = n - 2; d < n; d++) {
        block[d] = shape[d] < FC_COMPUTED_EDGE ? shape[d] : FC_COMPUTED_EDGE;
    }
    const fc_tensor like = {.name = codes->name, .dtype = f->dtype, .ndim = n, .shape = shape};
    const char *name = fc_arena_strndup(f->scratch, codes->name, strlen(codes->name) - strlen(q->quantizer->codes));
    return name ? fc_computed_add(f->out, &like, name, block, fc_four_bits_compute, w, f->err)
                : fc_no_memory(f->err, f->source->path);
}

static fc_code add_weight(const finder *f, size_t index) {
    const fc_tensor *codes = &f->source->tensors[index];
    const fc_quantized *q = &f->found[index];
    fc_scaled *w = fc_arena_calloc(f->out->arena, 1, sizeof *w);
    FC_NEED(w, f->err, f->source->path);
    *w = (fc_scaled){.codes = codes, .scales = &f->source->tensors[q->scales]};
    FC_TRY(fc_computed_shares(f->out, 0, w->scales, f->err));
    switch (q->quantizer->kind) {
    case FC_CODES_SCALED:
        return add_scaled(f, codes, q, w);
    case FC_CODES_TRANSPOSED:
        return add_transposed(f, codes, q, w);
    default:
        return refuse_codes(f, codes, q->quantizer);
    }
}

static fc_code build_dequantized(finder *f, const char *config) {
    const size_t count = f->source->ntensors;
    f->names = fc_names_of(f->source, f->scratch);
    f->found = fc_arena_calloc(f->scratch, count + 1, sizeof *f->found);
    f->dropped = fc_arena_calloc(f->scratch, count + 1, sizeof *f->dropped);
    FC_NEED(f->names && f->found && f->dropped, f->err, f->source->path);
    if (config) {
        FC_TRY(read_config(f, config));
    }
    FC_TRY(find_pairs(f));
    FC_TRY(check_others(f));
    for (size_t i = 0; i < count; i++) {
        if (f->found[i].quantizer) {
            FC_TRY(add_weight(f, i));
        } else if (!f->dropped[i]) {
            FC_TRY(fc_computed_keep(f->out, &f->source->tensors[i], f->err));
        }
    }
    return fc_computed_own(f->out, f->err);
}

fc_code fc_dequantize(fc_checkpoint *source, fc_dtype dtype, const char *config, fc_checkpoint **out, fc_error *err) {
    *out = NULL;
    if (fc_dtype_size(dtype) < 2) {
        return fc_fail(err, FC_EUSAGE, "quantized weights cannot become %s, which has too few bits without scales",
                       fc_dtype_get(dtype)->torch_name);
    }
    finder f = {.source = source, .dtype = dtype, .err = err};
    FC_TRY(fc_computed_new(&source, 1, source->ntensors, &f.out, err));
    f.scratch = fc_arena_new();
    fc_code rc = f.scratch ? build_dequantized(&f, config) : fc_no_memory(err, source->path);
    fc_arena_free(f.scratch);
    return fc_derived_finish(f.out, rc, out);
}
