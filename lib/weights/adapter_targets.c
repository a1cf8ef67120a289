/*
 * Finds what target_parameters are about: see adapter_targets.h. Every look-up takes the time that its name is long.
 */
#include "weights/adapter_targets.h"

#include <string.h>

/* ---- targets ---- */

bool fc_adapter_targets_list(const fc_adapter_config *config, fc_arena *arena, fc_adapter_targets *out) {
    *out = (fc_adapter_targets){0};
    if (config->nparameters == 0) {
        return true;
    }
    for (size_t i = 0; i < config->nparameters; i++) {
        const size_t len = strlen(config->parameters[i]);
        out->longest = len > out->longest ? len : out->longest;
    }
    bool *lengths = fc_arena_calloc(arena, out->longest + 1, sizeof *lengths);
    out->names = fc_name_table_new(arena, config->nparameters);
    if (!lengths || !out->names) {
        return false;
    }
    for (size_t i = 0; i < config->nparameters; i++) {
        const size_t len = strlen(config->parameters[i]);
        lengths[len] = true;
        fc_name_table_put(out->names, config->parameters[i], len, i);
    }
    out->lengths = lengths;
    return true;
}

bool fc_adapter_targets_have(const fc_adapter_targets *targets, const char *name) {
    const size_t all = strlen(name);
    for (size_t len = 1; targets->names && len <= targets->longest && len <= all; len++) {
        const char *end = name + all - len;
        if (targets->lengths[len] && (len == all || end[-1] == '.') &&
            fc_name_table_find(targets->names, end, len) != FC_NO_NAME) {
            return true;
        }
    }
    return false;
}

/* ---- modules ---- */

/* @return the length of the name of a tensor's module; 0 if it has none. */
static size_t module_of(const char *name) {
    const char *dot = strrchr(name, '.');
    return dot ? (size_t)(dot - name) : 0;
}

bool fc_module_parameters_list(const fc_checkpoint *source, fc_arena *arena, fc_module_parameters *out) {
    const size_t count = source->ntensors;
    *out = (fc_module_parameters){.first = fc_name_table_new(arena, count),
                                  .next = fc_arena_calloc(arena, count + 1, sizeof *out->next)};
    for (size_t i = count; out->first && out->next && i-- > 0;) { /* from the end: each becomes the first */
        const char *name = source->tensors[i].name;
        const size_t len = module_of(name), first = fc_name_table_put(out->first, name, len, i);
        out->next[i] = first == i ? FC_NO_NAME : first;
        fc_name_table_set(out->first, name, len, i);
    }
    return out->first && out->next;
}

const fc_tensor *fc_adapter_targets_prefix(const fc_adapter_targets *targets, const fc_checkpoint *source,
                                           const char *module, size_t *len) {
    const size_t wanted = strlen(module);
    const fc_tensor *found = NULL;
    for (size_t i = 0; i < source->ntensors; i++) {
        const fc_tensor *t = &source->tensors[i];
        const size_t all = module_of(t->name), more = all >= wanted ? all - wanted : 0;
        if (t->object || all < wanted || memcmp(t->name + more, module, wanted) != 0 ||
            (more > 0 && t->name[more - 1] != '.') || !fc_adapter_targets_have(targets, t->name + more)) {
            continue;
        }
        if (found && (more != *len || memcmp(found->name, t->name, more) != 0)) {
            return NULL;
        }
        found = t;
        *len = more;
    }
    return found;
}
