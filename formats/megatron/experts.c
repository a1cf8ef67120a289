/*
 * Counts and renumbers experts. All expert-parallel ranks have the same number of experts per layer and number them
 * from 0. Megatron stores experts in three forms: one module per expert (SequentialMLP:
 * `experts.local_experts.1.linear_fc1.weight`; the older SwitchMLP lacks the first `experts`), one parameter per expert
 * (TEGroupedMLP: `experts.linear_fc1.weight1`), or one matrix for all experts (GroupedMLP: `experts.weight1`). The
 * matrix is read with an additional first dimension for the experts, as Megatron uses it.
 */
#include "megatron/stages.h"

#include "base/file_name.h"
#include "base/name_table.h"
#include "fsdpckpt/try.h"

#include <inttypes.h>
#include <string.h>

enum { MOST_EXPERTS = 1 << 20 };

/* Returns the text after `infix`, which must start at an element of the name; NULL if there is none. */
static const char *after(const char *name, const char *infix) {
    for (const char *at = strstr(name, infix); at; at = strstr(at + 1, infix)) {
        if (at == name || at[-1] == '.') {
            return at + strlen(infix);
        }
    }
    return NULL;
}

/* Returns the text after `a` or `b`; NULL if it starts with neither. */
static const char *skip(const char *text, const char *a, const char *b) {
    size_t n = strlen(a), m = strlen(b);
    return strncmp(text, a, n) == 0 ? text + n : strncmp(text, b, m) == 0 ? text + m : NULL;
}

fc_mg_expert fc_mg_expert_of(const char *name, size_t *digits, size_t *end, int64_t *number) {
    const char *module = after(name, "local_experts."), *rest = after(name, "experts.");
    if (!module && !rest) {
        return MG_NO_EXPERT;
    }
    if (rest && (strcmp(rest, "weight1") == 0 || strcmp(rest, "weight2") == 0)) {
        return MG_ALL_EXPERTS;
    }
    const char *layer = rest ? skip(rest, "linear_fc1.", "linear_fc2.") : NULL;
    const char *p = module ? module : layer ? skip(layer, "weight", "bias") : NULL, *start = p;
    *number = p ? fc_take_number(&p, MOST_EXPERTS) : -1;
    if (*number < 0 || *p != (module ? '.' : '\0')) {
        return MG_OTHER_EXPERT;
    }
    *digits = (size_t)(start - name);
    *end = (size_t)(p - name);
    return MG_ONE_EXPERT;
}

/* ---- the number of experts ---- */

/* The rows of a router's matrix, one per expert of the layer; -1 if the leaf is not a router. */
static int64_t routed(const fc_mg_reader *r, const torch_leaf *leaf) {
    static const char router[] = ".router.weight";
    size_t n = strlen(leaf->name);
    fc_torch_tensor t = {0};
    bool is = n >= sizeof router && strcmp(leaf->name + n - (sizeof router - 1), router) == 0;
    return is && fc_torch_is_tensor(r->f.p, leaf->v) && fc_torch_tensor_decode(r->f.p, leaf->v, &t, NULL) == FC_OK &&
                   t.ndim == 2
               ? t.sizes[0]
               : -1;
}

/* Fails if the number of experts differs from that of earlier ranks or from args. */
static fc_code set_count(fc_mg_reader *r, int64_t count, const char *name) {
    if (r->local_experts == 0) {
        r->local_experts = count;
        r->experts_file = r->rank;
    }
    if (count != r->local_experts) {
        return fc_fail(r->err, FC_ECORRUPT,
                       "%s: %.256s: the rank has %" PRId64
                       " experts of the layer, but the rank of another file has %" PRId64 ": %s",
                       r->f.path, name, count, r->local_experts, fc_mg_file(r, r->experts_file));
    }
    if (r->args.experts > 0 && r->args.experts != count * r->grid.ep) {
        return fc_fail(r->err, FC_ECORRUPT,
                       "%s: %.256s: each of %" PRId64 " expert-parallel ranks has %" PRId64
                       " experts of a layer, but according to args there are %" PRId64,
                       r->f.path, name, r->grid.ep, count, r->args.experts);
    }
    return FC_OK;
}

/* A name without the number of its expert; "" if it has none. @return NULL when out of memory. */
static const char *without_number(fc_arena *arena, const char *name, int64_t *number) {
    size_t start, end;
    return fc_mg_expert_of(name, &start, &end, number) == MG_ONE_EXPERT
               ? fc_arena_printf(arena, "%.*s%s", (int)start, name, name + end)
               : "";
}

/* All experts have the same parameters. Counts each parameter by its name without the number. */
static fc_code count_numbered(fc_mg_reader *r, const torch_leaves *leaves) {
    fc_arena *scratch = fc_arena_new();
    fc_name_table *table = scratch ? fc_name_table_new(scratch, leaves->count + 1) : NULL;
    int64_t *counts = table ? fc_arena_calloc(scratch, leaves->count + 1, sizeof *counts) : NULL, number;
    fc_code rc;
    FC_TRY_GOTO(counts ? FC_OK : fc_mg_no_memory(r), rc, out);
    for (size_t i = 0; i < leaves->count; i++) {
        const char *key = without_number(scratch, leaves->items[i].name, &number);
        if (!key) {
            rc = fc_mg_no_memory(r);
            goto out;
        } else if (*key) {
            counts[fc_name_table_put(table, key, strlen(key), i)]++;
        }
    }
    for (size_t i = 0; i < leaves->count; i++) {
        const char *key = without_number(scratch, leaves->items[i].name, &number);
        int64_t count = key && *key ? counts[fc_name_table_find(table, key, strlen(key))] : 0;
        FC_TRY_GOTO(!key ? fc_mg_no_memory(r) : *key ? set_count(r, count, leaves->items[i].name) : FC_OK, rc, out);
        if (*key && number >= count) {
            rc = fc_fail(r->err, FC_ECORRUPT,
                         "%s: %.256s: the number of its expert exceeds the number of experts, %" PRId64, r->f.path,
                         leaves->items[i].name, count);
            goto out;
        }
    }
out:
    fc_arena_free(scratch);
    return rc;
}

fc_code fc_mg_count_experts(fc_mg_reader *r, const torch_leaves *leaves) {
    int64_t all = -1;
    for (size_t i = 0; all < 0 && i < leaves->count; i++) {
        all = routed(r, &leaves->items[i]);
    }
    for (size_t i = 0; i < leaves->count; i++) {
        size_t start, end;
        int64_t number;
        const torch_leaf *leaf = &leaves->items[i];
        fc_mg_expert kind = fc_mg_expert_of(leaf->name, &start, &end, &number);
        bool parameter = fc_torch_is_tensor(r->f.p, leaf->v) && !fc_mg_is_extra_state(leaf->name);
        if (kind == MG_OTHER_EXPERT && r->grid.ep > 1 && parameter) {
            return fc_fail(r->err, FC_EUNSUPPORTED,
                           "%s: %.256s: it is unknown which experts it belongs to; save with Megatron's --ckpt-format "
                           "torch_dist",
                           r->f.path, leaf->name);
        }
        if (kind == MG_ALL_EXPERTS && (all <= 0 || all % r->grid.ep != 0) && r->grid.ep * r->grid.expert_tp > 1) {
            return fc_fail(r->err, FC_EUNSUPPORTED,
                           "%s: %.256s: it is unknown how many experts it holds: router.weight, which has one row per "
                           "expert, is missing or cannot be divided among %" PRId64 " expert-parallel ranks",
                           r->f.path, leaf->name, r->grid.ep);
        }
        if (kind == MG_ALL_EXPERTS && all > 0) {
            FC_TRY(set_count(r, all / r->grid.ep, leaf->name));
        }
    }
    return count_numbered(r, leaves);
}

/* ---- matrices of all experts ---- */

/* weight1 is stored as [hidden, experts * ffn] and weight2 as [experts * ffn, hidden], but GroupedMLP views both as
 * [experts, rows, columns]. */
static fc_code ungroup(fc_mg_reader *r, fc_mg_value *v) {
    fc_arena *arena = r->checkpoint->arena;
    int64_t n = v->grouped;
    int dim = v->sharding.dim;
    if (v->ndim != 2 || v->sizes[dim] % n != 0 ||
        (v->sizes[0] > 1 && v->sizes[1] > 0 && v->extent->strides[0] != v->sizes[1]) ||
        (v->sizes[1] > 1 && v->extent->strides[1] != 1)) {
        return fc_fail(r->err, FC_ECORRUPT, "%s: tensor %.256s: it is not a matrix of %" PRId64 " experts",
                       fc_mg_file(r, v->file), v->name, n);
    }
    int64_t *sizes = fc_arena_calloc(arena, 3, sizeof *sizes);
    torch_extent *extent = fc_arena_calloc(arena, 1, sizeof *extent + 3 * sizeof *extent->strides);
    FC_NEED(sizes && extent, r->err, r->checkpoint->path);
    sizes[0] = n;
    sizes[1] = dim == 0 ? v->sizes[0] / n : v->sizes[0];
    sizes[2] = dim == 0 ? v->sizes[1] : v->sizes[1] / n;
    *extent = *v->extent;
    fc_row_major_strides(3, sizes, extent->strides);
    v->extent = extent;
    v->sizes = sizes;
    v->ndim = 3;
    v->sharding.dim = dim + 1;
    return FC_OK;
}

fc_code fc_mg_ungroup(fc_mg_reader *r) {
    for (size_t i = 0; i < r->nvalues; i++) {
        if (r->values[i].grouped > 0) {
            FC_TRY(ungroup(r, &r->values[i]));
        }
    }
    return FC_OK;
}
