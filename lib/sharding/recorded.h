/*
 * Placements and boxes as checkpoints record them.
 */
#pragma once

#include "fsdpckpt/mesh.h"

/** Returns whether sizes and names are equal. */
bool fc_mesh_equal(const fc_mesh *a, const fc_mesh *b);

/**
 * Computes what compute_local_shape_and_global_offset of PyTorch 2.10 to 2.15 returns, which DCP records as the box of
 * the rank: the divisions from left to right, the number of elements and the first of them, even if they are no box.
 * It differs from fc_local_box only for a _StridedShard of an uneven dimension. @return as fc_local_box.
 */
fc_code fc_recorded_box(int ndim, const int64_t *shape, const fc_mesh *mesh, const fc_placement *placements,
                        const int64_t *coordinate, int64_t *offsets, int64_t *sizes, fc_error *err);

/**
 * Reads what fc_placements_format writes, or torch's repr of the same ("Shard(dim=0)", "_StridedShard(dim=0, sf=2)").
 * @return false if `text` does not have that form and `count` entries.
 */
bool fc_placements_parse(const char *text, int count, fc_placement *placements);
