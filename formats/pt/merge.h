/*
 * The table in which the values of several ranks' files are merged: merge.c adds leaves to it, flat.c handles FSDP1's
 * flat parameters, and ranks.c reads the files and makes the manifest.
 */
#pragma once

#include "base/name_table.h"
#include "fsdpckpt/flat_param.h"
#include "pt/ranks.h"

/* A value of the merged checkpoint. */
typedef struct fc_pt_value {
    const char *name;
    fc_path path;
    const torch_object *object; /* NULL: a tensor */
    const char *refusal;        /* why the value is unreadable; NULL: it is readable */
    fc_hint hint;               /* what makes it readable, or FC_HINT_NONE */
    bool plain;                 /* whether every rank has the whole value */
    int64_t copies;             /* number of ranks whose files have it, if it is plain */
    bool view; /* whether it is a view of a flat parameter, which contains its bytes, so it is not a value of its own */
    fc_dtype dtype;
    int ndim;
    int64_t *shape;
    fc_chunk *chunks; /* malloc'ed; one per distinct box */
    size_t nchunks, capacity;
    uint32_t file; /* index of an object's file */
    fc_mesh mesh;
    fc_placement *placements;
    int64_t shards; /* number of ranks merged so far along the dimension that the TP plan shards; 0: the plan does not
                      shard it */
} fc_pt_value;

/* How a flat parameter is sharded. Its optimizer state is sharded in the same way, with padding at the end. */
typedef struct fc_pt_flat {
    int64_t numel, shard; /* elements of the whole, and of each rank's shard with padding */
    int64_t ranks;        /* number of ranks of the set */
    int64_t *offsets;     /* in the arena: per rank, offset of its shard in elements; -1: none */
    bool pieces; /* with use_orig_params: one parameter; each rank has any number of elements, which follow those of
                    the lower ranks */
} fc_pt_flat;

typedef struct fc_pt_builder {
    fc_checkpoint *checkpoint;
    const char *directory;
    fc_arena *scratch; /* memory for the current file */
    fc_pt_value *values;
    size_t count, capacity;
    fc_arena *tables;
    fc_name_table *names; /* in `tables`; from names to indexes */
    fc_name_table *boxes; /* in `tables`; the boxes that chunks have, each with its value as the parent */
    const torch_file *f;  /* the current file */
    int64_t rank;
    const fc_pt_layout *layout; /* layout record of the current file */
    const fc_pt_set *set;       /* the set of the current file */
    size_t item_name;      /* bytes of its name and a dot, with which the names of its leaves begin; 0: they do not */
    fc_flat_layout *units; /* what the numbers of an optimizer stand for, if it follows from the model; else NULL */
    size_t nunits;
    const char *optimizer;           /* the set of this optimizer, or "" if its names do not begin with it */
    uint32_t optimizer_file;         /* index of its first file */
    struct fc_pt_sharding *sharding; /* metadata.pkl of torch_checkpointing, or NULL */
    uint64_t *flat;                  /* malloc'ed: file offsets of the storages of the file's flat parameters */
    size_t nflat, flat_capacity;
    fc_pt_flat *flats; /* malloc'ed: the flat parameters of the last set with flat parameters, in its order */
    size_t nflats, flats_capacity;
    const struct fc_tp_plan *tp_plan; /* the plan for plain tensors, or NULL */
    bool numbered;                    /* whether optimizer state in the current file may belong to flat parameters */
    size_t joined;                    /* number of tensors that tp_plan joined */
    bool numbers_fit;                 /* whether it also uses the same numbers */
    fc_error *err;
} fc_pt_builder;

/**
 * Finds the flat parameters of the current file. With use_orig_params, FSDP1 stores next to each the local shard of its
 * parameters: one-dimensional views of the same storage.
 */
fc_code fc_pt_find_flat(fc_pt_builder *m, const torch_leaves *leaves);

/** Records how the flat parameters of a file are sharded, if it has any. @param ranks of the set */
fc_code fc_pt_note_flats(fc_pt_builder *m, const torch_leaves *leaves, int64_t ranks);
/** Adds a flat parameter of which no rank has a shard yet. */
fc_code fc_pt_add_flat(fc_pt_builder *m, int64_t ranks, fc_pt_flat **out);
/** @return the number of groups of the optimizers in this file. @param count receives the parameters of the last one */
size_t fc_pt_count_numbers(const fc_pt_builder *m, const torch_leaves *leaves, size_t *count);
/** Finds out whether this file is an optimizer's state_dict() of exactly these flat parameters, in one group. */
void fc_pt_match_numbers(fc_pt_builder *m, const torch_leaves *leaves);
/** Finds the shard of a leaf of such a file. `*is` is false for a leaf that is sharded differently. The local tensor is
 *  longer than the shard by the padding. */
fc_code fc_pt_state_shard(const fc_pt_builder *m, const torch_leaf *leaf, fc_pt_shard *out, bool *is, fc_error *err);

/** If the current file is an optimizer of FSDP1's flat parameters, and the model's files, which were read before, have
 *  the parameters, finds out which parameters are in which flat one. (units.c) */
fc_code fc_pt_infer_units(fc_pt_builder *m, const torch_leaves *leaves);
/** Call it after the last file of a set, whose values start at `first`. If the ranks' pieces of any parameter do not
 * add up to it, the numbers of this optimizer stand for something else, and all of its state is unreadable. */
fc_code fc_pt_check_pieces(const fc_pt_builder *m, size_t first);
/** @return the layout of the flat parameter whose state a value is, or NULL for any other value. */
const fc_flat_layout *fc_pt_unit_of(const fc_pt_builder *m, const fc_pt_value *v);
/** Divides the state `flat` of a flat parameter. @param out receives one tensor for each of unit->params */
fc_code fc_pt_divide_state(const fc_pt_builder *m, const fc_pt_value *v, const fc_tensor *flat,
                           const fc_flat_layout *unit, fc_tensor *out);
/** @return whether it is the path of the list of numbers in the group of that optimizer, and the list of names for it.
 */
bool fc_pt_is_group(const fc_pt_builder *m, const fc_path *path);
fc_code fc_pt_name_group(const fc_pt_builder *m, const torch_object **out);

/** Call it after the last file of a set of `ranks`, whose values start at `first`. Checks that every rank had a shard
 * of each tensor that is sharded according to the plan. */
fc_code fc_pt_check_shards(fc_pt_builder *m, size_t first, int64_t ranks);

/** Adds a leaf of the current file. Its name may be in m->scratch. If the ranks' values cannot be merged, the value is
 *  unreadable, and the others are not affected. */
fc_code fc_pt_merge_leaf(fc_pt_builder *m, const torch_leaf *leaf);
