/*
 * Describes in words how tensors are cut, from the result of fsdpckpt/cut.h, for `inspect`.
 */
#ifndef FSDPCKPT_CLI_CUT_H
#define FSDPCKPT_CLI_CUT_H

#include "fsdpckpt/cut.h"

/** Writes "8×1", "2×4 of 3 copies", "whole", "empty", "irregular, 7 chunks", into `buf`. @return buf. */
const char *cut_describe(const fc_tensor *tensor, const fc_cut *c, char *buf, size_t size);

enum { CUT_MAX_STYLES = 12 };

/** One way to cut tensors, and the number of tensors. */
typedef struct cut_style {
    char text[96];
    size_t tensors;
} cut_style;

/** A summary of all tensors. */
typedef struct cut_summary {
    int64_t ranks;   /**< the highest rank that wrote a chunk, plus one; 0: unknown */
    int64_t mesh[2]; /**< the largest 2D mesh found, or 0 */
    int64_t chunks;  /**< the largest number of chunks of a tensor that is cut along one dimension */
    uint32_t dims;   /**< bit d: a tensor is cut along dimension d alone */
    bool irregular;
    cut_style styles[CUT_MAX_STYLES];
    size_t nstyles;
    size_t other; /**< tensors of styles beyond CUT_MAX_STYLES */
} cut_summary;

/** Adds one recognised tensor of a checkpoint that records the mesh `recorded` (ndim 0: none); zero `summary` first. */
void cut_summary_add(cut_summary *summary, const fc_mesh *recorded, const fc_tensor *tensor, const fc_cut *c);

/** "8 ranks, Shard(0)" or "8 ranks, 4 × 2 mesh (FSDP × TP)", into `buf`: from a recorded mesh if there is one. */
const char *cut_summary_layout(const cut_summary *summary, const fc_mesh *recorded, char *buf, size_t size);

#endif
