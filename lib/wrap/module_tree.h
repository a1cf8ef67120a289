/*
 * The builder of module trees. module_tree.c builds nodes from names, module_marks.c adds what the user states about
 * them, and module_tree_of.c finds the parameters of a checkpoint.
 */
#pragma once

#include "base/name_table.h"
#include "fsdpckpt/wrap_policy.h"

/** A module or a parameter while the tree is built. */
typedef struct fc_tree_node {
    fc_name name, fqn;
    uint32_t parent, first, last, next; /**< children in the order of their first appearance; 0 means none */
    uint32_t depth;
    uint32_t spec;   /**< of a parameter: its index in `specs`, or UINT32_MAX */
    uint32_t number; /**< the index in the finished tree's modules or parameters */
    bool is_parameter;
} fc_tree_node;

typedef struct fc_tree_builder {
    const fc_parameter_spec *specs;
    size_t nspecs;
    const fc_model_info *info;
    fc_arena *arena;
    fc_module_tree *tree;
    fc_tree_node *nodes; /**< [0] is the root */
    size_t count;
    fc_arena *scratch;
    fc_name_table
        *children; /**< in `scratch`; from twice the parent, plus 1 for a parameter, and the name to the node */
    int skip;      /**< leading components of every name that are above the root */
    fc_module *modules;
    fc_parameter *parameters;
    const uint32_t **twins; /**< one entry per shared group: its nodes, ended by 0 */
    size_t ntwins;
} fc_tree_builder;

/** Like fc_module_tree_new, for names whose first `skip` components are above the root. */
fc_code fc_module_tree_build(const fc_parameter_spec *specs, size_t count, int skip, const fc_model_info *info,
                             fc_arena *arena, fc_module_tree *out, fc_error *err);

/** @return the child of `parent` called `name`, or 0. */
uint32_t fc_tree_find(const fc_tree_builder *b, uint32_t parent, fc_name name, bool is_parameter);

/** @return the module (or parameter) called `fqn`, or 0. */
uint32_t fc_tree_find_fqn(const fc_tree_builder *b, const char *fqn, bool is_parameter);

/** Adds the parameter `fqn`. @param spec its index in the specs, or UINT32_MAX for a parameter that is not among them.
 */
fc_code fc_tree_add(fc_tree_builder *b, const char *fqn, uint32_t spec, uint32_t *node, fc_error *err);

/** Reads the shared groups of the info, and adds the parameters that only they name. Call it before ordering the tree.
 */
fc_code fc_tree_read_shared(fc_tree_builder *b, fc_error *err);

/** Sets same_as, the classes and the marks (frozen, ignored, buffer) of the finished modules and parameters. */
fc_code fc_tree_mark(fc_tree_builder *b, fc_error *err);

/** @return whether the last components of the name match all components of `pattern`. */
bool fc_pattern_fits(const char *pattern, fc_name fqn);

/** How specific a pattern is. */
typedef struct fc_pattern_fit {
    int components; /**< 0 means no pattern */
    size_t literals;
} fc_pattern_fit;

/** @return whether `pattern` is more specific than `best`; if so, replaces `best`. */
bool fc_pattern_is_better(const char *pattern, fc_pattern_fit *best);

/** @return whether `s` is a decimal number such as the names in a ModuleList; `value` receives it. */
bool fc_name_is_number(fc_name s, uint64_t *value);
