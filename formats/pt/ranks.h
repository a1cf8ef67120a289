/*
 * The reader of checkpoints with one file per rank: sets.c and numbered.c find the files, shard.c (layout.c for our own
 * files, sharding.c for those of torch_checkpointing) finds the box of a rank's leaf, merge.c merges the leaves, and
 * ranks.c reads the files.
 */
#pragma once

#include "torch/file/file.h"

#include <limits.h>

/** A set of files, one per rank: "model_world_size_8_rank_0.pt" and those of the other ranks. */
typedef struct fc_pt_set {
    const char *name;        /* "model" */
    const char *head, *tail; /* the file names before and after the rank: "model_world_size_8_rank_" and ".pt" */
    int64_t ranks;
    int width;          /* digits of a rank that is padded with zeros, as in rank_00; else 1 */
    bool counted;       /* the names contain the number of ranks */
    bool alone;         /* a single file of any name */
    bool numbered;      /* the names have nothing but the number: model_0.pt */
    bool first;         /* of a numbered set: whether there is a file of rank 0 */
    size_t found;       /* of a numbered set: number of files */
    const char **files; /* the names of `nfiles` files; NULL: of each rank, `head`, the rank and `tail` */
    int64_t *owners;    /* the ranks of `files` */
    size_t nfiles;
    bool listed; /* the metadata of torch_checkpointing has an item of this name */
} fc_pt_set;

/** Returns the number of files of a set, and the rank of one of them. */
static inline size_t fc_pt_set_files(const fc_pt_set *set) {
    return set->files ? set->nfiles : (size_t)set->ranks;
}

static inline int64_t fc_pt_set_owner(const fc_pt_set *set, size_t index) {
    return set->files ? set->owners[index] : (int64_t)index;
}

/** The parts of a file name, as positions in the name. */
typedef struct fc_pt_rank_name {
    size_t name, head; /* lengths of the set's name and of the part before the rank, in bytes */
    const char *tail;
    int64_t ranks; /* 0: not in the name */
    int64_t rank;
    int width; /* as in fc_pt_set */
} fc_pt_rank_name;

/**
 * Parses the name of a rank's file: [<name>][_world_size_<N>]_rank_<r>.pt, "-rank<r>.bin" and similar names. @return
 * false for other names.
 */
bool fc_pt_parse_rank_name(const char *file, fc_pt_rank_name *out);

/** Parses a name with nothing but a number: <name>_<r>.pt, -<r>.safetensors, .<r>.json. @return false for other names.
 */
bool fc_pt_parse_numbered(const char *file, fc_pt_rank_name *out);

/** @return whether the name of a set says that it has tensors of the model or the optimizer. */
bool fc_pt_has_tensors(const char *set);

/** Writes the group of a file: its name with "*" for the rank and for the part of the training, such as "model". Files
 *  of one group are one checkpoint. */
void fc_pt_group_of(const char *file, const fc_pt_rank_name *name, char group[NAME_MAX + 1]);

/** Lists the groups of such files in a directory: fc_format_reader.list. */
fc_code fc_pt_list_sets(const char *directory, fc_listing *out, fc_error *err);

/** Lists the numbered files that are one checkpoint, and those that out->wanted names. (numbered.c) */
fc_code fc_pt_list_numbered(const char *directory, fc_listing *out, fc_error *err);

/** Finds the numbered sets of a group, which is a list of patterns such as "model_*.pt,optimizer_*.pt". @param group
 *  NULL: all of the directory */
fc_code fc_pt_find_numbered(const char *directory, const char *group, fc_arena *arena, fc_pt_set **out, size_t *count,
                            fc_error *err);

/**
 * Finds the sets of a group (fc_listed.name), "model" and "optim" first. If the names do not contain the number of
 * ranks, it follows from the highest rank. @param out in `arena`.
 */
fc_code fc_pt_find_sets(const char *directory, const char *group, fc_arena *arena, fc_pt_set **out, size_t *count,
                        fc_error *err);

/** A rank's shard of a tensor. */
typedef struct fc_pt_shard {
    int ndim;
    int64_t shape[FC_MAX_DIMS];
    int64_t offsets[FC_MAX_DIMS], sizes[FC_MAX_DIMS];
    bool within; /* the box is only a part of the local tensor, which begins there at `inside` */
    int64_t inside[FC_MAX_DIMS];
    fc_pv local;     /* the local tensor */
    int64_t padding; /* rows of padding at its end */
    fc_mesh mesh;    /* ndim 0: unknown */
    fc_placement placements[FC_MAX_MESH_DIMS];
    int64_t coordinate[FC_MAX_MESH_DIMS]; /* of the rank, if `in_mesh` */
    bool in_mesh;
} fc_pt_shard;

/** @return whether the torch.save file at `path` has shards of a mesh of several ranks. */
bool fc_pt_holds_shards(const char *path);

/** Reads this rank's shard of the DTensor `v`. `out->local` is FC_PV_ABSENT if the rank holds none. */
fc_code fc_pt_dtensor_shard(const torch_file *f, fc_pv v, fc_pt_shard *out, fc_error *err);

/** @return whether its shape and placements are valid for fc_local_box. */
bool fc_pt_shard_sane(const fc_pt_shard *shard);

/** Return the number of shards that the ShardedTensor `v` has on this rank, and one of them. */
size_t fc_pt_sharded_count(const torch_file *f, fc_pv v);
fc_code fc_pt_sharded_shard(const torch_file *f, fc_pv v, size_t index, fc_pt_shard *out, fc_error *err);

/** The layout record of a rank's file that fsdpckpt wrote. */
typedef struct fc_pt_layout {
    struct json_t *root; /* NULL: the file has no record */
    fc_mesh mesh;
} fc_pt_layout;

fc_code fc_pt_layout_load(torch_file *f, int64_t rank, int64_t ranks, fc_pt_layout *out, fc_error *err);
void fc_pt_layout_free(fc_pt_layout *layout);
/** Finds the shard of the plain tensor `name`. Returns FC_OK with ndim -1 if the record does not name it. */
fc_code fc_pt_layout_shard(const fc_pt_layout *layout, const torch_file *f, int64_t rank, const char *name, fc_pv v,
                           fc_pt_shard *out, fc_error *err);

/** Makes the manifest of the file checkpoint->path, which contains DTensors. Fails unless the file has all of
 * their shards, as after training on one GPU. */
fc_code fc_pt_open_alone(fc_checkpoint *checkpoint, const fc_open_options *options, fc_error *err);

/** Makes the manifest of a directory with metadata.pkl of torch_checkpointing. */
fc_code fc_pt_open_sharding(fc_checkpoint *checkpoint, const char *directory, const fc_open_options *options,
                            fc_error *err);

/** Makes the manifest of the sets in `directory`. With `only`, reads only the set of that name, without a prefix. */
fc_code fc_pt_open_ranks(fc_checkpoint *checkpoint, const char *directory, const char *only,
                         const fc_open_options *options, fc_error *err);
