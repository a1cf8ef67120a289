/*
 * MXFP4 as GPT-OSS stores it: four-bit floats (E2M1) in blocks of 32 with one exponent each. The blocks follow each
 * other along the dimension that the model multiplies by, which is the last one of the codes and the one before the
 * last of the weight. So a block of the weight is transposed, through a strip that fits the first-level cache.
 */
#include "fsdpckpt/cast.h"
#include "fsdpckpt/try.h"
#include "read/box.h"
#include "weights/scales.h"

/* The codes of a block, and the columns of the weight that are computed at once. */
enum { IN_BLOCK = 32, BYTES = IN_BLOCK / 2, STRIP = 256 };

const float fc_four_bit_floats[16] = {0.0F,  0.5F,  1.0F,  1.5F,  2.0F,  3.0F,  4.0F,  6.0F,
                                      -0.0F, -0.5F, -1.0F, -1.5F, -2.0F, -3.0F, -4.0F, -6.0F};

/* What a block of the weight is computed from: row-major [columns of the weight, blocks] of codes and of exponents. */
typedef struct packed {
    unsigned char *codes;
    float *scales;
    int64_t blocks; /* along the rows of the weight */
    int64_t rows, columns;
} packed;

/* Computes 32 rows of `count` columns. */
static void compute_strip(const packed *p, int64_t block, int64_t column, int64_t count, float *strip) {
    for (int64_t c = 0; c < count; c++) {
        const int64_t at = (column + c) * p->blocks + block;
        const unsigned char *codes = p->codes + at * BYTES;
        const float scale = p->scales[at];
        for (int i = 0; i < BYTES; i++) {
            strip[(size_t)(2 * i) * STRIP + (size_t)c] = fc_four_bit_floats[codes[i] & 15] * scale;
            strip[(size_t)(2 * i + 1) * STRIP + (size_t)c] = fc_four_bit_floats[codes[i] >> 4] * scale;
        }
    }
}

static void compute_all(const packed *p, fc_dtype dtype, unsigned char *out) {
    const size_t element = fc_dtype_size(dtype);
    float strip[IN_BLOCK * STRIP];
    for (int64_t block = 0; block < p->blocks; block++) {
        for (int64_t column = 0; column < p->columns; column += STRIP) {
            const int64_t count = p->columns - column < STRIP ? p->columns - column : STRIP;
            compute_strip(p, block, column, count, strip);
            for (int64_t i = 0; i < IN_BLOCK; i++) {
                const int64_t row = block * IN_BLOCK + i;
                fc_cast(FC_F32, strip + i * STRIP, dtype, out + (size_t)(row * p->columns + column) * element,
                        (size_t)count);
            }
        }
    }
}

/* Reads the codes and exponents of a block. Its rows begin and end at blocks of codes. */
static fc_code read_packed(const fc_computed_block *b, packed *p, fc_error *err) {
    const fc_scaled *w = b->what;
    const int n = b->box.ndim;
    int64_t offsets[FC_MAX_DIMS + 1] = {0}, sizes[FC_MAX_DIMS + 1];
    for (int d = 0; d < n; d++) {
        offsets[d] = b->box.offsets[d];
        sizes[d] = b->box.sizes[d];
    }
    p->rows = sizes[n - 2];
    p->columns = sizes[n - 1];
    p->blocks = p->rows / IN_BLOCK;
    offsets[n - 2] = b->box.offsets[n - 1];
    sizes[n - 2] = p->columns;
    offsets[n - 1] = b->box.offsets[n - 2] / IN_BLOCK;
    sizes[n - 1] = p->blocks;
    sizes[n] = BYTES;
    const fc_box codes = {n + 1, offsets, sizes}, scales = {n, offsets, sizes};
    p->codes = fc_work_buffer(b->work, 0, (size_t)fc_box_volume(&codes));
    FC_NEED(p->codes, err, b->sources[0]->path);
    FC_TRY(fc_read_box_crc(b->sources[0], w->codes, &codes, FC_U8, p->codes, b->crcs[0], err));
    return fc_scales_as_floats(b, w->scales, &scales, &p->scales, err);
}

fc_code fc_four_bits_compute(const fc_computed_block *b, fc_error *err) {
    packed p;
    FC_TRY(read_packed(b, &p, err));
    compute_all(&p, b->tensor->dtype, b->out);
    return FC_OK;
}
