/*
 * Adds to a module tree what the names cannot show: classes, which parameters are frozen, ignored or buffers, and which
 * modules or tensors have several names. All of it comes from the user's fc_model_info; some classes are also inferred.
 */
#include "wrap/module_tree.h"

#include "fsdpckpt/order.h"
#include "fsdpckpt/try.h"
#include "sharding/fqn.h"

#include <string.h>

/* The names of a group must all be modules, or they are parameters, some of which the checkpoint may lack. */
static fc_code read_group(fc_tree_builder *b, const char *const *group, uint32_t *nodes, fc_error *err) {
    size_t count = fc_count_texts(group), found = 0, modules = 0, n = 0;
    for (size_t i = 0; i < count; i++) {
        modules += fc_tree_find_fqn(b, group[i], false) != 0;
        found += fc_tree_find_fqn(b, group[i], true) != 0;
    }
    if (modules < count && found == 0) {
        const char *missing = group[0];
        for (size_t i = 0; i < count; i++) {
            missing = fc_tree_find_fqn(b, group[i], false) == 0 ? group[i] : missing;
        }
        return fc_fail(err, FC_EUSAGE, "$shared: there is no parameter or module '%.256s'", missing);
    }
    for (size_t i = 0; i < count; i++) {
        uint32_t node = fc_tree_find_fqn(b, group[i], modules < count || found == count);
        if (!node) {
            FC_TRY(fc_tree_add(b, group[i], UINT32_MAX, &node, err));
        }
        nodes[n++] = node;
        if (b->nodes[nodes[0]].spec ==
            UINT32_MAX) { /* a parameter of the checkpoint leads, so the others can copy it */
            nodes[n - 1] = nodes[0];
            nodes[0] = node;
        }
    }
    nodes[n] = 0;
    return FC_OK;
}

fc_code fc_tree_read_shared(fc_tree_builder *b, fc_error *err) {
    size_t groups = 0;
    while (b->info && b->info->shared && b->info->shared[groups]) {
        groups++;
    }
    b->twins = fc_arena_calloc(b->arena, groups, sizeof *b->twins);
    FC_NEED(b->twins, err, NULL);
    for (b->ntwins = 0; b->ntwins < groups; b->ntwins++) {
        const char *const *group = b->info->shared[b->ntwins];
        uint32_t *nodes = fc_arena_calloc(b->arena, fc_count_texts(group) + 1, sizeof *nodes);
        FC_NEED(nodes, err, NULL);
        FC_TRY(read_group(b, group, nodes, err));
        b->twins[b->ntwins] = nodes;
    }
    return FC_OK;
}

/* @return the first of the parameters that are the same as parameter `i`. */
static uint32_t first_parameter(const fc_tree_builder *b, uint32_t i) {
    while (b->parameters[i].same_as != i) {
        i = b->parameters[i].same_as = b->parameters[b->parameters[i].same_as].same_as;
    }
    return i;
}

static uint32_t first_module(const fc_tree_builder *b, uint32_t i) {
    while (b->modules[i].same_as != i) {
        i = b->modules[i].same_as = b->modules[b->modules[i].same_as].same_as;
    }
    return i;
}

static bool same_tensor(const fc_parameter *a, const fc_parameter *b) {
    return a->dtype == b->dtype && fc_same_sizes(a->ndim, a->shape, b->ndim, b->shape);
}

static fc_code tie_parameters(fc_tree_builder *b, uint32_t x, uint32_t y, fc_error *err) {
    uint32_t i = first_parameter(b, x), j = first_parameter(b, y);
    fc_parameter *low = &b->parameters[i < j ? i : j], *high = &b->parameters[i < j ? j : i];
    fc_parameter *added = low->spec == UINT32_MAX ? low : high, *known = added == low ? high : low;
    if (added->spec == UINT32_MAX && !added->shape) {
        added->dtype = known->dtype;
        added->ndim = known->ndim;
        added->shape = known->shape;
        added->numel = known->numel;
        added->bytes = known->bytes;
        added->buffer = known->buffer;
    } else if (!same_tensor(low, high)) {
        return fc_fail(err, FC_EUSAGE, "'%.256s' and '%.256s' cannot be shared: their types or shapes differ", low->fqn,
                       high->fqn);
    }
    high->same_as = low->same_as;
    return FC_OK;
}

/* Ties each parameter of module `y` itself to its counterpart in the module of node `x`. */
static fc_code tie_own_parameters(fc_tree_builder *b, uint32_t x, uint32_t y, fc_error *err) {
    const fc_module *m = &b->modules[y];
    for (uint32_t i = 0; i < m->nparameters; i++) {
        const fc_parameter *p = &b->parameters[m->first_parameter + i];
        uint32_t twin = fc_tree_find(b, x, p->name, true);
        if (twin == 0) {
            return fc_fail(err, FC_EUSAGE, "$shared: '%.256s' has no counterpart in '%.*s'", p->fqn,
                           (int)b->nodes[x].fqn.len, b->nodes[x].fqn.text);
        }
        FC_TRY(tie_parameters(b, b->nodes[twin].number, m->first_parameter + i, err));
    }
    return FC_OK;
}

/* Ties module y, and all modules below it, to the module of `x_node`. `nodes` is scratch: the counterpart per module.
 */
static fc_code tie_modules(fc_tree_builder *b, uint32_t x_node, uint32_t y, uint32_t *nodes, fc_error *err) {
    for (uint32_t m = y; m < b->modules[y].end; m++) {
        uint32_t twin = m == y ? x_node : fc_tree_find(b, nodes[b->modules[m].parent], b->modules[m].name, false);
        if (twin == 0) {
            return fc_fail(err, FC_EUSAGE, "$shared: '%.*s' has no counterpart below '%.*s'",
                           (int)b->modules[m].fqn.len, b->modules[m].fqn.text, (int)b->nodes[x_node].fqn.len,
                           b->nodes[x_node].fqn.text);
        }
        nodes[m] = twin;
        FC_TRY(tie_own_parameters(b, twin, m, err));
        uint32_t i = first_module(b, b->nodes[twin].number), j = first_module(b, m);
        b->modules[i < j ? j : i].same_as = i < j ? i : j;
    }
    return FC_OK;
}

static fc_code tie_group(fc_tree_builder *b, const uint32_t *group, fc_error *err) {
    uint32_t first = group[0], *nodes = NULL;
    if (!b->nodes[first].is_parameter) {
        for (const uint32_t *g = group + 1; *g; g++) {
            first = b->nodes[*g].number < b->nodes[first].number ? *g : first;
        }
        nodes = fc_arena_calloc(b->arena, b->tree->nmodules, sizeof *nodes);
        FC_NEED(nodes, err, NULL);
    }
    fc_code rc = FC_OK;
    for (const uint32_t *g = group; *g && rc == FC_OK; g++) {
        uint32_t number = b->nodes[*g].number, one = b->nodes[first].number;
        if (*g == first) {
            continue;
        }
        if (!nodes) {
            rc = tie_parameters(b, one, number, err);
        } else if (number < b->modules[one].end) {
            rc = fc_fail(err, FC_EUSAGE, "$shared: '%.*s' is within '%.*s'", (int)b->nodes[*g].fqn.len,
                         b->nodes[*g].fqn.text, (int)b->nodes[first].fqn.len, b->nodes[first].fqn.text);
        } else {
            rc = tie_modules(b, first, number, nodes, err);
        }
    }
    return rc;
}

static fc_code tie(fc_tree_builder *b, fc_error *err) {
    fc_code rc = FC_OK;
    for (size_t i = 0; i < b->ntwins && rc == FC_OK; i++) {
        rc = tie_group(b, b->twins[i], err);
    }
    for (size_t i = 0; i < b->nspecs && rc == FC_OK; i++) {
        if (b->specs[i].tied_to) {
            uint32_t one = fc_tree_find_fqn(b, b->specs[i].tied_to, true);
            uint32_t other = fc_tree_find_fqn(b, b->specs[i].fqn, true);
            rc = one && other ? tie_parameters(b, b->nodes[one].number, b->nodes[other].number, err)
                              : fc_fail(err, FC_EUSAGE, "'%.256s' is tied to '%.256s', which does not exist",
                                        b->specs[i].fqn, b->specs[i].tied_to);
        }
    }
    for (uint32_t i = 0; i < b->tree->nparameters; i++) {
        b->parameters[i].same_as = first_parameter(b, i);
    }
    for (uint32_t i = 0; i < b->tree->nmodules; i++) {
        b->modules[i].same_as = first_module(b, i);
    }
    return rc;
}

bool fc_pattern_fits(const char *pattern, fc_name fqn) {
    return fc_fqn_ends_with(fqn.text, fqn.len, pattern);
}

bool fc_pattern_is_better(const char *pattern, fc_pattern_fit *best) {
    fc_pattern_fit fit = {1, 0};
    for (const char *s = pattern; *s; s++) {
        fit.components += *s == '.';
        fit.literals += *s != '*';
    }
    if (fit.components < best->components || (fit.components == best->components && fit.literals <= best->literals)) {
        return false;
    }
    *best = fit;
    return true;
}

static void note_idle(fc_tree_builder *b, const char *pattern, bool used) {
    if (!used) {
        b->tree->idle_one = b->tree->idle++ == 0 ? pattern : b->tree->idle_one;
    }
}

/* A rule is idle when it matches nothing. A rule that better rules overrule everywhere is not idle. */
static fc_code give_classes(fc_tree_builder *b, fc_error *err) {
    size_t rules = b->info ? b->info->nclasses : 0;
    bool *used = fc_arena_calloc(b->arena, rules, sizeof *used);
    FC_NEED(used, err, NULL);
    for (uint32_t m = 1; m < b->tree->nmodules && rules > 0; m++) {
        fc_pattern_fit best = {0, 0};
        for (size_t r = 0; r < rules; r++) {
            const fc_class_rule *rule = &b->info->classes[r];
            bool fits = fc_pattern_fits(rule->pattern, b->modules[m].fqn);
            used[r] = used[r] || fits;
            if (fits && fc_pattern_is_better(rule->pattern, &best)) {
                b->modules[m].classes = rule->classes;
                b->modules[m].nclasses = rule->nclasses;
            }
        }
    }
    for (size_t r = 0; r < rules; r++) {
        note_idle(b, b->info->classes[r].pattern, used[r]);
    }
    return FC_OK;
}

static bool has_parameter(const fc_tree_builder *b, const fc_module *m, const char *name) {
    for (uint32_t i = 0; i < m->nparameters; i++) {
        fc_name own = b->parameters[m->first_parameter + i].name;
        if (own.len == strlen(name) && memcmp(own.text, name, own.len) == 0) {
            return true;
        }
    }
    return false;
}

static bool has_child(const fc_tree_builder *b, uint32_t m, const char *name) {
    for (uint32_t c = m + 1; c < b->modules[m].end; c = b->modules[c].end) {
        fc_name own = b->modules[c].name;
        if (own.len == strlen(name) && memcmp(own.text, name, own.len) == 0) {
            return true;
        }
    }
    return false;
}

static bool is_list(const fc_tree_builder *b, uint32_t m) {
    uint64_t number;
    for (uint32_t c = m + 1; c < b->modules[m].end; c = b->modules[c].end) {
        if (!fc_name_is_number(b->modules[c].name, &number)) {
            return false;
        }
    }
    return b->modules[m].end > m + 1 && b->modules[m].nparameters == 0;
}

/* Infers those classes that torch's policies treat specially by default, where names reveal them. */
static void infer_classes(fc_tree_builder *b) {
    static const char *const list[] = {"ModuleList", NULL}, *const attention[] = {"MultiheadAttention", NULL},
                             *const norm[] = {"_BatchNorm", NULL};
    for (uint32_t m = 1; m < b->tree->nmodules; m++) {
        fc_module *module = &b->modules[m];
        if (module->nclasses > 0) {
            continue;
        }
        const char *const *known = NULL;
        if (is_list(b, m)) {
            known = list;
        } else if (has_parameter(b, module, "in_proj_weight") && has_child(b, m, "out_proj")) {
            known = attention;
        } else if (has_parameter(b, module, "running_mean")) {
            known = norm;
        }
        module->classes = known;
        module->nclasses = known ? 1 : 0;
        module->inferred = known != NULL;
    }
}

/* The kinds of marks that a list of patterns can set. */
typedef enum mark_kind { MARK_FROZEN, MARK_IGNORED, MARK_BUFFER } mark_kind;

static void set_mark(fc_parameter *p, mark_kind kind) {
    *(kind == MARK_FROZEN ? &p->frozen : kind == MARK_IGNORED ? &p->ignored : &p->buffer) = true;
}

static fc_code mark(fc_tree_builder *b, const char *const *patterns, mark_kind kind, fc_error *err) {
    bool *below = fc_arena_alloc(b->arena, b->tree->nmodules * sizeof *below);
    FC_NEED(below, err, NULL);
    for (; patterns && *patterns; patterns++) {
        bool used = false;
        memset(below, 0, b->tree->nmodules * sizeof *below);
        for (uint32_t m = 0; m < b->tree->nmodules; m++) {
            fc_module *module = &b->modules[m];
            bool fits = m > 0 && fc_pattern_fits(*patterns, module->fqn);
            below[m] = fits || (m > 0 && below[module->parent]);
            used = used || fits;
            module->ignored = module->ignored || (kind == MARK_IGNORED && below[m]);
            for (uint32_t i = 0; i < module->nparameters; i++) {
                fc_parameter *p = &b->parameters[module->first_parameter + i];
                bool own = fc_fqn_ends_with(p->fqn, strlen(p->fqn), *patterns);
                used = used || own;
                if (own || below[m]) {
                    set_mark(p, kind);
                }
            }
        }
        note_idle(b, *patterns, used);
    }
    return FC_OK;
}

/* A tensor with several names is frozen, ignored or a buffer under all of them. */
static void share_marks(fc_tree_builder *b) {
    for (int pass = 0; pass < 2; pass++) {
        for (uint32_t i = 0; i < b->tree->nparameters; i++) {
            fc_parameter *one = &b->parameters[b->parameters[i].same_as], *other = &b->parameters[i];
            fc_parameter *to = pass == 0 ? one : other, *from = pass == 0 ? other : one;
            to->frozen = to->frozen || from->frozen;
            to->ignored = to->ignored || from->ignored;
            to->buffer = to->buffer || from->buffer;
        }
    }
}

fc_code fc_tree_mark(fc_tree_builder *b, fc_error *err) {
    FC_TRY(tie(b, err));
    FC_TRY(give_classes(b, err));
    infer_classes(b);
    if (b->info) {
        FC_TRY(mark(b, b->info->frozen, MARK_FROZEN, err));
        FC_TRY(mark(b, b->info->ignored, MARK_IGNORED, err));
        FC_TRY(mark(b, b->info->buffers, MARK_BUFFER, err));
    }
    share_marks(b);
    return FC_OK;
}
