/*
 * Visits the lines of `inspect` in natural order, as the tree of modules that their names form.
 */
#pragma once

#include "inspect/inspect.h"

/** A module, or a line of the list (a leaf). */
typedef struct tree_node {
    const char *label;        /**< the components that it adds to the name, not NUL-terminated: "layers.{0..31}" */
    size_t length;            /**< of the label, in bytes */
    const inspect_line *line; /**< of a leaf; NULL: a module */
    size_t tensors, objects, lines;
    uint64_t bytes; /**< of tensors */
    bool itself;    /**< whether it is a leaf with the name of its module */
    int depth;
    bool last; /**< whether it is the last node in its module */
} tree_node;

/** Callbacks of the walk. The first code other than FC_OK ends it. */
typedef struct tree_visitor {
    fc_code (*enter)(void *context, const tree_node *module, fc_error *err);
    fc_code (*leaf)(void *context, const tree_node *leaf, fc_error *err);
    void (*leave)(void *context, const tree_node *module); /**< may be NULL */
    void *context;
} tree_visitor;

/** Visits tensors, objects or both. */
fc_code inspect_walk(inspection *in, bool tensors, bool objects, const tree_visitor *visitor, fc_error *err);
