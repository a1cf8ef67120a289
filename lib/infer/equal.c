/*
 * Tensors that are equal to others of their side, such as norms that are all ones, and tied embeddings. Nothing but the
 * names tells which is which: those of other layers, those of the shipped recipes, and how alike they are.
 */
#include "base/grow.h"
#include "fsdpckpt/box.h"
#include "fsdpckpt/try.h"
#include "infer/search.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PREDICTED = 100000, SAME_NAME = 50000, SHIPPED = 20000, NUMBERS = 10000, SHAPE = 200000 };

/* The tensors with one sum. */
typedef struct bucket {
    size_t *a, *b; /* things, from malloc */
    size_t na, nb, capacity_a, capacity_b;
} bucket;

typedef struct finder {
    fc_search *s;
    fc_name_table *pairs; /* of skeletons that other matches have: "A\nB" */
    const fc_recipe **shipped;
    size_t nshipped;
    bucket *buckets;
    size_t nbuckets, capacity;
    fc_error *err;
} finder;

static bool is_name(char c) {
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
}

/* Characters in common at both ends and in equal words. */
long fc_search_likeness(const char *a, const char *b) {
    const size_t la = strlen(a), lb = strlen(b), most = la < lb ? la : lb;
    size_t front = 0, back = 0;
    while (front < most && a[front] == b[front]) {
        front++;
    }
    while (back < most - front && a[la - 1 - back] == b[lb - 1 - back]) {
        back++;
    }
    long words = 0;
    for (size_t i = 0; i < la;) {
        size_t len = 0;
        while (is_name(a[i + len])) {
            len++;
        }
        for (size_t k = 0; len > 1 && k + len <= lb; k++) {
            if (memcmp(a + i, b + k, len) == 0) {
                words += (long)len;
                break;
            }
        }
        i += len + 1;
    }
    return (2 * words) + (long)(front + back) - (long)(lb / 2);
}

static bool same_numbers(const fc_thing *t, const fc_thing *u) {
    return t->nslots == u->nslots && memcmp(t->numbers, u->numbers, (size_t)t->nslots * sizeof *t->numbers) == 0;
}

/* Whether a shipped recipe gives A's tensor the name of B's. */
static bool is_shipped(const finder *f, const char *a, const char *b) {
    for (size_t i = 0; i < f->nshipped; i++) {
        for (size_t r = 0; r < f->shipped[i]->nrules; r++) {
            const fc_recipe_rule *rule = &f->shipped[i]->rules[r];
            fc_recipe_bindings x, y;
            if (rule->kind != FC_RULE_MAP || rule->nfrom != 1 || rule->nto != 1 ||
                !fc_recipe_match(rule->from[0], a, &x) || !fc_recipe_match(rule->to[0], b, &y) || x.count != y.count) {
                continue;
            }
            bool same = true;
            for (size_t k = 0; k < x.count; k++) {
                same = same && fc_recipe_number_of(&x.all[k]) == fc_recipe_number_of(&y.all[k]);
            }
            if (same) {
                return true;
            }
        }
    }
    return false;
}

static const char *pair_key(const finder *f, const fc_thing *a, const fc_thing *b) {
    return fc_arena_printf(f->s->arena, "%s\n%s", a->skeleton, b->skeleton);
}

static long score_pair(const finder *f, const fc_thing *a, const fc_thing *b) {
    const char *key = pair_key(f, a, b);
    const bool numbers = same_numbers(a, b);
    long score = fc_search_likeness(a->tensor->name, b->tensor->name);
    score += numbers ? NUMBERS : 0;
    score += numbers && key && fc_name_table_find(f->pairs, key, strlen(key)) != FC_NO_NAME ? PREDICTED : 0;
    score += strcmp(a->tensor->name, b->tensor->name) == 0 ? SAME_NAME : 0;
    score += is_shipped(f, a->tensor->name, b->tensor->name) ? SHIPPED : 0;
    return score + (fc_same_sizes(a->tensor->ndim, a->tensor->shape, b->tensor->ndim, b->tensor->shape) ? SHAPE : 0);
}

/* ---- buckets ---- */

static fc_code put(finder *f, fc_name_table *table, const fc_side *side, size_t index, bool in_a) {
    const fc_thing *t = &side->things[index];
    for (int k = 0; k < f->s->ntypes; k++) {
        const uint64_t key[] = {t->sums[k], t->elements, (uint64_t)k};
        if (!(t->known >> k & 1) || side->taken[index]) {
            continue;
        }
        const uint64_t *copy = fc_arena_copy(f->s->arena, key, 3, sizeof *key);
        FC_NEED(copy && fc_grow(&f->buckets, &f->capacity, f->nbuckets + 1, sizeof *f->buckets), f->err, NULL);
        const size_t at = fc_name_table_put(table, (const char *)copy, sizeof key, f->nbuckets);
        FC_NEED(at != FC_NO_NAME, f->err, NULL);
        if (at == f->nbuckets) {
            f->buckets[f->nbuckets++] = (bucket){.a = NULL};
        }
        bucket *b = &f->buckets[at];
        FC_NEED(in_a ? fc_grow(&b->a, &b->capacity_a, b->na + 1, sizeof *b->a)
                     : fc_grow(&b->b, &b->capacity_b, b->nb + 1, sizeof *b->b),
                f->err, NULL);
        *(in_a ? &b->a[b->na++] : &b->b[b->nb++]) = index;
    }
    return FC_OK;
}

/* Matches one tensor with the one of B whose name fits best. */
static fc_code match_best(finder *f, const bucket *b, size_t a) {
    const fc_thing *t = &f->s->a.things[a];
    long best = 0;
    size_t found = SIZE_MAX;
    for (size_t k = 0; k < b->nb; k++) {
        if (f->s->b.taken[b->b[k]]) {
            continue;
        }
        const long score = score_pair(f, t, &f->s->b.things[b->b[k]]);
        if (found == SIZE_MAX || score > best) {
            best = score;
            found = b->b[k];
        }
    }
    if (found == SIZE_MAX) {
        return FC_OK;
    }
    const fc_match m = {
        .one = t, .many = {&f->s->b.things[found]}, .nmany = 1, .guess = best % SHAPE < SAME_NAME && b->nb + b->na > 2};
    return fc_search_add_match(f->s, &m, f->err);
}

/* The order in which tensors choose: first those whose best fit is best. */
static fc_code match_bucket(finder *f, const bucket *b) {
    static const long steps[] = {SHAPE + PREDICTED, SHAPE + SHIPPED, SHAPE + NUMBERS, SHAPE, -1000000};
    for (size_t step = 0; step < sizeof steps / sizeof *steps; step++) {
        for (size_t i = 0; i < b->na; i++) {
            bool fits = false;
            for (size_t k = 0; k < b->nb && !fits && !f->s->a.taken[b->a[i]]; k++) {
                fits = !f->s->b.taken[b->b[k]] &&
                       score_pair(f, &f->s->a.things[b->a[i]], &f->s->b.things[b->b[k]]) >= steps[step];
            }
            FC_TRY(fits ? match_best(f, b, b->a[i]) : FC_OK);
        }
    }
    return FC_OK;
}

static fc_code list_pairs(finder *f) {
    for (size_t i = 0; i < f->s->nmatches; i++) {
        const fc_match *m = &f->s->matches[i];
        const char *key = pair_key(f, m->reverse ? m->many[0] : m->one, m->reverse ? m->one : m->many[0]);
        FC_NEED(key && fc_name_table_put(f->pairs, key, strlen(key), i) != FC_NO_NAME, f->err, NULL);
    }
    return FC_OK;
}

static fc_code load_shipped(finder *f) {
    size_t count = 0;
    while (fc_shipped_recipes[count].name) {
        count++;
    }
    f->shipped = fc_arena_calloc(f->s->arena, 2 * count + 1, sizeof *f->shipped);
    FC_NEED(f->shipped, f->err, NULL);
    for (size_t i = 0; i < 2 * count; i++) {
        const fc_recipe_options how = {.reverse = i % 2 == 1};
        FC_TRY(fc_recipe_load(fc_shipped_recipes[i / 2].name, &how, f->s->arena, &f->shipped[f->nshipped++], f->err));
    }
    return FC_OK;
}

fc_code fc_search_match_equal(fc_search *s, fc_error *err) {
    finder f = {.s = s, .pairs = fc_name_table_new(s->arena, s->nmatches + 1), .err = err};
    fc_name_table *table = fc_name_table_new(s->arena, s->a.count + s->b.count);
    fc_code rc = f.pairs && table ? FC_OK : fc_no_memory(err, s->a.checkpoint->path);
    FC_TRY_GOTO(rc, rc, out);
    FC_TRY_GOTO(list_pairs(&f), rc, out);
    FC_TRY_GOTO(load_shipped(&f), rc, out);
    for (size_t i = 0; i < s->a.count; i++) {
        FC_TRY_GOTO(put(&f, table, &s->a, i, true), rc, out);
    }
    for (size_t i = 0; i < s->b.count; i++) {
        FC_TRY_GOTO(put(&f, table, &s->b, i, false), rc, out);
    }
    for (size_t i = 0; i < f.nbuckets && rc == FC_OK; i++) {
        rc = f.buckets[i].na && f.buckets[i].nb ? match_bucket(&f, &f.buckets[i]) : FC_OK;
    }
out:
    for (size_t i = 0; i < f.nbuckets; i++) {
        free(f.buckets[i].a);
        free(f.buckets[i].b);
    }
    free(f.buckets);
    return rc;
}
