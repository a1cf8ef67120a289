/*
 * The metadata of DTensors, and the two ways in which FSDP1 chunks a tensor. The semantics are those of
 * torch/distributed/tensor/parallel/fsdp.py and torch/distributed/fsdp/_shard_utils.py. dtensor.h lists their oddities.
 */
#include "fsdpckpt/sharded_tensor/dtensor.h"

#include "base/checked.h"
#include "fsdpckpt/try.h"

#include <string.h>

static fc_code check_dims(int ndim, fc_error *err) {
    if (ndim < 0 || ndim > FC_MAX_DIMS) {
        return fc_fail(err, FC_EUNSUPPORTED, "the tensor has %d dimensions; at most %d are supported", ndim,
                       FC_MAX_DIMS);
    }
    return FC_OK;
}

static void copy_dims(int64_t *to, const int64_t *from, int n) {
    if (n > 0) {
        memcpy(to, from, (size_t)n * sizeof *to);
    }
}

/* Fills in everything but the dtype and the device. `offsets` receives the offsets of the local box. */
static fc_code init_at(fc_dtensor *dt, int ndim, const int64_t *shape, const fc_mesh *mesh,
                       const fc_placement *placements, const int64_t *coordinate, int64_t *offsets, fc_error *err) {
    FC_TRY(check_dims(ndim, err));
    *dt = (fc_dtensor){.ndim = ndim, .mesh = *mesh, .dtype = FC_F32, .device = {"cpu", -1}};
    copy_dims(dt->shape, shape, ndim);
    FC_TRY(fc_local_box(ndim, dt->shape, mesh, placements, coordinate, offsets, dt->local_sizes, err));
    copy_dims(dt->coordinate, coordinate, mesh->ndim);
    memcpy(dt->placements, placements, (size_t)mesh->ndim * sizeof *placements);
    return FC_OK;
}

fc_code fc_dtensor_init(fc_dtensor *dt, int ndim, const int64_t *shape, const fc_mesh *mesh,
                        const fc_placement *placements, const int64_t *coordinate, fc_error *err) {
    int64_t offsets[FC_MAX_DIMS];
    return init_at(dt, ndim, shape, mesh, placements, coordinate, offsets, err);
}

fc_code fc_get_box(const fc_dtensor *dt, int64_t *offsets, int64_t *sizes, fc_error *err) {
    if (dt->mesh.ndim != 1) {
        return fc_fail(err, FC_EUNSUPPORTED, "only 1D DeviceMeshes are supported; this one has %d dimensions",
                       dt->mesh.ndim);
    }
    const fc_placement *p = &dt->placements[0];
    for (int d = 0; d < dt->ndim; d++) {
        offsets[d] = 0;
        sizes[d] = dt->local_sizes[d];
    }
    if (p->kind == FC_SHARD) {
        if (p->dim < 0 || p->dim >= dt->ndim || dt->mesh.sizes[0] < 1) {
            return fc_fail(err, FC_EUSAGE, "Shard(%d) does not fit a tensor of %d dimensions over %lld ranks", p->dim,
                           dt->ndim, (long long)dt->mesh.sizes[0]);
        }
        offsets[p->dim] = dt->shape[p->dim] / dt->mesh.sizes[0];
    }
    return FC_OK;
}

fc_code fc_get_box_for(const fc_dtensor *dt, int64_t index, int64_t *offsets, int64_t *sizes, fc_error *err) {
    FC_TRY(fc_get_box(dt, offsets, sizes, err));
    for (int d = 0; d < dt->ndim; d++) {
        if (!fc_mul_i64(offsets[d], index, &offsets[d])) {
            return fc_fail(err, FC_EUNSUPPORTED, "the offset of the box of rank %lld exceeds 64 bits",
                           (long long)index);
        }
    }
    return FC_OK;
}

fc_code fc_get_local_box(const fc_dtensor *dt, int64_t *offsets, int64_t *sizes, fc_error *err) {
    return fc_get_box_for(dt, dt->coordinate[0], offsets, sizes, err);
}

/* Allocates the box of a shard in the arena. @return its offsets followed by its sizes, or NULL when out of memory. */
static int64_t *new_shard(int ndim, fc_arena *arena, fc_shard_metadata *out, fc_error *err) {
    int64_t *dims = fc_arena_calloc(arena, 2 * (size_t)ndim, sizeof *dims);
    if (!dims) {
        fc_no_memory(err, NULL);
        return NULL;
    }
    *out = (fc_shard_metadata){.box = {ndim, dims, dims + ndim}, .has_placement = true};
    return dims;
}

static fc_code shard_of_dt(const fc_dtensor *dt, int64_t index, int64_t rank, fc_arena *arena, fc_shard_metadata *out,
                           fc_error *err) {
    int64_t *dims = new_shard(dt->ndim, arena, out, err);
    if (!dims) {
        return FC_ENOMEM;
    }
    out->placement = fc_remote_device_of_rank(rank, &dt->device);
    return fc_get_box_for(dt, index, dims, dims + dt->ndim, err);
}

fc_code fc_create_shard_md_from_dt(const fc_dtensor *dt, int64_t current_rank, fc_arena *arena, fc_shard_metadata *out,
                                   fc_error *err) {
    return shard_of_dt(dt, dt->coordinate[0], current_rank, arena, out, err);
}

fc_code fc_create_sharded_tensor_md_from_dt(const fc_dtensor *dt, int64_t my_rank, int64_t group_size, fc_arena *arena,
                                            fc_sharded_tensor_metadata *out, fc_error *err) {
    int64_t scapegoat = my_rank > 0 ? 0 : 1;
    int64_t count = dt->placements[0].kind == FC_SHARD ? group_size : 1;
    if (count < 1) {
        return fc_fail(err, FC_EUSAGE, "a process group needs at least one rank, not %lld", (long long)group_size);
    }
    int64_t *shape = fc_arena_calloc(arena, (size_t)dt->ndim, sizeof *shape);
    fc_shard_metadata *shards = fc_arena_calloc(arena, (size_t)count, sizeof *shards);
    FC_NEED(shape && shards, err, NULL);
    copy_dims(shape, dt->shape, dt->ndim);
    for (int64_t i = 0; i < count; i++) {
        FC_TRY(shard_of_dt(dt, i, i > 0 ? scapegoat : my_rank, arena, &shards[i], err));
    }
    *out = (fc_sharded_tensor_metadata){dt->ndim, shape, shards, (size_t)count, {dt->dtype, dt->requires_grad, false}};
    return FC_OK;
}

/* The tensor that _create_chunk_sharded_tensor chunks. */
typedef struct dense {
    int ndim;
    const int64_t *shape;
    fc_dtype dtype;
    fc_torch_device device;
} dense;

/* The counterpart of torch's _get_remote_device_str. */
static fc_remote_device device_of_member(const fc_process_group *group, int64_t member, int64_t devices_per_node) {
    int64_t rank = group->global_ranks ? group->global_ranks[member] : member;
    fc_torch_device device = group->device;
    if (strcmp(device.type, "cpu") == 0) {
        device.index = -1;
    } else if (strcmp(device.type, "hpu") != 0) {
        device.index = (int)(rank % devices_per_node);
    }
    return fc_remote_device_of_rank(rank, &device);
}

/* Describes chunk number `index`: up to `full` rows of `t`, starting at row index × full. */
static fc_code chunk_of(const dense *t, int64_t full, int64_t index, fc_arena *arena, fc_shard_metadata *out,
                        fc_error *err) {
    int64_t *dims = new_shard(t->ndim, arena, out, err);
    if (!dims) {
        return FC_ENOMEM;
    }
    copy_dims(dims + t->ndim, t->shape, t->ndim);
    dims[0] = full * index;
    dims[t->ndim] = fc_get_chunked_dim_size(t->shape[0], full, index);
    return FC_OK;
}

/* The counterpart of _create_chunk_sharded_tensor: torch.chunk along dimension 0, one chunk per rank while rows last.
 */
static fc_code chunk_dense(const dense *t, int64_t rank, int64_t world_size, int64_t devices_per_node,
                           const fc_process_group *group, fc_arena *arena, fc_chunked_item *out, fc_error *err) {
    if (t->ndim < 1) {
        return fc_fail(err, FC_EUSAGE, "chunk expects at least a 1-dimensional tensor");
    }
    if (world_size < 1 || rank < 0 || rank >= world_size || world_size > group->size || devices_per_node < 1) {
        return fc_fail(err, FC_EUSAGE,
                       "rank %lld of %lld does not fit a group of %lld ranks with %lld devices per node",
                       (long long)rank, (long long)world_size, (long long)group->size, (long long)devices_per_node);
    }
    int64_t full = fc_get_split_size(t->shape[0], world_size);
    /* torch.chunk returns only chunks that have rows, except that a dimension of size 0 yields all of them. */
    int64_t count = full > 0 ? fc_get_split_size(t->shape[0], full) : world_size;
    fc_shard_metadata *shards = fc_arena_calloc(arena, (size_t)count, sizeof *shards);
    int64_t *shape = fc_arena_calloc(arena, (size_t)t->ndim, sizeof *shape);
    FC_NEED(shards && shape, err, NULL);
    copy_dims(shape, t->shape, t->ndim);
    for (int64_t i = 0; i < count; i++) {
        FC_TRY(chunk_of(t, full, i, arena, &shards[i], err));
        shards[i].placement = device_of_member(group, i, devices_per_node);
    }
    out->metadata = (fc_sharded_tensor_metadata){t->ndim, shape, shards, (size_t)count, {t->dtype, false, false}};
    out->has_local = rank < count;
    if (out->has_local) {
        out->local = shards[rank];
        out->local.placement = fc_remote_device_of_rank(rank, &t->device);
    }
    return FC_OK;
}

static fc_code chunk_sharded(const fc_chunk_source *source, fc_chunk_result *out, dense *inner, fc_error *err) {
    if (source->nlocal_shards != 1) {
        return fc_fail(err, FC_EUSAGE,
                       "the ShardedTensor has %zu local shards; it can be chunked again only if it has one",
                       source->nlocal_shards);
    }
    const fc_shard_metadata *local = &source->local_shards[0];
    *inner = (dense){local->box.ndim, local->box.sizes, source->sharded->properties.dtype, source->device};
    out->outer.metadata = *source->sharded;
    out->outer.local = *local;
    return FC_OK;
}

static fc_code chunk_over_dtensor(const fc_chunk_source *source, fc_arena *arena, fc_chunk_result *out, dense *inner,
                                  fc_error *err) {
    const fc_dtensor *dt = source->dtensor;
    *inner = (dense){dt->ndim, dt->local_sizes, dt->dtype, dt->device};
    FC_TRY(fc_create_shard_md_from_dt(dt, source->dtensor_group->rank, arena, &out->outer.local, err));
    fc_sharded_tensor_metadata *outer = &out->outer.metadata;
    FC_TRY(fc_create_sharded_tensor_md_from_dt(dt, source->dtensor_group->rank, source->dtensor_group->size, arena,
                                               outer, err));
    /* ShardedTensor's constructor checks this, so torch cannot chunk an uneven DTensor either. */
    fc_code code = fc_validate_non_overlapping_shards_metadata(outer->shards, outer->nshards, err);
    if (code == FC_OK) {
        code = fc_check_tensor(outer->shards, outer->nshards, outer->ndim, outer->shape, err);
    }
    return code == FC_OK ? FC_OK : fc_context(err, code, "the DTensor is not sharded evenly");
}

fc_code fc_chunk_tensor(const fc_chunk_source *source, int64_t rank, int64_t world_size, int64_t devices_per_node,
                        int64_t accelerator_devices, const fc_process_group *group, fc_arena *arena,
                        fc_chunk_result *out, fc_error *err) {
    dense inner = {source->ndim, source->shape, source->dtype, source->device};
    memset(out, 0, sizeof *out);
    if (source->kind == FC_CHUNK_SHARDED) {
        FC_TRY(chunk_sharded(source, out, &inner, err));
    } else if (source->kind == FC_CHUNK_DTENSOR) {
        FC_TRY(chunk_over_dtensor(source, arena, out, &inner, err));
        devices_per_node = accelerator_devices;
    }
    if (source->kind != FC_CHUNK_PLAIN) {
        out->has_outer = true;
        out->outer.has_local = true;
        out->outer.metadata.properties.requires_grad = false;
    }
    return chunk_dense(&inner, rank, world_size, devices_per_node, group, arena, &out->inner, err);
}

/* The shape that DTensor.from_local infers: the local sizes, multiplied by the ranks along the sharded dimension. */
static fc_code shape_from_local(const fc_dtensor *tp, int64_t ranks, int64_t *shape, fc_error *err) {
    const fc_placement *p = &tp->placements[0];
    copy_dims(shape, tp->local_sizes, tp->ndim);
    if (p->kind != FC_SHARD && p->kind != FC_STRIDED_SHARD) {
        return FC_OK;
    }
    if (p->dim < 0 || p->dim >= tp->ndim) {
        return fc_fail(err, FC_EUSAGE, "Shard(%d) does not fit a tensor of %d dimensions", p->dim, tp->ndim);
    }
    if (!fc_mul_i64(shape[p->dim], ranks, &shape[p->dim])) {
        return fc_fail(err, FC_EUNSUPPORTED, "the size of dimension %d over %lld ranks exceeds 64 bits", p->dim,
                       (long long)ranks);
    }
    return FC_OK;
}

fc_code fc_chunk_dtensor(int ndim, const int64_t *shape, const fc_dtensor *tp, const fc_mesh *root_mesh,
                         const int64_t *coordinate, fc_dtensor *out, int64_t *offsets, fc_error *err) {
    if (!root_mesh) {
        return fc_fail(err, FC_EUSAGE, "No parent device_mesh is found for FSDP device_mesh.");
    }
    if (root_mesh->ndim < 2) {
        return fc_fail(err, FC_EUSAGE, "Found parent device_mesh of ndim=%d, but meshes must be at least 2D.",
                       root_mesh->ndim);
    }
    if (root_mesh->ndim > FC_MAX_MESH_DIMS) {
        return fc_fail(err, FC_EUNSUPPORTED, "the parent device_mesh has ndim=%d; at most %d is supported",
                       root_mesh->ndim, FC_MAX_MESH_DIMS);
    }
    const fc_placement shard0 = {FC_SHARD, 0, 0};
    fc_placement placements[FC_MAX_MESH_DIMS] = {{FC_REPLICATE, 0, 0}};
    if (!tp) {
        placements[0] = shard0;
        return init_at(out, ndim, shape, root_mesh, placements, coordinate, offsets, err);
    }
    int64_t inferred[FC_MAX_DIMS];
    int last = root_mesh->ndim - 1;
    placements[last - 1] = shard0;
    placements[last] = tp->placements[0];
    FC_TRY(shape_from_local(tp, root_mesh->sizes[last], inferred, err));
    FC_TRY(init_at(out, tp->ndim, inferred, root_mesh, placements, coordinate, offsets, err));
    out->dtype = tp->dtype;
    out->device = tp->device;
    return FC_OK;
}
