/*
 * A quantized weight whose elements are in the order of its codes: codes, scales, and which scale belongs to which
 * element.
 */
#pragma once

#include "fsdpckpt/checkpoint.h"
#include "plan/quantized.h"
#include "weights/computed.h"

/** How codes are stored. */
typedef enum fc_code_form {
    FC_FORM_WHOLE, /**< one in each element: a float, or int8 */
    FC_FORM_PAIRS, /**< two four-bit floats in each byte, the first one in its low bits */
    FC_FORM_WORDS /**< int32 words that are a stream of integers of `bits` bits along the last dimension, plus an offset
                   */
} fc_code_form;

/** A quantized weight. fc_computed_block.what points to it. */
typedef struct fc_scaled {
    const fc_tensor *codes, *scales;
    fc_code_form form;
    int bits; /**< of FC_FORM_WORDS: 1 to 8 */
    /** Number of leading dimensions of the weight that the scales have; along the others a scale is the same. */
    int ndim;
    int64_t block[FC_MAX_DIMS]; /**< elements of the weight along each of these dimensions that share a scale */
    bool equal_blocks;          /**< blocks are equal parts of a dimension */
    bool zero_is_positive;      /**< the code of -0 is 0 */
    bool largest_is_infinite;   /**< the exponent 255 of a scale is infinity, not NaN */
    float factor;               /**< of each product of code and scale; 0: none */
    const fc_tensor *zeros;   /**< one per scale, subtracted from codes; NULL: none. int8, or int32 words along the next
                                 to last dimension */
    const fc_tensor *columns; /**< the index of the scale of each column; NULL: they are in blocks */
    const fc_tensor *general; /**< one number for all scales; NULL: none */
    bool general_divides;     /**< scales are divided by it, else multiplied */
} fc_scaled;

/**
 * Finds which scale belongs to which element.
 * @param shape  of the weight; it has as many dimensions as the codes.
 * @param blocks the sizes of blocks along the last two dimensions that the model's configuration has; 0: unknown.
 * @return FC_EUNSUPPORTED if shapes or dtypes do not fit.
 */
fc_code fc_scaled_fit(fc_scaled *w, const int64_t *shape, const int64_t *blocks, fc_error *err);

/** Computes a block of a weight whose elements are in the order of its codes. */
fc_code fc_scaled_compute(const fc_computed_block *block, fc_error *err);

/** The scales that a box of the weight needs, with their zero points. */
typedef struct fc_scale_box {
    int64_t offsets[FC_MAX_DIMS], sizes[FC_MAX_DIMS], strides[FC_MAX_DIMS]; /**< in scales */
    float *values;
    float *zeros;           /**< NULL: none */
    const int32_t *columns; /**< of the columns of the box; NULL: none */
} fc_scale_box;

/** Reads the scales that a block of the weight needs. Uses buffers 1 to 4 of the block. */
fc_code fc_scales_read(const fc_computed_block *block, const fc_scaled *w, fc_scale_box *out, fc_error *err);

/**
 * Reads a box of scales as floats, into buffer 1 of the block. Scales of type uint8 are exponents of two, with bias
 * 127. Uses buffer 2.
 */
fc_code fc_scales_as_floats(const fc_computed_block *block, const fc_tensor *scales, const fc_box *box, float **out,
                            fc_error *err);

/** Takes `count` integers of `bits` bits out of a stream of words, from number `at` on, each minus 2^(bits - 1). */
void fc_unpack_words(const uint32_t *words, size_t at, size_t count, int bits, float *out);

/** The values of four-bit floats (E2M1). */
extern const float fc_four_bit_floats[16];

/** Computes a block of MXFP4 weights whose codes are blocks of 32 along the next to last dimension of the weight. */
fc_code fc_four_bits_compute(const fc_computed_block *block, fc_error *err);
