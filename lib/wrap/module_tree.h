/*
 * Inside of the module tree: its builder. module_tree.c makes nodes of names, module_marks.c adds what a person says of
 * them, module_tree_of.c finds the parameters of a checkpoint.
 */
#ifndef FSDPCKPT_WRAP_MODULE_TREE_H
#define FSDPCKPT_WRAP_MODULE_TREE_H

#ifndef FSDPCKPT_PRIVATE
#error "this header is private to fsdpckpt: include <fsdpckpt/...> instead"
#endif

#include "fsdpckpt/wrap_policy.h"

/** A module or a parameter while the tree grows. */
typedef struct fc_tree_node {
    fc_name name, fqn;
    uint32_t parent, first, last, next; /**< children in the order of first sight; 0: none */
    uint32_t depth;
    uint32_t spec;   /**< of a parameter */
    uint32_t number; /**< its place in the finished tree: of a module among modules, of a parameter among those */
    bool is_parameter;
} fc_tree_node;

typedef struct fc_tree_builder {
    const fc_parameter_spec *specs;
    size_t nspecs;
    const fc_model_info *info;
    fc_arena *arena;
    fc_module_tree *tree;
    fc_tree_node *nodes; /**< [0] is the root */
    size_t count, capacity;
    uint32_t *slots; /**< open addressing; node, or 0 */
    size_t nslots;   /**< a power of two, at least twice the nodes */
    int skip;        /**< components of every name that lead to the root */
    fc_module *modules;
    fc_parameter *parameters;
    const uint32_t **twins; /**< a shared group each: its nodes, 0-terminated */
    size_t ntwins;
} fc_tree_builder;

/** fc_module_tree_new with a root that lies `skip` levels below the start of the names. */
fc_code fc_module_tree_build(const fc_parameter_spec *specs, size_t count, int skip, const fc_model_info *info,
                             fc_arena *arena, fc_module_tree *out, fc_error *err);

/** The child `name` of `parent`, or 0. */
uint32_t fc_tree_find(const fc_tree_builder *b, uint32_t parent, fc_name name, bool is_parameter);

/** The module (or parameter) called `fqn`, or 0. */
uint32_t fc_tree_find_fqn(const fc_tree_builder *b, const char *fqn, bool is_parameter);

/** Adds the parameter `fqn`. @param spec UINT32_MAX for one that is not among the specs. */
fc_code fc_tree_add(fc_tree_builder *b, const char *fqn, uint32_t spec, uint32_t *node, fc_error *err);

/** Looks up the shared groups of the info and adds the parameters that only they name: before the tree is in order. */
fc_code fc_tree_read_shared(fc_tree_builder *b, fc_error *err);

/** Fills what names do not say: same_as, classes, frozen, ignored, buffers. For the finished modules and parameters. */
fc_code fc_tree_mark(fc_tree_builder *b, fc_error *err);

/** Whether the name equals `pattern` or ends with "." and it. */
bool fc_pattern_fits(const char *pattern, fc_name fqn);

/** How specific a pattern is. */
typedef struct fc_pattern_fit {
    int components; /**< 0: no pattern */
    size_t literals;
} fc_pattern_fit;

/** Whether `pattern` is more specific than `best`, which it then replaces. */
bool fc_pattern_is_better(const char *pattern, fc_pattern_fit *best);

/** Whether all of `s` is a decimal number as a ModuleList's names are; its value. */
bool fc_name_is_number(fc_name s, uint64_t *value);

#endif
