/*
 * What can be matched on one side: each tensor, and all tensors together whose names differ in one or two numbers that
 * count from 0, such as the experts of a layer.
 */
#include "base/grow.h"
#include "fsdpckpt/box.h"
#include "fsdpckpt/try.h"
#include "infer/search.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_NAME = 1024 };

/* The numbers of a name. */
typedef struct slots {
    size_t at[FC_SEARCH_SLOTS], len[FC_SEARCH_SLOTS];
    uint64_t numbers[FC_SEARCH_SLOTS];
    int count;
} slots;

/* Numbers that are only part of a word: one that ends the name (weight0, weight1), and the first (encoderblock_0). */
typedef enum part_of_word { NO_PART = 0, PART_LAST = 1, PART_FIRST = 2 } part_of_word;

/* How often a name occurs with other numbers of this kind. */
typedef struct ending {
    size_t count;
    uint64_t most;
    bool zero; /* one is 0 */
} ending;

typedef struct maker {
    fc_search *s;
    fc_side *side;
    fc_name_table *endings, *families;
    ending *ended;
    size_t nended;
    fc_error *err;
} maker;

/* Finds the numbers between dots, and those that are part of a word: PART_LAST, PART_FIRST or both. */
static void find_slots(const char *name, int parts, slots *out) {
    out->count = 0;
    for (size_t i = 0; name[i];) {
        const size_t len = strspn(name + i, "0123456789");
        const bool starts = i == 0 || name[i - 1] == '.', ends = name[i + len] == '.' || !name[i + len];
        const bool whole = starts && ends, last = parts & PART_LAST && !name[i + len];
        const bool first = parts & PART_FIRST && ends && i > 0 && name[i - 1] == '_' && out->count == 0;
        const bool zeros = len > 1 && name[i] == '0';
        if (len > 0 && len < 16 && !zeros && (whole || last || first) && out->count < FC_SEARCH_SLOTS) {
            out->at[out->count] = i;
            out->len[out->count] = len;
            out->numbers[out->count++] = strtoull(name + i, NULL, 10);
        }
        i += len ? len : 1;
    }
}

/* Writes the name with a mark for each number; `inner` are bits of those that count. With `key`, the other numbers
 * follow. */
static size_t write_skeleton(const char *name, const slots *n, unsigned inner, bool key, char *out) {
    size_t at = 0, from = 0;
    for (int i = 0; i < n->count; i++) {
        memcpy(out + at, name + from, n->at[i] - from);
        at += n->at[i] - from;
        out[at++] = inner >> i & 1 ? '\2' : '\1';
        from = n->at[i] + n->len[i];
    }
    at += (size_t)snprintf(out + at, MOST_NAME, "%s", name + from);
    for (int i = 0; key && i < n->count; i++) {
        if (!(inner >> i & 1)) {
            at += (size_t)snprintf(out + at, 24, "|%" PRIu64, n->numbers[i]);
        }
    }
    return at;
}

static size_t buffer_size(const char *name) {
    return strlen(name) + MOST_NAME + (FC_SEARCH_SLOTS * 24);
}

/* ---- numbers that are part of a word ---- */

/* Finds such a number. @return whether the name has one; then `number` is it. */
static bool find_part(const char *name, part_of_word part, slots *n, uint64_t *number) {
    slots without;
    find_slots(name, NO_PART, &without);
    find_slots(name, part, n);
    *number = n->count > 0 ? n->numbers[part == PART_LAST ? n->count - 1 : 0] : 0;
    return n->count > without.count && (part == PART_LAST || n->at[0] < (without.count ? without.at[0] : SIZE_MAX));
}

/* The key of the names that differ only in numbers, also in these. */
static fc_code part_key(const maker *m, const char *name, part_of_word part, const slots *n, const char **key,
                        size_t *len) {
    char *text = fc_arena_alloc(m->s->arena, buffer_size(name) + 1);
    FC_NEED(text, m->err, m->side->checkpoint->path);
    text[0] = part == PART_LAST ? 'l' : 'f';
    *len = 1 + write_skeleton(name, n, 0, false, text + 1);
    *key = text;
    return FC_OK;
}

static fc_code count_part(maker *m, const char *name, part_of_word part) {
    const char *key = NULL;
    size_t len = 0;
    uint64_t number;
    slots n;
    if (!find_part(name, part, &n, &number)) {
        return FC_OK;
    }
    FC_TRY(part_key(m, name, part, &n, &key, &len));
    const size_t at = fc_name_table_put(m->endings, key, len, m->nended);
    FC_NEED(at != FC_NO_NAME, m->err, m->side->checkpoint->path);
    m->nended += at == m->nended;
    ending *e = &m->ended[at];
    e->count++;
    e->most = number > e->most ? number : e->most;
    e->zero = e->zero || number == 0;
    return FC_OK;
}

static fc_code count_endings(maker *m) {
    for (size_t i = 0; i < m->side->count; i++) {
        FC_TRY(count_part(m, m->side->tensors[i]->name, PART_LAST));
        FC_TRY(count_part(m, m->side->tensors[i]->name, PART_FIRST));
    }
    return FC_OK;
}

/* Finds the numbers of a name. One that is part of a word counts only if all smaller ones occur as often. */
static fc_code find_numbers(const maker *m, const char *name, slots *n) {
    static const part_of_word kinds[] = {PART_LAST, PART_FIRST};
    int parts = NO_PART;
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        const char *key = NULL;
        size_t len = 0;
        uint64_t number;
        if (find_part(name, kinds[i], n, &number)) {
            FC_TRY(part_key(m, name, kinds[i], n, &key, &len));
            const ending *e = &m->ended[fc_name_table_find(m->endings, key, len)];
            parts |= e->zero && e->most > 0 && e->count % (e->most + 1) == 0 ? (int)kinds[i] : NO_PART;
        }
    }
    find_slots(name, parts, n);
    return FC_OK;
}

/* ---- things ---- */

static fc_code add_thing(maker *m, const fc_tensor *tensor, const slots *n, unsigned inner, fc_thing **out) {
    fc_side *side = m->side;
    FC_NEED(fc_grow(&side->things, &side->capacity, side->nthings + 1, sizeof *side->things), m->err,
            side->checkpoint->path);
    char *skeleton = fc_arena_alloc(m->s->arena, buffer_size(tensor->name));
    FC_NEED(skeleton, m->err, side->checkpoint->path);
    write_skeleton(tensor->name, n, inner, false, skeleton);
    fc_thing *t = &side->things[side->nthings++];
    *t = (fc_thing){.tensor = tensor, .skeleton = skeleton, .nslots = n->count, .known = ~0U};
    memcpy(t->numbers, n->numbers, sizeof t->numbers);
    for (int i = 0; i < n->count; i++) {
        if (inner >> i & 1) {
            t->inner[t->ninner++] = i;
        }
    }
    *out = t;
    return FC_OK;
}

static void add_member(const fc_side *side, fc_thing *t, size_t index, const slots *n) {
    const fc_tensor *tensor = side->tensors[index];
    int64_t elements = 0;
    fc_numel(tensor->ndim, tensor->shape, &elements);
    const bool same = tensor->dtype == t->tensor->dtype &&
                      fc_same_sizes(tensor->ndim, tensor->shape, t->tensor->ndim, t->tensor->shape);
    t->elements += (uint64_t)elements;
    t->known &= same ? side->known[index] : 0;
    t->number++;
    for (int k = 0; k < FC_SEARCH_TYPES; k++) {
        t->sums[k] += side->sums[index][k];
    }
    for (int k = 0; k < t->ninner; k++) {
        const int64_t count = (int64_t)n->numbers[t->inner[k]] + 1;
        t->counts[k] = count > t->counts[k] ? count : t->counts[k];
    }
}

/* Finds the thing of all tensors that differ from this one in the numbers `inner`; adds it if it is new. */
static fc_code find_family(maker *m, size_t index, const slots *n, unsigned inner, bool add, fc_thing **out) {
    fc_side *side = m->side;
    char *key = fc_arena_alloc(m->s->arena, buffer_size(side->tensors[index]->name));
    FC_NEED(key, m->err, side->checkpoint->path);
    const size_t len = write_skeleton(side->tensors[index]->name, n, inner, true, key);
    const size_t at =
        add ? fc_name_table_put(m->families, key, len, side->nthings) : fc_name_table_find(m->families, key, len);
    FC_NEED(at != FC_NO_NAME, m->err, side->checkpoint->path);
    if (at == side->nthings) {
        return add_thing(m, side->tensors[index], n, inner, out);
    }
    *out = &side->things[at];
    return FC_OK;
}

/* Adds a tensor to its families, or, in the second round, to their lists. */
static fc_code join_families(maker *m, size_t index, bool second) {
    slots n;
    FC_TRY(find_numbers(m, m->side->tensors[index]->name, &n));
    for (unsigned inner = 1; inner < 1U << n.count; inner++) {
        fc_thing *t = NULL;
        if (__builtin_popcount(inner) > FC_SEARCH_INNER) {
            continue;
        }
        FC_TRY(find_family(m, index, &n, inner, !second, &t));
        if (second) {
            m->side->order[t->first + t->number++] = index;
        } else {
            add_member(m->side, t, index, &n);
        }
    }
    return FC_OK;
}

/* Makes the list of tensors of each thing. One whose numbers are not all of 0, 1, 2 … is not known. */
static fc_code list_members(maker *m) {
    fc_side *side = m->side;
    size_t total = 0;
    for (size_t i = 0; i < side->nthings; i++) {
        fc_thing *t = &side->things[i];
        uint64_t all = 1;
        for (int k = 0; k < t->ninner; k++) {
            all = t->counts[k] > (int64_t)side->count ? 0 : all * (uint64_t)t->counts[k];
        }
        t->known = all == t->number && (t->ninner == 0 || t->number > 1) ? t->known : 0;
        t->first = total;
        total += t->number;
        t->number = 0;
    }
    side->order = fc_arena_calloc(m->s->arena, total + 1, sizeof *side->order);
    FC_NEED(side->order, m->err, side->checkpoint->path);
    for (size_t i = 0; i < side->count; i++) {
        side->order[side->things[i].first] = i;
        side->things[i].number = 1;
        FC_TRY(join_families(m, i, true));
    }
    return FC_OK;
}

fc_code fc_search_things(fc_search *s, fc_side *side, fc_error *err) {
    maker m = {.s = s,
               .side = side,
               .endings = fc_name_table_new(s->arena, side->count),
               .families = fc_name_table_new(s->arena, side->count),
               .ended = fc_arena_calloc(s->arena, 2 * side->count + 1, sizeof *m.ended),
               .err = err};
    FC_NEED(m.endings && m.families && m.ended, err, side->checkpoint->path);
    FC_TRY(count_endings(&m));
    for (size_t i = 0; i < side->count; i++) {
        fc_thing *t = NULL;
        slots n;
        FC_TRY(find_numbers(&m, side->tensors[i]->name, &n));
        FC_TRY(add_thing(&m, side->tensors[i], &n, 0, &t));
        add_member(side, t, i, &n);
    }
    for (size_t i = 0; i < side->count; i++) {
        FC_TRY(join_families(&m, i, false));
    }
    return list_members(&m);
}
