/*
 * Quantized weights are stored as codes and scales: weight = code × scale. A pair is recognised by names that
 * quantizers use, and by the codes' dtype.
 */
#pragma once

#include "checkpoint/same_name.h"
#include "fsdpckpt/checkpoint.h"

/** How quantizers name codes and scales: the ends of the names, after the same beginning. */
typedef struct fc_quantizer {
    const char *codes, *scales;
    enum {
        FC_CODES_SCALED,     /**< each code times the scale of its block, in row-major order */
        FC_CODES_TRANSPOSED, /**< blocks of four-bit floats; the last two dimensions of the weight are exchanged */
        FC_CODES_BLOCKWISE,  /**< blocks of codes in row-major order, whatever their rows */
        FC_CODES_GROUPED,    /**< words of codes with zero points for groups of columns; the weight is transposed */
        FC_CODES_OTHER       /**< they need more than one multiplication */
    } kind;
    const char *by; /**< who stores them like that; the names of torchao's weights differ in more than the end */
} fc_quantizer;

/** A pair of codes and scales of one checkpoint. */
typedef struct fc_quantized {
    const fc_quantizer *quantizer; /**< NULL: the tensor holds no codes */
    size_t scales;                 /**< index of the scales */
} fc_quantized;

/** Finds the scales of tensor `index`. @param names from fc_names_of. */
fc_quantized fc_quantized_find(const fc_checkpoint *source, const fc_name_table *names, size_t index);
