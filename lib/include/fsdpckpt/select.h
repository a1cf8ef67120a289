/*
 * From a source's manifest to a target: which values are selected, under which names, cut how, and what each rank's
 * file holds. Pure arithmetic.
 */
#ifndef FSDPCKPT_SELECT_H
#define FSDPCKPT_SELECT_H

#include "fsdpckpt/layout.h"
#include "fsdpckpt/target.h"

#ifdef __cplusplus
extern "C" {
#endif

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
    int compress;        /**< deflate level 1 … 9; 0: no compression */
    bool self_contained; /**< as in fc_target */
    bool flat_state;     /**< as in fc_target */
    /** With flat_state: returns whether a tensor is cut over the ranks; every other one is whole in each file. */
    bool (*is_cut)(const fc_checkpoint *source, const fc_tensor *tensor);
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
