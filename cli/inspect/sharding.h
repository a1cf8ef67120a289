/*
 * Describes in words how tensors are sharded, from the result of fsdpckpt/sharding.h, for `inspect`.
 */
#pragma once

#include "fsdpckpt/sharding.h"

/** Writes "8×1", "2×4 of 3 copies", "whole", "empty", "irregular, 7 chunks", into `buf`. @return buf. */
const char *sharding_describe(const fc_tensor *tensor, const fc_sharding *c, char *buf, size_t size);

enum { SHARDING_MAX_STYLES = 12 };

/** One way to shard tensors, and the number of tensors. */
typedef struct sharding_style {
    char text[96];
    size_t tensors;
} sharding_style;

/** A summary of all tensors. */
typedef struct sharding_summary {
    int64_t ranks;   /**< the highest rank that wrote a chunk, plus one; 0: unknown */
    int64_t mesh[2]; /**< the largest 2D mesh found, or 0 */
    int64_t chunks;  /**< the largest number of chunks of a tensor that is sharded along one dimension */
    uint32_t dims;   /**< bit d: a tensor is sharded along dimension d alone */
    bool irregular;
    sharding_style styles[SHARDING_MAX_STYLES];
    size_t nstyles;
    size_t other; /**< tensors of styles beyond SHARDING_MAX_STYLES */
} sharding_summary;

/** Adds one recognised tensor of a checkpoint that records the mesh `recorded` (ndim 0: none); zero `summary` first. */
void sharding_summary_add(sharding_summary *summary, const fc_mesh *recorded, const fc_tensor *tensor,
                          const fc_sharding *c);

/** "8 ranks, Shard(0)" or "8 ranks, 4 × 2 mesh (FSDP × TP)", into `buf`: from a recorded mesh if there is one. */
const char *sharding_summary_layout(const sharding_summary *summary, const fc_mesh *recorded, char *buf, size_t size);
