/*
 * Makes a target from the manifest of a source: selects values, renames them, gives each its placements, and computes
 * the content of each shard file. Pure arithmetic.
 */
#pragma once

#include "fsdpckpt/format.h"
#include "fsdpckpt/layout.h"
#include "fsdpckpt/target.h"

FC_BEGIN_DECLS

/** The dtype of the floating-point tensors of the source that match a glob. */
typedef struct fc_dtype_rule {
    const char *glob; /**< over FQNs */
    bool keep;        /**< they keep their dtype; `dtype` is ignored */
    fc_dtype dtype;
} fc_dtype_rule;

/** Which values of a source to take, and how to shard them. */
typedef struct fc_selection {
    const fc_mesh *mesh;              /**< NULL or ndim 0: a full target */
    const struct fc_tp_plan *tp_plan; /**< NULL: nothing is sharded by TP */
    const char *const *include;       /**< globs over FQNs, NULL-terminated; NULL: everything */
    const char *const *exclude;       /**< globs over FQNs, NULL-terminated; NULL: nothing */
    const char *strip_prefix;         /**< removed from names, with a dot that follows it; NULL: none */
    const char *const *rename; /**< applied after strip_prefix: "s/regex/replacement/gi", NULL-terminated; NULL: none */
    bool keep_layout;          /**< keep the layout of the source (fc_recognise_layout); mesh and tp_plan are ignored */
    bool may_be_empty;         /**< a source without values gives a target without values */
    /** For each value of the source, which holder stores its replicated boxes (fc_target_tensor.owner_offset). NULL:
     *  fc_spread_owners chooses. */
    const uint32_t *owner_offsets;
    bool cast; /**< floating-point tensors become `dtype` */
    fc_dtype dtype;
    const fc_dtype_rule *dtype_rules; /**< they override `cast`; the last one that matches decides */
    size_t ndtype_rules;
    int compress;    /**< deflate level 1 … 9; 0: no compression */
    bool flat_state; /**< as in fc_target */
    /** With flat_state: returns whether a tensor is sharded over the ranks; every other one is whole in each file. */
    bool (*is_sharded)(const fc_checkpoint *source, const fc_tensor *tensor);
    uint64_t max_file_bytes;        /**< as in fc_target */
    const fc_format_target *traits; /**< what the format says of its targets; NULL: one section, replicas stored once */
    /** Sets the order, `dtype` and `file` of the values after everything else was chosen. NULL: they stay. */
    fc_code (*arrange)(void *context, fc_target_tensor *tensors, size_t count, fc_error *err);
    void *arrange_context;
} fc_selection;

/** How many values fc_target_new selected. */
typedef struct fc_selected {
    size_t tensors, objects;
    size_t left_out;       /**< number of values that include and exclude left out */
    size_t tp_sharded;     /**< number of tensors that TP shards */
    size_t idle_rules;     /**< number of rules of a plan file that match no tensor, often misspelt */
    const char *idle_rule; /**< pattern of the first such rule, owned by the plan; or NULL */
} fc_selected;

/** @return FC_EUSAGE for a glob (`include` is NULL-terminated, or NULL) that matches no name, often misspelt. */
fc_code fc_check_includes(const fc_checkpoint *source, const char *const *include, fc_error *err);

/**
 * Finds a glob of `exclude` (NULL-terminated, or NULL) that matches no name, often misspelt.
 * @param out receives a line about the first one, in `arena`; NULL: there is none.
 */
fc_code fc_find_idle_exclude(const fc_checkpoint *source, const char *const *exclude, fc_arena *arena, const char **out,
                             fc_error *err);

/**
 * Lists for people what include and exclude leave out and is not the optimizer's, such as "lm_head, step".
 * @param out receives the list, in `arena`; "": nothing.
 */
fc_code fc_list_left_out(const fc_checkpoint *source, const fc_selection *selection, fc_arena *arena, const char **out,
                         fc_error *err);

/**
 * Gives the values of `source` the names and shapes that a format wants (fc_format_target.adapt). fc_convert does it.
 * @param selection of what it says about values, everything is done then, and removed from it.
 * @param left_out  adds the number of values that the selection leaves out.
 * @param out       for fc_checkpoint_close, before `source` is closed; NULL: the format wants no others.
 */
fc_code fc_target_adapt(const fc_checkpoint *source, const fc_format *format, fc_selection *selection, size_t *left_out,
                        fc_checkpoint **out, fc_error *err);

/**
 * Selects values of `source`, renames them and gives each its placements.
 * @param arena owns the result, and must outlive `out`.
 * @return FC_EUSAGE if nothing is selected; if a glob of `include`, the prefix, a rule of `rename` or one of
 * `dtype_rules` matches nothing; if two names become equal; or if the mesh has a tp dimension above 1 and the plan
 * shards no tensor. FC_EUNSUPPORTED if a cast would change quantized codes or their scales.
 */
fc_code fc_target_new(const fc_checkpoint *source, const fc_selection *selection, fc_arena *arena, fc_target *out,
                      fc_selected *counts, fc_error *err);

/**
 * Computes the item of one value in the file of `rank`, so that a file can be listed without storing all of its items.
 * Only rank 0 has objects; the caller skips them for other ranks.
 * @param tensor index into target->tensors.
 * @param dims   room for the 2 × ndim numbers of out->dims.
 */
fc_code fc_target_item_of(const fc_target *target, uint32_t tensor, uint32_t rank, int64_t *dims, fc_target_item *out,
                          fc_error *err);

/** Returns the size of an item's data in bytes. */
uint64_t fc_target_item_bytes(const fc_target *target, const fc_target_item *item);

/**
 * Computes the data bytes of each shard file without making the items. Tensors that are alike are measured once.
 * @param loads receives one number per rank of target->mesh.
 * @return FC_ECORRUPT if the bytes of all ranks overflow, else like fc_local_box.
 */
fc_code fc_target_loads(const fc_target *target, uint64_t *loads, fc_error *err);

/** Returns how many boxes the shard files store, each counted once, including empty ones. Saturates. */
uint64_t fc_target_boxes(const fc_target *target);

FC_END_DECLS
