/*
 * FSDP units: which modules of a model become units of their own, with which options. Semantics:
 * torch.distributed.fsdp.wrap and _wrap_utils.py of torch 2.15, with the checks that pull request 104346 planned.
 *
 * Choosing is separate from applying. A policy looks at the tree of modules and fills the targets (module → options);
 * checks look at the targets; one post-order pass applies them. What a C program has of a module tree are the names of
 * its parameters: "layers.0.attn.wq.weight" is the parameter weight of the module layers.0.attn.wq. What names do not
 * say (classes, frozen, shared) a person adds: fc_model_info.
 */
#ifndef FSDPCKPT_WRAP_POLICY_H
#define FSDPCKPT_WRAP_POLICY_H

#include "fsdpckpt/arena.h"
#include "fsdpckpt/dtype.h"
#include "fsdpckpt/error.h"
#include "fsdpckpt/flat_param.h"
#include "fsdpckpt/select.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define FC_NO_MODULE UINT32_MAX

/** Part of a name: not NUL-terminated. */
typedef struct fc_name {
    const char *text;
    size_t len;
} fc_name;

/** A parameter or buffer, as the caller knows it. */
typedef struct fc_parameter_spec {
    const char *fqn;
    fc_dtype dtype;
    int ndim;
    const int64_t *shape;
    bool buffer;         /**< never managed by a unit */
    const char *tied_to; /**< an earlier fqn that has the same storage; or NULL */
} fc_parameter_spec;

/** A parameter (or buffer) in the tree. */
typedef struct fc_parameter {
    const char *fqn; /**< without what wrappers (torch.compile, FSDP, checkpoint_wrapper) leave in it */
    fc_name name;    /**< its last component */
    fc_dtype dtype;
    int ndim;
    const int64_t *shape;
    int64_t numel;
    uint64_t bytes;
    uint32_t module;  /**< the module that has it */
    uint32_t spec;    /**< index of the fc_parameter_spec; UINT32_MAX for one that fc_model_info.shared adds */
    uint32_t same_as; /**< the first parameter, in this order, that is the same tensor; itself where it is not shared */
    bool frozen;      /**< requires_grad is False */
    bool buffer;
    bool ignored; /**< as ignored_states of FSDP: no unit manages it */
} fc_parameter;

/** A module. Modules lie in pre-order: the children of m are m + 1, then the `end` of each, up to the end of m. */
typedef struct fc_module {
    fc_name fqn;                /**< empty for the root, or the common path of a nested state dict: "model" */
    fc_name name;               /**< its last component */
    const char *const *classes; /**< its class, then the base classes that are known; as far as known */
    size_t nclasses;
    uint32_t parent; /**< FC_NO_MODULE for the root */
    uint32_t end;    /**< one past its last descendant */
    uint32_t depth;
    uint32_t first_parameter, nparameters; /**< its own ones */
    uint32_t same_as;                      /**< the first module, in this order, that is the same one; or itself */
    bool ignored;                          /**< with all below */
    bool inferred;                         /**< classes were told by names of children and parameters */
} fc_module;

/** A model as a tree. Immutable; lives in the arena it was made with. */
typedef struct fc_module_tree {
    const fc_module *modules; /**< [0] is the root */
    size_t nmodules;
    const fc_parameter *parameters; /**< in the order of the modules, which is that of Module.named_parameters() */
    size_t nparameters;
    size_t left_out;      /**< names that are optimizer state or objects (fc_module_tree_of) */
    size_t idle;          /**< patterns of the fc_model_info that match nothing: typing errors, often */
    const char *idle_one; /**< the first of them, or NULL */
} fc_module_tree;

/** Classes of the modules that a pattern matches. */
typedef struct fc_class_rule {
    const char *pattern;
    const char *const *classes; /**< the class, then its base classes: what isinstance would be asked for */
    size_t nclasses;
} fc_class_rule;

/**
 * What names do not say. A pattern matches a module (and all below it) or a parameter whose FQN equals it or ends with
 * "." + it; `*` matches within one component. The most specific class rule decides: most components, then most
 * literal characters, then the earlier.
 */
typedef struct fc_model_info {
    const fc_class_rule *classes;
    size_t nclasses;
    const char *const *frozen; /**< patterns, NULL-terminated, as the others; NULL: none */
    const char *const *ignored;
    const char *const *buffers;
    const char *const *const *shared; /**< groups of whole FQNs, each of parameters or each of modules that are the
                                           same; NULL-terminated like each group. A parameter that the checkpoint does
                                           not have beside its twin is added. */
} fc_model_info;

/**
 * Reads a fc_model_info: {"layers.*": "LlamaDecoderLayer", "norm": ["BatchNorm2d", "_BatchNorm"],
 * "$frozen": ["embed"], "$ignored": […], "$buffers": […], "$shared": [["lm_head.weight", "embed.weight"]]}.
 * @return FC_EUSAGE for a malformed file, naming file and member; FC_EIO when it cannot be read.
 */
fc_code fc_model_info_load(const char *path, fc_arena *arena, const fc_model_info **out, fc_error *err);

/**
 * Makes the tree of a list of parameters. Modules and their parameters come in the order of first sight; numbered
 * siblings ("0", "1", … "10") by number, as a ModuleList has them.
 * A class that no rule gives is told by names where these say it: ModuleList (nothing but numbered children),
 * MultiheadAttention (in_proj_weight and out_proj), _BatchNorm (running_mean).
 * @param info NULL: names only.
 * @return FC_EUNSUPPORTED for a name of more than 64 levels; FC_EUSAGE for an `info` that contradicts the names.
 */
fc_code fc_module_tree_new(const fc_parameter_spec *specs, size_t count, const fc_model_info *info, fc_arena *arena,
                           fc_module_tree *out, fc_error *err);

/**
 * The tree of the tensors of a selection (fc_target_new). Optimizer state and objects are no parameters (`left_out`);
 * buffers are integers of more than 8 bits, bools, and floats with the names that torch's own modules give to buffers.
 * Tensors with the very same bytes in the files are tied. fc_parameter.spec is the index into wanted->tensors.
 */
fc_code fc_module_tree_of(const fc_target *target, const fc_model_info *info, fc_arena *arena, fc_module_tree *out,
                          fc_error *err);

/** Modules with all children before them, children in order: that in which units are made. @param order nmodules. */
void fc_module_post_order(const fc_module_tree *tree, uint32_t *order);

/** The lowest module that has both below it, or is one of them. */
uint32_t fc_module_common_ancestor(const fc_module_tree *tree, uint32_t a, uint32_t b);

/** Whether the class of `m`, or a base class of it, is one of `classes` (NULL-terminated). */
bool fc_module_is_instance(const fc_module *m, const char *const *classes);

/** torch.distributed.fsdp.ShardingStrategy. */
typedef enum fc_unit_strategy {
    FC_UNIT_FULL_SHARD,
    FC_UNIT_SHARD_GRAD_OP,
    FC_UNIT_NO_SHARD,
    FC_UNIT_HYBRID_SHARD,
    FC_UNIT_HYBRID_SHARD_ZERO2
} fc_unit_strategy;

/** torch.distributed.fsdp.BackwardPrefetch, or None. */
typedef enum fc_unit_prefetch { FC_UNIT_PREFETCH_PRE, FC_UNIT_PREFETCH_POST, FC_UNIT_PREFETCH_NONE } fc_unit_prefetch;

/** How a unit is made: the arguments of FullyShardedDataParallel that are not Python objects. All 0 is torch's
 *  default, but for the dtypes, which matter only with mixed_precision. */
typedef struct fc_unit_options {
    fc_unit_strategy strategy;
    fc_unit_prefetch prefetch;
    bool mixed_precision;                             /**< false: None, and the dtypes say nothing */
    fc_dtype param_dtype, reduce_dtype, buffer_dtype; /**< FC_OPAQUE: left as it is */
    bool use_orig_params;
    bool cpu_offload;
    bool forward_prefetch;
} fc_unit_options;

/** The fields of fc_unit_options that an override sets. */
enum {
    FC_UNIT_SET_STRATEGY = 1,
    FC_UNIT_SET_PREFETCH = 2,
    FC_UNIT_SET_MIXED_PRECISION = 4, /**< mixed_precision and the three dtypes */
    FC_UNIT_SET_USE_ORIG_PARAMS = 8,
    FC_UNIT_SET_CPU_OFFLOAD = 16,
    FC_UNIT_SET_FORWARD_PREFETCH = 32
};

/** What a custom policy says of one module. */
typedef struct fc_wrap_choice {
    bool wrap;
    unsigned set; /**< FC_UNIT_SET_… of `options`; the others are the root's */
    fc_unit_options options;
} fc_wrap_choice;

/** What a policy made of each module of a tree. */
typedef struct fc_wrap_targets {
    const fc_module_tree *tree;
    fc_unit_options root; /**< of the root, which is always a unit */
    bool *chosen;         /**< one a module */
    fc_unit_options *options;
} fc_wrap_targets;

/** Targets with nothing chosen. */
fc_code fc_wrap_targets_new(const fc_module_tree *tree, const fc_unit_options *root, fc_arena *arena,
                            fc_wrap_targets *out, fc_error *err);

/** ModuleWrapPolicy: every module of the `classes` (NULL-terminated), with the root's options. */
void fc_wrap_by_class(fc_wrap_targets *targets, const char *const *classes);

/** The decision for module `m`: sets `choice`, which comes as "no". */
typedef fc_code (*fc_wrap_fn)(const fc_module_tree *tree, uint32_t m, void *user, fc_wrap_choice *choice,
                              fc_error *err);

/** CustomPolicy: asks `fn` for every module that is not ignored, in pre-order, the root included. */
fc_code fc_wrap_custom(fc_wrap_targets *targets, fc_wrap_fn fn, void *user, fc_error *err);

/**
 * size_based_auto_wrap_policy: bottom up, a module becomes a unit when what is left below it has at least `least`
 * elements. All is counted before anything is applied.
 * @param force_leaf classes (NULL-terminated) below which, and at which, nothing is wrapped; NULL: torch's,
 * {MultiheadAttention}.
 * @param exclude    classes that are not wrapped themselves; NULL: torch's, {ModuleList, ModuleDict}.
 */
fc_code fc_wrap_by_size(fc_wrap_targets *targets, int64_t least, const char *const *force_leaf,
                        const char *const *exclude, fc_error *err);

/**
 * What people choose for transformers, told by names: the outermost numbered modules that have modules themselves
 * ("model.layers.0", "h.11", "encoder.block.3").
 */
void fc_wrap_blocks(fc_wrap_targets *targets);

/**
 * Modules of the `classes` become units of their own without mixed precision, whatever the policy said.
 * @param overridden receives the distinct classes (the modules' own) of those found, in order, NULL-terminated.
 */
fc_code fc_wrap_override_mixed_precision(fc_wrap_targets *targets, const char *const *classes, fc_arena *arena,
                                         const char *const **overridden, fc_error *err);

/** A warning that does not stop anything, for the person. */
typedef void (*fc_wrap_warn)(void *user, const char *text);

/**
 * Checks that each unit would manage parameters that are all frozen or all not. With use_orig_params of that unit a
 * difference is a warning, else FC_EUSAGE; the texts are torch's.
 * @param warn NULL: warnings are dropped.
 */
fc_code fc_wrap_check_frozen(const fc_wrap_targets *targets, fc_wrap_warn warn, void *user, fc_error *err);

/**
 * Checks that each shared parameter is managed by the lowest common ancestor of its modules or higher: by one unit for
 * all of them. @return FC_EUSAGE, naming the parameters, their units and that ancestor.
 */
fc_code fc_wrap_check_shared(const fc_wrap_targets *targets, fc_error *err);

/** Makes the unit of module `m`. */
typedef fc_code (*fc_wrap_apply_fn)(const fc_module_tree *tree, uint32_t m, const fc_unit_options *options, void *user,
                                    fc_error *err);

/** Calls `fn` for each target in post-order, a shared module once; for the root last. Stops at the first failure. */
fc_code fc_wrap_apply(const fc_wrap_targets *targets, fc_wrap_apply_fn fn, void *user, fc_error *err);

/**
 * The unit that manages each module's own parameters: the nearest target from it upwards.
 * @param unit out: nmodules; a module each, 0 for the root.
 */
void fc_wrap_unit_of(const fc_wrap_targets *targets, uint32_t *unit);

/** A unit: what one flat parameter holds. */
typedef struct fc_unit {
    uint32_t module;
    const char *fqn; /**< of the module, NUL-terminated; "" for a root without a name */
    fc_unit_options options;
    const uint32_t *parameters; /**< into the tree's, in the order of FSDP's flat parameter; shared ones once */
    size_t nparameters;
    const uint32_t *names; /**< the same with shared ones as often as they occur */
    size_t nnames;
    int64_t numel;
    uint64_t bytes;
} fc_unit;

typedef struct fc_units {
    const fc_unit *units; /**< in the order of fc_wrap_apply; the root is the last */
    size_t count;
} fc_units;

/** Applies the targets to a list. The checks come before; without them a shared parameter is in the unit of the first.
 */
fc_code fc_wrap_units(const fc_wrap_targets *targets, fc_arena *arena, fc_units *out, fc_error *err);

/**
 * The parameters of a unit as fc_flat_layout_new takes them.
 * @param out receives unit->nnames of them, in `arena`.
 */
fc_code fc_unit_flat_descs(const fc_module_tree *tree, const fc_unit *unit, fc_arena *arena, const fc_flat_desc **out,
                           fc_error *err);

/** A policy from a file, see fc_wrap_file_load. */
typedef struct fc_wrap_file fc_wrap_file;

/**
 * Reads a custom policy: {"layers.*": true, "layers.0": false, "class:Embedding": true,
 * "lm_head": {"sharding_strategy": "SHARD_GRAD_OP"}, "$root": {"mixed_precision": {"param_dtype": "bfloat16"}},
 * "$fp32_classes": ["LayerNorm"]}. Patterns as in fc_model_info; one that names modules beats one that names classes.
 * The values are what CustomPolicy's function returns: true, false, or options that override the root's.
 */
fc_code fc_wrap_file_load(const char *path, fc_arena *arena, fc_wrap_file **out, fc_error *err);

/** The root's options and the classes kept out of mixed precision (NULL-terminated) of a policy file. */
const fc_unit_options *fc_wrap_file_root(const fc_wrap_file *file);
const char *const *fc_wrap_file_fp32_classes(const fc_wrap_file *file);

/** The fc_wrap_fn of a policy file, which is its `user`. */
fc_code fc_wrap_file_fn(const fc_module_tree *tree, uint32_t m, void *file, fc_wrap_choice *choice, fc_error *err);

/** Rules that decided no module so far. @param first receives the pattern of the first, or NULL. */
size_t fc_wrap_file_idle(const fc_wrap_file *file, const char **first);

/** "FULL_SHARD" …, for output. */
const char *fc_unit_strategy_name(fc_unit_strategy strategy);

#ifdef __cplusplus
}
#endif
#endif
