/*
 * Finds a recipe: reads both sides, matches their tensors, makes rules of the matches, writes the recipe, and proves
 * it: what it makes of A is compared with B, by the digests of tensors that it only renames, else bit for bit.
 */
#include "fsdpckpt/infer.h"

#include "base/grow.h"
#include "derived/derived.h"
#include "fsdpckpt/compare.h"
#include "fsdpckpt/recipe.h"
#include "fsdpckpt/try.h"
#include "infer/search.h"

#include <stdlib.h>
#include <string.h>

/* ---- dtypes ---- */

static fc_dtype dtype_of(const fc_match *m, bool in_b) {
    return (in_b == m->reverse ? m->one : m->many[0])->tensor->dtype;
}

static bool is_float(fc_dtype dtype) {
    return fc_dtype_get(dtype)->cls == FC_CLASS_FLOAT;
}

static fc_code add_dtype(fc_search *s, const char *glob, fc_dtype dtype, size_t *capacity, fc_error *err) {
    fc_recipe_dtype *list = (fc_recipe_dtype *)s->recipe.dtypes;
    for (size_t i = 0; i < s->recipe.ndtypes; i++) {
        if (strcmp(list[i].glob, glob) == 0) {
            return FC_OK;
        }
    }
    FC_NEED(fc_arena_grow(s->arena, &list, capacity, s->recipe.ndtypes, s->recipe.ndtypes + 1, sizeof *list), err,
            NULL);
    list[s->recipe.ndtypes++] = (fc_recipe_dtype){glob, dtype};
    s->recipe.dtypes = list;
    return FC_OK;
}

static const char *glob_of(const fc_search *s, const fc_thing *t) {
    char *glob = fc_arena_strndup(s->arena, t->skeleton, strlen(t->skeleton));
    for (char *at = glob; at && *at; at++) {
        *at = *at == '\1' || *at == '\2' ? '*' : *at;
    }
    return glob;
}

/* The dtype that most floating-point tensors of B have is that of all; the others have their own. */
static fc_code choose_dtypes(fc_search *s, fc_error *err) {
    size_t counts[FC_DTYPE_COUNT] = {0}, capacity = 0;
    fc_dtype usual = FC_F32;
    bool casts = false;
    for (size_t i = 0; i < s->nmatches; i++) {
        const fc_dtype a = dtype_of(&s->matches[i], false), b = dtype_of(&s->matches[i], true);
        casts = casts || a != b;
        counts[b] += is_float(b);
        usual = counts[b] > counts[usual] ? b : usual;
    }
    FC_TRY(casts ? add_dtype(s, "*", usual, &capacity, err) : FC_OK);
    for (size_t i = 0; i < s->nmatches && casts; i++) {
        const fc_match *m = &s->matches[i];
        for (int k = 0; k < (m->reverse ? 1 : m->nmany); k++) {
            const fc_thing *t = m->reverse ? m->one : m->many[k];
            const char *glob = is_float(t->tensor->dtype) && t->tensor->dtype != usual ? glob_of(s, t) : "*";
            FC_NEED(glob, err, NULL);
            FC_TRY(add_dtype(s, glob, t->tensor->dtype, &capacity, err));
        }
    }
    return FC_OK;
}

/* ---- what is left out ---- */

static fc_code add_drop(fc_search *s, const char *pattern, fc_name_table *patterns, fc_error *err) {
    const char **names = fc_arena_calloc(s->arena, 2, sizeof *names);
    FC_NEED(names, err, NULL);
    names[0] = pattern;
    const fc_recipe_rule rule = {.kind = FC_RULE_DROP, .from = names, .nfrom = 1};
    const size_t at = fc_name_table_put(patterns, pattern, strlen(pattern), s->recipe.nrules);
    FC_NEED(at != FC_NO_NAME, err, NULL);
    return at == s->recipe.nrules ? fc_search_add_rule(s, &rule, NULL, err) : FC_OK;
}

/* The pattern of a name; NULL: out of memory. */
static const char *pattern_of(const fc_search *s, const fc_thing *t) {
    static const char *const names[] = {"{n}", "{e}", "{k}", "{m}"};
    const char *text = "", *from = t->skeleton;
    if (t->nslots > 4) {
        return t->tensor->name;
    }
    for (int i = 0; i < t->nslots && text; i++) {
        const size_t len = strcspn(from, "\1");
        text = fc_arena_printf(s->arena, "%s%.*s%s", text, (int)len, from, names[i]);
        from += len + 1;
    }
    return text ? fc_arena_printf(s->arena, "%s%s", text, from) : NULL;
}

/* If all of B is explained, A's other tensors are left out. */
static fc_code drop_rest(fc_search *s, fc_error *err) {
    fc_name_table *patterns = fc_name_table_new(s->arena, s->a.count + 1);
    fc_name_table *kept = fc_name_table_new(s->arena, s->a.count + 1);
    FC_NEED(patterns && kept, err, NULL);
    for (size_t i = 0; i < s->b.count; i++) {
        if (!s->b.taken[i]) {
            return FC_OK;
        }
    }
    for (size_t i = 0; i < s->a.count; i++) {
        const char *skeleton = s->a.things[i].skeleton;
        FC_NEED(!s->a.taken[i] || fc_name_table_put(kept, skeleton, strlen(skeleton), i) != FC_NO_NAME, err, NULL);
    }
    for (size_t i = 0; i < s->a.count; i++) {
        const fc_thing *t = &s->a.things[i];
        if (s->a.taken[i]) {
            continue;
        }
        const bool alone = fc_name_table_find(kept, t->skeleton, strlen(t->skeleton)) != FC_NO_NAME;
        const char *pattern = alone ? t->tensor->name : pattern_of(s, t);
        FC_NEED(pattern, err, NULL);
        FC_TRY(add_drop(s, pattern, patterns, err));
        FC_NEED(fc_arena_grow(s->arena, &s->dropped, &s->dropped_capacity, s->ndropped, s->ndropped + 1,
                              sizeof *s->dropped),
                err, NULL);
        s->dropped[s->ndropped++] = t->tensor->name;
        s->a.taken[i] = true;
    }
    return FC_OK;
}

/* ---- proof ---- */

/* All tensors of A that have a rule. */
static fc_code make_target(const fc_search *s, fc_target *out, fc_error *err) {
    static const fc_mesh none;
    fc_target_tensor *tensors = fc_arena_calloc(s->arena, s->a.count + 1, sizeof *tensors);
    size_t count = 0;
    FC_NEED(tensors, err, s->source->path);
    for (size_t i = 0; i < s->a.count; i++) {
        const fc_tensor *t = s->a.tensors[i];
        if (s->a.taken[i]) {
            tensors[count++] = (fc_target_tensor){.name = t->name, .source = t, .path = t->path, .dtype = t->dtype};
        }
    }
    *out = (fc_target){.source = s->source, .mesh = &none, .tensors = tensors, .ntensors = count};
    return FC_OK;
}

/* What is compared: what the recipe makes with B. */
typedef struct proof {
    const fc_search *search;
    const fc_checkpoint *made;
} proof;

/* Whether the recipe keeps a tensor as it is in A, and the digests say that it is B's. */
static bool is_proven(const void *context, const fc_tensor *made, const fc_tensor *b) {
    const proof *p = context;
    const fc_tensor *a = fc_derived_kept(p->made, made, p->search->source);
    return a && fc_search_same_digest(p->search, a, b);
}

/* Compares what the recipe makes with B. @param explained receives, per tensor of B, whether it is equal. */
static fc_code compare_made(const fc_search *s, const fc_checkpoint *made, bool *explained, fc_error *err) {
    const proof p = {s, made};
    const fc_compare_options how = {.data = true, .same = is_proven, .context = &p, .work = s->work};
    fc_compare_report report;
    FC_TRY(fc_compare(made, s->b.checkpoint, &how, s->arena, &report, err));
    if (report.damage != FC_OK) {
        if (err) {
            *err = report.damaged;
        }
        return report.damage;
    }
    fc_name_table *same = fc_name_table_new(s->arena, report.count + 1);
    FC_NEED(same, err, NULL);
    for (size_t i = 0; i < report.count; i++) {
        const fc_compared *c = &report.items[i];
        const bool equal = c->a && c->b && !c->a->object && !fc_compare_is_difference(c->result);
        FC_NEED(!equal || fc_name_table_put(same, c->name, strlen(c->name), i) != FC_NO_NAME, err, NULL);
    }
    for (size_t i = 0; i < s->b.count; i++) {
        const char *name = s->b.tensors[i]->name;
        explained[i] = fc_name_table_find(same, name, strlen(name)) != FC_NO_NAME;
    }
    return FC_OK;
}

/* Applies what the text says, as --recipe would. */
static fc_code prove(fc_search *s, const char *text, const char *config, bool *explained, fc_error *err) {
    const fc_recipe_options options = {.config = config};
    const fc_recipe *recipe = NULL;
    fc_checkpoint *made = NULL;
    fc_target target;
    FC_TRY(make_target(s, &target, err));
    if (target.ntensors == 0) {
        return FC_OK;
    }
    FC_TRY(fc_recipe_parse("the recipe that was found", text, strlen(text), &options, s->arena, &recipe, err));
    fc_recipe borrowing = *recipe;
    borrowing.borrows = true;
    FC_TRY(fc_recipe_apply(s->source, &target, &borrowing, &made, err));
    const fc_code rc = compare_made(s, made, explained, err);
    fc_checkpoint_close(made);
    return rc;
}

/* ---- all of it ---- */

static fc_code list_b(fc_search *s, fc_error *err) {
    const fc_checkpoint *b = s->b.checkpoint;
    s->b_names = fc_name_table_new(s->arena, b->ntensors + 1);
    FC_NEED(s->b_names, err, b->path);
    for (size_t i = 0; i < b->ntensors; i++) {
        const char *name = b->tensors[i].name;
        FC_NEED(fc_name_table_put(s->b_names, name, strlen(name), i) != FC_NO_NAME, err, b->path);
    }
    return FC_OK;
}

static fc_code find_recipe(fc_search *s, const char *config, const char **text, fc_error *err) {
    FC_TRY(fc_search_sizes(s, config, err));
    FC_TRY(list_b(s, err));
    FC_TRY(fc_search_sums(s, err));
    FC_TRY(fc_search_things(s, &s->a, err));
    FC_TRY(fc_search_things(s, &s->b, err));
    FC_TRY(fc_search_match(s, err));
    for (size_t i = 0; i < s->b.count; i++) {
        s->same += s->b.taken[i] ? s->b.things[i].elements : 0;
    }
    FC_TRY(fc_search_rules(s, err));
    FC_TRY(choose_dtypes(s, err));
    FC_TRY(drop_rest(s, err));
    s->recipe.description = fc_arena_printf(s->arena, "%s as %s", s->a.checkpoint->path, s->b.checkpoint->path);
    *text = fc_search_text(s);
    return *text ? FC_OK : fc_no_memory(err, NULL);
}

fc_code fc_recipe_infer(fc_checkpoint *a, const fc_checkpoint *b, const fc_infer_options *options, fc_arena *arena,
                        fc_infer_report *report, fc_error *err) {
    fc_search s = {.a = {.checkpoint = a}, .b = {.checkpoint = b}, .source = a, .work = options->work, .arena = arena};
    const char *text = NULL;
    *report = (fc_infer_report){0};
    fc_code rc = find_recipe(&s, options->config, &text, err);
    bool *explained = fc_arena_calloc(arena, s.b.count + 1, sizeof *explained);
    FC_TRY_GOTO(rc == FC_OK && !explained ? fc_no_memory(err, NULL) : rc, rc, out);
    FC_TRY_GOTO(prove(&s, text, options->config, explained, err), rc, out);
    for (size_t i = 0; i < s.b.count; i++) {
        report->elements += s.b.things[i].elements;
        report->explained += explained[i];
    }
    report->agree = s.same;
    report->tensors = s.b.count;
    report->rules = s.recipe.nrules;
    report->dropped = s.dropped;
    report->ndropped = s.ndropped;
    report->guesses = s.guesses;
    report->nguesses = s.nguesses;
    report->recipe = report->agree >= report->elements / 2 ? text : NULL;
    rc = fc_search_unexplained(&s, explained, report, err);
out:
    free(s.a.things);
    free(s.b.things);
    return rc;
}
