/*
 * Pairs names that differ by a prefix or by wrapper components, and reports each difference once for all names.
 */
#include "check/check.h"

#include "fsdpckpt/order.h"

#include <stdlib.h>
#include <string.h>

enum { ROUNDS = 8 };

/* Returns a table of the names of one side. */
static fc_name_table *index_names(fc_check_run *c, const fc_unpaired *list) {
    fc_name_table *table = fc_name_table_new(c->arena, list->count);
    for (size_t i = 0; table && i < list->count; i++) {
        const char *name = list->names->items[list->items[i]].name;
        fc_name_table_put(table, name, strlen(name), list->items[i]);
    }
    c->no_memory |= !table;
    return table;
}

static bool same_kind(const fc_named *a, const fc_named *b) {
    return !a->tensor->object == !b->tensor->object;
}

static bool same_layout(const fc_tensor *a, const fc_tensor *b) {
    return a->dtype == b->dtype && fc_same_sizes(a->ndim, a->shape, b->ndim, b->shape);
}

/* A prefix, with its dot, that only one side's names have. */
typedef struct prefix {
    const char *text;
    size_t len, count;
} prefix;

/* A search for a prefix such that names of `longer` are the prefix plus a name of `shorter`. */
typedef struct search {
    fc_check_run *c;
    const fc_unpaired *longer, *shorter;
    prefix best;
} search;

/* Finds the most frequent prefix. A single name is no evidence unless its tensor has the same dtype and shape. */
static void find_prefix(search *s) {
    size_t dots = 0, n = 0;
    const fc_named *longer = s->longer->names->items, *shorter = s->shorter->names->items;
    for (size_t i = 0; i < s->longer->count; i++) {
        for (const char *at = longer[s->longer->items[i]].name; (at = strchr(at, '.')); at++) {
            dots++;
        }
    }
    fc_name_table *names = index_names(s->c, s->shorter), *seen = fc_name_table_new(s->c->arena, dots);
    prefix *prefixes = fc_check_alloc(s->c, dots, sizeof *prefixes);
    if (!names || !seen || !prefixes) {
        s->c->no_memory = true;
        return;
    }
    for (size_t i = 0; i < s->longer->count; i++) {
        const fc_named *a = &longer[s->longer->items[i]];
        for (const char *at = a->name; (at = strchr(at, '.')); at++) {
            size_t len = (size_t)(at + 1 - a->name);
            size_t b = fc_name_table_find(names, at + 1, strlen(at + 1));
            if (b == FC_NO_NAME || !same_kind(a, &shorter[b])) {
                continue;
            }
            size_t p = fc_name_table_put(seen, a->name, len, n);
            if (p == n) {
                prefixes[n++] = (prefix){a->name, len, 0};
            }
            prefixes[p].count += 1 + same_layout(a->tensor, shorter[b].tensor);
        }
    }
    for (size_t p = 0; p < n; p++) {
        if (prefixes[p].count > s->best.count) {
            s->best = prefixes[p];
        }
    }
    if (s->best.count < 2) {
        s->best.count = 0;
    }
}

/* Pairs the names that differ by the best prefix. */
static size_t pair_prefix(const search *s, bool here_is_longer, fc_pair *pairs) {
    fc_name_table *names = index_names(s->c, s->shorter);
    size_t n = 0;
    for (size_t i = 0; names && i < s->longer->count; i++) {
        size_t a = s->longer->items[i];
        const fc_named *named = &s->longer->names->items[a];
        if (strncmp(named->name, s->best.text, s->best.len) != 0) {
            continue;
        }
        const char *rest = named->name + s->best.len;
        size_t b = fc_name_table_find(names, rest, strlen(rest));
        if (b != FC_NO_NAME && same_kind(named, &s->shorter->names->items[b])) {
            pairs[n++] = here_is_longer ? (fc_pair){a, b} : (fc_pair){b, a};
        }
    }
    return n;
}

static const char **names_of(fc_check_run *c, const fc_pair *pairs, size_t count) {
    const char **names = count > 1 ? fc_check_alloc(c, count, sizeof *names) : NULL;
    for (size_t i = 0; names && i < count; i++) {
        names[i] = c->names.items[pairs[i].here].name;
    }
    return names;
}

/* Returns " (DistributedDataParallel)" for a prefix that consists of wrappers, otherwise "". */
static const char *explain(fc_check_run *c, const char *text, size_t len) {
    unsigned which;
    const char *rest = fc_check_unwrap(c, text, len, &which);
    return *rest ? "" : fc_check_text(c, " (%s)", fc_check_list_wrappers(c, which, true));
}

/*
 * Returns the names' distinct first components as "embed_tokens|layers", or NULL when there are too many. `*whole`
 * receives whether one of them is a whole name.
 */
static const char *first_components(fc_check_run *c, const fc_pair *pairs, size_t count, bool *whole) {
    enum { MOST = 12 };
    const char *list = "", *firsts[MOST];
    size_t n = 0;
    *whole = false;
    for (size_t i = 0; i < count; i++) {
        const char *name = c->names.items[pairs[i].here].name;
        size_t len = strcspn(name, "."), k = 0;
        *whole = *whole || !name[len];
        while (k < n && (strlen(firsts[k]) != len || memcmp(firsts[k], name, len) != 0)) {
            k++;
        }
        if (k == n && n == MOST) {
            return NULL;
        }
        if (k == n) {
            firsts[n++] = fc_check_text(c, "%.*s", (int)len, name);
            list = fc_check_text(c, "%s%s%s", list, *list ? "|" : "", fc_check_regex(c, name, len));
        }
    }
    return list;
}

/*
 * Returns the rename rule that adds a prefix to some names. Unless these are all names, it selects them by their first
 * components.
 */
static const char *adding_rule(fc_check_run *c, const fc_pair *pairs, size_t count, const char *text) {
    bool whole;
    const char *firsts = count < c->names.count ? first_components(c, pairs, count, &whole) : NULL;
    const char *escaped = fc_check_replacement(c, text);
    return firsts ? fc_check_text(c, "s/^(%s)%s/%s&/", firsts, whole ? "(\\.|$)" : "\\.", escaped)
                  : fc_check_text(c, "s/^/%s/", escaped);
}

static size_t take_prefix(fc_check_run *c, fc_unpaired *here, fc_unpaired *there, fc_pair *pairs) {
    search extra = {.c = c, .longer = here, .shorter = there}, lacking = {.c = c, .longer = there, .shorter = here};
    find_prefix(&extra);
    find_prefix(&lacking);
    bool is_extra = extra.best.count >= lacking.best.count;
    const search *s = is_extra ? &extra : &lacking;
    size_t n = s->best.count ? pair_prefix(s, is_extra, pairs) : 0;
    if (n == 0) {
        return 0;
    }
    const char *text = fc_check_text(c, "%.*s", (int)s->best.len, s->best.text);
    fc_check_add(c, &(fc_finding){.kind = is_extra ? FC_FOUND_PREFIX_EXTRA : FC_FOUND_PREFIX_LACKING,
                                  .name = c->names.items[pairs[0].here].name,
                                  .other = there->names->items[pairs[0].there].name,
                                  .expected = explain(c, text, strlen(text)),
                                  .detail = text,
                                  .fix = is_extra ? fc_check_fix(c, FC_SETTING_STRIP_PREFIX, text)
                                                  : fc_check_fix(c, FC_SETTING_RENAME, adding_rule(c, pairs, n, text)),
                                  .count = n,
                                  .names = names_of(c, pairs, n)});
    fc_check_take(here, there, pairs, n, c);
    return n;
}

/* ---- wrappers in the middle of names ---- */

/* A pair of names that are equal without wrappers, with the bits of the wrappers that only one side has. */
typedef struct wrapped {
    unsigned here, there;
    fc_pair pair;
} wrapped;

static int compare_wrappers(const void *a, const void *b) {
    const wrapped *x = a, *y = b;
    FC_ORDER_BY(x->here, y->here);
    FC_ORDER_BY(x->there, y->there);
    return FC_ORDER(x->pair.here, y->pair.here);
}

static size_t find_wrapped(fc_check_run *c, const fc_unpaired *here, const fc_unpaired *there, wrapped *found) {
    fc_name_table *bare = fc_name_table_new(c->arena, there->count);
    size_t n = 0;
    c->no_memory |= !bare;
    for (size_t i = 0; bare && i < there->count; i++) {
        const char *name = there->names->items[there->items[i]].name;
        const char *rest = fc_check_unwrap(c, name, strlen(name), NULL);
        fc_name_table_put(bare, rest, strlen(rest), there->items[i]);
    }
    for (size_t i = 0; bare && i < here->count; i++) {
        const fc_named *named = &here->names->items[here->items[i]];
        wrapped w = {.pair.here = here->items[i]};
        const char *rest = fc_check_unwrap(c, named->name, strlen(named->name), &w.here);
        w.pair.there = fc_name_table_find(bare, rest, strlen(rest));
        if (w.pair.there == FC_NO_NAME || !same_kind(named, &there->names->items[w.pair.there])) {
            continue;
        }
        fc_name_table_set(bare, rest, strlen(rest), FC_NO_NAME);
        const char *other = there->names->items[w.pair.there].name;
        fc_check_unwrap(c, other, strlen(other), &w.there);
        unsigned both = w.here & w.there;
        w.here &= ~both;
        w.there &= ~both;
        if (w.here || w.there) {
            found[n++] = w;
        }
    }
    return n;
}

static void report_wrapped(fc_check_run *c, const fc_unpaired *there, const wrapped *w, const fc_pair *pairs,
                           size_t n) {
    bool extra = w->there == 0;
    unsigned which = extra ? w->here : w->there;
    fc_check_add(c, &(fc_finding){.kind = extra ? FC_FOUND_WRAPPER_EXTRA : FC_FOUND_WRAPPER_LACKING,
                                  .name = c->names.items[pairs[0].here].name,
                                  .other = there->names->items[pairs[0].there].name,
                                  .expected = fc_check_text(c, " (%s)", fc_check_list_wrappers(c, which, true)),
                                  .detail = fc_check_list_wrappers(c, which, false),
                                  .fix = extra ? fc_check_drop_wrappers(c, which) : (fc_fix){FC_SETTING_NONE, NULL, 0},
                                  .count = n,
                                  .names = names_of(c, pairs, n)});
}

static size_t take_wrapped(fc_check_run *c, fc_unpaired *here, fc_unpaired *there, fc_pair *pairs) {
    wrapped *found = fc_check_alloc(c, here->count, sizeof *found);
    size_t n = found ? find_wrapped(c, here, there, found) : 0;
    fc_sort_items(found, n, sizeof *found, compare_wrappers);
    for (size_t i = 0, j; i < n; i = j) {
        for (j = i; j < n && found[j].here == found[i].here && found[j].there == found[i].there; j++) {
            pairs[j] = found[j].pair;
        }
        report_wrapped(c, there, &found[i], pairs + i, j - i);
    }
    fc_check_take(here, there, pairs, n, c);
    return n;
}

size_t fc_check_prefixes(fc_check_run *c, fc_unpaired *here, fc_unpaired *there, fc_pair *pairs) {
    size_t total = 0, n = 1;
    for (int round = 0; round < ROUNDS && n > 0 && here->count > 0 && there->count > 0; round++) {
        n = take_prefix(c, here, there, pairs + total);
        total += n;
    }
    if (here->count > 0 && there->count > 0) {
        total += take_wrapped(c, here, there, pairs + total);
    }
    return total;
}
