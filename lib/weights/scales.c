/*
 * Which scale belongs to which element of a quantized weight: see scales.h.
 */
#include "weights/scales.h"

#include "fsdpckpt/cast.h"
#include "fsdpckpt/try.h"
#include "plan/box_text.h"
#include "read/box.h"

#include <math.h>

/* DeepSeek's blocks, which all others who name their scales alike use too. */
enum { USUAL_BLOCK = 128 };

static int64_t divided_up(int64_t a, int64_t b) {
    return a / b + (a % b != 0);
}

/* @return the elements along a dimension that share a scale, or 0 if that cannot be told. */
static int64_t block_of(int64_t size, int64_t scales, int64_t known, bool equal) {
    if (scales <= 0) {
        return 0;
    }
    if (scales == 1 || scales == size) {
        return scales == 1 ? size : 1;
    }
    if (equal) {
        return size % scales == 0 ? size / scales : 0;
    }
    if (known > 0) {
        return divided_up(size, known) == scales ? known : 0;
    }
    if (divided_up(size, USUAL_BLOCK) == scales) {
        return USUAL_BLOCK;
    }
    return size % scales == 0 ? size / scales : 0;
}

static fc_code refuse_shape(const fc_scaled *w, const int64_t *shape, fc_error *err) {
    static const int64_t start[FC_MAX_DIMS];
    const fc_box weight = {w->codes->ndim, start, shape}, scales = {w->scales->ndim, start, w->scales->shape};
    return fc_fail(err, FC_EUNSUPPORTED,
                   "tensor %.256s, a quantized weight %s, does not fit its scales %s: the blocks are %s",
                   w->codes->name, fc_box_to_text(&weight).s, fc_box_to_text(&scales).s,
                   w->equal_blocks ? "no equal parts"
                                   : "neither 128 x 128, nor equal parts, nor those of the model's "
                                     "quantization_config.weight_block_size");
}

static bool are_scales(const fc_tensor *t) {
    return fc_dtype_get(t->dtype)->cls == FC_CLASS_FLOAT || t->dtype == FC_U8;
}

fc_code fc_scaled_fit(fc_scaled *w, const int64_t *shape, const int64_t *blocks, fc_error *err) {
    const fc_tensor *scales = w->scales;
    int64_t count = 0;
    if (!are_scales(scales)) {
        return fc_fail(err, FC_EUNSUPPORTED, "tensor %.256s: scales of type %s are not known", scales->name,
                       fc_dtype_get(scales->dtype)->torch_name);
    }
    if (fc_numel(scales->ndim, scales->shape, &count) && count == 1) {
        w->ndim = 0;
        return FC_OK;
    }
    w->ndim = scales->ndim;
    if (scales->ndim > w->codes->ndim) {
        return refuse_shape(w, shape, err);
    }
    for (int d = 0; d < w->ndim; d++) {
        const int from_end = w->codes->ndim - d;
        w->block[d] = block_of(shape[d], scales->shape[d], from_end > 2 ? 1 : blocks[2 - from_end], w->equal_blocks);
        if (shape[d] > 0 && w->block[d] == 0) {
            return refuse_shape(w, shape, err);
        }
    }
    return FC_OK;
}

fc_code fc_scales_as_floats(const fc_computed_block *b, const fc_tensor *scales, const fc_box *box, float **out,
                            fc_error *err) {
    const size_t count = (size_t)fc_box_volume(box);
    const bool exponents = scales->dtype == FC_U8;
    unsigned char *raw = exponents ? fc_work_buffer(b->work, 2, count) : NULL;
    *out = fc_work_buffer(b->work, 1, count * sizeof **out);
    FC_NEED(*out && (!exponents || raw), err, b->sources[0]->path);
    FC_TRY(fc_read_box_crc(b->sources[0], scales, box, exponents ? FC_U8 : FC_F32, exponents ? raw : (void *)*out, NULL,
                           err));
    if (exponents) {
        fc_cast(FC_F8_E8M0FNU, raw, FC_F32, *out, count);
    }
    return FC_OK;
}

/* ---- scales of a block of the weight ---- */

/* Applies the one number that all scales share. Without a dimension it does not change their type in torch, which is
 * bfloat16 for four-bit floats of compressed-tensors. */
static fc_code apply_general(const fc_computed_block *b, const fc_scaled *w, float *scales, size_t count,
                             fc_error *err) {
    static const int64_t start[FC_MAX_DIMS];
    const fc_box box = {w->general->ndim, start, w->general->shape};
    float general;
    FC_TRY(fc_read_box_crc(b->sources[0], w->general, &box, FC_F32, &general, NULL, err));
    for (size_t i = 0; i < count; i++) {
        scales[i] = w->general_divides ? scales[i] / general : scales[i] * general;
        if (w->general_divides && w->general->ndim == 0) {
            uint16_t rounded;
            fc_cast(FC_F32, &scales[i], FC_BF16, &rounded, 1);
            fc_cast(FC_BF16, &rounded, FC_F32, &scales[i], 1);
        }
    }
    return FC_OK;
}

/* Takes zero points out of words along the rows. @param words of `rows` rows, the first at `skip` in its word. */
static void unpack_rows(const uint32_t *words, int64_t rows, int64_t columns, int64_t skip, int bits, float *out) {
    uint32_t pair[2];
    for (int64_t r = 0; r < rows; r++) {
        const int64_t bit = (skip + r) * bits, word = bit / 32;
        const bool two = bit % 32 + bits > 32;
        for (int64_t c = 0; c < columns; c++) {
            pair[0] = words[word * columns + c] >> bit % 32;
            pair[1] = two ? words[(word + 1) * columns + c] : 0;
            pair[0] |= two ? pair[1] << (32 - bit % 32) : 0;
            fc_unpack_words(pair, 0, 1, bits, &out[r * columns + c]);
        }
    }
}

static fc_code read_packed_zeros(const fc_computed_block *b, const fc_scaled *w, const fc_box *scales, float *out,
                                 fc_error *err) {
    const int row = scales->ndim - 2;
    int64_t offsets[FC_MAX_DIMS], sizes[FC_MAX_DIMS], matrices = 1;
    const fc_box box = {scales->ndim, offsets, sizes};
    for (int d = 0; d < scales->ndim; d++) {
        offsets[d] = scales->offsets[d];
        sizes[d] = scales->sizes[d];
        matrices *= d < row ? sizes[d] : 1;
    }
    /* From a word that begins with a zero point, so that the bits before the first one are known. */
    const int64_t from = offsets[row] / 32 * 32, end = offsets[row] + sizes[row];
    offsets[row] = from * w->bits / 32;
    sizes[row] = (end * w->bits + 31) / 32 - offsets[row];
    uint32_t *words = fc_work_buffer(b->work, 2, (size_t)fc_box_volume(&box) * sizeof *words);
    FC_NEED(words, err, b->sources[0]->path);
    FC_TRY(fc_read_box_crc(b->sources[0], w->zeros, &box, FC_I32, words, NULL, err));
    const int64_t columns = sizes[row + 1], rows = scales->sizes[row];
    for (int64_t m = 0; m < matrices; m++) {
        unpack_rows(words + m * sizes[row] * columns, rows, columns, scales->offsets[row] - from, w->bits,
                    out + m * rows * columns);
    }
    return FC_OK;
}

static fc_code read_zeros(const fc_computed_block *b, const fc_scaled *w, const fc_box *scales, float **out,
                          fc_error *err) {
    const size_t count = (size_t)fc_box_volume(scales);
    *out = fc_work_buffer(b->work, 3, count * sizeof **out);
    FC_NEED(*out, err, b->sources[0]->path);
    if (w->zeros->dtype == FC_I32) {
        return read_packed_zeros(b, w, scales, *out, err);
    }
    signed char *raw = fc_work_buffer(b->work, 2, count);
    const fc_box box = {w->zeros->ndim, scales->offsets, scales->sizes};
    FC_NEED(raw, err, b->sources[0]->path);
    FC_TRY(fc_read_box_crc(b->sources[0], w->zeros, &box, FC_I8, raw, NULL, err));
    for (size_t i = 0; i < count; i++) {
        (*out)[i] = raw[i];
    }
    return FC_OK;
}

/* Reads which scale each column of the block has. */
static fc_code read_columns(const fc_computed_block *b, const fc_scaled *w, int64_t groups, const int32_t **out,
                            fc_error *err) {
    const int last = b->box.ndim - 1;
    const fc_box box = {1, &b->box.offsets[last], &b->box.sizes[last]};
    int32_t *columns = fc_work_buffer(b->work, 4, (size_t)box.sizes[0] * sizeof *columns);
    FC_NEED(columns, err, b->sources[0]->path);
    FC_TRY(fc_read_box_crc(b->sources[0], w->columns, &box, FC_I32, columns, NULL, err));
    for (int64_t i = 0; i < box.sizes[0]; i++) {
        if (columns[i] == -1) { /* compressed-tensors writes it if the columns are in order */
            columns[i] = (int32_t)((box.offsets[0] + i) / (w->ndim == b->box.ndim ? w->block[last] : INT64_MAX));
        }
        if (columns[i] < 0 || columns[i] >= groups) {
            return fc_fail(err, FC_ECORRUPT,
                           "%s: tensor %.256s says that column %lld has the scale %d, but there are %lld",
                           b->sources[0]->path, w->columns->name, (long long)(box.offsets[0] + i), (int)columns[i],
                           (long long)groups);
        }
    }
    *out = columns;
    return FC_OK;
}

fc_code fc_scales_read(const fc_computed_block *b, const fc_scaled *w, fc_scale_box *out, fc_error *err) {
    const fc_box scales = {w->scales->ndim, out->offsets, out->sizes};
    const int last = scales.ndim - 1;
    for (int d = 0; d < w->scales->ndim; d++) {
        const bool cut = d < w->ndim;
        out->offsets[d] = cut ? b->box.offsets[d] / w->block[d] : 0;
        out->sizes[d] = cut ? (b->box.offsets[d] + b->box.sizes[d] - 1) / w->block[d] - out->offsets[d] + 1 : 1;
    }
    if (w->columns) {
        out->offsets[last] = 0;
        out->sizes[last] = w->scales->shape[last];
    }
    fc_row_major_strides(scales.ndim, out->sizes, out->strides);
    FC_TRY(fc_scales_as_floats(b, w->scales, &scales, &out->values, err));
    const size_t count = (size_t)fc_box_volume(&scales);
    for (size_t i = 0; w->largest_is_infinite && i < count; i++) {
        out->values[i] = isnan(out->values[i]) ? INFINITY : out->values[i];
    }
    FC_TRY(w->general ? apply_general(b, w, out->values, count, err) : FC_OK);
    out->zeros = NULL;
    out->columns = NULL;
    FC_TRY(w->zeros ? read_zeros(b, w, &scales, &out->zeros, err) : FC_OK);
    return w->columns ? read_columns(b, w, w->scales->shape[last], &out->columns, err) : FC_OK;
}
