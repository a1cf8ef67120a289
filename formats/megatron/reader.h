/*
 * A checkpoint of the older `torch` format while it is opened, and its values (values.c).
 */
#pragma once

#include "megatron/grid.h"
#include "megatron/rules.h"

/** A value of one rank's file, under its name in the whole model. */
typedef struct fc_mg_value {
    const char *name;
    fc_path path;
    uint32_t file;
    bool shared;                /**< A parameter or its state: the values of all ranks form one tensor. */
    const char *refusal;        /**< Why the value is unreadable; NULL if it is readable. */
    const torch_object *object; /**< The object; NULL for a tensor. */
    const torch_extent *extent; /**< The extent of the tensor; NULL for an object. */
    fc_dtype dtype;
    int ndim;
    const int64_t *sizes;
    fc_mg_sharding sharding;
    size_t chunk;    /**< The chunk of the model (virtual pipeline stage) that it belongs to. */
    bool expert;     /**< It is sharded over grid.expert_tp ranks, and each expert-parallel rank has other experts. */
    int64_t grouped; /**< MG_ALL_EXPERTS: number of experts in the matrix; else 0. */
} fc_mg_value;

/** The number of layers with one prefix, e.g. "decoder.layers.", in each chunk of the model. */
typedef struct fc_mg_layers {
    const char *prefix;
    int64_t *counts; /**< One per chunk, in the order of the layers. */
} fc_mg_layers;

/** A checkpoint while it is opened. */
typedef struct fc_mg_reader {
    fc_checkpoint *checkpoint;
    fc_mg_grid grid;
    fc_mg_args args;
    size_t chunks; /**< Chunks of the model per stage; 1 without virtual pipeline parallelism. */
    fc_mg_layers *layers;
    size_t nlayers, layers_capacity;
    int64_t local_experts; /**< Experts per layer that each rank has; 0 until known. */
    uint32_t experts_file; /**< The file that determined local_experts. */
    fc_mg_value *values;   /**< malloc'ed */
    size_t nvalues, capacity;
    torch_file f;              /**< The file that is being read. */
    uint32_t rank;             /**< Its number. */
    const char *unnamed;       /**< Why optimizer states keep their numbers as names; NULL if they get names. */
    uint32_t unnamed_file;     /**< The file for which that is so. */
    const char *undistributed; /**< Why the distributed optimizer's states are left out; NULL if they are read. */
    const char *differing;     /**< The first tensor whose copies differ between ranks, or NULL. */
    size_t ndiffering;         /**< Number of such tensors. */
    fc_progress *progress;     /**< may be NULL */
    fc_error *err;
} fc_mg_reader;

static inline fc_code fc_mg_no_memory(const fc_mg_reader *r) {
    return fc_no_memory(r->err, r->checkpoint->path);
}

/** Returns the path of a file, for messages. */
static inline const char *fc_mg_file(const fc_mg_reader *r, uint32_t file) {
    return r->checkpoint->files[file].path;
}

/** Lists the leaves of `v`, whose path is `prefix`. @param leaves the caller frees leaves->items. */
fc_code fc_mg_flatten(fc_mg_reader *r, const fc_path *prefix, fc_pv v, torch_leaves *leaves);

/** Adds the leaves of `v`, whose path is `prefix`. */
fc_code fc_mg_add(fc_mg_reader *r, const fc_path *prefix, fc_pv v);

/** Adds `v` as one value. @return NULL, with a message, on failure. */
fc_mg_value *fc_mg_add_leaf(fc_mg_reader *r, const char *name, const fc_path *path, fc_pv v);
