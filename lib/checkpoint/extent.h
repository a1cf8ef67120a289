/*
 * Extents for the readers of formats.
 */
#pragma once

#include "fsdpckpt/checkpoint.h"

/** Returns the extent of bytes that are the elements, without strides. */
fc_extent fc_raw_extent(const fc_place *place);

/** Returns the extent of `size` bytes in memory, which must live as long as the checkpoint, as one-dimensional bytes.
 */
fc_extent fc_inline_extent(const void *bytes, uint64_t size);

/** Returns the extent of chunk `index` of a tensor that is computed: the row-major elements of its box.
 *  @param reads about how many bytes of the sources are read for each of its bytes; 0: one. */
fc_extent fc_computed_extent(const fc_tensor *tensor, size_t index, uint32_t reads);
