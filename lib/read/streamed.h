/*
 * Chunks that only their format can decode, and that do not fit the memory for decoding: they are decoded part by part,
 * in the order of their bytes.
 */
#pragma once

#include "codec/strided.h"
#include "fsdpckpt/checkpoint.h"

/** @return whether a chunk is read in this way. @param limit bytes for all decoded chunks. */
bool fc_can_stream(const fc_checkpoint *checkpoint, const fc_tensor *tensor, size_t chunk, const fc_extent *extent,
                   uint64_t limit);

/** Copies the elements of such a chunk, the first of which is `start` bytes after its first decoded byte, to `out`. */
fc_code fc_copy_streamed(const fc_checkpoint *checkpoint, const fc_tensor *tensor, size_t chunk, uint64_t start,
                         const fc_strided *copy, unsigned char *out, fc_error *err);
