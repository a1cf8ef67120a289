/*
 * Computes the lines of the list: values that look alike are of one kind, and names of one kind that differ only in
 * numbers are folded into one line.
 */
#include "fsdpckpt/order.h"
#include "inspect/fold.h"
#include "inspect/inspect.h"

#include "fsdpckpt/try.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { VALUE_MOST = 200 }; /* longer values of objects are not kept and compared, in characters */

/* A value and its key: values with the same key are of one kind. */
typedef struct keyed_value {
    const char *key;
    size_t item;
    inspect_kind kind;
} keyed_value;

static bool key_tensor(inspection *in, const fc_tensor *t, const char *same_as, keyed_value *k) {
    char chunks[96], placements[160], shape[FC_MAX_DIMS * 22] = "";
    fc_sharding c;
    if (!fc_recognise_sharding(t, &in->scratch, &c)) {
        return false;
    }
    fc_tensor as_placed = *t;
    as_placed.placements = inspect_placed(in, t);
    sharding_summary_add(&in->sharding, &in->mesh, &as_placed, &c);
    size_t used = 0;
    for (int d = 0; d < t->ndim; d++) {
        used += (size_t)snprintf(shape + used, sizeof shape - used, "%lld,", (long long)t->shape[d]);
    }
    k->kind.sharding = fc_arena_printf(in->arena, "%s", sharding_describe(t, &c, chunks, sizeof chunks));
    k->kind.placements = fc_arena_printf(in->arena, "%s", inspect_placements(in, t, &c, placements, sizeof placements));
    k->kind.same_as = same_as;
    k->key = fc_arena_printf(in->arena, "t %d %s %s %s %s", (int)t->dtype, shape, chunks, placements,
                             same_as ? same_as : "");
    return k->key && k->kind.sharding && k->kind.placements;
}

static bool key_object(inspection *in, const fc_tensor *t, keyed_value *k) {
    fc_error why = {FC_OK, ""};
    fc_arena *arena = fc_arena_new();
    const char *json = arena ? inspect_object(in, t, arena, &why) : NULL;
    if (json && strlen(json) <= VALUE_MOST) {
        k->kind.value = fc_arena_printf(in->arena, "%s", json);
        k->key = k->kind.value ? fc_arena_printf(in->arena, "v %s", json) : NULL;
    } else if (json) {
        k->key = fc_arena_printf(in->arena, "n %zu", k->item);
    } else if (why.message[0]) {
        k->kind.why = fc_arena_printf(in->arena, "%s", why.message);
        k->key = k->kind.why ? fc_arena_printf(in->arena, "w %s", why.message) : NULL;
    } else {
        k->key = fc_arena_printf(in->arena, "b %s %llu", t->object->encoding, (unsigned long long)inspect_bytes(t));
    }
    fc_arena_free(arena);
    return k->key != NULL;
}

static int compare_keys(const void *x, const void *y) {
    const keyed_value *a = x, *b = y;
    int order = strcmp(a->key, b->key);
    return order ? order : (a->item > b->item) - (a->item < b->item);
}

/* Gives each item its kind. @param kind_of receives the number of each item's kind. */
static bool find_kinds(inspection *in, const size_t *same_as, uint32_t *kind_of) {
    keyed_value *all = calloc(in->nitems + 1, sizeof *all);
    bool good = all != NULL;
    for (size_t i = 0; i < in->nitems && good; i++) {
        const fc_tensor *t = in->items[i];
        all[i] = (keyed_value){.item = i, .kind = {.example = t}};
        good = t->object ? key_object(in, t, &all[i])
                         : key_tensor(in, t, same_as[i] != i ? in->items[same_as[i]]->name : NULL, &all[i]);
    }
    in->kinds = good ? fc_arena_calloc(in->arena, in->nitems, sizeof *in->kinds) : NULL;
    if (in->kinds) {
        uint32_t kind = 0;
        fc_sort_items(all, in->nitems, sizeof *all, compare_keys);
        for (size_t i = 0; i < in->nitems; i++) {
            kind += i > 0 && strcmp(all[i].key, all[i - 1].key) != 0;
            kind_of[all[i].item] = kind;
            if (!in->kinds[kind].example) {
                in->kinds[kind] = all[i].kind;
                in->nkinds++;
            }
            in->kinds[kind].count++;
        }
    }
    free(all);
    return in->kinds != NULL;
}

/* ---- lines ---- */

/* A line and its kind for folding. */
typedef struct list_entry {
    inspect_line line;
    size_t place; /* position of its first value in the list */
    uint32_t kind;
} list_entry;

static void count_value(inspect_line *line, const fc_tensor *t) {
    if (t->object && line->tensors == 0) {
        line->bytes = inspect_add(line->bytes, inspect_bytes(t));
    } else if (!t->object) {
        line->bytes = inspect_add(line->tensors ? line->bytes : 0, inspect_bytes(t));
    }
    line->objects += t->object != NULL;
    line->tensors += t->object == NULL;
}

/* Adds the values of a line with the same name or pattern. */
static void add_line(inspect_line *to, const inspect_line *from) {
    if (from->tensors > 0) {
        to->bytes = inspect_add(to->tensors ? to->bytes : 0, from->bytes);
    } else if (to->tensors == 0) {
        to->bytes = inspect_add(to->bytes, from->bytes);
    }
    to->tensors += from->tensors;
    to->objects += from->objects;
}

/* The length of the first `depth` components of a name; all of it for depth 0. */
static size_t upper_part(const char *name, int64_t depth) {
    size_t len = depth > 0 ? strcspn(name, ".") : strlen(name);
    for (int64_t d = 1; d < depth && name[len]; d++) {
        len += 1 + strcspn(name + len + 1, ".");
    }
    return len;
}

static int compare_entry_names(const void *x, const void *y) {
    const list_entry *a = x, *b = y;
    int order = strcmp(a->line.name, b->line.name);
    if (order == 0) {
        order = (a->line.kind != NULL) - (b->line.kind != NULL); /* a value and a module may have the same name */
    }
    return order ? order : (a->place > b->place) - (a->place < b->place);
}

static int compare_entry_places(const void *x, const void *y) {
    const list_entry *a = x, *b = y;
    return (a->place > b->place) - (a->place < b->place);
}

/* Modules with equal numbers of values and bytes are alike. */
static int compare_entry_contents(const void *x, const void *y) {
    const list_entry *a = x, *b = y;
    FC_ORDER_BY(a->line.kind != NULL, b->line.kind != NULL);
    FC_ORDER_BY(a->line.tensors, b->line.tensors);
    FC_ORDER_BY(a->line.objects, b->line.objects);
    return FC_ORDER(a->line.bytes, b->line.bytes);
}

/* Joins the values below the same module. Kinds of modules are numbered after the kinds of values. */
static size_t join_modules(list_entry *all, size_t count) {
    size_t kept = 0;
    fc_sort_items(all, count, sizeof *all, compare_entry_names);
    for (size_t i = 0; i < count; i++) {
        list_entry *last = kept ? &all[kept - 1] : NULL;
        if (last && !last->line.kind && !all[i].line.kind && strcmp(last->line.name, all[i].line.name) == 0) {
            add_line(&last->line, &all[i].line);
        } else {
            all[kept++] = all[i];
        }
    }
    fc_sort_items(all, kept, sizeof *all, compare_entry_contents);
    for (size_t i = 0; i < kept && !all[i].line.kind; i++) {
        all[i].kind =
            i > 0 && compare_entry_contents(&all[i - 1], &all[i]) == 0 ? all[i - 1].kind : (uint32_t)(count + i);
    }
    fc_sort_items(all, kept, sizeof *all, compare_entry_places);
    return kept;
}

/* Makes one line per value, or per module where names have more components than --depth. */
static bool list_values(inspection *in, const uint32_t *kind_of, list_entry *all, size_t *count) {
    for (size_t i = 0; i < in->nitems; i++) {
        const fc_tensor *t = in->items[i];
        const size_t len = upper_part(t->name, in->how.depth);
        const bool module = t->name[len] != '\0';
        all[i] = (list_entry){.place = i, .kind = kind_of[i]};
        all[i].line = (inspect_line){.name = module ? fc_arena_strndup(in->arena, t->name, len) : t->name,
                                     .first = t,
                                     .kind = module ? NULL : &in->kinds[kind_of[i]],
                                     .folded = 1};
        if (!all[i].line.name) {
            return false;
        }
        count_value(&all[i].line, t);
    }
    *count = in->how.depth > 0 ? join_modules(all, in->nitems) : in->nitems;
    return true;
}

static int compare_entry_bytes(const void *x, const void *y) {
    const inspect_line *a = x, *b = y;
    FC_ORDER_BY(a->tensors == 0, b->tensors == 0);
    FC_ORDER_BY(b->bytes, a->bytes);
    return inspect_compare_names(a->name, b->name);
}

/* Folded lines are of one kind, so their totals are those of the first line, multiplied. Objects may differ in size. */
static void multiply_line(inspect_line *line, const fold_line *fold) {
    uint64_t bytes;
    line->name = fold->pattern;
    line->folded = fold->count;
    line->members = fold->members;
    line->tensors *= fold->count;
    line->objects *= fold->count;
    line->bytes = __builtin_mul_overflow(line->bytes, (uint64_t)fold->count, &bytes) ? UINT64_MAX : bytes;
}

/* Gives each line the statistics of its tensors. Without --depth, names are those of items. */
static bool join_stats(inspection *in) {
    for (size_t i = 0; i < in->nlines && in->stats; i++) {
        inspect_line *line = &in->lines[i];
        line->stats = inspect_stats_of(in, line->first);
        if (line->folded == 1 || line->tensors == 0) {
            continue;
        }
        fc_stats *sum = fc_arena_calloc(in->arena, 1, sizeof *sum);
        for (size_t k = 0; sum && k < line->folded; k++) {
            fc_stats_add(sum, inspect_stats_of(in, in->items[line->members[k]]));
        }
        if (!sum) {
            return false;
        }
        line->stats = sum;
    }
    return true;
}

static bool make_lines(inspection *in, const list_entry *all, size_t count) {
    fold_name *names = calloc(count + 1, sizeof *names);
    fold_line *folds = NULL;
    in->nlines = count;
    for (size_t i = 0; i < count && names; i++) {
        names[i] = (fold_name){all[i].line.name, all[i].kind};
    }
    bool good = names && (in->how.all || fold_names(names, count, in->arena, &folds, &in->nlines));
    in->lines = good ? fc_arena_calloc(in->arena, in->nlines, sizeof *in->lines) : NULL;
    for (size_t i = 0; i < in->nlines && in->lines; i++) {
        in->lines[i] = all[folds ? folds[i].first : i].line;
        if (folds) {
            multiply_line(&in->lines[i], &folds[i]);
        }
    }
    free(names);
    if (in->lines && in->how.sort == INSPECT_BY_SIZE) {
        fc_sort_items(in->lines, in->nlines, sizeof *in->lines, compare_entry_bytes);
    }
    return in->lines && join_stats(in);
}

fc_code inspect_list(inspection *in, fc_error *err) {
    size_t n = in->nitems, count;
    uint32_t *kind_of = calloc(n + 1, sizeof *kind_of);
    size_t *same_as = calloc(n + 1, sizeof *same_as);
    list_entry *all = calloc(n + 1, sizeof *all);
    bool memory = kind_of && same_as && all;
    fc_code rc;
    FC_TRY_GOTO(memory ? fc_find_ties(in->checkpoint, in->items, n, same_as, err)
                       : fc_no_memory(err, in->checkpoint->path),
                rc, out);
    if (!find_kinds(in, same_as, kind_of) || !list_values(in, kind_of, all, &count) || !make_lines(in, all, count)) {
        rc = fc_no_memory(err, in->checkpoint->path);
    }
out:
    free(all);
    free(same_as);
    free(kind_of);
    return rc;
}
