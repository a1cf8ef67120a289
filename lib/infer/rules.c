/*
 * Makes rules of matches: one rule for all whose names differ only in numbers. Each number of B's name is one of A's,
 * or one plus a number of the configuration, or always the same.
 */
#include "base/grow.h"
#include "fsdpckpt/order.h"
#include "fsdpckpt/try.h"
#include "infer/search.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

enum { LITERAL = -1 };

/* What a number of a part's name is. */
typedef struct source_of {
    int slot;        /**< of the one tensor, or LITERAL */
    uint64_t offset; /**< is added to it; of num_hidden_layers */
} source_of;

/* Matches whose names differ only in numbers. */
typedef struct class {
    size_t first; /* of fc_search.matches; the others follow in `next` */
    size_t count;
    bool literal;
} class;

typedef struct maker {
    fc_search *s;
    fc_name_table *table, *owners; /* of classes by their skeletons, and by those of A alone */
    class *classes;
    size_t nclasses, capacity;
    size_t *next; /* of each match */
    size_t *last; /* of each class */
    fc_error *err;
} maker;

/* The variables of a rule, in the order in which they get letters. */
typedef struct plan {
    source_of parts[FC_SEARCH_PARTS][FC_SEARCH_SLOTS];
    int letters[FC_SEARCH_SLOTS]; /* of the slots of the one tensor, or LITERAL */
    int used;
    bool special; /* it has a number or an offset, so it comes before others */
} plan;

static const char *const variable_names[] = {"n", "e", "k", "m"};

static bool is_inner(const fc_thing *t, int slot) {
    return (t->ninner > 0 && t->inner[0] == slot) || (t->ninner > 1 && t->inner[1] == slot);
}

/* ---- classes ---- */

static const char *class_key(const maker *m, const fc_match *match, size_t index, bool literal) {
    fc_arena *arena = m->s->arena;
    const char *key = fc_arena_printf(arena, "%d\n%s", match->reverse, match->one->skeleton);
    for (int i = 0; i < match->nmany && key; i++) {
        key = fc_arena_printf(arena, "%s\n%s", key, match->many[i]->skeleton);
    }
    return key && literal ? fc_arena_printf(arena, "%s\n%zu", key, index) : key;
}

static int by_skeleton(const void *a, const void *b) {
    const fc_thing *x = *(const fc_thing *const *)a, *y = *(const fc_thing *const *)b;
    return strcmp(x->skeleton, y->skeleton);
}

static fc_code join_class(maker *m, size_t index, bool literal) {
    fc_match *match = &m->s->matches[index];
    fc_sort_items(match->many, (size_t)match->nmany, sizeof *match->many, by_skeleton);
    const char *key = class_key(m, match, index, literal);
    FC_NEED(key && fc_grow(&m->classes, &m->capacity, m->nclasses + 1, sizeof *m->classes), m->err, NULL);
    const size_t at = fc_name_table_put(m->table, key, strlen(key), m->nclasses);
    FC_NEED(at != FC_NO_NAME, m->err, NULL);
    m->next[index] = SIZE_MAX;
    if (at == m->nclasses) {
        m->classes[m->nclasses++] = (class){.first = index, .literal = literal};
    } else {
        m->next[m->last[at]] = index;
    }
    m->last[at] = index;
    m->classes[at].count++;
    return FC_OK;
}

/* ---- variables ---- */

/* Whether slot `j` of part `p` is slot `i` of the one tensor plus `offset`, in all matches of the class. */
static bool follows(const maker *m, const class *c, int p, int j, int i, uint64_t offset) {
    for (size_t k = c->first; k != SIZE_MAX; k = m->next[k]) {
        const fc_match *match = &m->s->matches[k];
        if (match->many[p]->numbers[j] != match->one->numbers[i] + offset) {
            return false;
        }
    }
    return true;
}

static bool is_constant(const maker *m, const class *c, const fc_thing *first, int p, int j) {
    for (size_t k = c->first; k != SIZE_MAX; k = m->next[k]) {
        const fc_match *match = &m->s->matches[k];
        const fc_thing *t = p < 0 ? match->one : match->many[p];
        if (t->numbers[j] != first->numbers[j]) {
            return false;
        }
    }
    return true;
}

/* Finds where slot `j` of part `p` comes from. @return false: it has no rule. */
static bool find_source(const maker *m, const class *c, int p, int j, int preferred, source_of *out) {
    const fc_match *match = &m->s->matches[c->first];
    const uint64_t layers = match->reverse ? 0 : (uint64_t)fc_search_size(m->s, "num_hidden_layers");
    for (int round = 0; round < 3; round++) {
        for (int i = 0; i < match->one->nslots; i++) {
            const uint64_t offset = round == 2 ? layers : 0;
            if (!is_inner(match->one, i) && (round > 0 || i == preferred) && (round < 2 || layers) &&
                follows(m, c, p, j, i, offset)) {
                *out = (source_of){i, offset};
                return true;
            }
        }
    }
    *out = (source_of){LITERAL, 0};
    return is_constant(m, c, match->many[p], p, j);
}

/* Finds the variables. @return false: the names do not follow each other. */
static bool make_plan(const maker *m, const class *c, plan *out) {
    const fc_match *match = &m->s->matches[c->first];
    const fc_thing *one = match->one;
    *out = (plan){.used = 0};
    for (int i = 0; i < FC_SEARCH_SLOTS; i++) {
        out->letters[i] = LITERAL;
    }
    for (int p = 0; p < match->nmany; p++) {
        int preferred = 0;
        for (int j = 0; j < match->many[p]->nslots; j++) {
            source_of *source = &out->parts[p][j];
            if (is_inner(match->many[p], j)) {
                continue;
            }
            *source = (source_of){LITERAL, 0};
            if (!c->literal && !find_source(m, c, p, j, preferred, source)) {
                return false;
            }
            out->special = out->special || source->slot == LITERAL || source->offset;
            preferred = source->slot == LITERAL ? preferred : source->slot + 1;
            if (source->slot != LITERAL && p == 0) {
                out->letters[source->slot] = out->used++;
            } else if (source->slot != LITERAL && out->letters[source->slot] == LITERAL) {
                return false; /* the other parts do not have this number */
            }
        }
    }
    for (int i = 0; i < one->nslots; i++) {
        const bool free = !is_inner(one, i) && out->letters[i] == LITERAL;
        out->special = out->special || free;
        if (free && !c->literal && !is_constant(m, c, one, -1, i)) {
            return false;
        }
    }
    return out->used + (one->ninner > match->many[0]->ninner ? one->ninner : match->many[0]->ninner) <= 4;
}

/* ---- patterns ---- */

/* Spells a name with variables. @param part LITERAL: the one tensor. */
static const char *spell_pattern(const maker *m, const plan *v, const fc_thing *t, int part) {
    fc_arena *arena = m->s->arena;
    const char *text = "", *from = t->skeleton;
    int slot = 0, inner = 0;
    for (const char *at = from; text; at++) {
        if (*at && *at != '\1' && *at != '\2') {
            continue;
        }
        text = fc_arena_printf(arena, "%s%.*s", text, (int)(at - from), from);
        from = at + 1;
        if (!*at || !text) {
            break;
        }
        if (*at == '\2') {
            text = fc_arena_printf(arena, "%s{%s}", text, variable_names[v->used + inner++]);
        } else {
            const source_of source =
                part == LITERAL ? (source_of){v->letters[slot] == LITERAL ? LITERAL : slot, 0} : v->parts[part][slot];
            const char *letter = source.slot == LITERAL ? NULL : variable_names[v->letters[source.slot]];
            text = !letter         ? fc_arena_printf(arena, "%s%" PRIu64, text, t->numbers[slot])
                   : source.offset ? fc_arena_printf(arena, "%s{%s+num_hidden_layers}", text, letter)
                                   : fc_arena_printf(arena, "%s{%s}", text, letter);
        }
        slot++;
    }
    return text;
}

/* ---- owners ---- */

/* The names of a tensor of A in a class: the pattern that its rule would have. */
static const char *names_in_a(const maker *m, const class *c, int part) {
    plan v;
    const fc_match *match = &m->s->matches[c->first];
    const fc_thing *t = match->reverse ? match->many[part] : match->one;
    return make_plan(m, c, &v) ? spell_pattern(m, &v, t, match->reverse ? part : LITERAL) : t->skeleton;
}

/* Of several classes with the same names in A, only the largest has variables. */
static fc_code find_owners(maker *m) {
    for (size_t c = 0; c < m->nclasses; c++) {
        const fc_match *match = &m->s->matches[m->classes[c].first];
        for (int i = 0; i < (match->reverse ? match->nmany : 1); i++) {
            const char *name = names_in_a(m, &m->classes[c], i);
            const size_t at = name ? fc_name_table_put(m->owners, name, strlen(name), c) : FC_NO_NAME;
            FC_NEED(at != FC_NO_NAME, m->err, NULL);
            if (at != c && m->classes[at].count >= m->classes[c].count) {
                m->classes[c].literal = true;
            } else if (at != c) {
                m->classes[at].literal = true;
                fc_name_table_set(m->owners, name, strlen(name), c);
            }
        }
    }
    return FC_OK;
}

static fc_code add_guess(fc_search *s, const fc_recipe_rule *rule, const char *why, fc_error *err) {
    FC_NEED(fc_arena_grow(s->arena, &s->guesses, &s->guess_capacity, s->nguesses, s->nguesses + 1, sizeof *s->guesses),
            err, NULL);
    s->guesses[s->nguesses] = fc_arena_printf(s->arena, "%s -> %s: %s", rule->from[0], rule->to[0], why);
    FC_NEED(s->guesses[s->nguesses++], err, NULL);
    return FC_OK;
}

fc_code fc_search_add_rule(fc_search *s, const fc_recipe_rule *rule, const char *guess, fc_error *err) {
    fc_recipe *r = &s->recipe;
    FC_NEED(fc_arena_grow(s->arena, &r->rules, &s->rule_capacity, r->nrules, r->nrules + 1, sizeof *r->rules) &&
                fc_arena_grow(s->arena, &s->notes, &s->note_capacity, r->nrules, r->nrules + 1, sizeof *s->notes),
            err, NULL);
    s->notes[r->nrules] = guess ? fc_arena_printf(s->arena, "a guess: %s", guess) : NULL;
    r->rules[r->nrules++] = *rule;
    return guess ? add_guess(s, rule, guess, err) : FC_OK;
}

/* Frees the tensors of a match that no operations explain. */
static void forget(fc_search *s, const fc_match *match) {
    fc_side *one = match->reverse ? &s->b : &s->a, *many = match->reverse ? &s->a : &s->b;
    for (size_t k = 0; k < match->one->number; k++) {
        one->taken[one->order[match->one->first + k]] = false;
    }
    for (int i = 0; i < match->nmany; i++) {
        for (size_t k = 0; k < match->many[i]->number; k++) {
            many->taken[many->order[match->many[i]->first + k]] = false;
        }
    }
}

static fc_code make_rule(const maker *m, const class *c, const plan *v) {
    fc_search *s = m->s;
    const fc_match *match = &s->matches[c->first];
    const char **one = fc_arena_calloc(s->arena, 2, sizeof *one);
    const char **many = fc_arena_calloc(s->arena, FC_SEARCH_PARTS + 1, sizeof *many);
    FC_NEED(one && many, m->err, NULL);
    one[0] = spell_pattern(m, v, match->one, LITERAL);
    FC_NEED(one[0], m->err, NULL);
    for (int i = 0; i < match->nmany; i++) {
        many[i] = spell_pattern(m, v, match->many[i], i);
        FC_NEED(many[i], m->err, NULL);
    }
    fc_puzzle puzzle = {.match = match,
                        .rule = {.kind = FC_RULE_MAP,
                                 .from = match->reverse ? many : one,
                                 .to = match->reverse ? one : many,
                                 .nfrom = match->reverse ? (size_t)match->nmany : 1,
                                 .nto = match->reverse ? 1 : (size_t)match->nmany}};
    FC_TRY(fc_search_operations(s, &puzzle, m->err));
    const char *guess = puzzle.symmetric ? "two axes have the same size, so either order fits" : NULL;
    for (size_t k = c->first; k != SIZE_MAX; k = m->next[k]) {
        guess = s->matches[k].guess ? "the tensors are equal to others, so only the names say which is which" : guess;
        if (!puzzle.found) {
            forget(s, &s->matches[k]);
        }
    }
    return puzzle.found ? fc_search_add_rule(s, &puzzle.rule, guess, m->err) : FC_OK;
}

/* Makes a rule of each class. First those that have numbers, which a variable would match, too. */
static fc_code make_rules(maker *m, bool special) {
    for (size_t c = 0; c < m->nclasses; c++) {
        plan v;
        const bool planned = m->classes[c].count > 0 && make_plan(m, &m->classes[c], &v);
        FC_TRY(planned && v.special == special ? make_rule(m, &m->classes[c], &v) : FC_OK);
    }
    return FC_OK;
}

/* Takes the classes apart whose names do not follow each other. */
static fc_code split_classes(maker *m) {
    const size_t count = m->nclasses;
    for (size_t c = 0; c < count; c++) {
        plan v;
        const class old = m->classes[c];
        if (old.count < 2 || (!old.literal && make_plan(m, &old, &v))) {
            continue;
        }
        for (size_t k = old.first, next; k != SIZE_MAX; k = next) {
            next = m->next[k];
            FC_TRY(join_class(m, k, true));
        }
        m->classes[c].count = 0;
    }
    return FC_OK;
}

/* A's tensors with a rule of their own keep it if they are alone with their numbers. */
static fc_code make_classes(maker *m) {
    for (size_t i = 0; i < m->s->nmatches; i++) {
        FC_TRY(join_class(m, i, false));
    }
    FC_TRY(find_owners(m));
    return split_classes(m);
}

fc_code fc_search_rules(fc_search *s, fc_error *err) {
    maker m = {.s = s,
               .table = fc_name_table_new(s->arena, s->nmatches + 1),
               .owners = fc_name_table_new(s->arena, s->nmatches + 1),
               .next = fc_arena_calloc(s->arena, s->nmatches + 1, sizeof *m.next),
               .last = fc_arena_calloc(s->arena, 2 * s->nmatches + 1, sizeof *m.last),
               .err = err};
    fc_code rc = m.table && m.owners && m.next && m.last ? FC_OK : fc_no_memory(err, NULL);
    FC_TRY_GOTO(rc, rc, out);
    FC_TRY_GOTO(make_classes(&m), rc, out);
    FC_TRY_GOTO(make_rules(&m, true), rc, out);
    rc = make_rules(&m, false);
out:
    free(m.classes);
    return rc;
}
