/*
 * Turns a parameter of a flat tensor into a tensor whose chunks are boxes of the shards of the flat tensor.
 */
#pragma once

#include "fsdpckpt/checkpoint.h"
#include "fsdpckpt/flat_param.h"

/** The position of a chunk's first element: `at` elements after the start of chunk number `chunk` of the flat tensor.
 */
typedef struct fc_flat_position {
    size_t chunk;
    int64_t at;
} fc_flat_position;

/** @return the numbers of the flat tensor's chunks in the order of their offsets, in the arena; NULL when out of
 * memory.
 */
size_t *fc_flat_order_chunks(const fc_tensor *flat, fc_arena *arena);

/**
 * Builds the tensor of one parameter from a flat tensor: its shape and its boxes. The caller names it.
 * @param flat  a tensor of one dimension; borrowed for as long as `out` is used.
 * @param order the result of fc_flat_order_chunks.
 * @param positions receives one per chunk, in the arena.
 * @return FC_OK or FC_ENOMEM.
 */
fc_code fc_flat_boxes(const fc_tensor *flat, const size_t *order, const fc_flat_param *p, fc_arena *arena,
                      fc_tensor *out, const fc_flat_position **positions, fc_error *err);
