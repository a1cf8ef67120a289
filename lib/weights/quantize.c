/*
 * Quantizes: turns weights into fp8 codes with one scale for each block of 128 × 128, as DeepSeek and Transformers
 * store them. Codes and scales are computed apart from each other, so a weight is read twice.
 */
#include "derived/derived.h"
#include "fsdpckpt/cast.h"
#include "fsdpckpt/try.h"
#include "fsdpckpt/weights.h"
#include "plan/globs.h"
#include "plan/quantized_values.h"
#include "read/box.h"
#include "weights/computed.h"

#include <math.h>
#include <string.h>

/* COLUMNS: of a block of codes; rows are those of one block of scales. LARGEST: of float8_e4m3fn. */
enum { SIDE = 128, COLUMNS = 4096 };
static const float LARGEST = 448.0F;

/* Reads rows and columns of a weight as floats. */
static fc_code read_floats(const fc_computed_block *b, const fc_box *box, fc_source_crc *crc, float **out,
                           fc_error *err) {
    *out = fc_work_buffer(b->work, 0, (size_t)fc_box_volume(box) * sizeof **out);
    return *out ? fc_read_box_crc(b->sources[0], b->what, box, FC_F32, *out, crc, err)
                : fc_no_memory(err, b->sources[0]->path);
}

/*
 * Finds the largest magnitude in `columns` of each of `rows` rows, which are `stride` elements apart. Magnitudes are
 * compared as integers, which orders them in the same way, with infinity and NaN above all numbers.
 */
static uint32_t largest(const float *values, size_t rows, size_t columns, size_t stride) {
    uint32_t most = 0;
    for (size_t i = 0; i < rows; i++) {
        for (size_t j = 0; j < columns; j++) {
            uint32_t bits;
            memcpy(&bits, &values[i * stride + j], sizeof bits);
            bits &= 0x7fffffff;
            most = bits > most ? bits : most;
        }
    }
    return most;
}

/* Computes the factor of the codes, and its inverse, which is stored, in the steps of Transformers. */
static fc_code factors(const float *values, size_t rows, size_t columns, size_t stride, float *factor, float *scale,
                       fc_error *err) {
    const uint32_t bits = largest(values, rows, columns, stride);
    float most;
    memcpy(&most, &bits, sizeof most);
    if (!isfinite(most)) {
        return fc_fail(err, FC_EUNSUPPORTED, "has infinite values or NaN, which cannot be quantized");
    }
    *factor = most > 0 ? 1.0F / most * LARGEST : 1.0F; /* in the two steps of torch for a number / a tensor */
    *scale = 1.0F / *factor;
    return FC_OK;
}

static int64_t at_most(int64_t a, int64_t b) {
    return a < b ? a : b;
}

/* Multiplies a block of scales in place. */
static void multiply(float *values, size_t rows, size_t columns, size_t stride, float factor) {
    for (size_t i = 0; i < rows; i++) {
        for (size_t j = 0; j < columns; j++) {
            const float scaled = values[i * stride + j] * factor;
            values[i * stride + j] = scaled < -LARGEST ? -LARGEST : scaled > LARGEST ? LARGEST : scaled;
        }
    }
}

static fc_code compute_codes(const fc_computed_block *b, fc_error *err) {
    const int64_t rows = b->box.sizes[b->box.ndim - 2], columns = b->box.sizes[b->box.ndim - 1];
    float *values = NULL, factor = 1, scale;
    fc_code rc = read_floats(b, &b->box, b->crcs[0], &values, err);
    for (int64_t i = 0; rc == FC_OK && i < rows; i += SIDE) {
        for (int64_t j = 0; rc == FC_OK && j < columns; j += SIDE) {
            float *at = values + i * columns + j;
            const size_t height = (size_t)at_most(SIDE, rows - i), width = (size_t)at_most(SIDE, columns - j);
            rc = factors(at, height, width, (size_t)columns, &factor, &scale, err);
            if (rc == FC_OK) {
                multiply(at, height, width, (size_t)columns, factor);
            }
        }
    }
    if (rc == FC_OK) {
        fc_cast(FC_F32, values, FC_F8_E4M3FN, b->out, (size_t)fc_box_volume(&b->box));
    }
    return rc;
}

/* Computes scales of one row, from the rows of the weight that share it, COLUMNS of them at a time. */
static fc_code compute_scales(const fc_computed_block *b, fc_error *err) {
    const fc_tensor *weight = b->what;
    const int row = b->box.ndim - 2, column = b->box.ndim - 1;
    int64_t offsets[FC_MAX_DIMS], sizes[FC_MAX_DIMS];
    const fc_box box = {b->box.ndim, offsets, sizes};
    float *out = b->out, factor;
    for (int d = 0; d < row; d++) {
        offsets[d] = b->box.offsets[d];
        sizes[d] = b->box.sizes[d];
    }
    offsets[row] = b->box.offsets[row] * SIDE;
    sizes[row] = at_most(SIDE, weight->shape[row] - offsets[row]);
    const int64_t first = b->box.offsets[column] * SIDE;
    const int64_t end = at_most(first + b->box.sizes[column] * SIDE, weight->shape[column]);
    for (int64_t at = first; at < end; at += COLUMNS) {
        float *values = NULL;
        offsets[column] = at;
        sizes[column] = at_most(COLUMNS, end - at);
        fc_code rc = read_floats(b, &box, NULL, &values, err);
        for (int64_t j = 0; rc == FC_OK && j < sizes[column]; j += SIDE) {
            rc = factors(values + j, (size_t)sizes[row], (size_t)at_most(SIDE, sizes[column] - j),
                         (size_t)sizes[column], &factor, out++, err);
        }
        FC_TRY(rc);
    }
    return FC_OK;
}

static fc_code add_pair(fc_checkpoint *out, const fc_tensor *weight, fc_error *err) {
    int64_t block[FC_MAX_DIMS], shape[FC_MAX_DIMS];
    const int row = weight->ndim - 2, column = weight->ndim - 1;
    fc_tensor codes = *weight, scales = *weight;
    char *name = fc_arena_printf(out->arena, "%s_scale_inv", weight->name);
    FC_NEED(name, err, out->path);
    for (int d = 0; d < weight->ndim; d++) {
        block[d] = 1;
        shape[d] = d < row || weight->shape[d] == 0 ? weight->shape[d] : (weight->shape[d] - 1) / SIDE + 1;
    }
    codes.dtype = FC_F8_E4M3FN;
    codes.keeps_dtype = scales.keeps_dtype = true;
    block[row] = SIDE;
    block[column] = COLUMNS;
    FC_TRY(fc_computed_add(out, &codes, NULL, block, compute_codes, weight, err));
    fc_computed_reads(out, fc_dtype_size(weight->dtype) / fc_dtype_size(codes.dtype));
    scales.dtype = FC_F32;
    scales.shape = shape;
    block[row] = 1;
    block[column] = COLUMNS / SIDE;
    FC_TRY(fc_computed_add(out, &scales, name, block, compute_scales, weight, err));
    fc_computed_reads(out, SIDE * SIDE * fc_dtype_size(weight->dtype) / fc_dtype_size(FC_F32));
    return FC_OK;
}

/* Whether a matching value is quantized: matrices, but not norms and biases. */
static bool is_matrix(const fc_tensor *t) {
    return t->ndim >= 2 && !t->object && fc_dtype_get(t->dtype)->cls == FC_CLASS_FLOAT && fc_dtype_size(t->dtype) > 1;
}

static fc_code build_quantized(const fc_checkpoint *source, const char *const *globs, fc_checkpoint *out,
                               fc_error *err) {
    size_t count = 0;
    fc_quantized_values values;
    FC_TRY(fc_quantized_values_find(source, out->arena, &values, err));
    for (size_t i = 0; i < source->ntensors; i++) {
        const fc_tensor *t = &source->tensors[i];
        if (is_matrix(t) && fc_globs_match(globs, t->name, NULL)) {
            if (values.of[i].codes != FC_NO_NAME) {
                return fc_quantized_refuse(source, &values, i,
                                           "another quantization of either would change the weights", err);
            }
            FC_TRY(add_pair(out, t, err));
            count++;
        } else {
            FC_TRY(fc_computed_keep(out, t, err));
        }
    }
    return count > 0
               ? fc_computed_own(out, err)
               : fc_fail(err, FC_EUSAGE, "%s: no floating-point matrix has a name like '%s'", source->path, globs[0]);
}

fc_code fc_quantize(fc_checkpoint *source, const char *const *globs, fc_checkpoint **out, fc_error *err) {
    fc_checkpoint *made;
    *out = NULL;
    FC_TRY(fc_computed_new(&source, 1, 2 * source->ntensors, &made, err));
    return fc_derived_finish(made, build_quantized(source, globs, made, err), out);
}
