/*
 * DTensors with data: the rest of torch/distributed/tensor/parallel/fsdp.py, whose pure part is dtensor.h. FSDP1 uses
 * these functions for parameters of tensor parallelism: to flatten and unflatten them, to cut them for a sharded state
 * dict, and to gather them when one is loaded. They work on host memory and on GPUs, and are named as in that file.
 */
#pragma once

#include "fsdpckpt/gather/array.h"
#include "fsdpckpt/gather/device_comm.h"
#include "fsdpckpt/sharded_tensor/dtensor.h"

FC_BEGIN_DECLS

/** A DeviceMesh with its process groups, on one rank. All ranks make and free it together. The
 * device of its communicators must outlive it. */
typedef struct fc_device_mesh {
    fc_mesh mesh;
    int64_t coordinate[FC_MAX_MESH_DIMS];
    fc_comm *groups[FC_MAX_MESH_DIMS]; /**< get_group(dim): the ranks that differ only along `dim` */
    bool owns_groups;
    struct fc_pool *pool; /**< memory for gathers, which stays until the mesh is freed; a slice borrows it */
    const struct fc_device_mesh *root; /**< get_root_mesh: itself, or the mesh that it is a slice of */
} fc_device_mesh;

/** init_device_mesh: `comm` must have as many ranks as `mesh`, and outlive it. `*out` may not be moved. */
fc_code fc_device_mesh_new(fc_comm *comm, const fc_mesh *mesh, fc_device_mesh *out, fc_error *err);
void fc_device_mesh_free(fc_device_mesh *mesh);

/** mesh[name]: makes the one-dimensional mesh of this rank along `dim`, which borrows from `mesh`. */
fc_code fc_device_mesh_slice(const fc_device_mesh *mesh, int dim, fc_device_mesh *out, fc_error *err);

/** A tensor that FSDP manages: plain, or a DTensor, whose data is `_local_tensor`. */
typedef struct fc_fsdp_tensor {
    fc_array local;
    bool is_dtensor;
    fc_dtensor spec;            /**< DTensor only */
    const fc_device_mesh *mesh; /**< DTensor only; borrowed */
    bool fsdp_flattened;        /**< whether it is a view of a flat parameter, which no other unit may flatten again */
} fc_fsdp_tensor;

/**
 * Makes a DTensor from the local tensor of this rank, which it borrows.
 * @param shape the global shape; if NULL, it is inferred from the local sizes as in DTensor.from_local.
 * @return FC_EUSAGE if the local sizes are not those of fc_local_box.
 */
fc_code fc_dtensor_from_local(const fc_array *local, const fc_device_mesh *mesh, const fc_placement *placements,
                              int ndim, const int64_t *shape, fc_fsdp_tensor *out, fc_error *err);

/**
 * DTensor.redistribute: makes the same tensor with other placements, in new memory at `out->local`. Collective over the
 * mesh. Mesh dimensions that change are gathered from the last to the first, together with inner ones that cut the same
 * tensor dimension, then cut from the first to the last. Local tensors may be uneven or empty.
 * @return FC_EUNSUPPORTED for Partial; FC_ECORRUPT if the ranks disagree about the shape of the tensor.
 */
fc_code fc_redistribute(const fc_fsdp_tensor *tensor, const fc_placement *placements, fc_stream *stream,
                        fc_fsdp_tensor *out, fc_error *err);

/** DTensorExtensions: the streams that the transforms use. */
typedef struct fc_dtensor_extensions {
    fc_stream *compute_stream; /**< the default stream of FSDP, which is set together with its root unit */
    bool has_compute_stream;   /**< whether it is set; if not, the transforms use `current_stream` */
    fc_stream *current_stream;
} fc_dtensor_extensions;

/** Passes what pre_flatten_transform found to post_unflatten_transform. */
typedef struct fc_param_extension {
    bool is_dtensor; /**< false: the tensor was plain */
    fc_dtensor spec;
    const fc_device_mesh *mesh;
} fc_param_extension;

/** pre_flatten_transform: makes a view of the local tensor; that of a DTensor requires gradients. */
void fc_pre_flatten_transform(const fc_fsdp_tensor *tensor, fc_array *out, fc_param_extension *extension);

/**
 * post_unflatten_transform: makes the DTensor over `view`, a view of an unsharded flat parameter, and marks it as
 * flattened. Nothing is copied. The compute stream waits for `produced`, unless that is NULL.
 */
fc_code fc_post_unflatten_transform(const fc_dtensor_extensions *extensions, const fc_array *view,
                                    const fc_param_extension *extension, fc_event *produced, fc_fsdp_tensor *out,
                                    fc_error *err);

typedef struct fc_sharded_tensor fc_sharded_tensor;

/** A shard of a ShardedTensor on this rank: an array, or another ShardedTensor if FSDP cut the local tensor of TP. */
typedef struct fc_local_shard {
    fc_shard_metadata metadata;
    fc_array tensor;
    fc_sharded_tensor *inner; /**< NULL if `tensor` is the data */
} fc_local_shard;

struct fc_sharded_tensor {
    fc_sharded_tensor_metadata metadata;
    fc_local_shard *shards;
    size_t nshards; /**< number of local shards */
};

/** The input of chunk_tensor: a plain tensor or DTensor, or a ShardedTensor. One of the two pointers is NULL. */
typedef struct fc_chunk_input {
    const fc_fsdp_tensor *tensor;
    const fc_sharded_tensor *sharded;
    fc_torch_device torch_device; /**< the torch.device that its metadata names */
} fc_chunk_input;

/**
 * chunk_tensor: like fc_chunk_tensor, with a copy of the data of this rank's chunk. The result is allocated from
 * `arena`; fc_sharded_tensor_free releases its data. The result for a ShardedTensor or DTensor is a ShardedTensor
 * within a ShardedTensor.
 */
fc_code fc_chunk_tensor_data(const fc_chunk_input *input, int64_t rank, int64_t world_size, int64_t devices_per_node,
                             int64_t accelerator_devices, const fc_process_group *group, fc_stream *stream,
                             fc_arena *arena, fc_sharded_tensor **out, fc_error *err);
void fc_sharded_tensor_free(fc_sharded_tensor *tensor);

/**
 * pre_load_state_dict_transform: finds the ShardedTensor whose shards hold data, and those shards (`count` may be 0).
 * It is the inner ShardedTensor if the only local shard is one, else `tensor` itself.
 */
void fc_pre_load_state_dict_transform(const fc_sharded_tensor *tensor, const fc_sharded_tensor **out,
                                      const fc_local_shard **shards, size_t *count);

/**
 * chunk_dtensor: makes the DTensor on the root of `mesh` into which FSDP cuts its parameter (see fc_chunk_dtensor),
 * with a copy of this rank's local tensor. Collective over the root mesh if TP cuts dimension 0.
 */
fc_code fc_chunk_dtensor_data(const fc_fsdp_tensor *tensor, const fc_device_mesh *mesh, fc_stream *stream,
                              fc_fsdp_tensor *out, fc_error *err);

/**
 * all_gather_dtensor: gathers over all mesh dimensions except the last, which is TP's, into a new array.
 * @return FC_EUSAGE unless `parent_mesh` is the tensor's mesh.
 */
fc_code fc_all_gather_dtensor(const fc_fsdp_tensor *tensor, const fc_device_mesh *parent_mesh, fc_stream *stream,
                              fc_array *out, fc_error *err);

/** The same for a list of tensors of one mesh, together: one agreement of the ranks, one group of collectives, one
 * wait. */
fc_code fc_all_gather_dtensors(const fc_fsdp_tensor *tensors, size_t count, const fc_device_mesh *parent_mesh,
                               fc_stream *stream, fc_array *out, fc_error *err);

FC_END_DECLS
