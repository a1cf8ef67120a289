/*
 * What the steps of adapt.c share, and formats/fsdp_dtensor with them: the values that the adapted checkpoint gets.
 */
#pragma once

#include "base/name_table.h"
#include "fsdpckpt/format.h"
#include "fsdpckpt/select.h"

#include <jansson.h>

typedef struct fc_dist_adapting {
    fc_checkpoint *source, *out;
    fc_tensor *values; /* from malloc */
    size_t count, capacity;
    fc_name_table *names;  /* of the values */
    const fc_tensor *last; /* the object that fc_dist_add_text made last */
    fc_error *err;
} fc_dist_adapting;

/** Adds a value of the source under another name. @param path NULL: the name is the only key */
fc_code fc_dist_keep(fc_dist_adapting *a, const fc_tensor *value, const char *name, const fc_path *path);

/** Adds an object whose value is `json`. @param name, json static, or in the arena of the result. @param path as above
 */
fc_code fc_dist_add_text(fc_dist_adapting *a, const char *name, const fc_path *path, const char *json);

/** Leaves out of a target the lists of the parameters of the optimizer's groups, unless parameters have numbers there.
 */
void fc_dist_drop_lists(fc_target *target);

/** A value of one of the groups of megatron-core's optimizers. */
typedef struct fc_dist_setting {
    size_t optimizer, number; /**< the group: optimizer 1 is that of the experts */
    bool experts;             /**< whether experts have an optimizer of their own */
    const char *key;          /**< in the arena of the source or of the result */
    const fc_tensor *value;   /**< of the source; NULL: it is `json` */
    const char *json;
} fc_dist_setting;

/** What becomes of an optimizer. Values come before groups. */
typedef struct fc_dist_optimizer {
    void *context;
    bool takes_key_first; /**< whether states with the key before the parameter are added, too */
    bool takes_step;      /**< whether the "step" of each parameter is a state, too */
    /** Adds a state: "exp_avg", "exp_avg_sq" or "param", the weight that the optimizer changes. `parameter` is freed.
     */
    fc_code (*add_state)(void *context, const fc_tensor *value, const char *key, const char *parameter);
    fc_code (*add_setting)(void *context, const fc_dist_setting *setting);
} fc_dist_optimizer;

/**
 * Finds the optimizer of `target`, whose values have torch's names or Megatron's.
 * @param taken   one per value of `target`: set for those that belong to the optimizer.
 * @param step    receives the number of its steps; -1: there is no such optimizer, and nothing is added.
 * @param experts receives whether experts have an optimizer of their own.
 */
fc_code fc_dist_find_optimizer(fc_dist_adapting *a, const fc_target *target, const fc_dist_optimizer *to, bool *taken,
                               int64_t *step, bool *experts);

/** Adds the optimizer of `target` as torch_dist stores it, in the form `fully_reshardable`. Parameters as above. */
fc_code fc_dist_add_optimizer(fc_dist_adapting *a, const fc_target *target, bool *taken, int64_t *step);

/** Gives the values of `*source` that `how` chooses other names and shapes. `*source` becomes the result. */
typedef fc_code fc_dist_adapter(fc_checkpoint **source, const fc_selection *how, fc_arena *arena, size_t *left_out,
                                fc_error *err);

/** Implements fc_format_target.adapt by `adapt`. What Megatron's rank files have under "model" is selected without it.
 */
fc_code fc_dist_adapt_with(fc_dist_adapter *adapt, const fc_checkpoint *source, const fc_selection *selection,
                           size_t *left_out, fc_checkpoint **out, fc_error *err);

/** Whether the model is under "model", as in Megatron's rank files. */
bool fc_dist_has_model(const fc_checkpoint *source);

/** Whether tensors have the keys of torch_dist already: those of all layers, or all experts of a layer, in one. */
bool fc_dist_has_keys(const fc_target *target);

/** Refuses the names of the hub, which would become keys that megatron-core does not look for. */
fc_code fc_dist_refuse_hub_names(const fc_target *target, fc_error *err);

/**
 * Applies a recipe with `rules`, which it frees. `*source` stays if there are none.
 * @param name of the recipe, for messages. @param rules NULL: memory has run out
 */
fc_code fc_dist_apply_rules(fc_checkpoint **source, const fc_target *target, const char *name, json_t *rules,
                            fc_arena *arena, fc_error *err);
