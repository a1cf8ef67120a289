/*
 * Builds the module tree of a selection: finds out which of a checkpoint's tensors are parameters, and where their root
 * is. Reads only the manifest.
 */
#include "wrap/module_tree.h"

#include "checkpoint/parameters.h"
#include "checkpoint/path.h"
#include "fsdpckpt/checkpoint.h"
#include "fsdpckpt/try.h"
#include "sharding/fqn.h"

#include <string.h>

/* Counts the leading keys that all parameters share. They are keys of a state dict, not modules: {"model":
 * {"layers.0.w": …}}. */
static int common_levels(const fc_target *target, const uint32_t *chosen, size_t count) {
    const fc_path *first = count ? &target->tensors[chosen[0]].path : NULL;
    size_t common = first && first->count ? first->count - 1 : 0;
    for (size_t i = 0; i < count; i++) {
        const fc_path *path = &target->tensors[chosen[i]].path;
        size_t same = 0;
        while (same < common && same + 1 < path->count &&
               strcmp(path->elements[same].key, first->elements[same].key) == 0) {
            same++;
        }
        common = fc_path_spells(path, target->tensors[chosen[i]].name) ? same : 0;
    }
    int levels = 0;
    for (size_t i = 0; i < common; i++) {
        fc_fqn n;
        fc_fqn_split(first->elements[i].key, FC_FQN_COMPONENTS, &n);
        levels += n.count;
    }
    return levels;
}

static fc_code tie(const fc_target *target, const uint32_t *chosen, size_t count, fc_parameter_spec *specs,
                   fc_arena *arena, fc_error *err) {
    const fc_tensor **tensors = fc_arena_calloc(arena, count, sizeof *tensors);
    size_t *same_as = fc_arena_calloc(arena, count, sizeof *same_as);
    FC_NEED(tensors && same_as, err, NULL);
    for (size_t i = 0; i < count; i++) {
        tensors[i] = target->tensors[chosen[i]].source;
    }
    FC_TRY(fc_find_ties(target->source, tensors, count, same_as, err));
    for (size_t i = 0; i < count; i++) {
        specs[i].tied_to = same_as[i] != i ? specs[same_as[i]].fqn : NULL;
    }
    return FC_OK;
}

fc_code fc_module_tree_of(const fc_target *target, const fc_model_info *info, fc_arena *arena, fc_module_tree *out,
                          fc_error *err) {
    size_t count = 0;
    fc_parameter_spec *specs = fc_arena_calloc(arena, target->ntensors, sizeof *specs);
    uint32_t *chosen = fc_arena_calloc(arena, target->ntensors, sizeof *chosen);
    FC_NEED(specs && chosen, err, NULL);
    for (uint32_t i = 0; i < target->ntensors; i++) {
        const fc_target_tensor *w = &target->tensors[i];
        if (w->source->object || fc_is_optimizer_state(w->name)) {
            continue;
        }
        specs[count] = (fc_parameter_spec){.fqn = w->name,
                                           .dtype = w->dtype,
                                           .ndim = w->source->ndim,
                                           .shape = w->source->shape,
                                           .buffer = fc_is_buffer(w->name, w->dtype)};
        chosen[count++] = i;
    }
    const char *path = target->source->path;
    if (count == 0) {
        return fc_fail(err, FC_EUSAGE, "%s: no parameters: all of its %zu values are objects or optimizer state", path,
                       target->ntensors);
    }
    FC_TRY_CONTEXT(tie(target, chosen, count, specs, arena, err), err, "%s", path);
    FC_TRY_CONTEXT(fc_module_tree_build(specs, count, common_levels(target, chosen, count), info, arena, out, err), err,
                   "%s", path);
    for (size_t i = 0; i < out->nparameters; i++) {
        fc_parameter *p = (fc_parameter *)&out->parameters[i]; /* the builder just allocated them */
        p->spec = p->spec < count ? chosen[p->spec] : p->spec;
    }
    out->left_out = target->ntensors - count;
    return FC_OK;
}
