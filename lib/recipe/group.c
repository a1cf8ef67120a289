/*
 * Runs the operations of a rule on the tensors of a group: see group.h. The tensors are a list, in the order of
 * patterns and then of the numbers of variables; an operation joins, splits or changes them.
 */
#include "recipe/group.h"

#include "fsdpckpt/order.h"
#include "fsdpckpt/try.h"

#include <stdlib.h>
#include <string.h>

typedef struct list {
    fc_group_output *items; /* from malloc */
    size_t count;
    bool patterns; /* whether the items differ in their pattern */
    size_t extents[FC_RECIPE_VARIABLES];
    size_t nfrom, nto; /* how many numbers the items differ in: of variables of `from`, then of `to` */
    size_t nvariables; /* how many variables only `to` has */
    fc_list_budget *budget;
} list;

void fc_group_free_outputs(fc_group_output *outputs, size_t count) {
    for (size_t i = 0; outputs && i < count; i++) {
        fc_parted_free(&outputs[i].tensor);
    }
    free(outputs);
}

size_t fc_recipe_only(const char *const *has, size_t nhas, const char *const *lacks, size_t nlacks,
                      fc_recipe_variable out[FC_RECIPE_VARIABLES]) {
    const char *at = has[0], *name;
    size_t len, count = 0;
    while (nhas > 0 && count < FC_RECIPE_VARIABLES && (name = fc_recipe_next_variable(&at, &len))) {
        bool found = false;
        for (size_t i = 0; i < nlacks; i++) {
            found = found || fc_recipe_mentions(lacks[i], name, len);
        }
        for (size_t i = 0; i < count; i++) {
            found = found || (out[i].len == len && memcmp(out[i].name, name, len) == 0);
        }
        if (!found) {
            out[count++] = (fc_recipe_variable){name, len};
        }
    }
    return count;
}

bool fc_recipe_renames(const fc_recipe_rule *rule) {
    fc_recipe_variable inner[FC_RECIPE_VARIABLES];
    return rule->kind == FC_RULE_MAP && rule->nops == 0 && rule->nfrom == 1 && rule->nto == 1 &&
           fc_recipe_only(rule->to, 1, rule->from, 1, inner) == 0;
}

int fc_group_by_place(const void *a, const void *b) {
    const fc_group_input *x = a, *y = b;
    int order = (x->pattern > y->pattern) - (x->pattern < y->pattern);
    for (size_t i = 0; order == 0 && i < FC_RECIPE_VARIABLES; i++) {
        order = (x->numbers[i] > y->numbers[i]) - (x->numbers[i] < y->numbers[i]);
    }
    return order;
}

static fc_code missing(const fc_recipe *recipe, const fc_group *g, size_t pattern, fc_error *err) {
    fc_arena *arena = fc_arena_new();
    const char *name = arena ? fc_recipe_spell(g->rule->from[pattern], &g->bindings, arena) : NULL;
    fc_code rc = name ? fc_fail(err, FC_EUSAGE, "%s: '%.256s' needs '%s'%s", recipe->label, g->inputs[0].tensor->name,
                                name, strchr(name, '{') ? ", numbered from 0 without gaps" : ", which is missing")
                      : fc_no_memory(err, NULL);
    fc_arena_free(arena);
    return rc;
}

/* @return whether the inputs have all numbers below `extents`, in their order; the first number varies slowest. */
static bool have_all_numbers(const fc_group_input *inputs, size_t count, const size_t *extents, size_t n) {
    for (size_t i = 0; i < count; i++) {
        size_t rest = i;
        for (size_t k = n; k > 0; k--) {
            if (inputs[i].numbers[k - 1] != rest % extents[k - 1]) {
                return false;
            }
            rest /= extents[k - 1];
        }
        if (rest > 0) {
            return false;
        }
    }
    return true;
}

static size_t count_pattern(const fc_group *g, size_t at, size_t pattern) {
    size_t count = 0;
    while (at + count < g->ninputs && g->inputs[at + count].pattern == pattern) {
        count++;
    }
    return count;
}

/* Computes the extents from the last of `count` inputs. @return whether they multiply to `count`. */
static bool find_extents(const fc_group_input *inputs, size_t count, list *l) {
    size_t total = 1;
    for (size_t k = 0; k < l->nfrom && count > 0; k++) {
        const uint64_t last = inputs[count - 1].numbers[k];
        if (last >= count / total) {
            return false;
        }
        l->extents[k] = (size_t)last + 1;
        total *= l->extents[k];
    }
    return count == total;
}

/* All patterns must have a tensor, for the same numbers 0, 1, 2, … of each variable. */
static fc_code check_inputs(const fc_recipe *recipe, const fc_group *g, list *l, fc_error *err) {
    fc_sort_items(g->inputs, g->ninputs, sizeof *g->inputs, fc_group_by_place);
    const size_t each = count_pattern(g, 0, 0);
    if (!find_extents(g->inputs, each, l)) {
        return missing(recipe, g, 0, err);
    }
    for (size_t p = 0; p < g->rule->nfrom; p++) {
        const size_t at = p * each, count = count_pattern(g, at, p);
        if (count != each || !have_all_numbers(g->inputs + at, count, l->extents, l->nfrom)) {
            return missing(recipe, g, p, err);
        }
    }
    return FC_OK;
}

static fc_code start(const fc_group *g, list *l, fc_error *err) {
    FC_TRY(fc_list_budget_take(l->budget, g->ninputs, sizeof *l->items, err));
    l->items = calloc(g->ninputs, sizeof *l->items);
    FC_NEED(l->items, err, NULL);
    for (size_t i = 0; i < g->ninputs; i++, l->count++) {
        l->items[i].pattern = g->inputs[i].pattern;
        memcpy(l->items[i].numbers, g->inputs[i].numbers, sizeof l->items[i].numbers);
        FC_TRY(fc_parted_from(g->inputs[i].tensor, g->budget, &l->items[i].tensor, err));
    }
    return FC_OK;
}

static void replace(list *l, fc_group_output *items, size_t count) {
    fc_list_budget_give(l->budget, l->count, sizeof *l->items);
    fc_group_free_outputs(l->items, l->count);
    l->items = items;
    l->count = count;
}

/* Joins the items that differ in their pattern, or else in the last of their numbers. */
static fc_code join(list *l, const fc_recipe_op *op, bool patterns, fc_error *err) {
    const size_t each = l->count / (l->items[l->count - 1].pattern + 1), live = l->nfrom + l->nto;
    const size_t size = patterns ? l->count / each : l->extents[live - 1], groups = l->count / size;
    FC_TRY(fc_list_budget_take(l->budget, groups, sizeof(fc_group_output), err));
    fc_group_output *made = calloc(groups, sizeof *made);
    fc_parted **some = calloc(size, sizeof(fc_parted *));
    fc_code rc = made && some ? FC_OK : fc_no_memory(err, NULL);
    for (size_t k = 0; rc == FC_OK && k < groups; k++) {
        const fc_group_output *first = &l->items[patterns ? k : k * size];
        for (size_t i = 0; i < size; i++) {
            some[i] = &l->items[patterns ? i * each + k : k * size + i].tensor;
        }
        made[k].pattern = first->pattern;
        memcpy(made[k].numbers, first->numbers, sizeof made[k].numbers);
        rc = op->kind == FC_OP_STACK ? fc_parted_stack(some, size, op->dim, &made[k].tensor, err)
                                     : fc_parted_concatenate(some, size, op->dim, &made[k].tensor, err);
    }
    free((void *)some);
    if (rc != FC_OK) {
        fc_group_free_outputs(made, made ? groups : 0);
        return rc;
    }
    replace(l, made, groups);
    if (patterns) {
        l->patterns = false;
    } else {
        l->nto > 0 ? l->nto-- : l->nfrom--;
        for (size_t k = 0; k < groups; k++) {
            made[k].numbers[live - 1] = 0;
        }
    }
    return FC_OK;
}

/* Concatenation prefers patterns, stacking prefers numbers: {"stack": 0}, {"concatenate": 1} is how experts are fused.
 */
static fc_code do_join(list *l, const fc_recipe_op *op, fc_error *err) {
    const bool stack = op->kind == FC_OP_STACK, numbers = l->nfrom + l->nto > 0;
    if (!l->patterns && !numbers) {
        return fc_fail(err, FC_EUSAGE, "there is one tensor only, and nothing to %s", stack ? "stack" : "concatenate");
    }
    return join(l, op, stack ? !numbers : l->patterns, err);
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
                          const size_t *number, fc_group_output *made, size_t stride, fc_error *err) {
    const bool unstack = op->kind == FC_OP_UNSTACK;
    int dim;
    FC_TRY(fc_parted_dim(op->dim, item->tensor.ndim, &dim, err));
    int64_t *ends = calloc(parts + 1, sizeof *ends);
    fc_code rc = ends ? split_places(recipe, op, item->tensor.shape[dim], parts, ends, err) : fc_no_memory(err, NULL);
    for (size_t i = 0; rc == FC_OK && i < parts; i++) {
        fc_group_output *to = &made[i * stride];
        to->pattern = number ? item->pattern : i;
        memcpy(to->numbers, item->numbers, sizeof to->numbers);
        if (number) {
            to->numbers[*number] = i;
        }
        rc = fc_parted_slice(&item->tensor, dim, i > 0 ? ends[i - 1] : 0, ends[i], unstack, &to->tensor, err);
    }
    free(ends);
    return rc;
}

/*
 * Splits each item into one per pattern of the result, or unstacks it: into one per number as long as the names of the
 * result have another variable, else into one per pattern.
 */
static fc_code do_split(const fc_recipe *recipe, const fc_recipe_op *op, const fc_recipe_rule *rule, list *l,
                        fc_error *err) {
    const bool unstack = op->kind == FC_OP_UNSTACK;
    const bool numbers = unstack && l->nfrom == 0 && l->nto < l->nvariables;
    int dim;
    if (!numbers && l->patterns) {
        return fc_fail(err, FC_EUSAGE, "several tensors are left; join them before a split");
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
    FC_TRY(fc_list_budget_take(l->budget, parts, l->count * sizeof(fc_group_output) + sizeof(int64_t), err));
    fc_list_budget_give(l->budget, parts, sizeof(int64_t)); /* where the parts of one item end */
    fc_group_output *made = calloc(parts, l->count * sizeof *made);
    fc_code rc = made ? FC_OK : fc_no_memory(err, NULL);
    for (size_t i = 0; rc == FC_OK && i < l->count; i++) {
        rc = split_item(recipe, op, &l->items[i], parts, numbers ? &l->nto : NULL, &made[i * step], stride, err);
    }
    if (rc != FC_OK) {
        fc_group_free_outputs(made, made ? parts * l->count : 0);
        return rc;
    }
    replace(l, made, parts * l->count);
    if (numbers) {
        l->extents[l->nto++] = parts;
    } else {
        l->patterns = true;
    }
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
    const size_t patterns = l->items[l->count - 1].pattern + 1;
    if (l->nfrom > 0) {
        return fc_fail(err, FC_EUSAGE, "it makes several tensors of one name; stack or concatenate them");
    }
    if (l->nto < l->nvariables) {
        return fc_fail(err, FC_EUSAGE, "a variable of \"to\" has no value; unstack a dimension for it");
    }
    return patterns == g->rule->nto
               ? FC_OK
               : fc_fail(err, FC_EUSAGE, "it makes %zu tensors, but names %zu", patterns, g->rule->nto);
}

fc_code fc_group_run(const fc_recipe *recipe, fc_group *group, fc_group_output **out, size_t *count, fc_error *err) {
    const fc_recipe_rule *rule = group->rule;
    fc_recipe_variable ignored[FC_RECIPE_VARIABLES];
    list l = {.patterns = rule->nfrom > 1,
              .budget = group->budget,
              .nfrom = fc_recipe_only(rule->from, rule->nfrom, rule->to, rule->nto, ignored),
              .nvariables = fc_recipe_only(rule->to, rule->nto, rule->from, rule->nfrom, ignored)};
    FC_TRY(check_inputs(recipe, group, &l, err));
    fc_code rc = start(group, &l, err);
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
