/*
 * The writer of torch_dist: adapt.c gives the values of any source the names that megatron-core looks for, layers.c
 * finds what the layers of a model have in common, and torch_dist.c writes the files.
 */
#pragma once

#include "fsdpckpt/format.h"

/** Parts of the parameters' names in the source: "decoder.layers.", layer 3, "mlp.experts.linear_fc1.weight7". */
typedef struct fc_dist_parameter {
    const char *from;   /**< pattern of a recipe: "decoder.layers.{n}.mlp.experts.linear_fc1.weight{e}" */
    const char *module; /**< in megatron-core's keys, without the layer: "mlp.experts.experts.linear_fc1.weight" */
    size_t prefix;      /**< bytes of "decoder.layers." */
    int64_t layer;
    int64_t expert;  /**< -1: it is not of one expert */
    bool transposed; /**< stored for x @ weight, where megatron-core's key is for x @ weight.T */
    bool grouped;    /**< it has all experts of its layer */
} fc_dist_parameter;

/** One entry for all parameters with the same pattern. */
typedef struct fc_dist_kind {
    fc_dist_parameter like; /**< the first of them */
    const fc_tensor *first;
    size_t stack;          /**< index into fc_dist_layers.stacks */
    int64_t count, layers; /**< parameters; the highest layer plus 1 */
    int64_t experts;       /**< the highest expert plus 1; 0: not of experts */
} fc_dist_kind;

/** The layers that are called alike: those of "decoder.layers.". */
typedef struct fc_dist_stack {
    const char *prefix;
    size_t length;
    int64_t layers;
    bool alike; /**< all layers have the same parameters, so that megatron-core stores each of these as one tensor */
} fc_dist_stack;

typedef struct fc_dist_layers {
    fc_dist_kind *kinds;
    fc_dist_stack *stacks;
    size_t nkinds, nstacks;
    size_t *kind_of;               /**< per value of the target: its kind, or SIZE_MAX */
    fc_dist_parameter *parameters; /**< per value of the target, if it has a kind */
} fc_dist_layers;

/** Finds the parameters of layers in `target`. @param arena owns the result. */
fc_code fc_dist_find_layers(const fc_target *target, fc_arena *arena, fc_dist_layers *out, fc_error *err);

/** Whether a value belongs into common.pt: an object that is not one of the ranks' sharded objects. */
bool fc_dist_is_common(const fc_target_tensor *t);

/** Whether the name is that of an optimizer's value. */
bool fc_dist_is_state(const char *name);

/** Whether the checkpoint is what fc_dist_adapt made. */
bool fc_dist_is_adapted(const fc_checkpoint *source);

/** Implements fc_format_target.adapt. */
fc_code fc_dist_adapt(const fc_checkpoint *source, const struct fc_selection *selection, size_t *left_out,
                      fc_checkpoint **out, fc_error *err);
