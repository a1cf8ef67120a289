/*
 * Walking the lines of `inspect` as the tree of modules that their names spell, in natural order.
 */
#ifndef FSDPCKPT_CLI_INSPECT_TREE_H
#define FSDPCKPT_CLI_INSPECT_TREE_H

#include "inspect.h"

/** A module or a line. */
typedef struct tree_node {
    const char *label;        /**< its part of the name, not terminated: "layers.{0..31}" */
    size_t length;            /**< of the label, in bytes */
    const inspect_line *line; /**< of a leaf; NULL: a module */
    size_t tensors, objects, lines;
    uint64_t bytes; /**< of tensors */
    bool itself;    /**< a leaf whose name is also that of the module around it */
    int depth;
    bool last; /**< nothing follows in its module */
} tree_node;

/** What is done on the way. The first code that is not FC_OK ends the walk. */
typedef struct tree_visitor {
    fc_code (*enter)(void *context, const tree_node *module, fc_error *err);
    fc_code (*leaf)(void *context, const tree_node *leaf, fc_error *err);
    void (*leave)(void *context, const tree_node *module); /**< NULL: nothing to do */
    void *context;
} tree_visitor;

/** Walks tensors, or objects, or both. */
fc_code inspect_walk(inspection *in, bool tensors, bool objects, const tree_visitor *visitor, fc_error *err);

#endif
