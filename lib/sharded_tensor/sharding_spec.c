/*
 * ChunkShardingSpec and EnumerableShardingSpec: builds the metadata of a ShardedTensor from a spec and a shape.
 */
#include "fsdpckpt/sharded_tensor/sharding_spec.h"

#include "base/checked.h"
#include "fsdpckpt/try.h"

#include <string.h>

int64_t fc_get_split_size(int64_t dim_size, int64_t chunks) {
    return dim_size / chunks + (dim_size % chunks != 0);
}

int64_t fc_get_chunked_dim_size(int64_t dim_size, int64_t split_size, int64_t index) {
    int64_t start;
    if (!fc_mul_i64(split_size, index, &start) || start >= dim_size) {
        return 0;
    }
    return dim_size - start < split_size ? dim_size - start : split_size;
}

/* Describes shard number `index`, which is whole in every dimension but `dim`. */
static fc_code chunk_metadata(const fc_chunk_sharding_spec *spec, int dim, int ndim, const int64_t *shape, size_t index,
                              fc_arena *arena, fc_shard_metadata *out, fc_error *err) {
    int64_t *dims = fc_arena_calloc(arena, 2 * (size_t)ndim, sizeof *dims);
    FC_NEED(dims, err, NULL);
    int64_t *offsets = dims, *sizes = dims + ndim;
    int64_t split = fc_get_split_size(shape[dim], (int64_t)spec->count);
    memcpy(sizes, shape, (size_t)ndim * sizeof *sizes);
    sizes[dim] = fc_get_chunked_dim_size(shape[dim], split, (int64_t)index);
    if (!fc_mul_i64(split, (int64_t)index, &offsets[dim])) {
        return fc_fail(err, FC_EUNSUPPORTED, "the offset of chunk %zu in dimension %d exceeds 64 bits", index, dim);
    }
    *out = (fc_shard_metadata){{ndim, offsets, sizes}, true, spec->placements[index]};
    return FC_OK;
}

static fc_code build_chunks(const fc_chunk_sharding_spec *spec, int ndim, const int64_t *shape, fc_arena *arena,
                            fc_sharded_tensor_metadata *out, fc_error *err) {
    if (spec->dim >= ndim || spec->dim < -ndim) {
        return fc_fail(err, FC_EUSAGE, "invalid sharding dim: %d for a tensor of %d dimensions", spec->dim, ndim);
    }
    if (spec->count == 0) {
        return fc_fail(err, FC_EUSAGE, "the chunk sharding spec has no placements, so it describes no chunks");
    }
    int dim = spec->dim < 0 ? spec->dim + ndim : spec->dim;
    fc_shard_metadata *shards = fc_arena_calloc(arena, spec->count, sizeof *shards);
    FC_NEED(shards, err, NULL);
    for (size_t i = 0; i < spec->count; i++) {
        FC_TRY(chunk_metadata(spec, dim, ndim, shape, i, arena, &shards[i], err));
    }
    out->shards = shards;
    out->nshards = spec->count;
    return FC_OK;
}

fc_code fc_build_metadata(const fc_sharding_spec *spec, int ndim, const int64_t *shape,
                          const fc_tensor_properties *properties, fc_arena *arena, fc_sharded_tensor_metadata *out,
                          fc_error *err) {
    *out = (fc_sharded_tensor_metadata){ndim, shape, NULL, 0, *properties};
    if (ndim < 0 || ndim > FC_MAX_DIMS) {
        return fc_fail(err, FC_EUNSUPPORTED, "the tensor has %d dimensions; at most %d are supported", ndim,
                       FC_MAX_DIMS);
    }
    if (spec->kind == FC_SPEC_CHUNK) {
        return build_chunks(&spec->as.chunk, ndim, shape, arena, out, err);
    }
    const fc_enumerable_sharding_spec *e = &spec->as.enumerable;
    FC_TRY(fc_enumerable_sharding_spec_check(e, err));
    FC_TRY(fc_check_tensor(e->shards, e->count, ndim, shape, err));
    out->shards = e->shards;
    out->nshards = e->count;
    return FC_OK;
}

static bool needs_rewrite(const fc_remote_device *placement, const fc_torch_device *device, int64_t rank) {
    return placement->rank == rank && rank >= 0 && !fc_torch_device_equal(&placement->device, device);
}

fc_code fc_rewrite_spec_if_needed(const fc_sharding_spec *spec, const fc_torch_device *tensor_device, int64_t rank,
                                  fc_arena *arena, fc_sharding_spec *out, fc_error *err) {
    *out = *spec;
    if (spec->kind != FC_SPEC_CHUNK) {
        return FC_OK;
    }
    fc_remote_device *copy = NULL;
    size_t count = spec->as.chunk.count;
    for (size_t i = 0; i < count; i++) {
        if (!needs_rewrite(&spec->as.chunk.placements[i], tensor_device, rank)) {
            continue;
        }
        if (!copy) {
            copy = fc_arena_copy(arena, spec->as.chunk.placements, count, sizeof *copy);
            FC_NEED(copy, err, NULL);
            out->as.chunk.placements = copy;
        }
        copy[i] = fc_remote_device_of_rank(rank, tensor_device);
    }
    return FC_OK;
}
