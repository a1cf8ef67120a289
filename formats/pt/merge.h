/*
 * The table in which the values of several ranks' files are merged: merge.c adds leaves to it, flat.c knows those of
 * FSDP1's flat parameters, ranks.c goes through the files and makes the manifest.
 */
#ifndef FSDPCKPT_FORMATS_PT_MERGE_H
#define FSDPCKPT_FORMATS_PT_MERGE_H

#ifndef FSDPCKPT_PRIVATE
#error "this header is private to fsdpckpt: include <fsdpckpt/...> instead"
#endif

#include "pt/ranks.h"

/* A value of the whole. */
typedef struct pt_value {
    const char *name;
    fc_path path;
    const torch_object *object; /* NULL: a tensor */
    bool plain;                 /* every rank has all of it */
    bool view;                  /* of a flat parameter, which has its bytes: no value of its own */
    fc_dtype dtype;
    int ndim;
    int64_t *shape;
    fc_chunk *chunks; /* malloc'ed; each a box of its own */
    size_t nchunks, capacity;
    uint32_t file; /* of an object */
    fc_mesh mesh;
    fc_placement *placements;
    int64_t parts; /* ranks merged so far along the dimension that the TP plan cuts; 0: the plan does not cut it */
} pt_value;

/* How a flat parameter is cut: what an optimizer has of it is cut likewise, with padding at the end. */
typedef struct pt_flat {
    int64_t numel, shard; /* of all, of each rank with its padding */
    int64_t ranks;        /* of the set */
    int64_t *offsets;     /* in the arena: of each rank's shard; -1: it has none */
} pt_flat;

/* A slot of the table of all boxes, which finds boxes that several ranks have. */
typedef struct pt_box {
    uint32_t value, chunk; /* a chunk of values[value] */
    bool used;
} pt_box;

typedef struct pt_merger {
    fc_checkpoint *checkpoint;
    const char *directory;
    fc_arena *scratch; /* of the current file */
    pt_value *values;
    size_t count, capacity;
    uint32_t *slots; /* hash table: name → index + 1 */
    size_t nslots;
    pt_box *boxes;       /* hash table of the boxes of all values; malloc'ed */
    size_t nboxes;       /* slots */
    size_t nchunks;      /* of all values */
    const torch_file *f; /* the current one */
    int64_t rank;
    const pt_layout *layout; /* of the current file */
    uint64_t *flat;          /* file offsets of the storages of the file's flat parameters; malloc'ed */
    size_t nflat, flat_capacity;
    pt_flat *cuts; /* the flat parameters of the last set that has some, in its order; malloc'ed */
    size_t ncuts, cuts_capacity;
    const struct fc_tp_plan *tp_plan; /* of plain tensors; or NULL */
    size_t joined;                    /* tensors that it joined */
    bool numbered;                    /* optimizer state in the current file may be of flat parameters */
    bool numbers_fit;                 /* ... and uses the same numbers */
    fc_error *err;
} pt_merger;

/**
 * Finds the flat parameters of the current file. With use_orig_params, FSDP1 stores next to each the local part of its
 * parameters: one-dimensional views of the same storage.
 */
fc_code fc_pt_find_flat(pt_merger *m, const torch_leaves *leaves);

/** Notes how the flat parameters of a file are cut, if it has some. @param ranks of the set */
fc_code fc_pt_note_cuts(pt_merger *m, const torch_leaves *leaves, int64_t ranks);
/** Whether this file holds an optimizer's state_dict() of just these flat parameters, in one group. */
void fc_pt_match_numbers(pt_merger *m, const torch_leaves *leaves);
/** Finds the shard of a leaf of such a file. `*is` is false for a leaf that is cut in another way. The local tensor is
 *  longer than the shard by the padding. */
fc_code fc_pt_state_shard(const pt_merger *m, const torch_leaf *leaf, pt_shard *out, bool *is, fc_error *err);

/** After the last file of a set of `ranks`, whose values are those from `first` on: every rank must have had a part of
 *  what the plan says is cut. */
fc_code fc_pt_check_parts(pt_merger *m, size_t first, int64_t ranks);

/** Adds a leaf of the current file. Its name may die with m->scratch. */
fc_code fc_pt_merge_leaf(pt_merger *m, const torch_leaf *leaf);

#endif
