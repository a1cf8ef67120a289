/*
 * Finds the matrices that hold a gate. Their shards cannot simply be concatenated: each rank has its shard of the gate
 * followed by its shard of the rest.
 */
#include "megatron/stages.h"

#include "base/name_table.h"
#include "fsdpckpt/try.h"

#include <string.h>

/* If `v` is the first matrix of an MLP or its bias, names the second matrix. @return false when out of memory. */
static bool name_second(fc_arena *arena, const fc_mg_value *v, const char **out) {
    const char *a, *b, *at = fc_mg_first_of_mlp(v->name, &a, &b);
    *out = NULL;
    if (v->sharding.rule != MG_SHARD || v->ndim == 0 || !at) {
        return true;
    }
    const char *rest = at + strlen(a), *number = strncmp(rest, "bias", 4) == 0 ? rest + 4 : rest + 6;
    *out = v->grouped ? fc_arena_printf(arena, "%.*s%s", (int)(at - v->name), v->name, b)
                      : fc_arena_printf(arena, "%.*s%sweight%s", (int)(at - v->name), v->name, b, number);
    return *out != NULL;
}

/* Along the sharded dimensions, a first matrix with a gate has twice as many outputs as the second one has inputs. */
static fc_code find_gate(fc_mg_reader *r, fc_mg_value *v, const fc_mg_value *second, const char *name) {
    int64_t given = v->sizes[v->sharding.dim < v->ndim ? v->sharding.dim : 0];
    int64_t taken =
        second && second->ndim == 2 && second->sharding.rule == MG_SHARD ? second->sizes[second->sharding.dim] : -1;
    bool twice = given % 2 == 0 && given > 0 && given / 2 == taken, once = given == taken;
    if ((!twice && !once) || (twice && r->args.gated == 0) || (once && r->args.gated == 1)) {
        return fc_fail(r->err, FC_EUNSUPPORTED,
                       "%s: tensor %.256s: it is unclear whether it holds a gate (SwiGLU): args and the second matrix "
                       "of the MLP, %.256s, disagree, or one is missing",
                       r->f.path, v->name, name);
    }
    v->sharding.rule = twice ? MG_GATED : v->sharding.rule;
    return FC_OK;
}

fc_code fc_mg_find_gates(fc_mg_reader *r, size_t first) {
    fc_arena *scratch = fc_arena_new();
    fc_name_table *table = scratch ? fc_name_table_new(scratch, r->nvalues - first + 1) : NULL;
    fc_code rc;
    FC_TRY_GOTO(table ? FC_OK : fc_mg_no_memory(r), rc, out);
    for (size_t i = first; i < r->nvalues; i++) {
        fc_name_table_put(table, r->values[i].name, strlen(r->values[i].name), i);
    }
    for (size_t i = first; i < r->nvalues; i++) {
        const char *other;
        if (!name_second(scratch, &r->values[i], &other)) {
            rc = fc_mg_no_memory(r);
            goto out;
        } else if (other) {
            size_t found = fc_name_table_find(table, other, strlen(other));
            FC_TRY_GOTO(find_gate(r, &r->values[i], found != FC_NO_NAME ? &r->values[found] : NULL, other), rc, out);
        }
    }
out:
    fc_arena_free(scratch);
    return rc;
}
