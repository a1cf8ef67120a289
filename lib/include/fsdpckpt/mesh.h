/*
 * Device meshes, placements and local boxes: the shard of a tensor that each rank holds.
 * Semantics: torch.distributed.device_mesh, torch.distributed.tensor.placement_types and
 * torch.distributed.tensor._utils.compute_local_shape_and_global_offset.
 */
#pragma once

#include "fsdpckpt/error.h"

#include <stdbool.h>
#include <stdint.h>

FC_BEGIN_DECLS

#define FC_MAX_MESH_DIMS 8

/** A device mesh. Ranks are row-major as in init_device_mesh: the last dimension varies fastest. ndim 0 is no mesh. */
typedef struct fc_mesh {
    int ndim;
    int64_t sizes[FC_MAX_MESH_DIMS];
    char names[FC_MAX_MESH_DIMS][16];
} fc_mesh;

typedef enum fc_placement_kind {
    FC_REPLICATE,
    FC_SHARD,
    FC_STRIDED_SHARD, /**< _StridedShard(dim, split_factor): FSDP on a dimension that TP has already sharded */
    FC_PARTIAL
} fc_placement_kind;

/** The placement of a tensor along one mesh dimension. `dim` and `split_factor` are 0 if the kind does not use them. */
typedef struct fc_placement {
    fc_placement_kind kind;
    int dim;
    int64_t split_factor;
} fc_placement;

/** Returns the number of ranks: the product of the sizes, 1 without dimensions. */
int64_t fc_mesh_ranks(const fc_mesh *mesh);

/** Returns the size of the dimension called `name`, or 1 if there is none. */
int64_t fc_mesh_size(const fc_mesh *mesh, const char *name);

/** Computes the coordinate of `rank` (mesh->ndim entries). */
void fc_mesh_coordinate(const fc_mesh *mesh, int64_t rank, int64_t *coordinate);

/** Returns the rank at `coordinate`. */
int64_t fc_mesh_rank(const fc_mesh *mesh, const int64_t *coordinate);

/**
 * Computes shard `index` of `count` of a dimension of `size`, as torch.chunk makes them: each has ceil(size / count)
 * elements, the last ones are smaller or empty. An empty shard begins at `size`.
 */
void fc_shard_range(int64_t size, int64_t count, int64_t index, int64_t *offset, int64_t *length);

/**
 * Computes the local box of the rank at `coordinate` (ndim entries each).
 * Each Shard divides like torch.chunk, in the order of the mesh dimensions. A _StridedShard(d, n) is FSDP's if the
 * later mesh dimensions make n shards of dimension d. FSDP divides what they left the rank:
 * FSDPParam._init_sharded_param (torch/distributed/fsdp/_fully_shard/_fsdp_param.py) calls _chunk_with_empty, which is
 * torch.chunk, for the local tensor of the TP parameter. So its division comes last. The boxes of all ranks cover the
 * tensor exactly. An empty box begins at the end of the dimension that is sharded.
 *
 * For even sizes this equals torch's compute_local_shape_and_global_offset, from which DCP takes the boxes that it
 * records. For uneven sizes only PyTorch 2.8 and 2.9 compute these boxes too. PyTorch 2.10 and later divide from left
 * to right, and get other sizes than the ranks hold: with 7 rows on dp 3 × tp 2, the rank (2, 1) holds row 6, and its
 * box is said to be empty. See fc_recorded_box.
 * @return FC_EUNSUPPORTED for Partial, and for any other _StridedShard whose local shard is not a box; FC_EUSAGE for a
 * dimension or coordinate out of range.
 */
fc_code fc_local_box(int ndim, const int64_t *shape, const fc_mesh *mesh, const fc_placement *placements,
                     const int64_t *coordinate, int64_t *offsets, int64_t *sizes, fc_error *err);

/**
 * Writes placements like "[_StridedShard(0, 2), Shard(0)]", "[Replicate(), Partial()]".
 * @return the length of the whole text, like snprintf.
 */
int fc_placements_format(int count, const fc_placement *placements, char *buf, int size);

FC_END_DECLS
