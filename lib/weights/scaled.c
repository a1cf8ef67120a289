/*
 * Computes blocks of weights whose elements are in the order of their codes: (code - zero point) × scale, in float32,
 * rounded once.
 */
#include "fsdpckpt/cast.h"
#include "fsdpckpt/try.h"
#include "read/box.h"
#include "weights/scales.h"

/* Elements that are computed at once, in the first-level cache. */
enum { PIECE = 2048, WORD_BITS = 32 };

/* The codes of a block. */
typedef struct codes {
    unsigned char *bytes;
    size_t row; /* bytes of a row */
} codes;

void fc_unpack_words(const uint32_t *words, size_t at, size_t count, int bits, float *out) {
    const uint32_t mask = (1U << bits) - 1;
    const int offset = 1 << (bits - 1);
    for (size_t i = 0; i < count; i++) {
        const size_t bit = (at + i) * (size_t)bits, word = bit / WORD_BITS;
        const int from = (int)(bit % WORD_BITS);
        uint32_t code = words[word] >> from;
        if (from + bits > WORD_BITS) {
            code |= words[word + 1] << (WORD_BITS - from);
        }
        out[i] = (float)((int)(code & mask) - offset);
    }
}

/* Turns codes into floats. @param at the first code, in its row. */
static void codes_as_floats(const fc_scaled *w, const unsigned char *row, size_t at, size_t count, float *out) {
    if (w->form == FC_FORM_WORDS) {
        fc_unpack_words((const uint32_t *)(const void *)row, at, count, w->bits, out);
    } else if (w->form == FC_FORM_PAIRS) {
        for (size_t i = 0; i < count; i++) {
            const unsigned char both = row[(at + i) / 2];
            out[i] = fc_four_bit_floats[(at + i) % 2 == 0 ? both & 15 : both >> 4];
            out[i] = w->zero_is_positive ? out[i] + 0.0F : out[i];
        }
    } else if (w->codes->dtype == FC_I8) {
        for (size_t i = 0; i < count; i++) {
            out[i] = (float)(signed char)row[at + i];
        }
    } else {
        fc_cast(w->codes->dtype, row + at, FC_F32, out, count);
    }
}

/* The scales of a row of the block. */
typedef struct row_scales {
    const float *scales, *zeros; /* zeros: NULL if there are none */
    int64_t first;               /* the number of scales[0] in its row */
    int64_t block;               /* columns that share a scale */
} row_scales;

/* Multiplies `count` elements from column `column` on with their scales. */
static void scale_blocks(float *values, size_t count, const row_scales *s, int64_t column) {
    for (size_t i = 0; i < count;) {
        const int64_t at = column + (int64_t)i, end = (at / s->block + 1) * s->block;
        const size_t stop = (size_t)(end - column) < count ? (size_t)(end - column) : count;
        const int64_t which = at / s->block - s->first;
        const float scale = s->scales[which];
        if (s->zeros) {
            const float zero = s->zeros[which];
            for (size_t k = i; k < stop; k++) {
                values[k] -= zero;
            }
        }
        for (; i < stop; i++) {
            values[i] *= scale;
        }
    }
}

/* Multiplies `count` elements, each with the scale that its column names. */
static void scale_columns(float *values, size_t count, const row_scales *s, const int32_t *columns) {
    for (size_t i = 0; i < count; i++) {
        values[i] = (values[i] - (s->zeros ? s->zeros[columns[i]] : 0)) * s->scales[columns[i]];
    }
}

/* Computes one row of a block. @param first the first scale of the row. */
static void compute_row(const fc_computed_block *b, const fc_scale_box *all, int64_t first, size_t row,
                        const codes *c) {
    const fc_scaled *w = b->what;
    const int last = b->box.ndim - 1;
    const int64_t width = last >= 0 ? b->box.sizes[last] : 1, from = last >= 0 ? b->box.offsets[last] : 0;
    const bool per_column = last >= 0 && w->ndim == b->box.ndim;
    const row_scales s = {all->values + first, all->zeros ? all->zeros + first : NULL,
                          per_column ? all->offsets[last] : 0, per_column ? w->block[last] : INT64_MAX};
    const size_t element = fc_dtype_size(b->tensor->dtype);
    unsigned char *out = (unsigned char *)b->out + row * (size_t)width * element;
    float values[PIECE];
    for (int64_t i = 0; i < width; i += PIECE) {
        const size_t count = width - i < PIECE ? (size_t)(width - i) : PIECE;
        codes_as_floats(w, c->bytes + row * c->row, (size_t)i, count, values);
        if (all->columns) {
            scale_columns(values, count, &s, all->columns + i);
        } else {
            scale_blocks(values, count, &s, per_column ? from + i : 0);
        }
        for (size_t k = 0; w->factor != 0 && k < count; k++) {
            values[k] *= w->factor;
        }
        fc_cast(FC_F32, values, b->tensor->dtype, out + (size_t)i * element, count);
    }
}

/* Goes through the rows of the block, each with its scales. */
static void compute_rows(const fc_computed_block *b, const fc_scale_box *scales, const codes *c) {
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
        compute_row(b, scales, first, (size_t)row, c);
        for (int d = outer - 1; d >= 0 && ++at[d] == b->box.sizes[d]; d--) {
            at[d] = 0;
        }
    }
}

/* Reads the codes of the block. Blocks begin at multiples of 32 columns, so no two have codes in one byte or word. */
static fc_code read_codes(const fc_computed_block *b, codes *out, fc_error *err) {
    const fc_scaled *w = b->what;
    const int last = b->box.ndim - 1;
    int64_t offsets[FC_MAX_DIMS], sizes[FC_MAX_DIMS];
    const fc_box box = {b->box.ndim, offsets, sizes};
    for (int d = 0; d < box.ndim; d++) {
        offsets[d] = b->box.offsets[d];
        sizes[d] = b->box.sizes[d];
    }
    if (w->form == FC_FORM_PAIRS) {
        offsets[last] /= 2;
        sizes[last] /= 2;
    } else if (w->form == FC_FORM_WORDS) {
        offsets[last] = offsets[last] * w->bits / WORD_BITS;
        sizes[last] = (sizes[last] * w->bits + WORD_BITS - 1) / WORD_BITS;
    }
    const size_t element = fc_dtype_size(w->codes->dtype);
    out->row = (last >= 0 ? (size_t)sizes[last] : 1) * element;
    out->bytes = fc_work_buffer(b->work, 0, (size_t)fc_box_volume(&box) * element);
    return out->bytes ? fc_read_box_crc(b->sources[0], w->codes, &box, w->codes->dtype, out->bytes, b->crcs[0], err)
                      : fc_no_memory(err, b->sources[0]->path);
}

fc_code fc_scaled_compute(const fc_computed_block *b, fc_error *err) {
    fc_scale_box scales;
    codes c;
    FC_TRY(fc_scales_read(b, b->what, &scales, err));
    FC_TRY(read_codes(b, &c, err));
    compute_rows(b, &scales, &c);
    return FC_OK;
}
