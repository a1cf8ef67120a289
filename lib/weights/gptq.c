/*
 * Weights of GPTQ and AWQ: X.qweight holds int32 words of unsigned codes, and the weight is X.weight, transposed.
 * X.scales has a row for each group of columns of the weight, X.qzeros the zero points in words, and X.g_idx, which
 * only GPTQ has, the group of each column.
 */
#include "base/checked.h"
#include "fsdpckpt/cast.h"
#include "fsdpckpt/try.h"
#include "read/box.h"
#include "weights/dequantizer.h"

#include <string.h>
#include <strings.h>

enum { WORD_BITS = 32, AWQ_BITS = 4, AWQ_CODES = 8 };

/* fc_computed_block.what. */
typedef struct grouped {
    const fc_tensor *codes, *scales, *zeros;
    const fc_tensor *groups; /* NULL: groups of `size` columns each */
    int64_t size;
    int bits;
    int shift; /* what GPTQ's first format adds to zero points */
    bool awq;  /* words hold codes of eight rows of the weight in an order of their own, else of columns, in order */
} grouped;

/* The inputs of a block. */
typedef struct inputs {
    const uint32_t *words;
    const float *scales, *zeros; /* one row per group */
    const int32_t *groups;       /* one per column, counted from the first row of scales */
    int64_t rows, columns;       /* of the block */
} inputs;

/* Reads a box of a matrix. */
static fc_code read_matrix(const fc_computed_block *b, const fc_tensor *t, const int64_t *offsets, const int64_t *sizes,
                           fc_dtype dtype, int buffer, void **out, fc_error *err) {
    const fc_box box = {t->ndim, offsets, sizes};
    *out = fc_work_buffer(b->work, buffer, (size_t)fc_box_volume(&box) * fc_dtype_size(dtype));
    FC_NEED(*out, err, b->sources[0]->path);
    return fc_read_box_crc(b->sources[0], t, &box, dtype, *out,
                           t == ((const grouped *)b->what)->codes ? b->crcs[0] : NULL, err);
}

/* Finds the group of each column, and the range of groups. */
static fc_code find_groups(const fc_computed_block *b, int32_t **out, int64_t *first, int64_t *last, fc_error *err) {
    const grouped *w = b->what;
    const int64_t from = b->box.offsets[1], count = b->box.sizes[1];
    void *read = NULL;
    int32_t *groups = fc_work_buffer(b->work, 4, (size_t)count * sizeof *groups);
    FC_NEED(groups, err, b->sources[0]->path);
    if (w->groups) {
        FC_TRY(read_matrix(b, w->groups, &from, &count, FC_I32, 4, &read, err));
        groups = read;
    }
    *first = INT64_MAX;
    *last = 0;
    for (int64_t i = 0; i < count; i++) {
        groups[i] = w->groups ? groups[i] : (int32_t)((from + i) / w->size);
        if (w->groups && (groups[i] < 0 || groups[i] >= w->scales->shape[0])) {
            return fc_fail(err, FC_ECORRUPT,
                           "%s: tensor %.256s says that column %lld is of group %d, but there are %lld",
                           b->sources[0]->path, w->groups->name, (long long)(from + i), (int)groups[i],
                           (long long)w->scales->shape[0]);
        }
        *first = groups[i] < *first ? groups[i] : *first;
        *last = groups[i] > *last ? groups[i] : *last;
    }
    *out = groups;
    return FC_OK;
}

/* Takes a code out of a stream of words that are `step` words apart. */
static unsigned take_code(const uint32_t *words, int64_t number, int64_t step, int bits) {
    const int64_t bit = number * bits, word = bit / WORD_BITS;
    const int from = (int)(bit % WORD_BITS);
    uint32_t code = words[word * step] >> from;
    if (from + bits > WORD_BITS) {
        code |= words[(word + 1) * step] << (WORD_BITS - from);
    }
    return code & ((1U << bits) - 1);
}

/* Takes code `number` out of words of AWQ: each has those of rows 0, 2, 4, 6, 1, 3, 5, 7. */
static unsigned take_awq(const uint32_t *words, int64_t number) {
    static const int places[AWQ_CODES] = {0, 4, 1, 5, 2, 6, 3, 7};
    return words[number / AWQ_CODES] >> (AWQ_BITS * places[number % AWQ_CODES]) & 15;
}

/* Reads the zero points of groups as floats. GPTQ's first format wraps them around, but for three bits. */
static fc_code read_zeros(const fc_computed_block *b, const int64_t *offsets, const int64_t *sizes, const float **out,
                          fc_error *err) {
    const grouped *w = b->what;
    const int64_t words_at[2] = {offsets[0], offsets[1] * w->bits / WORD_BITS};
    const int64_t words_of[2] = {sizes[0], (sizes[1] * w->bits + WORD_BITS - 1) / WORD_BITS};
    const unsigned mask = w->bits == 3 ? ~0U : (1U << w->bits) - 1;
    void *words = NULL;
    float *zeros = fc_work_buffer(b->work, 3, (size_t)(sizes[0] * sizes[1]) * sizeof *zeros);
    FC_NEED(zeros, err, b->sources[0]->path);
    FC_TRY(read_matrix(b, w->zeros, words_at, words_of, FC_I32, 2, &words, err));
    for (int64_t g = 0; g < sizes[0]; g++) {
        const uint32_t *row = (const uint32_t *)words + g * words_of[1];
        for (int64_t i = 0; i < sizes[1]; i++) {
            const unsigned code = w->awq ? take_awq(row, i) : take_code(row, i, 1, w->bits);
            zeros[g * sizes[1] + i] = (float)((code + (unsigned)w->shift) & mask);
        }
    }
    *out = zeros;
    return FC_OK;
}

static fc_code read_inputs(const fc_computed_block *b, inputs *in, fc_error *err) {
    const grouped *w = b->what;
    int32_t *groups = NULL;
    int64_t first = 0, last = 0;
    void *words = NULL, *scales = NULL;
    in->rows = b->box.sizes[0];
    in->columns = b->box.sizes[1];
    FC_TRY(find_groups(b, &groups, &first, &last, err));
    for (int64_t i = 0; i < in->columns; i++) {
        groups[i] -= (int32_t)first;
    }
    const int64_t offsets[2] = {first, b->box.offsets[0]}, sizes[2] = {last - first + 1, in->rows};
    FC_TRY(read_matrix(b, w->scales, offsets, sizes, FC_F32, 1, &scales, err));
    FC_TRY(read_zeros(b, offsets, sizes, &in->zeros, err));
    int64_t words_at[2] = {b->box.offsets[1], b->box.offsets[0]}, words_of[2] = {in->columns, in->rows};
    const int packed = w->awq ? 1 : 0;
    words_at[packed] = words_at[packed] * w->bits / WORD_BITS;
    words_of[packed] = (words_of[packed] * w->bits + WORD_BITS - 1) / WORD_BITS;
    FC_TRY(read_matrix(b, w->codes, words_at, words_of, FC_I32, 0, &words, err));
    in->words = words;
    in->scales = scales;
    in->groups = groups;
    return FC_OK;
}

static fc_code compute(const fc_computed_block *b, fc_error *err) {
    const grouped *w = b->what;
    const size_t element = fc_dtype_size(b->tensor->dtype);
    inputs in = {0};
    float values[FC_COMPUTED_EDGE];
    FC_TRY(read_inputs(b, &in, err));
    for (int64_t r = 0; r < in.rows; r++) {
        for (int64_t c = 0; c < in.columns; c++) {
            const unsigned code = w->awq ? take_awq(in.words + c * (in.rows / AWQ_CODES), r)
                                         : take_code(in.words + r, c, in.rows, w->bits);
            const int64_t at = in.groups[c] * in.rows + r;
            values[c] = ((float)code - in.zeros[at]) * in.scales[at];
        }
        fc_cast(FC_F32, values, b->tensor->dtype, (unsigned char *)b->out + (size_t)(r * in.columns) * element,
                (size_t)in.columns);
    }
    return FC_OK;
}

/* ---- finding ---- */

static bool is_matrix(const fc_tensor *t, fc_dtype_class cls, int64_t rows, int64_t columns) {
    return t && !t->object && fc_dtype_get(t->dtype)->cls == cls && t->ndim == 2 && t->shape[0] == rows &&
           t->shape[1] == columns;
}

/* @return the bits of each of `count` codes that fill `words` words; 0: none that GPTQ has. */
static int bits_of(int64_t words, int64_t count) {
    static const int known[] = {2, 3, 4, 8};
    int64_t have, want;
    for (size_t i = 0; fc_mul_i64(words, WORD_BITS, &have) && i < sizeof known / sizeof *known; i++) {
        if (fc_mul_i64(count, known[i], &want) && have == want) {
            return known[i];
        }
    }
    return 0;
}

static fc_code fit_shapes(const fc_dequantizer *d, grouped *w, int64_t *shape) {
    const fc_tensor *codes = w->codes;
    const int64_t *scales = w->scales->shape;
    if (codes->dtype != FC_I32 || codes->ndim != 2 || w->scales->ndim != 2 || scales[0] < 1 || scales[1] < 1 ||
        !is_matrix(w->scales, FC_CLASS_FLOAT, scales[0], scales[1]) || scales[1] % AWQ_CODES != 0) {
        return fc_dequantizer_refuse(d, codes, "they are no int32 matrix, or %.256s is no matrix of floats for it",
                                     w->scales->name);
    }
    if (!w->zeros || w->zeros->ndim != 2 || w->zeros->dtype != FC_I32 ||
        !is_matrix(w->zeros, FC_CLASS_SIGNED, scales[0], w->zeros->shape[1])) {
        return fc_dequantizer_refuse(d, codes, "there is no .qzeros of type int32 next to it with %lld rows",
                                     (long long)scales[0]);
    }
    w->awq = codes->shape[1] != scales[1];
    w->bits = bits_of(w->zeros->shape[1], scales[1]);
    const bool fits = w->bits > 0;
    if (!fits || (w->awq && (w->bits != AWQ_BITS || codes->shape[1] != w->zeros->shape[1]))) {
        return fc_dequantizer_refuse(d, codes,
                                     "the shapes of it, .scales and .qzeros are not those of GPTQ with 2, 3, 4 or 8 "
                                     "bits, and not those of AWQ's GEMM");
    }
    shape[0] = scales[1];
    int64_t all;
    if (!fc_mul_i64(codes->shape[0], WORD_BITS, &all) || (!w->awq && all % w->bits != 0)) {
        return fc_dequantizer_refuse(d, codes, "its %lld rows hold no whole number of codes of %d bits",
                                     (long long)codes->shape[0], w->bits);
    }
    shape[1] = w->awq ? codes->shape[0] : all / w->bits;
    return FC_OK;
}

/* Finds the group of each column. */
static fc_code fit_groups(const fc_dequantizer *d, grouped *w, int64_t columns) {
    const fc_tensor *t = w->groups;
    if (!t) {
        w->size = columns % w->scales->shape[0] == 0 ? columns / w->scales->shape[0] : 0;
        return w->size > 0 || columns == 0
                   ? FC_OK
                   : fc_dequantizer_refuse(d, w->codes, "its %lld columns are no %lld equal groups", (long long)columns,
                                           (long long)w->scales->shape[0]);
    }
    return !t->object && t->dtype == FC_I32 && t->ndim == 1 && t->shape[0] == columns
               ? FC_OK
               : fc_dequantizer_refuse(d, w->codes, "%.256s should have %lld elements of type int32", t->name,
                                       (long long)columns);
}

/* Finds what the tensors do not say: whether zero points are one less than they should be. */
static fc_code use_config(const fc_dequantizer *d, grouped *w) {
    const char *method = json_string_value(json_object_get(d->config, "quant_method"));
    const char *format = json_string_value(json_object_get(d->config, "checkpoint_format"));
    const char *version = json_string_value(json_object_get(d->config, "version"));
    const char *expected = w->awq ? "awq" : "gptq";
    const json_int_t bits = json_integer_value(json_object_get(d->config, "bits"));
    if (method ? strcmp(method, expected) != 0 : bits != 0 && bits != w->bits) {
        return fc_dequantizer_refuse(d, w->codes,
                                     "their shapes are those of %s with %d bits, but the model's config.json says '%s'",
                                     expected, w->bits, method ? method : "other bits");
    }
    if (w->awq) {
        return !version || strcasecmp(version, "gemm") == 0
                   ? FC_OK
                   : fc_dequantizer_refuse(d, w->codes, "AWQ's version '%s' is not known, only 'gemm'", version);
    }
    if (!d->config) {
        return fc_dequantizer_refuse(d, w->codes,
                                     "whether GPTQ's zero points are one less is said by checkpoint_format in the "
                                     "quantization_config of the model's config.json, which is not next to it");
    }
    w->shift = !format || strcmp(format, "gptq") == 0;
    return w->shift || strcmp(format, "gptq_v2") == 0
               ? FC_OK
               : fc_dequantizer_refuse(d, w->codes, "GPTQ's checkpoint_format '%s' is not known", format);
}

fc_code fc_grouped_add(const fc_dequantizer *d, const fc_tensor *codes, const fc_tensor *scales, size_t end) {
    int64_t shape[2] = {0}, block[2];
    grouped *w = fc_arena_calloc(d->out->arena, 1, sizeof *w);
    const char *name = fc_arena_printf(d->scratch, "%.*s.weight", (int)(strlen(codes->name) - end), codes->name);
    FC_NEED(w && name, d->err, d->source->path);
    *w = (grouped){.codes = codes,
                   .scales = scales,
                   .zeros = fc_dequantizer_near(d, codes->name, end, ".qzeros"),
                   .groups = fc_dequantizer_near(d, codes->name, end, ".g_idx")};
    FC_TRY(fit_shapes(d, w, shape));
    FC_TRY(fit_groups(d, w, shape[1]));
    FC_TRY(use_config(d, w));
    const fc_tensor *const shared[] = {w->scales, w->zeros, w->groups};
    for (size_t i = 0; i < sizeof shared / sizeof *shared; i++) {
        FC_TRY(shared[i] ? fc_computed_shares(d->out, 0, shared[i], d->err) : FC_OK);
    }
    for (int i = 0; i < 2; i++) {
        block[i] = shape[i] < FC_COMPUTED_EDGE ? shape[i] : FC_COMPUTED_EDGE;
    }
    const fc_tensor like = {.name = codes->name, .dtype = d->dtype, .ndim = 2, .shape = shape};
    return fc_computed_add(d->out, &like, name, block, compute, w, d->err);
}
