/*
 * Matches things of A with things of B by their sums: one with one, and one with up to four, whose sums add up. The
 * parts of one tensor have names with the same numbers.
 */
#include "base/grow.h"
#include "fsdpckpt/try.h"
#include "infer/search.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_IN_GROUP = 24, MOST_FOR_FOUR = 16, MOST_PAIRS = 1 << 20 };

/* What a sum is looked up by. Without padding of zeros, the number of elements is the same. */
typedef struct sum_key {
    uint64_t sum, elements, type;
} sum_key;

/* Some things of a side with the same numbers, and their sum. */
typedef struct set {
    sum_key key;
    const fc_thing *things[FC_SEARCH_PARTS];
    int count;
    struct set *next; /* with the same key */
} set;

typedef struct index {
    fc_search *s;
    fc_side *side;
    fc_name_table *table;
    set **sets; /* from malloc */
    size_t nsets, capacity;
    fc_error *err;
} index_of;

fc_code fc_search_add_match(fc_search *s, const fc_match *match, fc_error *err) {
    FC_NEED(fc_arena_grow(s->arena, &s->matches, &s->match_capacity, s->nmatches, s->nmatches + 1, sizeof *s->matches),
            err, s->a.checkpoint->path);
    s->matches[s->nmatches++] = *match;
    fc_side *one = match->reverse ? &s->b : &s->a, *many = match->reverse ? &s->a : &s->b;
    for (size_t k = 0; k < match->one->number; k++) {
        one->taken[one->order[match->one->first + k]] = true;
    }
    for (int i = 0; i < match->nmany; i++) {
        for (size_t k = 0; k < match->many[i]->number; k++) {
            many->taken[many->order[match->many[i]->first + k]] = true;
        }
    }
    return FC_OK;
}

/* Whether none of its tensors is matched. */
static bool is_free(const fc_side *side, const fc_thing *t) {
    for (size_t k = 0; k < t->number; k++) {
        if (side->taken[side->order[t->first + k]]) {
            return false;
        }
    }
    return t->known != 0;
}

/* ---- the sums of one side ---- */

static fc_code add_set(index_of *x, set *made) {
    set *copy = fc_arena_copy(x->s->arena, made, 1, sizeof *made);
    FC_NEED(copy && fc_grow(&x->sets, &x->capacity, x->nsets + 1, sizeof *x->sets), x->err, x->side->checkpoint->path);
    const size_t at = fc_name_table_put(x->table, (const char *)&copy->key, sizeof copy->key, x->nsets);
    FC_NEED(at != FC_NO_NAME, x->err, x->side->checkpoint->path);
    copy->next = NULL;
    if (at == x->nsets) {
        x->sets[x->nsets++] = copy;
    } else {
        copy->next = x->sets[at];
        x->sets[at] = copy;
    }
    return FC_OK;
}

/* Adds the sets that begin with `made` and have more of `things`. */
static fc_code add_larger(index_of *x, fc_thing **things, size_t count, size_t from, const set *made, int type,
                          int most) { // NOLINT(misc-no-recursion): four levels
    for (size_t i = from; i < count; i++) {
        set more = *made;
        if (!(things[i]->known >> type & 1)) {
            continue;
        }
        more.things[more.count++] = things[i];
        more.key.sum += things[i]->sums[type];
        more.key.elements += things[i]->elements;
        FC_TRY(more.count > 1 ? add_set(x, &more) : FC_OK);
        FC_TRY(more.count < most ? add_larger(x, things, count, i + 1, &more, type, most) : FC_OK);
    }
    return FC_OK;
}

/* Adds all things, each as a set of one. */
static fc_code add_singles(index_of *x, bool families) {
    for (size_t i = 0; i < x->side->nthings; i++) {
        fc_thing *t = &x->side->things[i];
        for (int k = 0; k < x->s->ntypes; k++) {
            set one = {.key = {t->sums[k], t->elements, (uint64_t)k}, .things = {t}, .count = 1};
            if (t->known >> k & 1 && (families || t->ninner == 0) && is_free(x->side, t)) {
                FC_TRY(add_set(x, &one));
            }
        }
    }
    return FC_OK;
}

/* The numbers of a thing that do not count its tensors, and how many do. */
static size_t outer_numbers(const fc_thing *t, uint64_t *out) {
    size_t count = 1;
    out[0] = (uint64_t)t->ninner;
    for (int i = 0; i < t->nslots; i++) {
        if (t->inner[0] != i || t->ninner < 1) {
            if (t->ninner < 2 || t->inner[1] != i) {
                out[count++] = t->numbers[i];
            }
        }
    }
    return count;
}

/*
 * What things have in common that can be parts of one: their numbers, and with `front` the name before the last number.
 * @return the bytes of the key; 0: out of memory.
 */
static size_t group_key(const index_of *x, const fc_thing *t, bool front, const char **key) {
    uint64_t numbers[FC_SEARCH_SLOTS + 1];
    const size_t count = outer_numbers(t, numbers) * sizeof *numbers;
    const char *last = front ? strrchr(t->skeleton, '\1') : NULL;
    const size_t len = last ? (size_t)(last - t->skeleton) : 0;
    char *copy = fc_arena_alloc(x->s->arena, count + len);
    if (copy) {
        memcpy(copy, numbers, count);
        memcpy(copy + count, t->skeleton, len);
    }
    *key = copy;
    return copy ? count + len : 0;
}

/* Counts the things with the same numbers. If there are too many, the names in front tell them apart. */
static fc_code find_group(const index_of *x, const fc_thing *t, bool front, fc_name_table *table, size_t *ngroups,
                          size_t *at) {
    const char *key = NULL;
    const size_t len = group_key(x, t, front, &key);
    *at = len ? fc_name_table_put(table, key, len, *ngroups) : FC_NO_NAME;
    FC_NEED(*at != FC_NO_NAME, x->err, x->side->checkpoint->path);
    *ngroups += *at == *ngroups;
    return FC_OK;
}

/* Puts things that can be parts of one tensor in lists: `last` of each group, and then fc_thing.next. */
static fc_code list_groups(index_of *x, size_t *last, size_t *counts, size_t *ngroups) {
    fc_side *side = x->side;
    fc_name_table *numbers = fc_name_table_new(x->s->arena, side->nthings);
    fc_name_table *table = fc_name_table_new(x->s->arena, side->nthings);
    size_t nnumbers = 0, at = 0;
    FC_NEED(numbers && table, x->err, side->checkpoint->path);
    for (size_t i = 0; i < side->nthings; i++) {
        if (is_free(side, &side->things[i])) {
            FC_TRY(find_group(x, &side->things[i], false, numbers, &nnumbers, &at));
            counts[at]++;
        }
    }
    for (size_t i = 0; i < side->nthings; i++) {
        fc_thing *t = &side->things[i];
        if (!is_free(side, t)) {
            continue;
        }
        FC_TRY(find_group(x, t, false, numbers, &nnumbers, &at));
        const size_t before = *ngroups;
        FC_TRY(find_group(x, t, counts[at] > MOST_FOR_FOUR, table, ngroups, &at));
        t->next = at == before ? SIZE_MAX : last[at];
        last[at] = i;
    }
    return FC_OK;
}

/* Adds sets of two to four things with the same numbers. */
static fc_code add_groups(index_of *x) {
    fc_side *side = x->side;
    size_t *last = malloc((side->nthings + 1) * sizeof *last), ngroups = 0;
    size_t *counts = calloc(side->nthings + 1, sizeof *counts);
    fc_code rc = last && counts ? FC_OK : fc_no_memory(x->err, side->checkpoint->path);
    FC_TRY_GOTO(rc, rc, out);
    FC_TRY_GOTO(list_groups(x, last, counts, &ngroups), rc, out);
    for (size_t g = 0; g < ngroups && rc == FC_OK; g++) {
        fc_thing *things[MOST_IN_GROUP];
        size_t count = 0;
        for (size_t i = last[g]; i != SIZE_MAX && count < MOST_IN_GROUP; i = side->things[i].next) {
            things[count++] = &side->things[i];
        }
        for (int k = 0; k < x->s->ntypes && rc == FC_OK; k++) {
            const set none = {.key = {0, 0, (uint64_t)k}};
            rc = add_larger(x, things, count, 0, &none, k, count <= MOST_FOR_FOUR ? FC_SEARCH_PARTS : 3);
        }
    }
out:
    free(last);
    free(counts);
    return rc;
}

/* ---- looking up ---- */

/* Finds the only free set with the sum of `t`. Several: none, unless `any`. */
static const set *find_set(const index_of *x, const fc_thing *t, const fc_side *side) {
    for (int k = 0; k < x->s->ntypes; k++) {
        const sum_key key = {t->sums[k], t->elements, (uint64_t)k};
        const size_t at =
            t->known >> k & 1 && x->sets ? fc_name_table_find(x->table, (const char *)&key, sizeof key) : FC_NO_NAME;
        const set *only = NULL;
        size_t count = 0;
        for (const set *found = at == FC_NO_NAME ? NULL : x->sets[at]; found; found = found->next) {
            bool free_all = true;
            for (int i = 0; i < found->count; i++) {
                free_all = free_all && is_free(side, found->things[i]);
            }
            only = free_all ? found : only;
            count += free_all;
        }
        if (count == 1) {
            return only;
        }
    }
    return NULL;
}

/* Matches each free thing of `from` with a set of the index. */
static fc_code match_all(index_of *x, fc_side *from, bool families, const index_of *own) {
    for (size_t i = 0; i < from->nthings; i++) {
        fc_thing *t = &from->things[i];
        if ((t->ninner > 0) != families || !is_free(from, t)) {
            continue;
        }
        const set *found = find_set(x, t, x->side);
        if (!found || (own && !find_set(own, t, from))) { /* several things of its own side have the sum */
            continue;
        }
        fc_match m = {.reverse = from == &x->s->b, .one = t, .nmany = found->count};
        memcpy(m.many, found->things, sizeof m.many);
        FC_TRY(fc_search_add_match(x->s, &m, x->err));
    }
    return FC_OK;
}

static fc_code start_index(index_of *x, fc_search *s, fc_side *side, fc_error *err) {
    *x = (index_of){.s = s, .side = side, .table = fc_name_table_new(s->arena, side->nthings), .err = err};
    return x->table ? FC_OK : fc_no_memory(err, side->checkpoint->path);
}

/* Single tensors that have the only equal sum on both sides. */
static fc_code match_singles(fc_search *s, fc_error *err) {
    index_of a, b = {.sets = NULL};
    fc_code rc = start_index(&a, s, &s->a, err);
    FC_TRY_GOTO(rc, rc, out);
    FC_TRY_GOTO(start_index(&b, s, &s->b, err), rc, out);
    FC_TRY_GOTO(add_singles(&a, false), rc, out);
    FC_TRY_GOTO(add_singles(&b, false), rc, out);
    rc = match_all(&b, &s->a, false, &a);
out:
    free(a.sets);
    free(b.sets);
    return rc;
}

/* One thing of `from` with several tensors of the other side. */
static fc_code match_parts(fc_search *s, fc_side *from, fc_side *to, fc_error *err) {
    index_of x;
    fc_code rc = start_index(&x, s, to, err);
    FC_TRY_GOTO(rc, rc, out);
    FC_TRY_GOTO(add_singles(&x, true), rc, out);
    FC_TRY_GOTO(add_groups(&x), rc, out);
    FC_TRY_GOTO(match_all(&x, from, false, NULL), rc, out);
out:
    free(x.sets);
    return rc;
}

/* Whether the name of `u` is nearer to that of `t` than the name of `old`: it has as many numbers, or is more alike. */
static bool fits_better(const fc_thing *t, const fc_thing *u, const fc_thing *old) {
    const bool numbers = t->nslots == u->nslots, before = t->nslots == old->nslots;
    return numbers != before ? numbers
                             : fc_search_likeness(t->tensor->name, u->tensor->name) >
                                   fc_search_likeness(t->tensor->name, old->tensor->name);
}

/* Pairs that are equal but for zeros at the end of the first dimension. */
static fc_code match_padded(fc_search *s, fc_error *err) {
    size_t free_in_a = 0, free_in_b = 0;
    for (size_t i = 0; i < s->a.count; i++) {
        free_in_a += is_free(&s->a, &s->a.things[i]);
    }
    for (size_t i = 0; i < s->b.count; i++) {
        free_in_b += is_free(&s->b, &s->b.things[i]);
    }
    if (free_in_b == 0 || free_in_a > MOST_PAIRS / free_in_b) { /* too many to be the few that a program pads */
        return FC_OK;
    }
    for (size_t i = 0; i < s->a.count; i++) {
        const fc_thing *t = &s->a.things[i], *found = NULL;
        for (size_t k = 0; k < s->b.count && is_free(&s->a, t); k++) {
            const fc_thing *u = &s->b.things[k];
            const bool fits = is_free(&s->b, u) && t->tensor->ndim == u->tensor->ndim && t->tensor->ndim > 0 &&
                              t->elements != u->elements &&
                              memcmp(t->tensor->shape + 1, u->tensor->shape + 1,
                                     (size_t)(t->tensor->ndim - 1) * sizeof *t->tensor->shape) == 0;
            for (int type = 0; fits && type < s->ntypes; type++) {
                if (t->known & u->known & 1U << type && t->sums[type] == u->sums[type] && t->sums[type] &&
                    (!found || fits_better(t, u, found))) {
                    found = u;
                }
            }
        }
        const fc_match m = {.one = t, .many = {found}, .nmany = 1};
        FC_TRY(found ? fc_search_add_match(s, &m, err) : FC_OK);
    }
    return FC_OK;
}

fc_code fc_search_match(fc_search *s, fc_error *err) {
    FC_TRY(match_singles(s, err));
    FC_TRY(fc_search_match_equal(s, err));
    FC_TRY(match_parts(s, &s->a, &s->b, err));
    FC_TRY(match_parts(s, &s->b, &s->a, err));
    FC_TRY(match_padded(s, err));
    FC_TRY(fc_search_ties(s, &s->a, err));
    return fc_search_ties(s, &s->b, err);
}
