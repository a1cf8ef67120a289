/*
 * The target of a conversion: its values, their names and placements, and the content of each target file. Pure
 * arithmetic: it is made from the manifest of a source, and read by the writers of formats and by the engine.
 */
#pragma once

#include "fsdpckpt/checkpoint.h"
#include "fsdpckpt/mesh.h"

FC_BEGIN_DECLS

/** A value of the target, and the value of the source that it comes from. */
typedef struct fc_target_tensor {
    const char *name;
    const fc_tensor *source;
    fc_path path;
    fc_dtype dtype;                 /**< the type in the target, which differs from the source's after a cast */
    const fc_placement *placements; /**< mesh->ndim entries; NULL if the mesh has no dimensions */
    uint32_t owner_offset;          /**< which holder stores replicated boxes, see fc_replica_owner */
    uint32_t file;                  /**< values of two numbers are in two files of a full target of limited size */
    uint32_t section;               /**< ascending in fc_target.tensors, see fc_format_target.set_sections */
} fc_target_tensor;

/** The whole target. Everything that it points to belongs to the source or to the caller's arena. */
typedef struct fc_target {
    const fc_checkpoint *source;
    const fc_mesh *mesh; /**< ndim 0: a full target */
    const fc_target_tensor *tensors;
    size_t ntensors;
    int compress;        /**< deflate level 1 … 9; 0: no compression */
    bool self_contained; /**< each rank stores all of its boxes (fc_format_target.self_contained) */
    bool flat_state; /**< as in LOCAL_STATE_DICT of FSDP1: flat parameters are sharded, all other values are whole in
                        each file */
    uint64_t max_file_bytes; /**< most data bytes per file of a full target; 0: one file */
} fc_target;

/** One value in one file of the target. */
typedef struct fc_target_item {
    uint32_t tensor; /**< index into fc_target.tensors */
    uint32_t owner;  /**< the rank whose file stores the box */
    bool owned; /**< stored in this file: owner is this rank, or the target is self-contained. A writer may clear it in
                   fc_format_writer.reserve for what it stores in its own way (an object, a view) */
    const int64_t *dims; /**< 2 × ndim: offsets, then sizes; sizes may be 0 (empty shard) */
    uint64_t offset; /**< out (fc_format_writer.reserve): byte offset of the first element in the file; owned items are
                        row-major and contiguous */
    const int64_t *chunk; /**< stored in compressed chunks of these sizes (ndim), see fc_target_chunk; the writer sets
                               `offset` to its place in the order of writing. NULL: contiguous */
    uint64_t crc64; /**< out (the engine, before fc_format_writer.finish_item and finish_file): CRC-64 of the row-major
                       bytes of the box, if owned */
    uint32_t crc32; /**< their CRC-32, if fc_format_target.wants_crc32 */
} fc_target_item;

/**
 * The content of the file of one rank: its local box of every tensor. Objects are in the file of rank 0 only, or in
 * each file if the target is self-contained.
 */
typedef struct fc_target_file {
    uint32_t rank;
    fc_target_item *items; /**< in the order of fc_target.tensors */
    size_t nitems;
    const char *path; /**< out (fc_format_writer.reserve): the file that the engine writes to; owned by the writer */
} fc_target_file;

FC_END_DECLS
