/*
 * Experts: each expert-parallel rank has as many of a layer as the others, and numbers them from 0. Megatron has them
 * in three forms: one module an expert (SequentialMLP: `experts.local_experts.1.linear_fc1.weight`; SwitchMLP before
 * it, without the first `experts`), one parameter an expert (TEGroupedMLP: `experts.linear_fc1.weight1`), or a matrix
 * of all (GroupedMLP: `experts.weight1`), which is read as it is used: with a first dimension for the experts.
 */
#include "megatron/megatron.h"

#include "base/name_table.h"
#include "base/try.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_EXPERTS = 1 << 20 };

/* Behind a part of a name, with its dot: NULL where there is none. */
static const char *behind(const char *name, const char *part) {
    for (const char *at = strstr(name, part); at; at = strstr(at + 1, part)) {
        if (at == name || at[-1] == '.') {
            return at + strlen(part);
        }
    }
    return NULL;
}

/* Skips one of the words, where the text begins with it. */
static const char *skip(const char *text, const char *a, const char *b) {
    size_t n = strlen(a), m = strlen(b);
    return strncmp(text, a, n) == 0 ? text + n : strncmp(text, b, m) == 0 ? text + m : NULL;
}

mg_expert fc_mg_expert(const char *name, size_t *digits, size_t *end, int64_t *number) {
    const char *module = behind(name, "local_experts."), *rest = behind(name, "experts.");
    if (!module && !rest) {
        return MG_NO_EXPERT;
    }
    if (rest && (strcmp(rest, "weight1") == 0 || strcmp(rest, "weight2") == 0)) {
        return MG_ALL_EXPERTS;
    }
    const char *layer = rest ? skip(rest, "linear_fc1.", "linear_fc2.") : NULL;
    const char *p = module ? module : layer ? skip(layer, "weight", "bias") : NULL, *start = p;
    *number = 0;
    for (; p && *p >= '0' && *p <= '9' && *number < MOST_EXPERTS; p++) {
        *number = *number * 10 + (*p - '0');
    }
    if (!p || p == start || *number >= MOST_EXPERTS || *p != (module ? '.' : '\0')) {
        return MG_OTHER_EXPERT;
    }
    *digits = (size_t)(start - name);
    *end = (size_t)(p - name);
    return MG_ONE_EXPERT;
}

/* ---- how many there are ---- */

/* The rows of a router's matrix: one for each expert of the layer. @return -1 where the leaf is something else. */
static int64_t routed(const mg_reader *r, const torch_leaf *leaf) {
    static const char router[] = ".router.weight";
    size_t n = strlen(leaf->name);
    fc_torch_tensor t = {0};
    bool is = n >= sizeof router && strcmp(leaf->name + n - (sizeof router - 1), router) == 0;
    return is && fc_torch_is_tensor(r->f.p, leaf->v) && fc_torch_tensor_decode(r->f.p, leaf->v, &t, NULL) == FC_OK &&
                   t.ndim == 2
               ? t.sizes[0]
               : -1;
}

/* Fails where the rank has another number of experts than ranks before, or than args says. */
static fc_code set_count(mg_reader *r, int64_t count, const char *name) {
    if (r->local_experts == 0) {
        r->local_experts = count;
        r->experts_file = r->rank;
    }
    if (count != r->local_experts) {
        return fc_fail(r->err, FC_ECORRUPT,
                       "%s: %.256s and its like are there for %" PRId64 " experts of the layer, and a rank has %" PRId64
                       " in %s",
                       r->f.path, name, count, r->local_experts, fc_mg_file(r, r->experts_file));
    }
    if (r->args.experts > 0 && r->args.experts != count * r->grid.ep) {
        return fc_fail(r->err, FC_ECORRUPT,
                       "%s: %.256s: each of %" PRId64 " expert-parallel ranks has %" PRId64
                       " experts of a layer, and args says %" PRId64 " in all",
                       r->f.path, name, r->grid.ep, count, r->args.experts);
    }
    return FC_OK;
}

/* A name without the number of its expert. @return NULL when out of memory, "" where it has none. */
static const char *without_number(fc_arena *arena, const char *name, int64_t *number) {
    size_t start, end;
    return fc_mg_expert(name, &start, &end, number) == MG_ONE_EXPERT
               ? fc_arena_printf(arena, "%.*s%s", (int)start, name, name + end)
               : "";
}

/* What one expert has, the others have: counts each, by its name without the number. */
static fc_code count_numbered(mg_reader *r, const torch_leaves *leaves) {
    fc_arena *scratch = fc_arena_new();
    fc_name_table *table = scratch ? fc_name_table_new(scratch, leaves->count + 1) : NULL;
    int64_t *counts = table ? fc_arena_calloc(scratch, leaves->count + 1, sizeof *counts) : NULL, number;
    fc_code rc = counts ? FC_OK : fc_mg_no_memory(r);
    for (size_t i = 0; rc == FC_OK && i < leaves->count; i++) {
        const char *key = without_number(scratch, leaves->items[i].name, &number);
        if (!key) {
            rc = fc_mg_no_memory(r);
        } else if (*key) {
            counts[fc_name_table_put(table, key, strlen(key), i)]++;
        }
    }
    for (size_t i = 0; rc == FC_OK && i < leaves->count; i++) {
        const char *key = without_number(scratch, leaves->items[i].name, &number);
        int64_t count = key && *key ? counts[fc_name_table_find(table, key, strlen(key))] : 0;
        rc = !key ? fc_mg_no_memory(r) : *key ? set_count(r, count, leaves->items[i].name) : FC_OK;
        if (rc == FC_OK && *key && number >= count) {
            rc = fc_fail(r->err, FC_ECORRUPT, "%s: %.256s: the number of its expert is too high, of %" PRId64,
                         r->f.path, leaves->items[i].name, count);
        }
    }
    fc_arena_free(scratch);
    return rc;
}

fc_code fc_mg_count_experts(mg_reader *r, const torch_leaves *leaves) {
    int64_t all = -1;
    for (size_t i = 0; all < 0 && i < leaves->count; i++) {
        all = routed(r, &leaves->items[i]);
    }
    for (size_t i = 0; i < leaves->count; i++) {
        size_t start, end;
        int64_t number;
        const torch_leaf *leaf = &leaves->items[i];
        mg_expert kind = fc_mg_expert(leaf->name, &start, &end, &number);
        bool parameter = fc_torch_is_tensor(r->f.p, leaf->v) && !fc_mg_is_extra_state(leaf->name);
        if (kind == MG_OTHER_EXPERT && r->grid.ep > 1 && parameter) {
            return fc_fail(r->err, FC_EUNSUPPORTED,
                           "%s: %.256s: which experts it is of is not known; save with --ckpt-format torch_dist",
                           r->f.path, leaf->name);
        }
        if (kind == MG_ALL_EXPERTS && (all <= 0 || all % r->grid.ep != 0) && r->grid.ep * r->grid.expert_tp > 1) {
            return fc_fail(r->err, FC_EUNSUPPORTED,
                           "%s: %.256s: how many experts it holds cannot be told: the rows of router.weight are "
                           "experts, of which each of %" PRId64 " expert-parallel ranks has as many",
                           r->f.path, leaf->name, r->grid.ep);
        }
        FC_TRY(kind == MG_ALL_EXPERTS && all > 0 ? set_count(r, all / r->grid.ep, leaf->name) : FC_OK);
    }
    return count_numbered(r, leaves);
}

/* ---- matrices of all of them ---- */

/* weight1 is [hidden, experts * ffn] and weight2 [experts * ffn, hidden] for the sake of their class, which sees both
 * as [experts, rows, columns]. */
static fc_code ungroup(mg_reader *r, mg_value *v) {
    fc_arena *arena = r->checkpoint->arena;
    int64_t n = v->grouped;
    int cut = v->cut.dim;
    if (v->ndim != 2 || v->sizes[cut] % n != 0 ||
        (v->sizes[0] > 1 && v->sizes[1] > 0 && v->piece->strides[0] != v->sizes[1]) ||
        (v->sizes[1] > 1 && v->piece->strides[1] != 1)) {
        return fc_fail(r->err, FC_ECORRUPT, "%s: tensor %.256s: it is not a matrix of %" PRId64 " experts",
                       fc_mg_file(r, v->file), v->name, n);
    }
    int64_t *sizes = fc_arena_calloc(arena, 3, sizeof *sizes);
    torch_extent *piece = fc_arena_calloc(arena, 1, sizeof *piece + 3 * sizeof *piece->strides);
    if (!sizes || !piece) {
        return fc_mg_no_memory(r);
    }
    sizes[0] = n;
    sizes[1] = cut == 0 ? v->sizes[0] / n : v->sizes[0];
    sizes[2] = cut == 0 ? v->sizes[1] : v->sizes[1] / n;
    *piece = *v->piece;
    fc_row_major_strides(3, sizes, piece->strides);
    v->piece = piece;
    v->sizes = sizes;
    v->ndim = 3;
    v->cut.dim = cut + 1;
    return FC_OK;
}

fc_code fc_mg_ungroup(mg_reader *r) {
    for (size_t i = 0; i < r->nvalues; i++) {
        FC_TRY(r->values[i].grouped > 0 ? ungroup(r, &r->values[i]) : FC_OK);
    }
    return FC_OK;
}
