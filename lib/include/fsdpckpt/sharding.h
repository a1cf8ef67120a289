/*
 * Recognises from its chunks how a tensor is sharded: the grid that they form, and the mesh and placements that give
 * the ranks that wrote them. Also finds the mesh that all tensors of a checkpoint follow. Pure arithmetic on the
 * manifest, linear in the number of chunks except for one sort per dimension.
 */
#pragma once

#include "fsdpckpt/checkpoint.h"

FC_BEGIN_DECLS

/** How one tensor is sharded. */
typedef struct fc_sharding {
    bool grid;                   /**< whether the chunks form a grid that fills the tensor */
    int64_t counts[FC_MAX_DIMS]; /**< number of chunks along each dimension; all 1 without a grid */
    size_t copies;               /**< how often each box is stored: 1, or more with replicas */
    int nsharded;                /**< number of dimensions with more than one chunk */
    int dims[2];                 /**< the first two of these dimensions */
    bool placed;                 /**< whether the mesh and placements below give exactly the ranks of the chunks */
    int mesh_ndim;               /**< number of dimensions of the mesh, 1 or 2 */
    int64_t mesh[2];             /**< sizes of the mesh */
    fc_placement placements[2];  /**< one per mesh dimension */
} fc_sharding;

/** Memory that calls of fc_recognise_sharding share. Zero it before the first call. */
typedef struct fc_sharding_scratch {
    int64_t *axis[FC_MAX_DIMS]; /**< the sorted distinct offsets along each dimension, in `values` */
    int64_t *values;            /**< storage of `axis` */
    size_t capacity;            /**< entries that `values` has room for */
    uint32_t *cells;            /**< for each cell of the grid, row-major, the index of its chunk plus 1 */
    size_t ncells;              /**< entries that `cells` has room for */
} fc_sharding_scratch;

/** Frees the memory in `scratch`. */
void fc_sharding_scratch_free(fc_sharding_scratch *scratch);

/**
 * Recognises how `tensor`, which is not an object, is sharded. If the chunks form a grid, scratch->cells holds the
 * chunk of each cell until the next call. @return false when out of memory.
 */
bool fc_recognise_sharding(const fc_tensor *tensor, fc_sharding_scratch *scratch, fc_sharding *out);

/**
 * Finds the layout in which values of `source` are stored: the recorded mesh and placements, else the smallest mesh
 * (replicate, dp, tp) whose local boxes are the chunks of every tensor. If the chunks name ranks, a mesh is preferred
 * on which each chunk is the box of its rank. The layout is full if all tensors are whole, or if the chunks name no
 * rank, as in HDF5 files of other programs.
 * @param tensors    `count` values of the source, tensors and objects.
 * @param mesh       receives the mesh; ndim is 0 for a full layout.
 * @param placements receives mesh->ndim entries per value, in the arena; NULL for a full layout.
 * @return FC_EUNSUPPORTED naming the first tensor that follows no mesh.
 */
fc_code fc_recognise_layout(const fc_checkpoint *source, size_t count, const fc_tensor *const *tensors, fc_arena *arena,
                            fc_mesh *mesh, fc_placement **placements, fc_error *err);

/**
 * Tells whether the replicas of a mesh that fc_recognise_layout found are the stages of a pipeline: each layer is
 * stored by one of them as a whole. DTensor has no placement for that; each stage has a mesh of its own, without
 * "replicate".
 * @return the number of stages; 1: they are replicas, or there are none.
 */
int64_t fc_find_stages(const fc_tensor *const *tensors, size_t count, const fc_mesh *mesh);

/**
 * Finds a mesh of exactly `ranks` ranks on which each chunk of every value of `source` is the local box of its rank.
 * Equal chunks of several ranks are replicas.
 * @param placements receives mesh->ndim entries per value, in the arena.
 * @return as fc_recognise_layout.
 */
fc_code fc_recognise_layout_of(const fc_checkpoint *source, int64_t ranks, fc_arena *arena, fc_mesh *mesh,
                               fc_placement **placements, fc_error *err);

FC_END_DECLS
