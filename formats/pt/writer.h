/*
 * The torch.save writer: writer.c lays out a file and writes its headers, tree.c nests the values by their paths and
 * writes the pickle, ties.c finds values that share bytes, sharded_out.c writes ShardedTensors, sparse_out.c writes
 * sparse tensors, and layout.c writes the layout record of a rank's file.
 */
#pragma once

#include "base/name_table.h"
#include "fsdpckpt/format.h"
#include "torch/file/file.h"
#include "torch/pickle/copy.h"
#include "torch/zip/write.h"

/** How an item of a file is stored: as a view of the item `root`, which may be the item itself. */
typedef struct fc_pt_tie {
    uint32_t root;          /* index into file->items */
    uint64_t offset;        /* offset in the root's row-major elements */
    const int64_t *strides; /* in elements; NULL: row-major */
} fc_pt_tie;

/** Finds the items of `file` that are views of others. @param ties receives one tie per item, in `arena`. */
fc_code fc_pt_find_ties(const fc_target *target, const fc_target_file *file, fc_arena *arena, fc_pt_tie **ties,
                        fc_error *err);

/** A level of the nesting. Children are in the order in which they were found. */
typedef struct fc_pt_node {
    const fc_path_element *element; /* borrowed from the path */
    uint32_t parent;
    uint32_t first, last, next; /* children, sibling; 0: none, as 0 is the root */
    uint32_t nchildren;
    uint32_t item;   /* index into file->items for a leaf, else UINT32_MAX */
    uint32_t sparse; /* of a sparse tensor: the item that says what it is apart from its parts, plus 1; else 0 */
} fc_pt_node;

typedef struct fc_pt_tree {
    fc_pt_node *nodes;
    size_t count, capacity;
    fc_path_element *flat; /* two per item: the paths of values without nesting */
    fc_arena *scratch;
    fc_name_table *children; /* in `scratch`; from the parent, the kind of the key and the key to the node */
} fc_pt_tree;

/** Nests the items of `file`. */
fc_code fc_pt_tree_build(const fc_target *target, const fc_target_file *file, fc_pt_tree *tree, fc_error *err);
void fc_pt_tree_free(fc_pt_tree *tree);

/** Writes the nested values into `w`; `leaf` writes an item. */
typedef fc_code (*fc_pt_leaf_fn)(void *context, fc_torch_pickler *w, uint32_t item, fc_error *err);
/** Writes the sparse tensor of a node. `written` receives false if the file does not have all of its parts. */
typedef fc_code (*fc_pt_sparse_fn)(void *context, fc_torch_pickler *w, uint32_t node, bool *written, fc_error *err);
fc_code fc_pt_tree_write(const fc_pt_tree *tree, fc_torch_pickler *w, fc_pt_leaf_fn leaf, fc_pt_sparse_fn sparse,
                         void *context, fc_error *err);

/** For an fc_pt_sparse_fn. @param dense writes a dense tensor. */
typedef void (*fc_pt_dense_fn)(void *context, fc_torch_pickler *w, uint32_t item);
fc_code fc_pt_write_sparse(const fc_target *target, const fc_target_file *file, const fc_pt_tree *tree, uint32_t node,
                           fc_torch_pickler *w, fc_pt_dense_fn dense, void *context, bool *written, fc_error *err);

/**
 * Writes a flat parameter as FSDP1's _local_post_state_dict_hook does: a ShardedTensor with this rank's shard, or
 * without one. @param local writes the tensor of the shard.
 */
typedef void (*fc_pt_local_fn)(void *context, fc_torch_pickler *w, uint32_t item);
void fc_pt_write_sharded(const fc_target *target, const fc_target_file *file, uint32_t item, fc_pt_local_fn local,
                         void *context, fc_torch_pickler *w);

bool fc_pt_is_directory(const fc_target *target);
size_t fc_pt_files(const fc_target *target);
fc_code fc_pt_create(const fc_target *target, const char *staging, fc_writer *writer, fc_error *err);
fc_code fc_pt_reserve(fc_writer *writer, fc_target_file *file, fc_error *err);
fc_code fc_pt_finish_item(fc_writer *writer, const fc_target_item *item, int fd, fc_error *err);
fc_code fc_pt_finish_file(fc_writer *writer, const fc_target_file *file, fc_error *err);
fc_code fc_pt_finish(fc_writer *writer, const uint64_t *digests, fc_error *err);
void fc_pt_destroy(fc_writer *writer);

/** Makes the layout of one rank's file as malloc'ed JSON, for the record FC_PT_LAYOUT. */
#define FC_PT_LAYOUT ".data/fsdpckpt_layout.json"
fc_code fc_pt_layout_json(const fc_target *target, const fc_target_file *file, char **out, fc_error *err);
