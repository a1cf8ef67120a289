/*
 * The chunks of Blosc 2. Only blosc2.c, which reads the frames around them, uses this.
 */
#pragma once

#include "fsdpckpt/box.h"
#include "fsdpckpt/error.h"

#include <stddef.h>
#include <stdint.h>

/** An array whose blocks are stored one after the other, each whole: those at the far edges have elements outside. */
typedef struct fc_blosc2_grid {
    int ndim;                                       /**< 0: no array, and a block has consecutive bytes */
    int64_t shape[FC_MAX_DIMS], block[FC_MAX_DIMS]; /**< in elements; no block is larger than the array */
    uint64_t element;                               /**< bytes */
    uint64_t stored;                                /**< bytes of all blocks */
} fc_blosc2_grid;

/** The values that all elements of a chunk may have, as the format numbers them. */
typedef enum fc_blosc2_special {
    FC_BLOSC2_ZEROS = 1,
    FC_BLOSC2_NANS = 2,
    FC_BLOSC2_VALUE = 3,
    FC_BLOSC2_UNSET = 4 /**< of no value; zeros are as good as any */
} fc_blosc2_special;

/** Fills a chunk with zeros or NaNs of `element` bytes. */
fc_code fc_blosc2_fill(fc_blosc2_special special, uint64_t element, unsigned char *out, size_t out_size, fc_error *err);

/**
 * Decodes the chunk at the start of `in`, which may be followed by other bytes.
 * @param scratch FC_BLOSC2_SCRATCH × `out_size` bytes.
 */
fc_code fc_blosc2_decode_chunk(const unsigned char *in, size_t in_size, const fc_blosc2_grid *grid,
                               unsigned char *scratch, unsigned char *out, size_t out_size, fc_error *err);
