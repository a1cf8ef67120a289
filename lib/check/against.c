/*
 * Compares a checkpoint with a reference: missing and unexpected names, and different shapes and dtypes. Equal names
 * are joined first; prefix.c and renames.c pair the rest.
 */
#include "check/check.h"

#include "fsdpckpt/order.h"
#include "plan/globs.h"

#include <inttypes.h>
#include <string.h>

typedef struct against {
    fc_check_run *c;
    const fc_names *here, *there;
    fc_pair *pairs; /* names that mean the same value */
    size_t npairs;
} against;

/* ---- shapes ---- */

static bool is_transposed(const fc_tensor *a, const fc_tensor *b) {
    if (a->ndim != b->ndim || a->ndim < 2) {
        return false;
    }
    for (int d = 0; d < a->ndim; d++) {
        if (a->shape[d] != b->shape[a->ndim - 1 - d]) {
            return false;
        }
    }
    return true;
}

/* Returns the only dimension in which two shapes with the same number of dimensions differ, or -1. */
static int only_difference(const fc_tensor *a, const fc_tensor *b) {
    int found = -1;
    for (int d = 0; d < a->ndim && a->ndim == b->ndim; d++) {
        if (a->shape[d] != b->shape[d]) {
            if (found >= 0) {
                return -1;
            }
            found = d;
        }
    }
    return found;
}

static void compare_shapes(fc_check_run *c, const fc_named *here, const fc_tensor *b) {
    const fc_tensor *a = here->tensor;
    int64_t na, nb;
    fc_finding f = {
        .kind = FC_FOUND_SHAPE, .name = here->name, .found = fc_check_shape(c, a), .expected = fc_check_shape(c, b)};
    int d = only_difference(a, b);
    if (is_transposed(a, b)) {
        f.kind = FC_FOUND_SHAPE_TRANSPOSED;
    } else if (d >= 0 && a->shape[d] > 0 && b->shape[d] % a->shape[d] == 0 && a->shape[d] < b->shape[d]) {
        f.kind = FC_FOUND_SHAPE_SHARD;
        f.count = (uint64_t)(b->shape[d] / a->shape[d]);
        f.detail = fc_check_text(c, "%d", d);
    } else if (d >= 0) {
        f.kind = FC_FOUND_SHAPE_DIMENSION;
        int64_t by = a->shape[d] - b->shape[d];
        f.detail = fc_check_text(c, "%d is %" PRId64 " %s", d, by < 0 ? -by : by, by < 0 ? "shorter" : "longer");
    } else if (fc_numel(a->ndim, a->shape, &na) && fc_numel(b->ndim, b->shape, &nb) && na == nb) {
        f.kind = FC_FOUND_SHAPE_RESHAPED;
    }
    fc_check_add(c, &f);
}

/* ---- nesting ---- */

static const char *path_text(fc_check_run *c, const fc_path *path) {
    const char *text = "";
    for (size_t i = 0; i < path->count; i++) {
        const fc_path_element *e = &path->elements[i];
        text = fc_check_text(c, e->is_index ? "%s[%s]" : "%s['%s']", text, e->key);
    }
    return text;
}

static bool same_path(const fc_path *a, const fc_path *b) {
    bool same = a->count == b->count;
    for (size_t i = 0; same && i < a->count; i++) {
        same =
            a->elements[i].is_index == b->elements[i].is_index && strcmp(a->elements[i].key, b->elements[i].key) == 0;
    }
    return same;
}

/* Flat formats have no nesting. A renamed value is expected to have another path. */
static void compare_paths(fc_check_run *c, const fc_named *here, const fc_named *there) {
    const fc_path *a = &here->tensor->path, *b = &there->tensor->path;
    if (a->count > 1 && b->count > 1 && strcmp(here->tensor->name, there->tensor->name) == 0 && !same_path(a, b)) {
        fc_check_add(c, &(fc_finding){.kind = FC_FOUND_NESTING,
                                      .name = here->name,
                                      .found = path_text(c, a),
                                      .expected = path_text(c, b)});
    }
}

/* ---- dtypes: equal differences share one finding ---- */

static bool is_float(const fc_tensor *t) {
    return !t->object && fc_dtype_get(t->dtype)->cls == FC_CLASS_FLOAT;
}

/* Returns whether casting all floating-point tensors to `to` makes them match the reference. */
static bool cast_mends(const against *a, fc_dtype to) {
    for (size_t i = 0; i < a->npairs; i++) {
        const fc_tensor *here = a->here->items[a->pairs[i].here].tensor,
                        *there = a->there->items[a->pairs[i].there].tensor;
        if (is_float(here) && !there->object && there->dtype != to) {
            return false;
        }
    }
    return true;
}

static void report_dtype(against *a, fc_dtype from, fc_dtype to, const char **names, size_t count) {
    fc_check_run *c = a->c;
    fc_finding f = {.kind = FC_FOUND_DTYPE_OTHER,
                    .name = names[0],
                    .other = fc_check_others(c, count),
                    .found = fc_dtype_get(from)->torch_name,
                    .expected = fc_dtype_get(to)->torch_name,
                    .count = count,
                    .names = count > 1 ? names : NULL};
    if (fc_dtype_get(from)->cls == FC_CLASS_FLOAT && fc_dtype_get(to)->cls == FC_CLASS_FLOAT) {
        bool mends = cast_mends(a, to);
        f.kind = mends ? FC_FOUND_DTYPE : FC_FOUND_DTYPE_MIXED;
        f.fix = mends ? fc_check_fix(c, FC_SETTING_DTYPE, fc_dtype_get(to)->short_name) : f.fix;
    }
    fc_check_add(c, &f);
}

/* Finds the dtypes of a pair. Returns false unless both are tensors. */
static bool dtypes_of(const against *a, size_t pair, fc_dtype *from, fc_dtype *to) {
    const fc_tensor *here = a->here->items[a->pairs[pair].here].tensor;
    const fc_tensor *there = a->there->items[a->pairs[pair].there].tensor;
    *from = here->dtype;
    *to = there->dtype;
    return !here->object && !there->object;
}

static void report_dtypes(against *a, fc_dtype from, fc_dtype to, size_t count) {
    const char **names = fc_check_alloc(a->c, count, sizeof *names);
    size_t n = 0;
    for (size_t i = 0; names && i < a->npairs; i++) {
        fc_dtype here, there;
        if (dtypes_of(a, i, &here, &there) && here == from && there == to) {
            names[n++] = a->here->items[a->pairs[i].here].name;
        }
    }
    if (n > 0) {
        report_dtype(a, from, to, names, n);
    }
}

static void compare_dtypes(against *a) {
    size_t counts[FC_DTYPE_COUNT][FC_DTYPE_COUNT] = {{0}};
    for (size_t i = 0; i < a->npairs; i++) {
        fc_dtype from, to;
        if (dtypes_of(a, i, &from, &to)) {
            counts[from][to]++;
        }
    }
    for (int from = 0; from < FC_DTYPE_COUNT; from++) {
        for (int to = 0; to < FC_DTYPE_COUNT; to++) {
            if (from != to && counts[from][to] > 0) {
                report_dtypes(a, (fc_dtype)from, (fc_dtype)to, counts[from][to]);
            }
        }
    }
}

/* ---- pairs ---- */

static void compare_pair(against *a, const fc_pair *pair) {
    const fc_named *here = &a->here->items[pair->here], *there = &a->there->items[pair->there];
    fc_check_run *c = a->c;
    if (!here->tensor->object != !there->tensor->object) {
        fc_check_add(c, &(fc_finding){.kind = here->tensor->object ? FC_FOUND_NOT_A_TENSOR : FC_FOUND_NOT_AN_OBJECT,
                                      .name = here->name,
                                      .found = fc_check_type(c, here->tensor),
                                      .expected = fc_check_type(c, there->tensor)});
        return;
    }
    if (!here->tensor->object &&
        !fc_same_sizes(here->tensor->ndim, here->tensor->shape, there->tensor->ndim, there->tensor->shape)) {
        compare_shapes(c, here, there->tensor);
    }
    compare_paths(c, here, there);
}

/* Says that a pair is a head and the embedding that the other side ties it to: only these have two names. */
static void report_tied(fc_check_run *c, const fc_named *here, const fc_named *there) {
    if (strcmp(here->name, there->name) != 0) {
        fc_check_add(c, &(fc_finding){.kind = FC_FOUND_TIED, .name = here->name, .other = there->name});
    }
}

/* Joins equal names. The others are left to be paired by similarity. */
static bool join(against *a, fc_unpaired *here, fc_unpaired *there) {
    fc_check_run *c = a->c;
    bool *taken = fc_check_alloc(c, a->there->count, sizeof *taken);
    here->items = fc_check_alloc(c, a->here->count, sizeof *here->items);
    there->items = fc_check_alloc(c, a->there->count, sizeof *there->items);
    a->pairs = fc_check_alloc(c, a->here->count + a->there->count, sizeof *a->pairs);
    if (!taken || !here->items || !there->items || !a->pairs) {
        return false;
    }
    here->names = a->here;
    there->names = a->there;
    for (size_t i = 0; i < a->here->count; i++) {
        size_t at = fc_names_find(a->there, a->here->items[i].name);
        if (at == FC_NO_NAME) {
            here->items[here->count++] = i;
        } else {
            taken[at] = true;
            a->pairs[a->npairs++] = (fc_pair){i, at};
        }
    }
    for (size_t i = 0; i < a->there->count; i++) {
        const size_t at = taken[i] ? FC_NO_NAME : fc_names_find(a->here, a->there->items[i].name);
        if (at != FC_NO_NAME) {
            a->pairs[a->npairs++] = (fc_pair){at, i};
        } else if (!taken[i]) {
            there->items[there->count++] = i;
        }
    }
    for (size_t i = 0; i < a->npairs; i++) {
        report_tied(c, &a->here->items[a->pairs[i].here], &a->there->items[a->pairs[i].there]);
    }
    return true;
}

/* Removes allowed names, and reports globs that match nothing. */
static void allow(fc_check_run *c, fc_unpaired *list, const char *const *globs, fc_finding_kind idle) {
    const size_t n = fc_count_texts(globs);
    size_t kept = 0;
    bool *used = fc_check_alloc(c, n, sizeof *used);
    for (size_t i = 0; used && i < list->count; i++) {
        const char *name = list->names->items[list->items[i]].name;
        bool allowed = false;
        for (size_t g = 0; g < n; g++) {
            if (fnmatch(globs[g], name, 0) == 0) {
                allowed = used[g] = true;
            }
        }
        if (allowed) {
            c->allowed++;
        } else {
            list->items[kept++] = list->items[i];
        }
    }
    list->count = used ? kept : list->count;
    for (size_t g = 0; used && g < n; g++) {
        if (!used[g]) {
            fc_check_add(c, &(fc_finding){.kind = idle, .detail = globs[g]});
        }
    }
}

static void report_unpaired(fc_check_run *c, const fc_unpaired *list, fc_finding_kind tensor, fc_finding_kind object) {
    for (size_t i = 0; i < list->count; i++) {
        const fc_named *n = &list->names->items[list->items[i]];
        const char *type = fc_check_type(c, n->tensor);
        fc_check_add(
            c, &(fc_finding){
                   .kind = n->tensor->object ? object : tensor, .name = n->name, .found = type, .expected = type});
    }
}

/* Removes the names that are taken from a list. */
static void remove_taken(fc_unpaired *list, const bool *taken) {
    size_t kept = 0;
    for (size_t i = 0; i < list->count; i++) {
        if (!taken[list->items[i]]) {
            list->items[kept++] = list->items[i];
        }
    }
    list->count = kept;
}

void fc_check_take(fc_unpaired *here, fc_unpaired *there, const fc_pair *pairs, size_t count, fc_check_run *c) {
    bool *h = fc_check_alloc(c, here->names->count, sizeof *h), *t = fc_check_alloc(c, there->names->count, sizeof *t);
    if (!h || !t) {
        return;
    }
    for (size_t i = 0; i < count; i++) {
        h[pairs[i].here] = t[pairs[i].there] = true;
    }
    remove_taken(here, h);
    remove_taken(there, t);
}

void fc_check_against(fc_check_run *c, const fc_names *reference) {
    against a = {.c = c, .here = &c->names, .there = reference};
    fc_unpaired here = {0}, there = {0};
    if (!join(&a, &here, &there)) {
        return;
    }
    /*
     * Prefixes come before the allowed names, so that --allow-missing '*' does not hide the cause. Guessed renames come
     * after them.
     */
    a.npairs += fc_check_prefixes(c, &here, &there, a.pairs + a.npairs);
    allow(c, &there, c->options->allow_missing, FC_FOUND_IDLE_ALLOW_MISSING);
    allow(c, &here, c->options->allow_unexpected, FC_FOUND_IDLE_ALLOW_UNEXPECTED);
    a.npairs += fc_check_renames(c, &here, &there, a.pairs + a.npairs);
    report_unpaired(c, &there, FC_FOUND_MISSING, FC_FOUND_MISSING_OBJECT);
    report_unpaired(c, &here, FC_FOUND_UNEXPECTED, FC_FOUND_UNEXPECTED_OBJECT);
    for (size_t i = 0; i < a.npairs; i++) {
        compare_pair(&a, &a.pairs[i]);
    }
    compare_dtypes(&a);
}
