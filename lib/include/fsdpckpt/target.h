/*
 * The target of a conversion: which values, under which names, cut how; and what each rank's file holds of it.
 * Pure arithmetic: made from a source's manifest, read by the writers of formats and by the engine.
 */
#ifndef FSDPCKPT_TARGET_H
#define FSDPCKPT_TARGET_H

#include "fsdpckpt/checkpoint.h"
#include "fsdpckpt/layout.h"

#ifdef __cplusplus
extern "C" {
#endif

/** A value of the target: what it is called there and which source value it comes from. */
typedef struct fc_target_tensor {
    const fc_tensor *source;
    const char *name;
    fc_path path;
    fc_dtype dtype;                 /**< of the target; differs from the source's under --dtype */
    const fc_placement *placements; /**< mesh->ndim entries; NULL when the mesh has no dimensions */
    uint32_t owner_offset;          /**< spreads replicated boxes over their holders, see fc_layout_owner */
} fc_target_tensor;

/** The whole target. Everything it points to is borrowed from the source or lives in the caller's arena. */
typedef struct fc_target {
    const fc_checkpoint *source;
    const fc_mesh *mesh; /**< ndim 0: one full file */
    const fc_target_tensor *tensors;
    size_t ntensors;
    int compress;            /**< deflate level 1 … 9; 0: stored as they are */
    bool self_contained;     /**< every rank stores all of its boxes (fc_format.self_contained) */
    bool flat_state;         /**< as FSDP1's LOCAL_STATE_DICT: flat parameters are cut, all else is whole everywhere */
    uint64_t max_file_bytes; /**< --max-shard-size: data bytes of a file of a full target at most; 0: one file */
} fc_target;

/** What to take from a source, and how to cut it. */
typedef struct fc_selection {
    const fc_mesh *mesh;              /**< NULL or ndim 0: one full file */
    const struct fc_tp_plan *tp_plan; /**< NULL: nothing is cut by TP */
    const char *const *include;       /**< globs over FQNs, NULL-terminated; NULL: everything */
    const char *const *exclude;       /**< globs over FQNs, NULL-terminated; NULL: nothing */
    const char *strip_prefix;         /**< and a dot that is left after it; NULL: none */
    const char *const *rename;        /**< then these, "s/regex/replacement/gi", NULL-terminated; NULL: none */
    bool keep_layout;                 /**< cut as the source is (fc_cut_layout); mesh and tp_plan are not looked at */
    bool cast;                        /**< floating-point tensors become `dtype` */
    fc_dtype dtype;
    int compress;            /**< deflate level 1 … 9; 0: no compression */
    bool self_contained;     /**< as in fc_target */
    bool flat_state;         /**< as in fc_target */
    uint64_t max_file_bytes; /**< as in fc_target */
} fc_selection;

/** Counts of what fc_target_new selected. */
typedef struct fc_selected {
    size_t tensors, objects;
    size_t left_out;       /**< by include and exclude */
    size_t tp_cut;         /**< tensors that TP cuts */
    size_t idle_rules;     /**< rules of a TP plan from a file that decide no tensor: typing errors, often */
    const char *idle_rule; /**< the pattern of the first of them, or NULL; the plan's */
} fc_selected;

/**
 * Selects values of `source`, renames them and gives each its placements.
 * @param arena owns what is made; it must outlive `out`.
 * @return FC_EUSAGE when nothing is left, a glob of `include`, the prefix or a rule of `rename` matches nothing, two
 * names become equal, or the mesh has a tp dimension above 1 and the plan cuts no tensor.
 */
fc_code fc_target_new(const fc_checkpoint *source, const fc_selection *selection, fc_arena *arena, fc_target *out,
                      fc_selected *counts, fc_error *err);

/** One value in one file of the target. */
typedef struct fc_target_item {
    uint32_t tensor;      /**< index into fc_target.tensors */
    uint32_t owner;       /**< rank whose file stores the box */
    bool owned;           /**< stored in this file: owner is this rank, or the target is self-contained. A writer may
                               clear it in fc_format.reserve for what it stores in its own way (an object, a view) */
    const int64_t *dims;  /**< 2 × ndim: offsets, then sizes; sizes may be 0 (empty shard) */
    uint64_t offset;      /**< out (fc_format.reserve): byte offset in the file of the first element; owned ones are
                               row-major and contiguous */
    const int64_t *chunk; /**< stored in compressed chunks of these sizes (ndim), see fc_target_chunk; the writer sets
                               `offset` to its place in the order of writing. NULL: contiguous */
    uint64_t crc64;       /**< out (the engine, before fc_format.seal): of the row-major bytes of the box, if owned */
    uint32_t crc32;       /**< the same as CRC-32, if fc_format.wants_crc32 */
} fc_target_item;

/** What one rank's file holds: its local box of every tensor; objects are in the file of rank 0 only, or in each if
 *  self-contained. */
typedef struct fc_target_file {
    uint32_t rank;
    fc_target_item *items; /**< in the order of fc_target.tensors */
    size_t nitems;
    const char *path; /**< out (fc_format.reserve): the file the engine writes into, owned by the writer */
} fc_target_file;

/**
 * What `rank` holds of one value, for walking a part without holding it. (Of objects only rank 0 holds any: the caller
 * leaves them out for the others.)
 * @param tensor index into wanted->tensors.
 * @param dims   2 × ndim numbers for out->dims.
 */
fc_code fc_target_item_of(const fc_target *target, uint32_t tensor, uint32_t rank, int64_t *dims, fc_target_item *out,
                          fc_error *err);

/** The part of `rank`. Its items live in `arena`; path and the items' offsets are left 0. */
fc_code fc_target_file_of(const fc_target *target, uint32_t rank, fc_arena *arena, fc_target_file *out, fc_error *err);

/** Bytes of a compressed chunk at most: what HDF5 programs cache unless told otherwise; and the least worth one. */
enum { FC_CHUNK_BYTES = 1 << 20, FC_CHUNK_LEAST = 16 << 10 };

/**
 * The sizes of the chunks of a box of `sizes`, into `chunk` (ndim entries): 1 … 1, c, whole … whole, at most
 * FC_CHUNK_BYTES each. So chunks are runs of the box's row-major order, and the elements that a chunk at the edge has
 * are its first ones. They depend on nothing but the arguments: what is written is the same on any machine.
 * @return false when the box is stored contiguously: no dimensions, or below FC_CHUNK_LEAST bytes.
 */
bool fc_target_chunk(int ndim, const int64_t *sizes, uint32_t element, int64_t *chunk);

/** Data bytes of an item. */
uint64_t fc_target_item_bytes(const fc_target *target, const fc_target_item *item);

/**
 * The data bytes that each rank's file stores, without making the parts: alike tensors are measured once.
 * @param loads out: one number a rank of wanted->mesh.
 * @return FC_ECORRUPT when the bytes of all ranks overflow, else as fc_local_box.
 */
fc_code fc_target_loads(const fc_target *target, uint64_t *loads, fc_error *err);

/** How many boxes the ranks' files store, each counted once, empty ones included; saturates. */
uint64_t fc_target_boxes(const fc_target *target);

#ifdef __cplusplus
}
#endif
#endif
