/*
 * Tells pipeline stages from replicas. Both are groups of ranks with the same mesh, and a checkpoint stores each value
 * once. But a stage has whole layers, and writers of replicas spread the tensors of each layer over all of them.
 */
#include "fsdpckpt/sharding.h"

#include "base/name_table.h"

#include <stdlib.h>
#include <string.h>

/* The length of the beginning of a name that names its layer, such as "model.layers.3"; 0: it is in none. */
static size_t layer_length(const char *name) {
    const char *at = name;
    for (size_t len; at[len = strcspn(at, ".")]; at += len + 1) {
        if (len > 0 && strspn(at, "0123456789") == len) {
            return (size_t)(at - name) + len;
        }
    }
    return 0;
}

/* The group of ranks that stores all chunks of a tensor; -1: there is none. */
static int64_t group_of(const fc_tensor *t, int64_t ranks, int64_t groups) {
    int64_t group = -1;
    for (size_t i = 0; i < t->nchunks; i++) {
        const int64_t of = t->chunks[i].rank < ranks ? t->chunks[i].rank / (ranks / groups) : -1;
        if (of < 0 || (i > 0 && of != group)) {
            return -1;
        }
        group = of;
    }
    return group;
}

/* Notes that a layer is in a group. `pairs[group]` counts tensors whose layer was there before. @return false if it is
 * in another one, too. */
static bool add_layer(fc_name_table *layers, const char *name, size_t group, size_t *pairs) {
    const size_t len = layer_length(name);
    if (len == 0) {
        return true;
    }
    const size_t known = fc_name_table_find(layers, name, len);
    if (known == FC_NO_NAME) {
        return fc_name_table_put(layers, name, len, group) == group;
    }
    pairs[group] += known == group;
    return known == group;
}

static bool are_stages(const fc_tensor *const *tensors, size_t count, int64_t ranks, int64_t groups,
                       fc_name_table *layers, size_t *pairs) {
    for (size_t i = 0; i < count; i++) {
        const fc_tensor *t = tensors[i];
        if (t->object || t->nchunks == 0) {
            continue;
        }
        const int64_t group = group_of(t, ranks, groups);
        if (group < 0 || (t->nchunks > 1 && !add_layer(layers, t->name, (size_t)group, pairs))) {
            return false;
        }
    }
    for (int64_t g = 0; g < groups; g++) {
        if (pairs[g] == 0) { /* no layer of several tensors shows that it is a stage */
            return false;
        }
    }
    return true;
}

int64_t fc_find_stages(const fc_tensor *const *tensors, size_t count, const fc_mesh *mesh) {
    const int64_t groups = mesh->ndim > 0 && strcmp(mesh->names[0], "replicate") == 0 ? mesh->sizes[0] : 1;
    if (groups < 2) {
        return 1;
    }
    fc_arena *arena = fc_arena_new();
    fc_name_table *layers = arena ? fc_name_table_new(arena, count + 1) : NULL;
    size_t *pairs = calloc((size_t)groups, sizeof *pairs);
    const bool stages = layers && pairs && are_stages(tensors, count, fc_mesh_ranks(mesh), groups, layers, pairs);
    free(pairs);
    fc_arena_free(arena);
    return stages ? groups : 1;
}
