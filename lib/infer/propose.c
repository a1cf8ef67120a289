/*
 * Proposes a recipe from the names of one checkpoint: the rules of the shipped recipe that knows most of them, then
 * those of others. Each rule is applied to the headers, so the shapes fit; nothing shows that the values are right.
 */
#include "infer/propose.h"

#include "base/grow.h"
#include "derived/optim_name.h"
#include "fsdpckpt/infer.h"
#include "fsdpckpt/order.h"
#include "fsdpckpt/recipe.h"
#include "fsdpckpt/select.h"
#include "fsdpckpt/try.h"
#include "infer/search.h"

#include <stdlib.h>
#include <string.h>

/* A shipped recipe. */
typedef struct known {
    const char *name;
    const fc_recipe *written, *placed; /* as people write it, and with the numbers of the configuration */
    bool *applies;                     /* per rule: its "when" holds */
    bool for_model;
    size_t points; /* how well it fits */
} known;

/* A rule for some names. */
typedef struct made {
    size_t from, rule; /* the shipped recipe, by rank, and its rule */
    fc_recipe_rule written, placed;
    const char *key;
    bool near; /* the names are not those of the rule */
    size_t taken;
    const char *why; /* the shapes do not fit; NULL: they do */
} made;

typedef struct proposer {
    fc_search s; /* the result, and the arena */
    fc_checkpoint *source;
    const char *config;
    fc_target all;
    const fc_target_tensor **names; /* without objects and optimizer state, which follows its parameter */
    size_t count;
    known *recipes; /* best first */
    size_t nrecipes;
    made *rules;
    size_t nrules, capacity;
    size_t *rule_of; /* of each name; SIZE_MAX: none */
    fc_infer_report *report;
    fc_error *err;
} proposer;

/* ---- the shipped recipes ---- */

static fc_code list_parameter_names(proposer *p) {
    static const fc_selection everything;
    fc_selected counts;
    FC_TRY(fc_target_new(p->source, &everything, p->s.arena, &p->all, &counts, p->err));
    p->names = fc_arena_calloc(p->s.arena, p->all.ntensors + 1, sizeof *p->names);
    p->rule_of = fc_arena_calloc(p->s.arena, p->all.ntensors + 1, sizeof *p->rule_of);
    FC_NEED(p->names && p->rule_of, p->err, p->source->path);
    for (size_t i = 0; i < p->all.ntensors; i++) {
        const fc_target_tensor *w = &p->all.tensors[i];
        if (!w->source->object && fc_optim_name_of(w).kind == FC_OPTIM_NONE) {
            p->names[p->count++] = w;
        }
    }
    return FC_OK;
}

/* The best way in which a rule takes a name. */
static fc_lift lift_by(const known *k, size_t rule, const char *name) {
    const fc_recipe_rule *r = &k->placed->rules[rule];
    fc_lift best = {FC_LIFT_NONE, 0, 0};
    for (size_t i = 0; k->applies[rule] && i < r->nfrom && r->kind != FC_RULE_ADD; i++) {
        fc_lift lift = fc_lift_name(r->from[i], name);
        const bool exact = r->kind == FC_RULE_DROP || strcmp(r->from[i], k->written->rules[rule].from[i]) != 0;
        best = lift.kind < best.kind && (lift.kind == FC_LIFT_SAME || !exact) ? lift : best;
    }
    return best;
}

/* The best rule of a recipe for a name; of several, the first. */
static fc_lift find_rule(const known *k, const char *name, size_t *rule) {
    fc_lift best = {FC_LIFT_NONE, 0, 0};
    for (size_t r = 0; r < k->placed->nrules && best.kind != FC_LIFT_SAME; r++) {
        const fc_lift lift = lift_by(k, r, name);
        *rule = lift.kind < best.kind ? r : *rule;
        best = lift.kind < best.kind ? lift : best;
    }
    return best;
}

static fc_code load_one(const proposer *p, const char *name, known *k) {
    const fc_recipe_options written = {.as_written = true}, placed = {.config = p->config, .headers_only = true};
    k->name = name;
    FC_TRY(fc_recipe_load(name, &written, p->s.arena, &k->written, p->err));
    FC_TRY(fc_recipe_load(name, &placed, p->s.arena, &k->placed, p->err));
    FC_TRY(fc_recipe_conditions(k->placed, p->s.arena, &k->applies, p->err));
    for (size_t i = 0; i < p->count; i++) {
        size_t rule = 0;
        k->points += (size_t)FC_LIFT_NONE - (size_t)find_rule(k, p->names[i]->name, &rule).kind;
    }
    const char *model = k->placed->config ? k->placed->config->model : NULL;
    k->for_model = model && fc_recipe_is_for(k->placed, model);
    return FC_OK;
}

/* Those for the model that fit half of the names come first. */
static bool is_better(const proposer *p, const known *a, const known *b) {
    const size_t half = p->count * (size_t)FC_LIFT_NONE / 2;
    const bool x = a->for_model && a->points >= half, y = b->for_model && b->points >= half;
    return x != y ? x : a->points > b->points;
}

static fc_code load_all(proposer *p) {
    while (fc_shipped_recipes[p->nrecipes].name) {
        p->nrecipes++;
    }
    p->recipes = fc_arena_calloc(p->s.arena, p->nrecipes + 1, sizeof *p->recipes);
    FC_NEED(p->recipes, p->err, NULL);
    for (size_t i = 0; i < p->nrecipes; i++) {
        known k = {.points = 0};
        size_t at = i;
        FC_TRY(load_one(p, fc_shipped_recipes[i].name, &k));
        for (; at > 0 && is_better(p, &k, &p->recipes[at - 1]); at--) {
            p->recipes[at] = p->recipes[at - 1];
        }
        p->recipes[at] = k;
    }
    return FC_OK;
}

/* Fails if all names are those that the reversed recipes take, and no recipe takes all of them. */
static fc_code check_direction(const proposer *p) {
    const fc_target all = p->all;
    const char *names = "";
    for (size_t i = 0; i < p->nrecipes; i++) {
        const fc_recipe_options back = {.reverse = true, .config = p->config, .headers_only = true};
        const fc_recipe *reversed = NULL;
        const fc_target_tensor *untaken = NULL;
        FC_TRY(fc_recipe_takes_all(p->recipes[i].placed, &all, &untaken, p->err));
        if (!untaken) {
            return FC_OK;
        }
        FC_TRY(fc_recipe_load(p->recipes[i].name, &back, p->s.arena, &reversed, p->err));
        FC_TRY(fc_recipe_takes_all(reversed, &all, &untaken, p->err));
        names =
            untaken ? names : fc_arena_printf(p->s.arena, "%s%s'%s'", names, *names ? ", " : "", p->recipes[i].name);
        FC_NEED(names, p->err, NULL);
    }
    return !*names ? FC_OK
                   : fc_fail(p->err, FC_EUSAGE,
                             "%s: the names are those of the model hub already; reversed, these recipes turn them into "
                             "those of another program: %s",
                             p->source->path, names);
}

/* ---- rules ---- */

static bool mentions_other_size(const proposer *p, const known *k, const fc_recipe_rule *rule) {
    for (size_t i = 0; i < k->written->nsizes; i++) {
        const fc_recipe_size *size = &k->written->sizes[i];
        bool differs = false;
        const bool mentioned = fc_search_mentions(rule, size->name);
        for (size_t n = 0; n < p->s.recipe.nsizes && mentioned; n++) {
            const fc_recipe_size *mine = &p->s.recipe.sizes[n];
            for (size_t e = 0; strcmp(mine->name, size->name) == 0 && !differs; e++) {
                const char *x = mine->expressions[e], *y = size->expressions[e];
                differs = !x != !y || (x && strcmp(x, y) != 0);
                if (!x || !y) {
                    break;
                }
            }
        }
        if (differs) {
            return true;
        }
    }
    return false;
}

/* Adds the sizes of a recipe that are not there. */
static fc_code add_sizes(proposer *p, const known *k) {
    fc_search *s = &p->s;
    for (size_t i = 0; i < k->written->nsizes; i++) {
        const fc_recipe_size *size = &k->written->sizes[i];
        if (!fc_recipe_has_size(&s->recipe, size->name, strlen(size->name))) {
            FC_NEED(fc_arena_grow(s->arena, &s->sizes, &s->size_capacity, s->recipe.nsizes, s->recipe.nsizes + 1,
                                  sizeof *s->sizes),
                    p->err, NULL);
            s->sizes[s->recipe.nsizes++] = *size;
            s->recipe.sizes = s->sizes;
        }
    }
    return FC_OK;
}

/* Finds or makes the rule for a name. */
static fc_code use_rule(proposer *p, size_t recipe, size_t rule, const fc_lift *lift, size_t name) {
    const known *k = &p->recipes[recipe];
    const char *text = p->names[name]->name;
    const char *key = fc_arena_printf(p->s.arena, "%zu %zu %zu %.*s", recipe, rule, lift->cut, (int)lift->front, text);
    FC_NEED(key, p->err, NULL);
    for (size_t i = 0; i < p->nrules; i++) {
        if (strcmp(p->rules[i].key, key) == 0) {
            p->rules[i].taken++;
            p->rule_of[name] = i;
            return FC_OK;
        }
    }
    FC_NEED(fc_arena_grow(p->s.arena, &p->rules, &p->capacity, p->nrules, p->nrules + 1, sizeof *p->rules), p->err,
            NULL);
    made *m = &p->rules[p->nrules];
    *m = (made){.from = recipe, .rule = rule, .key = key, .near = lift->kind != FC_LIFT_SAME, .taken = 1};
    FC_NEED(fc_lift_rule(&k->written->rules[rule], lift, text, &m->written, p->s.arena) &&
                fc_lift_rule(&k->placed->rules[rule], lift, text, &m->placed, p->s.arena),
            p->err, NULL);
    FC_TRY(add_sizes(p, k));
    p->rule_of[name] = p->nrules++;
    return FC_OK;
}

/* Gives each name to a rule: to one of the best recipe, else to one of another that has the very name. */
static fc_code choose_rules(proposer *p) {
    FC_TRY(add_sizes(p, &p->recipes[0]));
    for (size_t i = 0; i < p->count; i++) {
        p->rule_of[i] = SIZE_MAX;
        for (size_t k = 0; k < p->nrecipes && p->rule_of[i] == SIZE_MAX; k++) {
            size_t rule = 0;
            const fc_lift lift = find_rule(&p->recipes[k], p->names[i]->name, &rule);
            const fc_lift_kind most = k == 0 || p->recipes[k].for_model ? FC_LIFT_LAYERS : FC_LIFT_SAME;
            if (lift.kind <= most && lift.kind != FC_LIFT_NONE &&
                !mentions_other_size(p, &p->recipes[k], &p->recipes[k].written->rules[rule])) {
                FC_TRY(use_rule(p, k, rule, &lift, i));
            }
        }
    }
    return FC_OK;
}

/* ---- shapes ---- */

/* Applies one rule to the headers of its tensors. */
static fc_code try_rule(proposer *p, size_t index) {
    made *m = &p->rules[index];
    fc_target_tensor *tensors = fc_arena_calloc(p->s.arena, m->taken + 1, sizeof *tensors);
    fc_recipe recipe = *p->recipes[m->from].placed;
    fc_target target = p->all;
    fc_checkpoint *result = NULL;
    fc_error failed = {.message = ""};
    FC_NEED(tensors, p->err, p->source->path);
    target.tensors = tensors;
    target.ntensors = 0;
    for (size_t i = 0; i < p->count; i++) {
        if (p->rule_of[i] == index) {
            tensors[target.ntensors++] = *p->names[i];
        }
    }
    recipe.rules = &m->placed;
    recipe.nrules = 1;
    recipe.ndtypes = 0;
    recipe.borrows = true;
    const fc_code rc = fc_recipe_apply(p->source, &target, &recipe, &result, &failed);
    if (rc == FC_EUSAGE && p->config) {
        m->why = fc_arena_printf(p->s.arena, "%s", failed.message);
        FC_NEED(m->why, p->err, NULL);
        return FC_OK;
    }
    fc_checkpoint_close(result);
    if (rc != FC_OK && p->err) {
        *p->err = failed;
    }
    return rc;
}

/* ---- the recipe ---- */

static int by_rank(const void *a, const void *b) {
    const made *x = *(const made *const *)a, *y = *(const made *const *)b;
    return x->from != y->from   ? (x->from < y->from ? -1 : 1)
           : x->rule != y->rule ? (x->rule < y->rule ? -1 : 1)
                                : strcmp(x->key, y->key);
}

static fc_code add_made(proposer *p, const made *m) {
    const char *name = p->recipes[m->from].name, *why = NULL;
    if (m->from > 0 || m->near) {
        why = m->near ? fc_arena_printf(p->s.arena, "the name is nearly one of %s", name)
                      : fc_arena_printf(p->s.arena, "the name is one of %s", name);
        FC_NEED(why, p->err, NULL);
    }
    return fc_search_add_rule(&p->s, &m->written, why, p->err);
}

static fc_code add_rules(proposer *p) {
    const made **order = fc_arena_calloc(p->s.arena, p->nrules + 1, sizeof *order);
    const fc_recipe *base = p->recipes[0].written;
    FC_NEED(order, p->err, NULL);
    for (size_t i = 0; i < p->nrules; i++) {
        order[i] = &p->rules[i];
    }
    fc_sort_items(order, p->nrules, sizeof *order, by_rank);
    for (size_t i = 0; i < p->nrules; i++) {
        FC_TRY(order[i]->why ? FC_OK : add_made(p, order[i]));
    }
    for (size_t i = 0; i < base->nrules; i++) {
        FC_TRY(base->rules[i].kind == FC_RULE_ADD ? fc_search_add_rule(&p->s, &base->rules[i], NULL, p->err) : FC_OK);
    }
    p->s.recipe.dtypes = base->dtypes;
    p->s.recipe.ndtypes = base->ndtypes;
    p->s.recipe.description = fc_arena_printf(p->s.arena, "not proven, from names alone, after %s: %s",
                                              p->recipes[0].name, base->description);
    return p->s.recipe.description ? FC_OK : fc_no_memory(p->err, NULL);
}

/* Applies all of it to the headers: no two tensors get one name. */
static fc_code try_all(const proposer *p, const char *text) {
    const fc_recipe_options options = {.config = p->config, .headers_only = true};
    fc_target_tensor *tensors = fc_arena_calloc(p->s.arena, p->count + 1, sizeof *tensors);
    const fc_recipe *recipe = NULL;
    fc_target target = p->all;
    fc_checkpoint *result = NULL;
    FC_NEED(tensors, p->err, p->source->path);
    target.tensors = tensors;
    target.ntensors = 0;
    for (size_t i = 0; i < p->count; i++) {
        if (p->rule_of[i] != SIZE_MAX && !p->rules[p->rule_of[i]].why) {
            tensors[target.ntensors++] = *p->names[i];
        }
    }
    FC_TRY(fc_recipe_parse("the recipe that is proposed", text, strlen(text), &options, p->s.arena, &recipe, p->err));
    fc_recipe borrowing = *recipe;
    borrowing.borrows = true;
    FC_TRY(fc_recipe_apply(p->source, &target, &borrowing, &result, p->err));
    fc_checkpoint_close(result);
    return FC_OK;
}

/* ---- the report ---- */

static fc_code list_left(const proposer *p) {
    fc_unexplained *left = fc_arena_calloc(p->s.arena, p->count + 1, sizeof *left);
    const char **dropped = fc_arena_calloc(p->s.arena, p->count + 1, sizeof *dropped);
    fc_infer_report *r = p->report;
    FC_NEED(left && dropped, p->err, NULL);
    for (size_t i = 0; i < p->count; i++) {
        const fc_target_tensor *w = p->names[i];
        const made *m = p->rule_of[i] == SIZE_MAX ? NULL : &p->rules[p->rule_of[i]];
        if (!m || m->why) {
            left[r->nunexplained++] =
                (fc_unexplained){.name = w->name, .tensor = w->source, .in_a = true, .why = m ? m->why : NULL};
        } else if (m->written.kind == FC_RULE_DROP) {
            dropped[r->ndropped++] = w->name;
        }
    }
    r->unexplained = left;
    r->dropped = dropped;
    r->tensors = p->count;
    r->explained = p->count - r->nunexplained;
    r->rules = p->s.recipe.nrules;
    r->guesses = p->s.guesses;
    r->nguesses = p->s.nguesses;
    r->base = p->recipes[0].name;
    r->for_model = p->recipes[0].for_model;
    r->model = p->recipes[0].placed->config ? p->recipes[0].placed->config->model : NULL;
    for (size_t i = 1; i < p->nrecipes && !is_better(p, &p->recipes[0], &p->recipes[i]); i++) {
        const char *old = r->also;
        r->also = fc_arena_printf(p->s.arena, "%s%s%s", old ? old : "", old ? ", " : "", p->recipes[i].name);
        FC_NEED(r->also, p->err, NULL);
    }
    return FC_OK;
}

fc_code fc_recipe_propose(fc_checkpoint *a, const char *config, fc_arena *arena, fc_infer_report *report,
                          fc_error *err) {
    proposer p = {.s = {.arena = arena}, .source = a, .config = config, .report = report, .err = err};
    *report = (fc_infer_report){0};
    FC_TRY(list_parameter_names(&p));
    FC_TRY(load_all(&p));
    FC_TRY(check_direction(&p));
    if (p.recipes[0].points == 0) {
        return fc_fail(err, FC_EUSAGE, "%s: no shipped recipe has one of its names", a->path);
    }
    FC_TRY(choose_rules(&p));
    for (size_t i = 0; i < p.nrules; i++) {
        FC_TRY(try_rule(&p, i));
    }
    FC_TRY(add_rules(&p));
    FC_TRY(list_left(&p));
    report->recipe = fc_search_text(&p.s);
    FC_NEED(report->recipe, err, NULL);
    return try_all(&p, report->recipe);
}
