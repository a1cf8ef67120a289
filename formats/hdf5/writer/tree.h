/*
 * The groups and datasets that a target becomes: worked out once, the same for every file of a target.
 */
#ifndef FSDPCKPT_FORMATS_HDF5_WRITER_TREE_H
#define FSDPCKPT_FORMATS_HDF5_WRITER_TREE_H

#ifndef FSDPCKPT_PRIVATE
#error "this header is private to fsdpckpt: include <fsdpckpt/...> instead"
#endif

#include "fsdpckpt/format.h"

/** What the members of a group are: the attribute `kind`, which a dict with text keys does without. */
typedef enum fc_h5_group_kind {
    FC_H5_DICT,
    FC_H5_LIST,
    FC_H5_TUPLE,
    FC_H5_NUMBERS /* a dict whose keys are integers */
} fc_h5_group_kind;

/** The attribute's text; NULL for a dict. */
const char *fc_h5_group_kind_text(unsigned char kind);
/** The kind that the text (or NULL) names. */
unsigned char fc_h5_group_kind_parse(const char *text);

/** A group or a dataset. */
typedef struct fc_h5_node {
    const char *link;   /**< encoded name in the parent; "" for the root */
    uint32_t parent;    /**< index; the root is its own */
    uint32_t depth;     /**< 0 for the root */
    uint32_t tensor;    /**< the first target tensor at or below it */
    bool is_value;      /**< a dataset */
    unsigned char kind; /**< of a group: fc_h5_group_kind */
} fc_h5_node;

typedef struct fc_h5_tree {
    fc_h5_node *nodes; /**< [0] is the root; parents before children */
    size_t count;
    uint32_t *leaves; /**< the node of each target tensor */
    uint32_t *order;  /**< the target tensors, depth first: as a reader of the file meets them */
    uint32_t depth;   /**< the largest */
} fc_h5_tree;

/**
 * Builds the tree; everything in it lives in `arena`, except that keys are borrowed from `wanted`.
 * @return FC_EUNSUPPORTED naming both tensors when two of them cannot have their places in one file.
 */
fc_code fc_h5_tree_build(const fc_target *target, fc_arena *arena, fc_h5_tree *tree, fc_error *err);

/** The absolute path of a node, "/a/b", from `arena`; NULL when out of memory. */
char *fc_h5_tree_path(const fc_h5_tree *tree, uint32_t node, fc_arena *arena);

#endif
