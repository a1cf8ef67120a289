/*
 * The reader of checkpoints with one file per rank: sets.c finds the files, shard.c (layout.c for our own) finds the
 * box of a rank's leaf, merge.c merges the leaves, ranks.c goes through the files.
 */
#ifndef FSDPCKPT_FORMATS_PT_RANKS_H
#define FSDPCKPT_FORMATS_PT_RANKS_H

#ifndef FSDPCKPT_PRIVATE
#error "this header is private to fsdpckpt: include <fsdpckpt/...> instead"
#endif

#include "torch/torch_file.h"

/** A set of files, one per rank: "model_world_size_8_rank_0.pt" and those of the other ranks. */
typedef struct pt_set {
    const char *name;        /* "model" */
    const char *head, *tail; /* of the files' names, around the rank: "model_world_size_8_rank_" and ".pt" */
    int64_t ranks;
    int width; /* of ranks that are padded with zeros, rank_00; else 1 */
} pt_set;

/** The parts of a file's name, in the name itself. */
typedef struct pt_rank_name {
    size_t name, head; /* so many bytes from the start */
    const char *tail;
    int64_t ranks; /* 0: the name does not say how many */
    int64_t rank;
    int width; /* as in pt_set */
} pt_rank_name;

/** Whether a file is called like one of a set: [<name>][_world_size_<N>]_rank_<r>.pt, or "-rank<r>.bin" and the like.
 */
bool fc_pt_parse_rank_name(const char *file, pt_rank_name *out);

/** Whether the directory has such a file. */
bool fc_pt_has_sets(const char *directory, fc_error *err);

/** Finds the sets of a directory, "model" and "optim" first. Where names do not say it, the number of ranks follows
 * from the highest. @param out in `arena`. */
fc_code fc_pt_find_sets(const char *directory, fc_arena *arena, pt_set **out, size_t *count, fc_error *err);

/** The shard of a tensor that a rank holds. */
typedef struct pt_shard {
    int ndim;
    int64_t shape[FC_MAX_DIMS];
    int64_t offsets[FC_MAX_DIMS], sizes[FC_MAX_DIMS];
    fc_pv local;     /* the tensor that holds it */
    int64_t padding; /* rows at its end that are none of the whole's */
    fc_mesh mesh;    /* ndim 0: not known */
    fc_placement placements[FC_MAX_MESH_DIMS];
} pt_shard;

/** Reads this rank's shard of the DTensor `v`. `out->local` is FC_PV_ABSENT if the rank holds none. */
fc_code fc_pt_dtensor_shard(const torch_file *f, fc_pv v, pt_shard *out, fc_error *err);

/** Whether its shape and placements are valid for fc_local_box. */
bool fc_pt_shard_sane(const pt_shard *shard);

/** The number of shards that the ShardedTensor `v` has on this rank, and one of them. */
size_t fc_pt_sharded_count(const torch_file *f, fc_pv v);
fc_code fc_pt_sharded_shard(const torch_file *f, fc_pv v, size_t index, pt_shard *out, fc_error *err);

/** The layout record of a rank's file that this program wrote. */
typedef struct pt_layout {
    struct json_t *root; /* NULL: it has none */
    fc_mesh mesh;
} pt_layout;

fc_code fc_pt_layout_load(torch_file *f, int64_t rank, int64_t ranks, pt_layout *out, fc_error *err);
void fc_pt_layout_free(pt_layout *layout);
/** Finds the shard of the plain tensor `name`. Returns FC_OK with ndim -1 if the record does not name it. */
fc_code fc_pt_layout_shard(const pt_layout *layout, const torch_file *f, int64_t rank, const char *name, fc_pv v,
                           pt_shard *out, fc_error *err);

/** The manifest of the sets in `directory`; with `only`, of the set of that name alone, without a prefix. */
fc_code fc_pt_open_ranks(fc_checkpoint *checkpoint, const char *directory, const char *only,
                         const fc_open_options *options, fc_error *err);

#endif
