/*
 * metadata.pkl of torch_checkpointing: which items a checkpoint has, in which file each rank wrote its part, and for
 * each tensor its shape and the box of each rank. It is a pickle of plain dicts. sharding.c reads boxes, and
 * sharding_files.c finds the files.
 */
#pragma once

#include "base/name_table.h"
#include "pt/ranks.h"

/** The name of the file. */
#define FC_PT_SHARDING "metadata.pkl"

/** One item of the checkpoint, such as the model. */
typedef struct fc_pt_item {
    const char *name;
    fc_pv layouts;   /* dict from rank to the description of its file; 0 in version 1.0 */
    bool *has_parts; /* per rank: whether it has a part of some tensor */
} fc_pt_item;

/** The content of metadata.pkl. */
typedef struct fc_pt_sharding {
    const char *path;
    fc_arena *arena;
    fc_pickle *p;
    int64_t ranks;
    fc_pt_item *items; /* malloc'ed */
    size_t nitems, items_capacity;
    fc_pv layouts;        /* version 1.0: dict from rank to a dict from item to the description of its file */
    fc_name_table *names; /* from item names to indexes */
    fc_name_table *paths; /* from an item's index and a name in it to an index of `groups` */
    fc_pv *groups;        /* malloc'ed: for each tensor the list of its descriptions */
    size_t ngroups, groups_capacity;
    fc_pv mesh; /* the last mesh, whose place of `mesh_rank` is known */
    int64_t mesh_rank, mesh_place;
} fc_pt_sharding;

/** Reads `path`. @param arena for names. @param out the caller frees its content, also after a failure. */
fc_code fc_pt_sharding_load(const char *path, fc_arena *arena, fc_pt_sharding *out, fc_error *err);
void fc_pt_sharding_free(fc_pt_sharding *sharding);

/** @return whether `directory` has such a file. */
bool fc_pt_sharding_is_in(const char *directory, fc_error *err);

/** Finds the sets of `directory`: the items, then other numbered files of as many ranks. @param out in the arena. */
fc_code fc_pt_sharding_sets(fc_pt_sharding *sharding, const char *directory, fc_pt_set **out, size_t *count,
                            fc_error *err);

/** @return how the tensor `name` of an item is sharded on a rank, or FC_PV_ABSENT. */
fc_pv fc_pt_sharding_find(const fc_pt_sharding *sharding, const char *item, const char *name, int64_t rank);

/** Returns the number of boxes that the rank has of such a tensor, and one of them. `out->local` is not set. */
size_t fc_pt_sharding_count(const fc_pt_sharding *sharding, fc_pv how);
fc_code fc_pt_sharding_shard(fc_pt_sharding *sharding, fc_pv how, int64_t rank, size_t index, fc_pt_shard *out,
                             fc_error *err);
