/*
 * How a tensor is cut, recognised from its chunks: the grid they form, and which placements on which mesh give the
 * rank order they were written in. Pure arithmetic on the manifest, linear in the chunks but for one sort an axis.
 */
#ifndef FSDPCKPT_CLI_CUT_H
#define FSDPCKPT_CLI_CUT_H

#include "fsdpckpt/checkpoint.h"

/** How one tensor is cut. */
typedef struct cut {
    bool grid;                   /**< the chunks form a grid that fills the tensor; false: irregular or none */
    int64_t counts[FC_MAX_DIMS]; /**< pieces along each dimension (1 where it is not cut; all 1 when not a grid) */
    size_t copies;               /**< how often each box is stored: 1, or more for replicas */
    int ncut;                    /**< dimensions with more than one piece */
    int dims[2];                 /**< the first two of them */
    bool placed;                 /**< the placements below give exactly this rank order */
    int mesh_ndim;               /**< 1 or 2 */
    int64_t mesh[2];
    fc_placement placements[2];
} cut;

/** Memory that cut_recognise uses again and again; zero it first. */
typedef struct cut_scratch {
    int64_t *axis[FC_MAX_DIMS]; /**< sorted distinct offsets of each dimension, within `values` */
    int64_t *values;
    size_t capacity;
    uint32_t *cells; /**< chunk + 1 of each cell of the grid, row-major */
    size_t ncells;
} cut_scratch;

void cut_scratch_free(cut_scratch *scratch);

/**
 * Recognises how `tensor` (not an object) is cut. With a grid, scratch->cells names the chunk of each cell until the
 * next call. @return false when out of memory.
 */
bool cut_recognise(const fc_tensor *tensor, cut_scratch *scratch, cut *out);

/** "8×1", "2×4 of 3 copies", "whole", "empty", "irregular (7 pieces)", into `buf`. @return buf. */
const char *cut_describe(const fc_tensor *tensor, const cut *c, char *buf, size_t size);

enum { CUT_MAX_STYLES = 12 };

/** One way of cutting and how many tensors have it. */
typedef struct cut_style {
    char text[96];
    size_t tensors;
} cut_style;

/** What all tensors have in common. */
typedef struct cut_summary {
    int64_t ranks;   /**< highest rank that wrote a chunk, plus one; 0 unknown */
    int64_t mesh[2]; /**< largest 2D mesh seen, else 0 */
    int64_t pieces;  /**< most pieces of a tensor cut along one dimension */
    uint32_t dims;   /**< bit d: a tensor is cut along dimension d alone */
    bool irregular;
    cut_style styles[CUT_MAX_STYLES];
    size_t nstyles;
    size_t other; /**< tensors of styles beyond CUT_MAX_STYLES */
} cut_summary;

/** Adds one recognised tensor of a checkpoint that records the mesh `recorded` (ndim 0: none); zero `summary` first. */
void cut_summary_add(cut_summary *summary, const fc_mesh *recorded, const fc_tensor *tensor, const cut *c);

/** "8 ranks, Shard(0)" or "8 ranks, 4 × 2 mesh (FSDP × TP)", into `buf`: from a recorded mesh if there is one. */
const char *cut_summary_layout(const cut_summary *summary, const fc_mesh *recorded, char *buf, size_t size);

#endif
