/*
 * What one file of a target has, and how its boxes are chunked.
 */
#pragma once

#include "fsdpckpt/select.h"

/** Makes the description of the file of `rank`. `arena` owns the items. The path and the items' offsets are 0. */
fc_code fc_target_file_of(const fc_target *target, uint32_t rank, fc_arena *arena, fc_target_file *out, fc_error *err);

/** The most bytes of a compressed HDF5 chunk, which HDF5 programs cache by default; and the least bytes of a chunked
 *  tensor. */
enum { FC_CHUNK_BYTES = 1 << 20, FC_CHUNK_LEAST = 16 << 10 };

/**
 * Computes the sizes of the HDF5 chunks of a box (ndim entries): 1 … 1, c, whole … whole, at most FC_CHUNK_BYTES each.
 * So each chunk is a run of the box in row-major order, and a chunk at the edge has its first elements. The sizes
 * depend only on the arguments, so the output is the same on every machine.
 * @param element bytes per element.
 * @return false if the box is stored contiguously: without dimensions, or with less than FC_CHUNK_LEAST bytes.
 */
bool fc_target_chunk(int ndim, const int64_t *sizes, uint32_t element, int64_t *chunk);
