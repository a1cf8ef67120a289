/*
 * Runs the operations of a rule on the tensors of a group: see group.h. The tensors are a list, in the order of
 * patterns and then of the numbers of a variable; an operation joins, splits or changes them.
 */
#include "recipe/group.h"

#include "fsdpckpt/try.h"

#include <stdlib.h>
#include <string.h>

typedef struct list {
    fc_group_output *items; /* from malloc */
    size_t count;
    bool patterns, numbers; /* whether the items differ in these */
} list;

void fc_group_free_outputs(fc_group_output *outputs, size_t count) {
    for (size_t i = 0; outputs && i < count; i++) {
        fc_parted_free(&outputs[i].tensor);
    }
    free(outputs);
}

const char *fc_recipe_only(const char *const *has, size_t nhas, const char *const *lacks, size_t nlacks, size_t *len) {
    const char *at = has[0], *name;
    while (nhas > 0 && (name = fc_recipe_next_variable(&at, len))) {
        bool found = false;
        for (size_t i = 0; i < nlacks; i++) {
            found = found || fc_recipe_mentions(lacks[i], name, *len);
        }
        if (!found) {
            return name;
        }
    }
    return NULL;
}

bool fc_recipe_renames(const fc_recipe_rule *rule) {
    size_t len;
    return rule->kind == FC_RULE_MAP && rule->nops == 0 && rule->nfrom == 1 && rule->nto == 1 &&
           !fc_recipe_only(rule->to, 1, rule->from, 1, &len);
}

static int by_place(const void *a, const void *b) {
    const fc_group_input *x = a, *y = b;
    return x->pattern != y->pattern ? (x->pattern > y->pattern) - (x->pattern < y->pattern)
                                    : (x->number > y->number) - (x->number < y->number);
}

static fc_code missing(const fc_recipe *recipe, const fc_group *g, size_t pattern, fc_error *err) {
    fc_arena *arena = fc_arena_new();
    const char *name = arena ? fc_recipe_spell(g->rule->from[pattern], &g->bindings, arena) : NULL;
    fc_code rc = name ? fc_fail(err, FC_EUSAGE, "%s: '%.256s' needs '%s'%s", recipe->label, g->inputs[0].tensor->name,
                                name, strchr(name, '{') ? ", numbered from 0 without gaps" : ", which is not there")
                      : fc_no_memory(err, NULL);
    fc_arena_free(arena);
    return rc;
}

/* All patterns must have a tensor, for the same numbers 0, 1, 2, … */
static fc_code check_inputs(const fc_recipe *recipe, const fc_group *g, fc_error *err) {
    size_t at = 0, each = 0;
    qsort(g->inputs, g->ninputs, sizeof *g->inputs, by_place);
    for (size_t p = 0; p < g->rule->nfrom; p++) {
        size_t count = 0;
        while (at < g->ninputs && g->inputs[at].pattern == p && g->inputs[at].number == count) {
            at++;
            count++;
        }
        each = p == 0 ? count : each;
        if (count == 0 || count != each || (at < g->ninputs && g->inputs[at].pattern == p)) {
            return missing(recipe, g, p, err);
        }
    }
    return FC_OK;
}

static fc_code start(const fc_group *g, list *l, fc_error *err) {
    l->items = calloc(g->ninputs, sizeof *l->items);
    if (!l->items) {
        return fc_no_memory(err, NULL);
    }
    for (size_t i = 0; i < g->ninputs; i++, l->count++) {
        l->items[i].pattern = g->inputs[i].pattern;
        l->items[i].number = g->inputs[i].number;
        FC_TRY(fc_parted_from(g->inputs[i].tensor, &l->items[i].tensor, err));
    }
    return FC_OK;
}

static void replace(list *l, fc_group_output *items, size_t count) {
    fc_group_free_outputs(l->items, l->count);
    l->items = items;
    l->count = count;
}

/* Joins the items that differ in their pattern, or else in their number. */
static fc_code join(list *l, const fc_recipe_op *op, bool patterns, fc_error *err) {
    const size_t npatterns = l->items[l->count - 1].pattern + 1, each = l->count / npatterns;
    const size_t groups = patterns ? each : npatterns, size = l->count / groups;
    fc_group_output *made = calloc(groups, sizeof *made);
    fc_parted **some = calloc(size, sizeof(fc_parted *));
    fc_code rc = made && some ? FC_OK : fc_no_memory(err, NULL);
    for (size_t k = 0; rc == FC_OK && k < groups; k++) {
        for (size_t i = 0; i < size; i++) {
            some[i] = &l->items[patterns ? i * each + k : k * each + i].tensor;
        }
        made[k].pattern = patterns ? 0 : k;
        made[k].number = patterns ? k : 0;
        rc = op->kind == FC_OP_STACK ? fc_parted_stack(some, size, op->dim, &made[k].tensor, err)
                                     : fc_parted_concatenate(some, size, op->dim, &made[k].tensor, err);
    }
    free((void *)some);
    if (rc != FC_OK) {
        fc_group_free_outputs(made, made ? groups : 0);
        return rc;
    }
    replace(l, made, groups);
    *(patterns ? &l->patterns : &l->numbers) = false;
    return FC_OK;
}

/* Concatenation prefers patterns, stacking prefers numbers: {"stack": 0}, {"concatenate": 1} is how experts are fused.
 */
static fc_code do_join(list *l, const fc_recipe_op *op, fc_error *err) {
    const bool stack = op->kind == FC_OP_STACK;
    if (!l->patterns && !l->numbers) {
        return fc_fail(err, FC_EUSAGE, "there is one tensor only, and nothing to %s", stack ? "stack" : "concatenate");
    }
    return join(l, op, stack ? !l->numbers : l->patterns, err);
}

/* Computes where the parts of a split begin and end: `ends` receives one number for each part. */
static fc_code split_places(const fc_recipe *recipe, const fc_recipe_op *op, int64_t total, size_t parts, int64_t *ends,
                            fc_error *err) {
    int64_t at = 0;
    for (size_t i = 0; i < parts; i++) {
        int64_t size = total / (int64_t)parts;
        const char *unknown;
        if (op->sizes) {
            if (!op->sizes[i]) {
                return fc_fail(err, FC_EUSAGE, "\"sizes\" has fewer sizes than there are tensors");
            }
            FC_TRY(fc_recipe_evaluate(recipe, op->sizes[i], &size, &unknown, err));
        }
        if (size < 0 || size > total - at) {
            return fc_fail(err, FC_EUSAGE, "the sizes of the parts exceed the dimension, which has %lld elements",
                           (long long)total);
        }
        ends[i] = at += size;
    }
    return at == total ? FC_OK
                       : fc_fail(err, FC_EUSAGE, "a dimension of %lld elements is cut into parts that sum up to %lld",
                                 (long long)total, (long long)at);
}

static fc_code split_item(const fc_recipe *recipe, const fc_recipe_op *op, const fc_group_output *item, size_t parts,
                          bool numbers, fc_group_output *made, size_t stride, fc_error *err) {
    const bool unstack = op->kind == FC_OP_UNSTACK;
    int dim;
    FC_TRY(fc_parted_dim(op->dim, item->tensor.ndim, &dim, err));
    int64_t *ends = calloc(parts + 1, sizeof *ends);
    fc_code rc = ends ? split_places(recipe, op, item->tensor.shape[dim], parts, ends, err) : fc_no_memory(err, NULL);
    for (size_t i = 0; rc == FC_OK && i < parts; i++) {
        fc_group_output *to = &made[i * stride];
        to->pattern = numbers ? item->pattern : i;
        to->number = numbers ? i : item->number;
        rc = fc_parted_slice(&item->tensor, dim, i > 0 ? ends[i - 1] : 0, ends[i], unstack, &to->tensor, err);
    }
    free(ends);
    return rc;
}

/*
 * Splits each item into one per pattern of the result, or unstacks it: into one per number if the names of the result
 * have a number, else into one per pattern.
 */
static fc_code do_split(const fc_recipe *recipe, const fc_recipe_op *op, const fc_recipe_rule *rule, list *l,
                        fc_error *err) {
    size_t len;
    const bool unstack = op->kind == FC_OP_UNSTACK;
    const bool numbers = unstack && !l->numbers && fc_recipe_only(rule->to, rule->nto, rule->from, rule->nfrom, &len);
    int dim;
    if (!numbers && l->patterns) {
        return fc_fail(err, FC_EUSAGE, "its tensors are still several; join them before they are split");
    }
    FC_TRY(fc_parted_dim(op->dim, l->items[0].tensor.ndim, &dim, err));
    const size_t parts = unstack ? (size_t)l->items[0].tensor.shape[dim] : rule->nto;
    const size_t stride = numbers ? 1 : l->count, step = numbers ? parts : 1;
    for (size_t i = 0; i < l->count; i++) {
        const fc_parted *t = &l->items[i].tensor;
        if (parts == 0 || t->ndim <= dim || (unstack && (size_t)t->shape[dim] != parts)) {
            return fc_fail(err, FC_EUSAGE, "its tensors have different shapes, or an empty dimension %d", dim);
        }
    }
    fc_group_output *made = calloc(parts, l->count * sizeof *made);
    fc_code rc = made ? FC_OK : fc_no_memory(err, NULL);
    for (size_t i = 0; rc == FC_OK && i < l->count; i++) {
        rc = split_item(recipe, op, &l->items[i], parts, numbers, &made[i * step], stride, err);
    }
    if (rc != FC_OK) {
        fc_group_free_outputs(made, made ? parts * l->count : 0);
        return rc;
    }
    replace(l, made, parts * l->count);
    *(numbers ? &l->numbers : &l->patterns) = true;
    return FC_OK;
}

static fc_code change_each(const fc_recipe *recipe, const fc_recipe_op *op, list *l, fc_error *err) {
    int64_t size = 0;
    const char *unknown;
    if (op->kind == FC_OP_RESIZE) {
        FC_TRY(fc_recipe_evaluate(recipe, op->right, &size, &unknown, err));
    }
    for (size_t i = 0; i < l->count; i++) {
        fc_parted *t = &l->items[i].tensor;
        FC_TRY(op->kind == FC_OP_REARRANGE   ? fc_parted_rearrange(t, recipe, op, err)
               : op->kind == FC_OP_TRANSPOSE ? fc_parted_transpose(t, op->dim, op->other, err)
                                             : fc_parted_resize(t, op->dim, size, err));
    }
    return FC_OK;
}

static fc_code run_operation(const fc_recipe *recipe, const fc_recipe_op *op, const fc_recipe_rule *rule, list *l,
                             fc_error *err) {
    switch (op->kind) {
    case FC_OP_CONCATENATE:
    case FC_OP_STACK:
        return do_join(l, op, err);
    case FC_OP_SPLIT:
    case FC_OP_UNSTACK:
        return do_split(recipe, op, rule, l, err);
    default:
        return change_each(recipe, op, l, err);
    }
}

/* After all operations there must be a tensor for each name. */
static fc_code check_outputs(const fc_group *g, const list *l, fc_error *err) {
    size_t len;
    const bool numbers = fc_recipe_only(g->rule->to, g->rule->nto, g->rule->from, g->rule->nfrom, &len) != NULL;
    const size_t patterns = l->items[l->count - 1].pattern + 1;
    if (l->numbers && !numbers) {
        return fc_fail(err, FC_EUSAGE, "it makes several tensors of one name; stack or concatenate them");
    }
    if (numbers && !l->numbers) {
        return fc_fail(err, FC_EUSAGE, "a variable of \"to\" has no value; unstack a dimension for it");
    }
    return patterns == g->rule->nto
               ? FC_OK
               : fc_fail(err, FC_EUSAGE, "it makes %zu tensors, but names %zu", patterns, g->rule->nto);
}

fc_code fc_group_run(const fc_recipe *recipe, fc_group *group, fc_group_output **out, size_t *count, fc_error *err) {
    const fc_recipe_rule *rule = group->rule;
    size_t len;
    list l = {.patterns = rule->nfrom > 1,
              .numbers = fc_recipe_only(rule->from, rule->nfrom, rule->to, rule->nto, &len) != NULL};
    fc_code rc = check_inputs(recipe, group, err);
    FC_TRY(rc);
    rc = start(group, &l, err);
    for (size_t i = 0; rc == FC_OK && i < rule->nops; i++) {
        rc = run_operation(recipe, &rule->ops[i], rule, &l, err);
    }
    rc = rc == FC_OK ? check_outputs(group, &l, err) : rc;
    if (rc != FC_OK) {
        fc_group_free_outputs(l.items, l.count);
        return fc_context(err, rc, "%s: '%.256s', which matches '%s'", recipe->label, group->inputs[0].tensor->name,
                          rule->from[group->inputs[0].pattern]);
    }
    *out = l.items;
    *count = l.count;
    return FC_OK;
}
