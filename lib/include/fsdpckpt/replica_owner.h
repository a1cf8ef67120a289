/*
 * Who stores a box that several ranks hold: one of them, its owner.
 */
#pragma once

#include "fsdpckpt/checkpoint.h"
#include "fsdpckpt/mesh.h"

FC_BEGIN_DECLS

/**
 * Chooses, for each of `count` tensors, which of the ranks that hold its replicated boxes stores them, so that no rank
 * stores much more than another. The choice is deterministic. Tensors that are replicated along fewer mesh dimensions
 * come first, then the order of the arguments counts. Each goes to the holder whose busiest rank stores least so far;
 * the lowest rank wins a tie. O(ranks) for each set of mesh dimensions along which some tensor is replicated, and O(log
 * ranks) for each tensor.
 * @param bytes      size of each tensor in bytes.
 * @param placements count × mesh->ndim placements.
 * @param offsets    receives for each tensor the index of the chosen holder, in rank order.
 */
fc_code fc_spread_owners(const fc_mesh *mesh, size_t count, const uint64_t *bytes, const fc_placement *placements,
                         uint32_t *offsets, fc_error *err);

/**
 * Returns the rank that stores the box of the rank at `coordinate`: number `owner_offset`, modulo their count, of the
 * ranks that hold the same box, in rank order.
 */
int64_t fc_replica_owner(const fc_mesh *mesh, const fc_placement *placements, const int64_t *coordinate,
                         uint32_t owner_offset);

/**
 * Chooses, like fc_spread_owners, which of the ranks that hold a box stores it, but only a rank of which a chunk tells
 * that it holds the box. The other arguments are those of fc_recognise_layout_of.
 * @param owner_offsets receives one for each value (fc_selection.owner_offsets).
 */
fc_code fc_held_owners(const fc_checkpoint *source, const fc_mesh *mesh, const fc_placement *placements,
                       uint32_t *owner_offsets, fc_error *err);

FC_END_DECLS
