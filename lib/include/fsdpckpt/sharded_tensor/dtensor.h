/*
 * DTensor metadata without data, and the pure part of torch/distributed/tensor/parallel/fsdp.py: how FSDP1 shards a
 * plain tensor, a ShardedTensor or a DTensor of tensor parallelism into chunks. Functions are named as in that file.
 *
 * Nothing here communicates: a process group is only its rank, its size and its numbering.
 */
#pragma once

#include "fsdpckpt/mesh.h"
#include "fsdpckpt/sharded_tensor/sharding_spec.h"

FC_BEGIN_DECLS

/** The metadata of a DTensor on one rank. A plain value that may be copied. */
typedef struct fc_dtensor {
    int ndim;
    int64_t shape[FC_MAX_DIMS]; /**< of the global tensor, in elements */
    fc_mesh mesh;
    fc_placement placements[FC_MAX_MESH_DIMS];
    int64_t coordinate[FC_MAX_MESH_DIMS]; /**< the place of this rank on `mesh` */
    int64_t local_sizes[FC_MAX_DIMS];     /**< shape of `_local_tensor`, in elements */
    fc_dtype dtype;
    fc_torch_device device; /**< the device of `_local_tensor` */
    bool requires_grad;
} fc_dtensor;

/**
 * Makes the metadata of a DTensor of `shape` on `mesh` for the rank at `coordinate`; local_sizes come from
 * fc_local_box. The device is "cpu", the dtype float32, and no gradient is required; change them afterwards.
 */
fc_code fc_dtensor_init(fc_dtensor *dt, int ndim, const int64_t *shape, const fc_mesh *mesh,
                        const fc_placement *placements, const int64_t *coordinate, fc_error *err);

/**
 * _get_box: for Shard(d), offsets[d] is shape[d] / ranks, rounded down: the step from one rank to the next. All other
 * offsets are 0, and so are those of any other placement, including _StridedShard. `sizes` are those of the local
 * tensor.
 *
 * This is the box of rank 1, not that of this rank, and it is right only if the ranks divide the dimension: 10 rows on
 * 4 ranks are sharded at 0, 3, 6, 9, but the step is 2. fc_local_box returns the true box; these functions exist to
 * reproduce what FSDP1 with TP wrote.
 * @return FC_EUNSUPPORTED unless the mesh has one dimension.
 */
fc_code fc_get_box(const fc_dtensor *dt, int64_t *offsets, int64_t *sizes, fc_error *err);

/** _get_box_for: the offsets of fc_get_box times `index`, with the sizes of this rank. Also wrong for uneven shards. */
fc_code fc_get_box_for(const fc_dtensor *dt, int64_t index, int64_t *offsets, int64_t *sizes, fc_error *err);

/** _get_local_box: fc_get_box_for with the coordinate of this rank. Differs from fc_local_box only for uneven shards.
 */
fc_code fc_get_local_box(const fc_dtensor *dt, int64_t *offsets, int64_t *sizes, fc_error *err);

/** _create_shard_md_from_dt: the local box, placed on "rank:<current_rank>/<device of the local tensor>". */
fc_code fc_create_shard_md_from_dt(const fc_dtensor *dt, int64_t current_rank, fc_arena *arena, fc_shard_metadata *out,
                                   fc_error *err);

/**
 * _create_sharded_tensor_md_from_dt: metadata of all shards. Shard 0 is placed on `my_rank`, whatever its coordinate,
 * and all others on rank 0, or on rank 1 if the caller is rank 0. There is one shard unless the placement is Shard. All
 * shards have the sizes of this rank.
 */
fc_code fc_create_sharded_tensor_md_from_dt(const fc_dtensor *dt, int64_t my_rank, int64_t group_size, fc_arena *arena,
                                            fc_sharded_tensor_metadata *out, fc_error *err);

/** The part of a process group that metadata needs. */
typedef struct fc_process_group {
    int64_t rank, size;
    const int64_t *global_ranks; /**< the global ranks of its members; NULL: 0 … size - 1 */
    fc_torch_device device; /**< its default device; the index is that of the current device, used only for "hpu" */
} fc_process_group;

/** The three kinds of input of _chunk_tensor. */
typedef enum fc_chunk_kind { FC_CHUNK_PLAIN, FC_CHUNK_SHARDED, FC_CHUNK_DTENSOR } fc_chunk_kind;

/** A tensor on one rank, of one of these kinds. */
typedef struct fc_chunk_source {
    fc_chunk_kind kind;
    /** PLAIN: the shape, type and device of the tensor. */
    int ndim;
    const int64_t *shape;
    fc_dtype dtype;
    fc_torch_device device;
    /** SHARDED: the metadata and the local shards. */
    const fc_sharded_tensor_metadata *sharded;
    const fc_shard_metadata *local_shards;
    size_t nlocal_shards;
    /** DTENSOR: the metadata. */
    const fc_dtensor *dtensor;
    const fc_process_group *dtensor_group; /**< the process group of its mesh */
} fc_chunk_source;

/** A ShardedTensor that has at most one shard on this rank. */
typedef struct fc_chunked_item {
    fc_sharded_tensor_metadata metadata;
    bool has_local;          /**< false on ranks beyond the last chunk */
    fc_shard_metadata local; /**< the shard of this rank, if has_local */
} fc_chunked_item;

/** The result of _chunk_tensor: only `inner` for PLAIN, else an outer ShardedTensor whose one shard is `inner`. */
typedef struct fc_chunk_result {
    bool has_outer;
    fc_chunked_item outer;
    fc_chunked_item inner;
} fc_chunk_result;

/**
 * _chunk_tensor: divides the tensor, or the local shard of a tensor that TP has sharded, into chunks along dimension 0,
 * one per rank of `group`, or fewer if there are not enough rows.
 * @param devices_per_node    numbers the devices: rank r uses device r % devices_per_node. Not used on "cpu".
 * @param accelerator_devices is used in its place for a DTensor, where torch calls torch.accelerator.device_count().
 * @return FC_EUSAGE for a tensor without dimensions, a ShardedTensor that does not have one local shard, or a count
 * below 1; FC_ECORRUPT for a DTensor that is not sharded evenly, because fc_create_sharded_tensor_md_from_dt makes
 * overlapping shards of it.
 */
fc_code fc_chunk_tensor(const fc_chunk_source *source, int64_t rank, int64_t world_size, int64_t devices_per_node,
                        int64_t accelerator_devices, const fc_process_group *group, fc_arena *arena,
                        fc_chunk_result *out, fc_error *err);

/**
 * _chunk_dtensor: the DTensor on `root_mesh` (dp, tp) or (replicate, dp, tp) into which FSDP1 turns its parameter.
 * - A plain tensor of `shape`: Shard(0) on the *first* mesh dimension, Replicate on all others.
 * - A DTensor on the TP mesh (`tp` not NULL, its first placement counts): Shard(0) on the last but one dimension, the
 *   TP placement on the last, Replicate on all others. The global shape is the one that DTensor.from_local derives: the
 *   local size times the TP ranks. For an uneven TP shard it is wrong.
 * @param root_mesh  the parent mesh; NULL is the error "No parent device_mesh is found for FSDP device_mesh."
 * @param coordinate of this rank on root_mesh.
 * @param out        receives the DTensor; its local box is also written to `offsets` and `out->local_sizes`.
 */
fc_code fc_chunk_dtensor(int ndim, const int64_t *shape, const fc_dtensor *tp, const fc_mesh *root_mesh,
                         const int64_t *coordinate, fc_dtensor *out, int64_t *offsets, fc_error *err);

FC_END_DECLS
