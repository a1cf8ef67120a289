/*
 * Gathers DTensors along one mesh dimension, for redistribute.c.
 */
#pragma once

#include "fsdpckpt/gather/dtensor_data.h"

/** A DTensor between two steps. `local` is the caller's tensor at first; after a gather, its memory is owned. */
typedef struct fc_tensor_state {
    const fc_device_mesh *mesh;
    int ndim;
    const int64_t *shape;
    fc_placement placements[FC_MAX_MESH_DIMS];
    fc_array local;
    fc_stream *stream;
} fc_tensor_state;

/**
 * Replicates tensors of one mesh along its dimension `m`, together: one agreement of the ranks, one group of
 * collectives, one wait.
 * @return FC_ECORRUPT on all ranks if they disagree about a shape.
 */
fc_code fc_gather_dim(fc_tensor_state *const *tensors, size_t count, int m, fc_error *err);
