/*
 * FSDP units: which modules of a model become units, and with which options. Semantics: torch.distributed.fsdp.wrap and
 * _wrap_utils.py of torch 2.15, with the checks that pull request 104346 planned.
 *
 * Choosing is separate from applying. A policy reads the module tree and fills a map from modules to options; checks
 * read that map; one post-order pass applies it. The module tree comes from the names of parameters:
 * "layers.0.attn.wq.weight" is the parameter "weight" of the module "layers.0.attn.wq". fc_model_info adds what names
 * do not show, such as classes, frozen and shared parameters.
 */
#pragma once

#include "fsdpckpt/arena.h"
#include "fsdpckpt/dtype.h"
#include "fsdpckpt/error.h"
#include "fsdpckpt/flat_param.h"
#include "fsdpckpt/select.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

FC_BEGIN_DECLS

#define FC_NO_MODULE UINT32_MAX

/** A component of a name, without a final NUL. */
typedef struct fc_name {
    const char *text;
    size_t len;
} fc_name;

/** A parameter or buffer, described by the caller. */
typedef struct fc_parameter_spec {
    const char *fqn;
    fc_dtype dtype;
    int ndim;
    const int64_t *shape;
    bool buffer;         /**< never managed by a unit */
    const char *tied_to; /**< an earlier FQN with the same storage, or NULL */
} fc_parameter_spec;

/** A parameter (or buffer) in the tree. */
typedef struct fc_parameter {
    const char *fqn; /**< without the components that torch.compile, FSDP and checkpoint_wrapper add */
    fc_name name;    /**< its last component */
    fc_dtype dtype;
    int ndim;
    const int64_t *shape;
    int64_t numel;
    uint64_t bytes;
    uint32_t module;  /**< index of the module that has it */
    uint32_t spec;    /**< index of the fc_parameter_spec; UINT32_MAX for one that fc_model_info.shared adds */
    uint32_t same_as; /**< index of the first parameter that is the same tensor; its own if it is not shared */
    bool frozen;      /**< requires_grad is False */
    bool buffer;
    bool ignored; /**< whether no unit manages it, like ignored_states of FSDP */
} fc_parameter;

/**
 * A module. Modules are in pre-order: the first child of module m is m + 1, and each further child begins at the `end`
 * of the one before.
 */
typedef struct fc_module {
    fc_name fqn;                /**< empty for the root, unless a nested state dict gives it a path such as "model" */
    fc_name name;               /**< its last component */
    const char *const *classes; /**< its class, then its base classes, as far as known */
    size_t nclasses;
    uint32_t parent; /**< FC_NO_MODULE for the root */
    uint32_t end;    /**< one past its last descendant */
    uint32_t depth;
    uint32_t first_parameter, nparameters; /**< its own parameters, without those of its children */
    uint32_t same_as; /**< index of the first module that is the same object; its own index if it is not shared */
    bool ignored;     /**< whether it is ignored, with everything below it */
    bool inferred;    /**< whether its class was derived from names */
} fc_module;

/** A model as a tree. Immutable; the arena that it was made with owns it. */
typedef struct fc_module_tree {
    const fc_module *modules; /**< [0] is the root */
    size_t nmodules;
    const fc_parameter *parameters; /**< in the order of the modules, which is that of Module.named_parameters() */
    size_t nparameters;
    size_t left_out;      /**< number of names of optimizer state and objects (fc_module_tree_of) */
    size_t idle;          /**< number of patterns of the fc_model_info that match nothing, often misspelt */
    const char *idle_one; /**< the first such pattern, or NULL */
} fc_module_tree;

/** The classes of modules that a pattern matches. */
typedef struct fc_class_rule {
    const char *pattern;
    const char *const *classes; /**< the class, then its base classes */
    size_t nclasses;
} fc_class_rule;

/**
 * Facts about a model that names do not show. A pattern matches a module, with everything below it, or a parameter
 * whose FQN equals it or ends with "." and it; `*` matches within one component. The most specific class rule decides:
 * the one with more components, then with more literal characters, then the earlier one.
 */
typedef struct fc_model_info {
    const fc_class_rule *classes;
    size_t nclasses;
    const char *const *frozen; /**< patterns, NULL-terminated, as the others; NULL: none */
    const char *const *ignored;
    const char *const *buffers;
    const char *const *const *shared; /**< groups of whole FQNs, each of parameters or of modules that are the same;
                                         each group and the list are NULL-terminated. A parameter that the checkpoint
                                         has only under another name of its group is added */
} fc_model_info;

/**
 * Reads an fc_model_info: {"layers.*": "LlamaDecoderLayer", "norm": ["BatchNorm2d", "_BatchNorm"], "$frozen":
 * ["embed"], "$ignored": […], "$buffers": […], "$shared": [["lm_head.weight", "embed.weight"]]}.
 * @return FC_EUSAGE for a malformed file, naming file and member; FC_EIO when it cannot be read.
 */
fc_code fc_model_info_load(const char *path, fc_arena *arena, const fc_model_info **out, fc_error *err);

/**
 * Makes the tree of a list of parameters. Modules and their parameters come in the order of first sight; numbered
 * siblings ("0", "1", … "10") by number, as a ModuleList has them.
 * If no rule gives a class, it is derived from names if possible: ModuleList (only numbered children),
 * MultiheadAttention (in_proj_weight and out_proj), _BatchNorm (running_mean).
 * @param info NULL: names only.
 * @return FC_EUNSUPPORTED for a name of more than 64 levels; FC_EUSAGE for an `info` that contradicts the names.
 */
fc_code fc_module_tree_new(const fc_parameter_spec *specs, size_t count, const fc_model_info *info, fc_arena *arena,
                           fc_module_tree *out, fc_error *err);

/**
 * Makes the tree of the tensors of a target (fc_target_new). Optimizer state and objects are not parameters
 * (`left_out`); buffers are integers of more than 8 bits, bools, and floats with the names that torch's own modules
 * give to buffers. Tensors with the same bytes in the files are tied. fc_parameter.spec is the index into
 * target->tensors.
 */
fc_code fc_module_tree_of(const fc_target *target, const fc_model_info *info, fc_arena *arena, fc_module_tree *out,
                          fc_error *err);

/** Computes the post-order of modules, in which units are made. @param order receives tree->nmodules indexes. */
void fc_module_post_order(const fc_module_tree *tree, uint32_t *order);

/** Returns the lowest module that contains both; it may be one of them. */
uint32_t fc_module_common_ancestor(const fc_module_tree *tree, uint32_t a, uint32_t b);

/** Returns whether the class of `m`, or a base class, is one of `classes` (NULL-terminated). */
bool fc_module_is_instance(const fc_module *m, const char *const *classes);

/** torch.distributed.fsdp.ShardingStrategy. */
typedef enum fc_sharding_strategy {
    FC_FULL_SHARD,        /**< unsharded parameters are freed after forward and after backward */
    FC_SHARD_GRAD_OP,     /**< they are kept from forward to backward */
    FC_NO_SHARD,          /**< parameters and gradients are whole on each rank; gradients are all-reduced */
    FC_HYBRID_SHARD,      /**< FULL_SHARD within a group, replicated over groups */
    FC_HYBRID_SHARD_ZERO2 /**< SHARD_GRAD_OP within a group, replicated over groups */
} fc_sharding_strategy;

/** torch.distributed.fsdp.BackwardPrefetch, or None: when the backward gathers the parameters of the next unit. */
typedef enum fc_backward_prefetch {
    FC_BACKWARD_PREFETCH_PRE,  /**< before the gradients of this unit are computed: the most overlap */
    FC_BACKWARD_PREFETCH_POST, /**< after the parameters of this unit are freed: less memory */
    FC_BACKWARD_PREFETCH_NONE
} fc_backward_prefetch;

/** The options of a unit: the arguments of FullyShardedDataParallel that are not Python objects. All 0 is torch's
 * default. The dtypes are used only with mixed_precision. */
typedef struct fc_unit_options {
    fc_sharding_strategy strategy;
    fc_backward_prefetch prefetch;
    bool mixed_precision;                             /**< whether the dtypes are used */
    fc_dtype param_dtype, reduce_dtype, buffer_dtype; /**< FC_OPAQUE: unchanged */
    bool use_orig_params;
    bool cpu_offload;
    bool forward_prefetch;
    bool keep_low_precision_grads, cast_forward_inputs, no_cast_root_forward_inputs; /**< with mixed_precision */
    bool fp32_inputs; /**< set by fc_wrap_override_mixed_precision: the inputs of the module are cast to float32, and
                           its outputs back */
} fc_unit_options;

/** The fields of fc_unit_options that an override sets. */
enum {
    FC_UNIT_SET_STRATEGY = 1,
    FC_UNIT_SET_PREFETCH = 2,
    FC_UNIT_SET_MIXED_PRECISION = 4, /**< mixed_precision, the three dtypes and the three flags that go with them */
    FC_UNIT_SET_USE_ORIG_PARAMS = 8,
    FC_UNIT_SET_CPU_OFFLOAD = 16,
    FC_UNIT_SET_FORWARD_PREFETCH = 32
};

/** The decision of a custom policy for one module. */
typedef struct fc_wrap_choice {
    bool wrap;
    unsigned set; /**< FC_UNIT_SET_… flags of the members of `options` that are used; the others are the root's */
    fc_unit_options options;
} fc_wrap_choice;

/** The decisions of a policy for all modules of a tree. */
typedef struct fc_wrap_targets {
    const fc_module_tree *tree;
    fc_unit_options root; /**< options of the root, which is always a unit */
    bool *chosen;         /**< one per module */
    fc_unit_options *options;
} fc_wrap_targets;

/** Makes targets in which no module is chosen. */
fc_code fc_wrap_targets_new(const fc_module_tree *tree, const fc_unit_options *root, fc_arena *arena,
                            fc_wrap_targets *out, fc_error *err);

/** ModuleWrapPolicy: every module of the `classes` (NULL-terminated), with the root's options. */
void fc_wrap_by_class(fc_wrap_targets *targets, const char *const *classes);

/** Decides for module `m`: sets `choice`, which is "do not wrap" at first. */
typedef fc_code (*fc_wrap_fn)(const fc_module_tree *tree, uint32_t m, void *user, fc_wrap_choice *choice,
                              fc_error *err);

/** CustomPolicy: calls `fn` for every module that is not ignored, in pre-order, including the root. */
fc_code fc_wrap_custom(fc_wrap_targets *targets, fc_wrap_fn fn, void *user, fc_error *err);

/** What a term of fc_wrap_any chooses. */
typedef enum fc_wrap_kind {
    FC_WRAP_ALWAYS, /**< always_wrap_policy: every module */
    FC_WRAP_SIZE,   /**< size_based_auto_wrap_policy, see fc_wrap_by_size */
    FC_WRAP_CLASS,  /**< transformer_auto_wrap_policy: modules of the classes `names` */
    FC_WRAP_NAME,   /**< modules whose FQN fits one of the patterns `names` */
    FC_WRAP_LAMBDA  /**< lambda_auto_wrap_policy: modules for which `lambda` returns true */
} fc_wrap_kind;

/** A policy of fc_wrap_any. Lists are NULL-terminated. */
typedef struct fc_wrap_term {
    fc_wrap_kind kind;
    int64_t least;            /**< SIZE */
    const char *const *names; /**< CLASS, NAME */
    bool (*lambda)(const fc_module_tree *tree, uint32_t m, void *user);
    void *user;
    const char *const *leaf;    /**< classes below which this policy chooses nothing. NULL: with SIZE torch's
                                   {MultiheadAttention}, else none */
    const char *const *exclude; /**< classes that it never chooses. NULL: with SIZE torch's {ModuleList, ModuleDict},
                                   else none */
} fc_wrap_term;

/**
 * _or_policy: a module becomes a unit if one of the terms chooses it. As in torch, the terms share one pass: if one
 * descends into a module, all are asked about what is below it, and elements in units count for none of them.
 */
fc_code fc_wrap_any(fc_wrap_targets *targets, const fc_wrap_term *terms, size_t count, fc_error *err);

/**
 * Parses terms: "always", "size:100M", "class:A,B" and "name:layers.*,head", joined by "+". "leaf:A,B" and
 * "exclude:A,B" belong to the term before them: "size:100M+leaf:Attention+class:Embedding".
 */
fc_code fc_wrap_terms_parse(const char *text, fc_arena *arena, const fc_wrap_term **out, size_t *count, fc_error *err);

/** Returns the first class or pattern of a term that no module has or fits, or NULL. It is often misspelt. */
const char *fc_wrap_term_idle(const fc_module_tree *tree, const fc_wrap_term *term, bool *is_pattern);

/** Returns whether `text` begins like terms, and not like the name of a file. */
bool fc_wrap_is_terms(const char *text);

/**
 * size_based_auto_wrap_policy: bottom up, a module becomes a unit if the parameters below it that are in no unit yet
 * have at least `least` elements. All elements are counted before any unit is made.
 * @param force_leaf classes (NULL-terminated) that are not wrapped, nor is anything below them; NULL: torch's,
 * {MultiheadAttention}.
 * @param exclude    classes that are not wrapped themselves; NULL: torch's, {ModuleList, ModuleDict}.
 */
fc_code fc_wrap_by_size(fc_wrap_targets *targets, int64_t least, const char *const *force_leaf,
                        const char *const *exclude, fc_error *err);

/**
 * The usual choice for transformers, derived from names: the outermost numbered modules that contain modules
 * ("model.layers.0", "h.11", "encoder.block.3").
 */
void fc_wrap_blocks(fc_wrap_targets *targets);

/**
 * Makes modules of the `classes` units without mixed precision, whatever the policy has decided.
 * @param overridden receives the distinct classes (the modules' own) of those found, in order, NULL-terminated.
 */
fc_code fc_wrap_override_mixed_precision(fc_wrap_targets *targets, const char *const *classes, fc_arena *arena,
                                         const char *const **overridden, fc_error *err);

/** Receives a warning for people. */
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

/** Called for each unit with its module `m`. */
typedef fc_code (*fc_wrap_apply_fn)(const fc_module_tree *tree, uint32_t m, const fc_unit_options *options, void *user,
                                    fc_error *err);

/**
 * Calls `fn` for each unit in post-order, once for a shared module, and last for the root. Stops at the first failure.
 */
fc_code fc_wrap_apply(const fc_wrap_targets *targets, fc_wrap_apply_fn fn, void *user, fc_error *err);

/**
 * Computes the unit that manages each module's own parameters: the module itself or its nearest ancestor that is a
 * unit.
 * @param unit receives, for each module, the module of its unit; 0 for the root.
 */
void fc_wrap_unit_of(const fc_wrap_targets *targets, uint32_t *unit);

/** A unit: the parameters of one flat parameter. */
typedef struct fc_unit {
    uint32_t module;
    const char *fqn; /**< FQN of the module; "" for a root without a name */
    fc_unit_options options;
    const uint32_t
        *parameters; /**< indexes into the tree's parameters, in the order of FSDP's flat parameter; shared ones once */
    size_t nparameters;
    const uint32_t *names; /**< the same, but shared ones as often as they occur */
    size_t nnames;
    int64_t numel;
    uint64_t bytes;
} fc_unit;

typedef struct fc_units {
    const fc_unit *units; /**< in the order of fc_wrap_apply; the root is the last */
    size_t count;
} fc_units;

/** Makes the list of units. Run the checks before; without them a shared parameter is in the unit of its first module.
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
 * Instead of patterns it may have "$policy": terms for fc_wrap_any.
 */
fc_code fc_wrap_file_load(const char *path, fc_arena *arena, fc_wrap_file **out, fc_error *err);

/** Return the root's options of a policy file, and its classes without mixed precision (NULL-terminated): batch norms
 * unless the file lists others, as in torch's MixedPrecision; none if the root has no mixed precision. */
const fc_unit_options *fc_wrap_file_root(const fc_wrap_file *file);
const char *const *fc_wrap_file_fp32_classes(const fc_wrap_file *file);

/** Returns the terms of "$policy", or NULL if the file has patterns. */
const fc_wrap_term *fc_wrap_file_terms(const fc_wrap_file *file, size_t *count);

/** The fc_wrap_fn of a policy file; pass the file as its `user`. */
fc_code fc_wrap_file_fn(const fc_module_tree *tree, uint32_t m, void *file, fc_wrap_choice *choice, fc_error *err);

/** Returns the number of rules that have decided no module yet. @param first receives the pattern of the first, or
 * NULL. */
size_t fc_wrap_file_idle(const fc_wrap_file *file, const char **first);

/** Returns the name of a strategy, e.g. "FULL_SHARD". */
const char *fc_sharding_strategy_name(fc_sharding_strategy strategy);

FC_END_DECLS
