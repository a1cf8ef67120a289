/*
 * DTensor metadata without the tensor, and the pure part of torch/distributed/tensor/parallel/fsdp.py: how FSDP1 turns
 * a plain tensor, a ShardedTensor or the DTensor of tensor parallelism into chunks. Function names follow that file.
 *
 * Nothing here talks to other ranks: a process group is its rank, its size and its numbering.
 */
#ifndef FSDPCKPT_DTENSOR_H
#define FSDPCKPT_DTENSOR_H

#include "fsdpckpt/mesh.h"
#include "fsdpckpt/sharding_spec.h"

#ifdef __cplusplus
extern "C" {
#endif

/** What a DTensor knows on one rank. A plain value: copy it freely. */
typedef struct fc_dtensor {
    int ndim;
    int64_t shape[FC_MAX_DIMS]; /**< global */
    fc_mesh mesh;
    fc_placement placements[FC_MAX_MESH_DIMS];
    int64_t coordinate[FC_MAX_MESH_DIMS]; /**< of this rank on `mesh` */
    int64_t local_sizes[FC_MAX_DIMS];     /**< shape of `_local_tensor` */
    fc_dtype dtype;
    fc_torch_device device; /**< of `_local_tensor` */
    bool requires_grad;
} fc_dtensor;

/**
 * Makes the metadata of the DTensor of `shape` on `mesh` for the rank at `coordinate`; local_sizes are those of
 * fc_local_box. Device "cpu", no gradient, float32: set them afterwards.
 */
fc_code fc_dtensor_init(fc_dtensor *dt, int ndim, const int64_t *shape, const fc_mesh *mesh,
                        const fc_placement *placements, const int64_t *coordinate, fc_error *err);

/**
 * _get_box: for Shard(d), offsets[d] = shape[d] / ranks *rounded down*, the step from one rank to the next; 0 elsewhere
 * and for every other placement (_StridedShard included). `sizes` are the local tensor's.
 *
 * This is the box of rank 1, not of this rank, and the true one only when the ranks divide the dimension: 10 rows on 4
 * ranks are cut at 0, 3, 6, 9, but the step here is 2. fc_local_box gives the true box; these functions exist to
 * reproduce what FSDP1 with TP wrote.
 * @return FC_EUNSUPPORTED for a mesh that has not one dimension.
 */
fc_code fc_get_box(const fc_dtensor *dt, int64_t *offsets, int64_t *sizes, fc_error *err);

/** _get_box_for: the offsets of fc_get_box times `index`, with this rank's sizes. Wrong as above for uneven shards. */
fc_code fc_get_box_for(const fc_dtensor *dt, int64_t index, int64_t *offsets, int64_t *sizes, fc_error *err);

/** _get_local_box: fc_get_box_for this rank's coordinate. Differs from fc_local_box for uneven shards only. */
fc_code fc_get_local_box(const fc_dtensor *dt, int64_t *offsets, int64_t *sizes, fc_error *err);

/** _create_shard_md_from_dt: the local box on "rank:<current_rank>/<device of the local tensor>". */
fc_code fc_create_shard_md_from_dt(const fc_dtensor *dt, int64_t current_rank, fc_arena *arena, fc_shard_metadata *out,
                                   fc_error *err);

/**
 * _create_sharded_tensor_md_from_dt: metadata with full coverage in which only shard 0 belongs to the caller. Shard 0
 * is given to `my_rank`, whatever its coordinate, and all others to a scapegoat, rank 0 (or 1 when that is the caller).
 * One shard unless the placement is Shard. All shards have this rank's sizes.
 */
fc_code fc_create_sharded_tensor_md_from_dt(const fc_dtensor *dt, int64_t my_rank, int64_t group_size, fc_arena *arena,
                                            fc_sharded_tensor_metadata *out, fc_error *err);

/** A process group as far as metadata needs it. */
typedef struct fc_process_group {
    int64_t rank, size;
    const int64_t *global_ranks; /**< of its members; NULL: 0 … size - 1 */
    fc_torch_device device;      /**< its default device; the index is the current one and used for "hpu" only */
} fc_process_group;

/** What _chunk_tensor is given. */
typedef enum fc_chunk_kind { FC_CHUNK_PLAIN, FC_CHUNK_SHARDED, FC_CHUNK_DTENSOR } fc_chunk_kind;

/** A tensor on one rank, in one of the three forms. */
typedef struct fc_chunk_source {
    fc_chunk_kind kind;
    /** PLAIN: the tensor. */
    int ndim;
    const int64_t *shape;
    fc_dtype dtype;
    fc_torch_device device;
    /** SHARDED: its metadata and the local shards. */
    const fc_sharded_tensor_metadata *sharded;
    const fc_shard_metadata *local_shards;
    size_t nlocal_shards;
    /** DTENSOR. */
    const fc_dtensor *dtensor;
    const fc_process_group *dtensor_group; /**< of its mesh */
} fc_chunk_source;

/** A ShardedTensor of which a rank has at most one shard. */
typedef struct fc_chunked {
    fc_sharded_tensor_metadata metadata;
    bool has_local; /**< false for the ranks beyond the last chunk */
    fc_shard_metadata local;
} fc_chunked;

/** What _chunk_tensor returns: for PLAIN the inner alone, else an outer ShardedTensor whose one shard is the inner. */
typedef struct fc_chunk_result {
    bool has_outer;
    fc_chunked outer;
    fc_chunked inner;
} fc_chunk_result;

/**
 * _chunk_tensor: cuts the tensor, or the local part of what TP has already cut, in chunks along dimension 0, one a rank
 * of `group` (fewer where there are not enough rows).
 * @param devices_per_node    numbers the devices: rank r is on device r % devices_per_node. Not used on "cpu".
 * @param accelerator_devices takes its place for a DTensor, where torch asks torch.accelerator.device_count().
 * @return FC_EUSAGE for a tensor without dimensions, a ShardedTensor with other than one local shard, a count < 1;
 * FC_ECORRUPT for a DTensor that is not cut evenly, of which fc_create_sharded_tensor_md_from_dt makes overlapping
 * shards.
 */
fc_code fc_chunk_tensor(const fc_chunk_source *source, int64_t rank, int64_t world_size, int64_t devices_per_node,
                        int64_t accelerator_devices, const fc_process_group *group, fc_arena *arena,
                        fc_chunk_result *out, fc_error *err);

/**
 * _chunk_dtensor: the DTensor on `root_mesh` (dp, tp) or (replicate, dp, tp) into which FSDP1 turns its parameter.
 * - A plain tensor of `shape`: Shard(0) on the *first* mesh dimension, Replicate on all others.
 * - A DTensor on the TP mesh (`tp` not NULL, its first placement counts): Shard(0) on the last but one dimension, the
 *   TP placement on the last, Replicate before. The global shape is what DTensor.from_local makes of the local sizes:
 *   the local size times the TP ranks, which for an uneven TP shard is not the true shape.
 * @param root_mesh  the parent mesh; NULL is the error "No parent device_mesh is found for FSDP device_mesh."
 * @param coordinate of this rank on root_mesh.
 * @param out        receives the DTensor; its local box is also written to `offsets` and `out->local_sizes`.
 */
fc_code fc_chunk_dtensor(int ndim, const int64_t *shape, const fc_dtensor *tp, const fc_mesh *root_mesh,
                         const int64_t *coordinate, fc_dtensor *out, int64_t *offsets, fc_error *err);

#ifdef __cplusplus
}
#endif
#endif
