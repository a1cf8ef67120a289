/*
 * Pairs tensors that have another name: the same bytes by both sides' recorded digests, or the same dtype, shape and
 * numbers in the name and a similar name. Tensors that differ in the same component share one finding.
 */
#include "check/check.h"

#include "fsdpckpt/digest.h"
#include "fsdpckpt/order.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

/* At most this many tensors of a group are compared with each other. The result is only a guess. */
enum { MOST_ALIKE = 24, LEAST_SIMILARITY = 40 };

/* A tensor without a partner on the other side. */
typedef struct candidate {
    size_t index; /* into the names */
    size_t group; /* tensors that are alike have the same number */
    bool taken;
} candidate;

typedef struct renamed {
    fc_pair pair;
    bool certain;          /* by digests */
    const char *from, *to; /* the components that differ */
    const char *rule;      /* the argument of --rename */
} renamed;

typedef struct rename_search {
    fc_check_run *c;
    const fc_unpaired *here, *there;
    fc_name_table *groups;
    size_t ngroups;
    renamed *found;
    size_t count;
} rename_search;

/* ---- groups ---- */

/* Returns "float32[64, 32]/3/0": type and numbers in the name. So layers.3 can become blocks.3, but not blocks.4. */
static const char *alike_key(fc_check_run *c, const fc_named *named) {
    const char *key = fc_check_type(c, named->tensor);
    for (const char *at = named->name; *at;) {
        size_t n = strcspn(at, ".");
        if (n > 0 && strspn(at, "0123456789") == n) {
            key = fc_check_text(c, "%s/%.*s", key, (int)n, at);
        }
        at += n + (at[n] == '.');
    }
    return key;
}

static const char *digest_key(fc_check_run *c, const fc_checkpoint *checkpoint, const fc_named *named) {
    fc_digest digest;
    if (fc_checkpoint_digest(checkpoint, named->tensor, FC_WHOLE_TENSOR, &digest, NULL) != FC_OK ||
        digest.kind != FC_DIGEST_CRC64) {
        return NULL;
    }
    return fc_check_text(c, "%s:%016" PRIx64, fc_check_type(c, named->tensor), digest.value);
}

static size_t group_of(rename_search *m, const char *key) {
    size_t at = fc_name_table_put(m->groups, key, strlen(key), m->ngroups);
    m->ngroups += at == m->ngroups;
    return at;
}

static int compare_candidate_groups(const void *a, const void *b) {
    const candidate *x = a, *y = b;
    FC_ORDER_BY(x->group, y->group);
    return FC_ORDER(x->index, y->index);
}

/* Returns the tensors of a list sorted by group, without those that have no key. */
static candidate *gather(rename_search *m, const fc_unpaired *list, const fc_checkpoint *checkpoint, bool digests,
                         size_t *count) {
    candidate *items = fc_check_alloc(m->c, list->count, sizeof *items);
    *count = 0;
    for (size_t i = 0; items && i < list->count; i++) {
        const fc_named *named = &list->names->items[list->items[i]];
        if (named->tensor->object) {
            continue;
        }
        const char *key = digests ? digest_key(m->c, checkpoint, named) : alike_key(m->c, named);
        if (key) {
            items[(*count)++] = (candidate){list->items[i], group_of(m, key), false};
        }
    }
    if (*count > 0) {
        fc_sort_items(items, *count, sizeof *items, compare_candidate_groups);
    }
    return items;
}

/* ---- similarity ---- */

/* Returns the percentage of character pairs that two names share (Dice's coefficient). */
static int similarity(const char *a, const char *b) {
    size_t na = strlen(a), nb = strlen(b), shared = 0;
    if (na < 2 || nb < 2 || na > 512 || nb > 512) {
        return 0;
    }
    bool used[512] = {false};
    for (size_t i = 0; i + 1 < na; i++) {
        for (size_t j = 0; j + 1 < nb; j++) {
            if (!used[j] && a[i] == b[j] && a[i + 1] == b[j + 1]) {
                used[j] = true;
                shared++;
                break;
            }
        }
    }
    return (int)(200 * shared / (na + nb - 2));
}

/*
 * Finds the most similar pair that is not taken. Ties go to the earlier pair, because state dicts preserve their order.
 */
static bool most_similar(const candidate *a, size_t na, const candidate *b, size_t nb,
                         int alike[MOST_ALIKE][MOST_ALIKE], size_t *x, size_t *y) {
    int best = LEAST_SIMILARITY - 1;
    for (size_t i = 0; i < na; i++) {
        for (size_t j = 0; j < nb; j++) {
            if (!a[i].taken && !b[j].taken && alike[i][j] > best) {
                best = alike[i][j];
                *x = i;
                *y = j;
            }
        }
    }
    return best >= LEAST_SIMILARITY;
}

/* Pairs the members of a group, the most similar first. */
static void match_alike(rename_search *m, candidate *a, size_t na, candidate *b, size_t nb) {
    int alike[MOST_ALIKE][MOST_ALIKE];
    size_t x = 0, y = 0;
    na = na > MOST_ALIKE ? MOST_ALIKE : na;
    nb = nb > MOST_ALIKE ? MOST_ALIKE : nb;
    for (size_t i = 0; i < na; i++) {
        for (size_t j = 0; j < nb; j++) {
            alike[i][j] = similarity(m->here->names->items[a[i].index].name, m->there->names->items[b[j].index].name);
        }
    }
    while (most_similar(a, na, b, nb, alike, &x, &y)) {
        a[x].taken = b[y].taken = true;
        m->found[m->count++] = (renamed){.pair = {a[x].index, b[y].index}};
    }
}

/* Pairs by digest only unique tensors: many tensors are all ones. */
static void match_same(rename_search *m, candidate *a, size_t na, candidate *b, size_t nb) {
    if (na == 1 && nb == 1) {
        m->found[m->count++] = (renamed){.pair = {a->index, b->index}, .certain = true};
    }
}

static size_t group_end(const candidate *items, size_t count, size_t begin) {
    size_t end = begin;
    while (end < count && items[end].group == items[begin].group) {
        end++;
    }
    return end;
}

/* Visits the groups that both sides have. */
static void match_groups(rename_search *m, bool digests) {
    size_t na, nb;
    m->groups = fc_name_table_new(m->c->arena, m->here->count + m->there->count);
    m->ngroups = 0;
    if (!m->groups) {
        m->c->no_memory = true;
        return;
    }
    candidate *a = gather(m, m->here, m->c->checkpoint, digests, &na);
    candidate *b = gather(m, m->there, m->c->options->reference, digests, &nb);
    for (size_t i = 0, j = 0; i < na && j < nb;) {
        size_t end_a = group_end(a, na, i), end_b = group_end(b, nb, j);
        if (a[i].group == b[j].group) {
            (digests ? match_same : match_alike)(m, a + i, end_a - i, b + j, end_b - j);
        }
        size_t ga = a[i].group, gb = b[j].group;
        i = ga <= gb ? end_a : i;
        j = gb <= ga ? end_b : j;
    }
}

/* ---- rename rules ---- */

/* Returns the length of the components that two names share at the start: after a dot, or 0. */
static size_t common_start(const char *a, const char *b) {
    size_t start = 0;
    for (size_t i = 0; a[i] && a[i] == b[i]; i++) {
        start = a[i] == '.' ? i + 1 : start;
    }
    return start;
}

/*
 * Returns how many characters they share at the end, from a dot on. Leaves the first `start` characters and something
 * to replace.
 */
static size_t common_end(const char *a, const char *b, size_t start) {
    size_t na = strlen(a), nb = strlen(b), end = 0;
    for (size_t i = 1; i < na - start && i < nb - start && a[na - i] == b[nb - i]; i++) {
        end = a[na - i] == '.' ? i : end;
    }
    return end;
}

/* Finds the components that differ, and a rule that replaces them between dots or at the ends of a name. */
static void find_rule(fc_check_run *c, renamed *r, const char *here, const char *there) {
    size_t start = common_start(here, there), end = common_end(here, there, start);
    size_t nh = strlen(here) - start - end, nt = strlen(there) - start - end;
    const char *before = start ? "\\." : "^", *after = end ? "\\." : "$";
    r->from = fc_check_text(c, "%.*s", (int)nh, here + start);
    r->to = fc_check_text(c, "%.*s", (int)nt, there + start);
    r->rule = fc_check_text(c, "s/%s%s%s/%s%s%s/", before, fc_check_regex(c, r->from, nh), after, start ? "." : "",
                            fc_check_replacement(c, r->to), end ? "." : "");
}

static int compare_renamed_rules(const void *a, const void *b) {
    const renamed *x = a, *y = b;
    int order = strcmp(x->rule, y->rule);
    return order ? order : (x->pair.here > y->pair.here) - (x->pair.here < y->pair.here);
}

static const fc_named *here_of(const rename_search *m, const renamed *r) {
    return &m->here->names->items[r->pair.here];
}

static const fc_named *there_of(const rename_search *m, const renamed *r) {
    return &m->there->names->items[r->pair.there];
}

static void report_one(const rename_search *m, const renamed *r) {
    fc_check_run *c = m->c;
    const char *here = here_of(m, r)->name, *there = there_of(m, r)->name;
    const char *whole =
        fc_check_text(c, "s/^%s$/%s/", fc_check_regex(c, here, strlen(here)), fc_check_replacement(c, there));
    fc_check_add(c, &(fc_finding){.kind = r->certain ? FC_FOUND_RENAMED : FC_FOUND_RENAMED_PERHAPS,
                                  .name = here,
                                  .other = there,
                                  .found = fc_check_type(c, here_of(m, r)->tensor),
                                  .fix = fc_check_fix(c, FC_SETTING_RENAME, whole)});
}

static void report_group(const rename_search *m, const renamed *r, size_t count) {
    fc_check_run *c = m->c;
    const char **names = fc_check_alloc(c, count, sizeof *names);
    size_t certain = 0;
    for (size_t i = 0; names && i < count; i++) {
        names[i] = here_of(m, &r[i])->name;
        certain += r[i].certain;
    }
    fc_check_add(c, &(fc_finding){.kind = FC_FOUND_RENAMED_COMPONENT,
                                  .name = here_of(m, r)->name,
                                  .other = there_of(m, r)->name,
                                  .found = r->from,
                                  .expected = r->to,
                                  .detail = certain == count ? ", bit for bit" : "",
                                  .fix = fc_check_fix(c, FC_SETTING_RENAME, r->rule),
                                  .count = count,
                                  .names = names});
}

static void report(rename_search *m) {
    for (size_t i = 0; i < m->count; i++) {
        find_rule(m->c, &m->found[i], here_of(m, &m->found[i])->name, there_of(m, &m->found[i])->name);
    }
    fc_sort_items(m->found, m->count, sizeof *m->found, compare_renamed_rules);
    for (size_t i = 0, j; i < m->count; i = j) {
        for (j = i; j < m->count && strcmp(m->found[j].rule, m->found[i].rule) == 0; j++) {
        }
        if (j - i > 1) {
            report_group(m, &m->found[i], j - i);
        } else {
            report_one(m, &m->found[i]);
        }
    }
}

size_t fc_check_renames(fc_check_run *c, fc_unpaired *here, fc_unpaired *there, fc_pair *pairs) {
    rename_search m = {.c = c, .here = here, .there = there, .found = fc_check_alloc(c, here->count, sizeof *m.found)};
    size_t taken = 0;
    for (int digests = 1; m.found && digests >= 0 && here->count > 0 && there->count > 0; digests--) {
        match_groups(&m, digests != 0);
        for (size_t i = taken; i < m.count; i++) {
            pairs[i] = m.found[i].pair;
        }
        fc_check_take(here, there, pairs + taken, m.count - taken, c);
        taken = m.count;
    }
    report(&m);
    return m.count;
}
