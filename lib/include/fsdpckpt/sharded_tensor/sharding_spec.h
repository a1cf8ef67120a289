/*
 * Sharding specs of torch.distributed._shard: which rank holds which shard of a tensor, on which device. They describe
 * the ShardedTensors of FSDP1's sharded state dicts. Semantics: torch/distributed/_shard/metadata.py,
 * sharding_spec/{api,chunk_sharding_spec,_internals}.py, sharded_tensor/metadata.py and remote_device.py.
 *
 * All structs are plain values that borrow what they point to. Functions allocate results in the arena that they get.
 */
#pragma once

#include "fsdpckpt/arena.h"
#include "fsdpckpt/box.h"
#include "fsdpckpt/dtype.h"
#include "fsdpckpt/error.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

FC_BEGIN_DECLS

/** A torch.device. */
typedef struct fc_torch_device {
    char type[16]; /**< "cpu", "cuda" … */
    int index;     /**< -1 for none; as in torch, "cuda" and "cuda:0" are different devices */
} fc_torch_device;

/** Reads "cpu", "cuda:0" …. @return false when torch.device would refuse it. */
bool fc_torch_device_parse(const char *text, size_t len, fc_torch_device *out);

/** Returns whether type and index are equal. */
bool fc_torch_device_equal(const fc_torch_device *a, const fc_torch_device *b);

/** A torch.distributed._remote_device: a device of a rank, of a named worker, or of this process. */
typedef struct fc_remote_device {
    char worker[64]; /**< name of the worker; empty for none */
    int64_t rank;    /**< -1 for none */
    fc_torch_device device;
} fc_remote_device;

/**
 * Reads "rank:0/cuda:0", "trainer0/cpu", "rank:0", "trainer0", "cuda:1"; a missing device is "cpu".
 * @return FC_EUSAGE for anything else, FC_EUNSUPPORTED for a worker name above 63 bytes.
 */
fc_code fc_remote_device_parse(const char *text, fc_remote_device *out, fc_error *err);

/** Returns device `device` of rank `rank`. */
fc_remote_device fc_remote_device_of_rank(int64_t rank, const fc_torch_device *device);

/** Writes the device like str() in torch, e.g. "rank:0/cuda:0". @return the length of the whole text, like snprintf. */
int fc_remote_device_format(const fc_remote_device *device, char *buf, size_t size);

/** ShardMetadata: the box of a shard and its device. */
typedef struct fc_shard_metadata {
    fc_box box; /**< shard_offsets, shard_sizes */
    bool has_placement;
    fc_remote_device placement;
} fc_shard_metadata;

/** Writes a shard as torch prints it, for messages. @return the length of the whole text, like snprintf. */
int fc_shard_metadata_format(const fc_shard_metadata *shard, char *buf, size_t size);

/** The part of TensorProperties that outlives a process. The layout is always strided. */
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

/** Returns ceil(dim_size / chunks), the size of all chunks but the last ones. `chunks` is at least 1. */
int64_t fc_get_split_size(int64_t dim_size, int64_t chunks);

/** Returns the size of chunk `index` if chunks have `split_size` elements; 0 for a chunk beyond the end. */
int64_t fc_get_chunked_dim_size(int64_t dim_size, int64_t split_size, int64_t index);

/** ChunkShardingSpec: one dimension is divided into equal chunks, one per placement. */
typedef struct fc_chunk_sharding_spec {
    int dim; /**< negative counts from the last dimension */
    const fc_remote_device *placements;
    size_t count;
} fc_chunk_sharding_spec;

/** EnumerableShardingSpec: a list of all shards. */
typedef struct fc_enumerable_sharding_spec {
    const fc_shard_metadata *shards;
    size_t count;
} fc_enumerable_sharding_spec;

typedef enum fc_sharding_spec_kind { FC_SPEC_CHUNK, FC_SPEC_ENUMERABLE } fc_sharding_spec_kind;

/** A sharding spec of either kind. */
typedef struct fc_sharding_spec {
    fc_sharding_spec_kind kind;
    union {
        fc_chunk_sharding_spec chunk;
        fc_enumerable_sharding_spec enumerable;
    } as;
} fc_sharding_spec;

/**
 * Makes the checks of EnumerableShardingSpec's constructor: there is a shard, all have the same number of dimensions,
 * no number is negative, and no two overlap.
 * @return FC_ECORRUPT with the shards.
 */
fc_code fc_enumerable_sharding_spec_check(const fc_enumerable_sharding_spec *spec, fc_error *err);

/**
 * Checks that no two shards overlap, in O(n log n) for shards that are sharded along one dimension, and by a sweep
 * otherwise. As in torch, an empty shard inside another is an overlap, unless all shards are the same empty one at the
 * origin.
 * @return FC_ECORRUPT with the first two shards that overlap.
 */
fc_code fc_validate_non_overlapping_shards_metadata(const fc_shard_metadata *shards, size_t count, fc_error *err);

/**
 * Checks that the shards are within a tensor of `shape` and that their volumes add up to its volume. If they do not
 * overlap either, they cover it.
 * @return FC_ECORRUPT with the shard or the volumes.
 */
fc_code fc_check_tensor(const fc_shard_metadata *shards, size_t count, int ndim, const int64_t *shape, fc_error *err);

/**
 * spec.build_metadata(shape, properties). Chunks beyond the end of the dimension have size 0 and, as in torch, the
 * offset split size × index, which may be beyond the end of the tensor.
 * @param shape is borrowed by `out`, and so are the shards of an enumerable spec.
 * @return FC_EUSAGE for a dimension out of range or no placements; FC_ECORRUPT if enumerated shards do not cover the
 * tensor exactly.
 */
fc_code fc_build_metadata(const fc_sharding_spec *spec, int ndim, const int64_t *shape,
                          const fc_tensor_properties *properties, fc_arena *arena, fc_sharded_tensor_metadata *out,
                          fc_error *err);

/**
 * _rewrite_spec_if_needed: if the placements of a chunk spec name another device for `rank` than that of the tensor,
 * they are replaced by it. Any other spec is copied unchanged. (FSDP moves optimizer state to the CPU, but its spec
 * still says cuda.)
 * @param out receives a copy of `spec`, with new placements in `arena` if they were replaced.
 */
fc_code fc_rewrite_spec_if_needed(const fc_sharding_spec *spec, const fc_torch_device *tensor_device, int64_t rank,
                                  fc_arena *arena, fc_sharding_spec *out, fc_error *err);

FC_END_DECLS
