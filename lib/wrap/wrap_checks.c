/*
 * Checks targets before they are applied: the parameters of a unit must be all frozen or all trained, and a shared
 * parameter must have one unit. The messages are those of torch's _validate_frozen_params, on one line.
 */
#include "fsdpckpt/wrap_policy.h"

#include "base/checked.h"
#include "fsdpckpt/try.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

void fc_wrap_unit_of(const fc_wrap_targets *targets, uint32_t *unit) {
    const fc_module_tree *tree = targets->tree;
    unit[0] = 0;
    for (uint32_t m = 1; m < tree->nmodules; m++) {
        uint32_t one = tree->modules[m].same_as;
        unit[m] = targets->chosen[one] ? one : unit[tree->modules[m].parent];
    }
}

/* How many parameters of a unit are frozen, and how many are trained. */
typedef struct split {
    uint32_t frozen, trained;  /* parameters */
    int64_t total, with_grads; /* elements; they saturate */
} split;

static bool is_managed(const fc_parameter *p, uint32_t i) {
    return !p->buffer && !p->ignored && p->same_as == i;
}

static void add_elements(int64_t *sum, int64_t n) {
    if (!fc_add_i64(*sum, n, sum)) {
        *sum = INT64_MAX;
    }
}

static void list_names(FILE *out, const fc_module_tree *tree, const uint32_t *unit, uint32_t of, bool frozen) {
    const char *before = "[";
    for (uint32_t i = 0; i < tree->nparameters; i++) {
        const fc_parameter *p = &tree->parameters[i];
        if (unit[p->module] == of && is_managed(p, i) && p->frozen == frozen) {
            fprintf(out, "%s'%s'", before, p->fqn);
            before = ", ";
        }
    }
    fputs("]", out);
}

static void write_split(FILE *out, const fc_wrap_targets *targets, const uint32_t *unit, uint32_t m, const split *s,
                        bool use_orig_params) {
    fc_name fqn = targets->tree->modules[m].fqn;
    fprintf(out, "%.*s has both parameters with requires_grad=True and False.", m ? (int)fqn.len : 15,
            m ? fqn.text : "the root module");
    if (use_orig_params) {
        fprintf(out,
                " We do not recommend wrapping such modules since the gradient memory usage will be higher than "
                "expected (%" PRId64 " numel instead of %" PRId64 " numel before sharding via reduce-scatter).",
                s->total, s->with_grads);
    } else {
        fputs(" FSDP does not support wrapping such modules when use_orig_params=False.", out);
    }
    fputs(" If possible, wrap the frozen parameters with FSDP separately. The following parameters have "
          "requires_grad=True: ",
          out);
    list_names(out, targets->tree, unit, m, false);
    fputs(" The following parameters have requires_grad=False: ", out);
    list_names(out, targets->tree, unit, m, true);
}

static fc_code report_split(const fc_wrap_targets *targets, const uint32_t *unit, uint32_t m, const split *s,
                            fc_wrap_warn warn, void *user, fc_error *err) {
    char *text = NULL;
    size_t size = 0;
    bool use_orig_params = m ? targets->options[m].use_orig_params : targets->root.use_orig_params;
    FILE *out = open_memstream(&text, &size);
    FC_NEED(out, err, NULL);
    write_split(out, targets, unit, m, s, use_orig_params);
    fc_code rc = FC_OK;
    if (fclose(out) != 0) {
        rc = fc_no_memory(err, NULL);
    } else if (!use_orig_params) {
        rc = fc_fail(err, FC_EUSAGE, "%s", text);
    } else if (warn) {
        warn(user, text);
    }
    free(text);
    return rc;
}

fc_code fc_wrap_check_frozen(const fc_wrap_targets *targets, fc_wrap_warn warn, void *user, fc_error *err) {
    const fc_module_tree *tree = targets->tree;
    uint32_t *unit = calloc(tree->nmodules, sizeof *unit), *order = calloc(tree->nmodules, sizeof *order);
    split *splits = calloc(tree->nmodules, sizeof *splits);
    fc_code rc;
    FC_TRY_GOTO(unit && order && splits ? FC_OK : fc_no_memory(err, NULL), rc, out);
    fc_wrap_unit_of(targets, unit);
    fc_module_post_order(tree, order);
    for (uint32_t i = 0; i < tree->nparameters; i++) {
        const fc_parameter *p = &tree->parameters[i];
        split *s = &splits[unit[p->module]];
        if (is_managed(p, i)) {
            *(p->frozen ? &s->frozen : &s->trained) += 1;
            add_elements(&s->total, p->numel);
            add_elements(&s->with_grads, p->frozen ? 0 : p->numel);
        }
    }
    for (uint32_t i = 0; i < tree->nmodules; i++) {
        const split *s = &splits[order[i]];
        if (s->frozen > 0 && s->trained > 0) {
            FC_TRY_GOTO(report_split(targets, unit, order[i], s, warn, user, err), rc, out);
        }
    }
out:
    free(unit);
    free(order);
    free(splits);
    return rc;
}

/* Finds the name of a module for a message. @return its length. */
static int name_of(const fc_module_tree *tree, uint32_t m, const char **text) {
    *text = m ? tree->modules[m].fqn.text : "the root";
    return m ? (int)tree->modules[m].fqn.len : 8;
}

fc_code fc_wrap_check_shared(const fc_wrap_targets *targets, fc_error *err) {
    const fc_module_tree *tree = targets->tree;
    uint32_t *unit = calloc(tree->nmodules, sizeof *unit);
    FC_NEED(unit, err, NULL);
    fc_wrap_unit_of(targets, unit);
    fc_code rc = FC_OK;
    for (uint32_t i = 0; i < tree->nparameters && rc == FC_OK; i++) {
        const fc_parameter *p = &tree->parameters[i], *one = &tree->parameters[p->same_as];
        uint32_t mine = unit[p->module], other = unit[one->module];
        if (p->buffer || p->ignored || mine == other) {
            continue;
        }
        const char *a, *b, *c;
        int a_len = name_of(tree, other, &a), b_len = name_of(tree, mine, &b);
        int c_len = name_of(tree, fc_module_common_ancestor(tree, one->module, p->module), &c);
        rc = fc_fail(err, FC_EUSAGE,
                     "'%.200s' and '%.200s' are one shared parameter, but the policy puts them into two units, '%.*s' "
                     "and '%.*s'; their lowest common ancestor '%.*s', or a module above it, must manage them: do not "
                     "wrap any module in between",
                     one->fqn, p->fqn, a_len, a, b_len, b, c_len, c);
    }
    free(unit);
    return rc;
}
