/*
 * The groups and datasets of a target, computed once for all of its files.
 */
#pragma once

#include "fsdpckpt/format.h"

/** The kind of a group: the attribute `kind`, which a dict with text keys does not have. */
typedef enum fc_h5_group_kind {
    FC_H5_DICT,
    FC_H5_LIST,
    FC_H5_TUPLE,
    FC_H5_NUMBERS /* a dict with integer keys */
} fc_h5_group_kind;

/** @return the text of the attribute; NULL for a dict. */
const char *fc_h5_group_kind_text(unsigned char kind);
/** @return the kind that the text (or NULL) stands for. */
unsigned char fc_h5_group_kind_parse(const char *text);

/** A group or a dataset. */
typedef struct fc_h5_node {
    const char *link;   /**< the encoded name in the parent; "" for the root */
    uint32_t parent;    /**< index of the parent; the root's is its own */
    uint32_t depth;     /**< 0 for the root */
    uint32_t tensor;    /**< index of the first target tensor at or below it */
    bool is_value;      /**< whether it is a dataset */
    unsigned char kind; /**< fc_h5_group_kind of a group */
} fc_h5_node;

typedef struct fc_h5_tree {
    fc_h5_node *nodes; /**< [0] is the root; parents before children */
    size_t count;
    uint32_t *leaves; /**< the node of each target tensor */
    uint32_t *order;  /**< the target tensors in depth-first order, in which a reader finds them */
    uint32_t depth;   /**< the largest depth of a node */
} fc_h5_tree;

/**
 * Builds the tree in `arena`. Keys are borrowed from `target`.
 * @return FC_EUNSUPPORTED with both names, if two tensors cannot be in one file.
 */
fc_code fc_h5_tree_build(const fc_target *target, fc_arena *arena, fc_h5_tree *tree, fc_error *err);

/** @return the absolute path of a node, such as "/a/b", from `arena`; NULL when out of memory. */
char *fc_h5_tree_path(const fc_h5_tree *tree, uint32_t node, fc_arena *arena);
