/*
 * What the steps of adapt.c share: the values that the adapted checkpoint gets.
 */
#pragma once

#include "base/name_table.h"
#include "fsdpckpt/format.h"

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

/**
 * Adds the optimizer of `target`, whose values have torch's names, as megatron-core's distributed optimizer stores it.
 * @param taken one per value of `target`: set for those that belong to the optimizer.
 * @param step  receives the number of its steps; -1: there is no such optimizer, and nothing is added.
 */
fc_code fc_dist_add_optimizer(fc_dist_adapting *a, const fc_target *target, bool *taken, int64_t *step);
