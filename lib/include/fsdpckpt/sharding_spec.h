/*
 * Sharding specs of torch.distributed._shard: who holds which shard of a tensor, on which device. What ShardedTensor
 * (FSDP1's sharded state dicts) is described by. Semantics: torch/distributed/_shard/metadata.py,
 * sharding_spec/{api,chunk_sharding_spec,_internals}.py, sharded_tensor/metadata.py and remote_device.py.
 *
 * All structs are plain values that borrow; what a function here makes lives in the arena it is given.
 */
#ifndef FSDPCKPT_SHARDING_SPEC_H
#define FSDPCKPT_SHARDING_SPEC_H

#include "fsdpckpt/arena.h"
#include "fsdpckpt/box.h"
#include "fsdpckpt/dtype.h"
#include "fsdpckpt/error.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/** A torch.device. */
typedef struct fc_torch_device {
    char type[16]; /**< "cpu", "cuda" … */
    int index;     /**< -1: none. "cuda" and "cuda:0" are different devices, as in torch */
} fc_torch_device;

/** Reads "cpu", "cuda:0" …. @return false when torch.device would refuse it. */
bool fc_torch_device_parse(const char *text, size_t len, fc_torch_device *out);

/** Same type and same index. */
bool fc_torch_device_equal(const fc_torch_device *a, const fc_torch_device *b);

/** Writes "cuda:0", as str(torch.device). @return the length needed, as snprintf. */
int fc_torch_device_format(const fc_torch_device *device, char *buf, size_t size);

/** A torch.distributed._remote_device: a device of a rank, of a named worker, or of this process. */
typedef struct fc_remote_device {
    char worker[64]; /**< "": no worker name */
    int64_t rank;    /**< -1: no rank */
    fc_torch_device device;
} fc_remote_device;

/**
 * Reads "rank:0/cuda:0", "trainer0/cpu", "rank:0", "trainer0", "cuda:1"; a missing device is "cpu".
 * @return FC_EUSAGE for anything else, FC_EUNSUPPORTED for a worker name above 63 bytes.
 */
fc_code fc_remote_device_parse(const char *text, fc_remote_device *out, fc_error *err);

/** The device `device` of rank `rank`. */
fc_remote_device fc_remote_device_of_rank(int64_t rank, const fc_torch_device *device);

/** Writes "rank:0/cuda:0", as str() in torch. @return the length needed, as snprintf. */
int fc_remote_device_format(const fc_remote_device *device, char *buf, size_t size);

/** ShardMetadata: the box of a shard and where it lives. */
typedef struct fc_shard_metadata {
    fc_box box; /**< shard_offsets, shard_sizes */
    bool has_placement;
    fc_remote_device placement;
} fc_shard_metadata;

/** Writes a shard as torch prints it, for messages. @return the length needed, as snprintf. */
int fc_shard_metadata_format(const fc_shard_metadata *shard, char *buf, size_t size);

/** TensorProperties, as far as they outlive a process; the layout is always strided. */
typedef struct fc_tensor_properties {
    fc_dtype dtype;
    bool requires_grad;
    bool pin_memory;
} fc_tensor_properties;

/** ShardedTensorMetadata. */
typedef struct fc_sharded_tensor_metadata {
    int ndim;
    const int64_t *shape; /**< `size` in torch */
    const fc_shard_metadata *shards;
    size_t nshards;
    fc_tensor_properties properties;
} fc_sharded_tensor_metadata;

/** ceil(dim_size / chunks), the size of all chunks but the last ones. `chunks` >= 1. */
int64_t fc_get_split_size(int64_t dim_size, int64_t chunks);

/** The size of chunk `index` when chunks are `split_size` long: 0 for those beyond the end. */
int64_t fc_get_chunked_dim_size(int64_t dim_size, int64_t split_size, int64_t index);

/** ChunkShardingSpec: one dimension in equal chunks, one for each placement. */
typedef struct fc_chunk_sharding_spec {
    int dim; /**< negative counts from the last dimension */
    const fc_remote_device *placements;
    size_t count;
} fc_chunk_sharding_spec;

/** EnumerableShardingSpec: every shard written out. */
typedef struct fc_enumerable_sharding_spec {
    const fc_shard_metadata *shards;
    size_t count;
} fc_enumerable_sharding_spec;

typedef enum fc_sharding_spec_kind { FC_SPEC_CHUNK, FC_SPEC_ENUMERABLE } fc_sharding_spec_kind;

/** Either of the two. */
typedef struct fc_sharding_spec {
    fc_sharding_spec_kind kind;
    union {
        fc_chunk_sharding_spec chunk;
        fc_enumerable_sharding_spec enumerable;
    } as;
} fc_sharding_spec;

/**
 * The constructor's checks of EnumerableShardingSpec: at least one shard, one rank (number of dimensions) for all,
 * no negative number, no overlap.
 * @return FC_ECORRUPT naming the shards.
 */
fc_code fc_enumerable_sharding_spec_check(const fc_enumerable_sharding_spec *spec, fc_error *err);

/**
 * No two shards overlap. O(n log n) for shards cut along one dimension, a sweep otherwise. As in torch, an empty shard
 * inside another counts as an overlap, and all shards being the same empty one at the origin does not.
 * @return FC_ECORRUPT naming the first two that do.
 */
fc_code fc_validate_non_overlapping_shards_metadata(const fc_shard_metadata *shards, size_t count, fc_error *err);

/**
 * The shards lie within a tensor of `shape` and their volumes add up to its own. With the check above: they cover it.
 * @return FC_ECORRUPT naming the shard or the volumes.
 */
fc_code fc_check_tensor(const fc_shard_metadata *shards, size_t count, int ndim, const int64_t *shape, fc_error *err);

/**
 * spec.build_metadata(shape, properties). Chunks beyond the end of the dimension have size 0 and, as in torch, an
 * offset of split size × index, which may lie beyond the tensor.
 * @param shape borrowed by `out`, which also borrows an enumerable spec's shards.
 * @return FC_EUSAGE for a bad dimension or no placements, FC_ECORRUPT when enumerated shards do not make the tensor.
 */
fc_code fc_build_metadata(const fc_sharding_spec *spec, int ndim, const int64_t *shape,
                          const fc_tensor_properties *properties, fc_arena *arena, fc_sharded_tensor_metadata *out,
                          fc_error *err);

/**
 * _rewrite_spec_if_needed: a chunk spec whose placements for `rank` name another device than the tensor's is copied
 * with that device in them; any other spec is handed back as it is. (FSDP ships optimizer state to the CPU while its
 * spec still says cuda.)
 * @param out receives a copy of `spec`, with new placements in `arena` where it was rewritten.
 */
fc_code fc_rewrite_spec_if_needed(const fc_sharding_spec *spec, const fc_torch_device *tensor_device, int64_t rank,
                                  fc_arena *arena, fc_sharding_spec *out, fc_error *err);

#ifdef __cplusplus
}
#endif
#endif
