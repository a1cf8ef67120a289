/*
 * How tensors are cut, recognised from their chunks: the grid they form, which placements on which mesh give the rank
 * order they were written in, and the mesh that all of them follow. Pure arithmetic on the manifest, linear in the
 * chunks but for one sort an axis.
 */
#ifndef FSDPCKPT_CUT_H
#define FSDPCKPT_CUT_H

#include "fsdpckpt/checkpoint.h"

#ifdef __cplusplus
extern "C" {
#endif

/** How one tensor is cut. */
typedef struct fc_cut {
    bool grid;                   /**< the chunks form a grid that fills the tensor; false: irregular or none */
    int64_t counts[FC_MAX_DIMS]; /**< pieces along each dimension (1 where it is not cut; all 1 when not a grid) */
    size_t copies;               /**< how often each box is stored: 1, or more for replicas */
    int ncut;                    /**< dimensions with more than one piece */
    int dims[2];                 /**< the first two of them */
    bool placed;                 /**< the placements below give exactly this rank order */
    int mesh_ndim;               /**< 1 or 2 */
    int64_t mesh[2];
    fc_placement placements[2];
} fc_cut;

/** Memory that fc_cut_recognise uses again and again; zero it first. */
typedef struct fc_cut_scratch {
    int64_t *axis[FC_MAX_DIMS]; /**< sorted distinct offsets of each dimension, within `values` */
    int64_t *values;
    size_t capacity;
    uint32_t *cells; /**< chunk + 1 of each cell of the grid, row-major */
    size_t ncells;
} fc_cut_scratch;

void fc_cut_scratch_free(fc_cut_scratch *scratch);

/**
 * Recognises how `tensor` (not an object) is cut. With a grid, scratch->cells names the chunk of each cell until the
 * next call. @return false when out of memory.
 */
bool fc_cut_recognise(const fc_tensor *tensor, fc_cut_scratch *scratch, fc_cut *out);

/**
 * The layout of values of `source` as they are stored: the recorded mesh and placements, or else the smallest mesh
 * (replicate, dp, tp) whose local boxes are the chunks of every tensor. Where the chunks name ranks, each is the box of
 * its rank if any such mesh can be had. A source whose tensors are whole, or whose chunks name no rank (as those of
 * other programs' HDF5 files), is full.
 * @param tensors    `count` values of the source, tensors and objects.
 * @param mesh       receives the mesh; ndim 0: full.
 * @param placements receives mesh->ndim entries a value, in the arena; NULL when full.
 * @return FC_EUNSUPPORTED naming the first tensor that follows no mesh.
 */
fc_code fc_cut_layout(const fc_checkpoint *source, size_t count, const fc_tensor *const *tensors, fc_arena *arena,
                      fc_mesh *mesh, fc_placement **placements, fc_error *err);

#ifdef __cplusplus
}
#endif
#endif
