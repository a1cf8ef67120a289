/*
 * The search for the operations that make one tensor into others: the layouts of this field, simple ones first. Each is
 * tried from A to B.
 */
#include "fsdpckpt/box.h"
#include "fsdpckpt/try.h"
#include "infer/sketch.h"

#include <string.h>

/* Where the axes of a dimension come from: the sizes that are tried first. */
static const char *const no_names[] = {NULL}, *const axis_names[] = {"heads", "kv_heads", "experts", "head", NULL};

/* The same for tensors that follow each other in one dimension. */
static const char *const merged_names[] = {"experts", "heads", "kv_heads", NULL};

typedef struct solver {
    fc_search *s;
    fc_puzzle *puzzle;
    const fc_match *match;
    int64_t shape[FC_MAX_DIMS]; /* of the one tensor, after what was sketched */
    int ndim, base;             /* the first `base` dimensions number tensors */
    int nparts;
    int order[FC_SEARCH_PARTS];
    int64_t parts[FC_SEARCH_PARTS][FC_MAX_DIMS]; /* the shapes, in the order of the match */
    int part_dims;
    fc_error *err;
} solver;

/* ---- trying ---- */

static void add_op(fc_sketch *k, fc_recipe_op op) {
    k->ops[k->count++] = op;
}

/* Adds what is left after the parts are separate: each number of a name takes a dimension away. */
static fc_code finish(const solver *v, fc_sketch k) {
    for (int i = 0; i < v->base; i++) {
        add_op(&k, (fc_recipe_op){.kind = FC_OP_UNSTACK});
    }
    return fc_sketch_try(v->s, v->puzzle, v->order, &k, v->err);
}

/* ---- rearrangements ---- */

/* Spells a side of a rearrangement of `ndim` dimensions, with `inside` in place of dimension `at`. */
static const char *spell_side(const solver *v, int at, const char *inside) {
    static const char *const letters[] = {"a", "b", "c", "i", "j", "k", "l", "m"};
    const char *text = "";
    for (int d = 0; d < v->ndim && text && d < 8; d++) {
        text = fc_arena_printf(v->s->arena, "%s%s%s", text, d ? " " : "", d == at ? inside : letters[d]);
    }
    return text;
}

static fc_code add_rearrange(const solver *v, fc_sketch *k, int at, const char *left, const char *right) {
    fc_recipe_op op = {.kind = FC_OP_REARRANGE};
    FC_NEED(left && right, v->err, NULL);
    op.left = spell_side(v, at, left);
    op.right = spell_side(v, at, right);
    FC_NEED(op.left && op.right, v->err, NULL);
    add_op(k, op);
    return FC_OK;
}

/* Tries all orders of three axes of one dimension. The sizes of the first and of another one are known. */
static fc_code try_orders(const solver *v, int at, const char *x, const char *y, const char *z) {
    static const int orders[][3] = {{0, 2, 1}, {1, 0, 2}, {1, 2, 0}, {2, 0, 1}, {2, 1, 0}};
    const char *const axes[] = {x, y, z};
    fc_arena *arena = v->s->arena;
    for (size_t i = 0; i < sizeof orders / sizeof *orders && !v->puzzle->found; i++) {
        const int *o = orders[i];
        fc_sketch k = {.count = 0};
        if (!*x && o[0] != 0) { /* the first axis has no elements: only the others change places */
            continue;
        }
        const char *space = *x ? " " : "";
        FC_TRY(add_rearrange(v, &k, at, fc_arena_printf(arena, "(%s%s%s %s)", x, space, y, z),
                             fc_arena_printf(arena, "(%s%s%s %s)", axes[o[0]], space, axes[o[1]], axes[o[2]])));
        FC_TRY(finish(v, k));
    }
    return FC_OK;
}

/* The sizes that an axis of `total` elements can have: first those of `names`. @return their number. */
static size_t list_divisors(const solver *v, int64_t total, const char *const *names, int64_t *out, size_t most) {
    size_t count = 0;
    for (const char *const *name = names; *name; name++) {
        const int64_t value = fc_search_size(v->s, *name);
        if (value > 1 && total % value == 0 && count < most) {
            out[count++] = value;
        }
    }
    for (int64_t i = 2; i < total && i <= 4096 && count < most; i++) {
        bool listed = total % i != 0;
        for (size_t k = 0; k < count && !listed; k++) {
            listed = out[k] == i;
        }
        if (!listed) {
            out[count++] = i;
        }
    }
    return count;
}

/* Rearranges the elements of one dimension: RoPE, and heads that are interleaved. */
static fc_code try_permutations(const solver *v, int at) {
    int64_t first[40], second[40];
    const int64_t total = v->shape[at];
    const size_t n = list_divisors(v, total, axis_names, first, sizeof first / sizeof *first);
    for (size_t i = 0; i <= n && !v->puzzle->found; i++) {
        const int64_t x = i < n ? first[i] : 1;
        const size_t m = list_divisors(v, total / x, no_names, second, sizeof second / sizeof *second);
        const char *outer = x > 1 ? fc_search_axis(v->s, x, axis_names) : "";
        FC_NEED(outer, v->err, NULL);
        for (size_t k = 0; k < m && !v->puzzle->found; k++) {
            const int64_t y = second[k], z = total / x / y;
            const char *axis = fc_search_axis(v->s, y, y > 3 ? axis_names : NULL); /* 2 and 3 are halves, and q, k, v */
            FC_NEED(axis, v->err, NULL);
            if (z > 1 && strcmp(axis, outer) != 0) {
                const bool alike = y == z, last = alike && y <= 3 && !strstr(v->match->one->tensor->name, "_proj");
                FC_TRY(try_orders(v, at, outer, last ? "d" : axis, last ? axis : "d"));
                FC_TRY(!v->puzzle->found ? try_orders(v, at, outer, last ? axis : "d", last ? "d" : axis) : FC_OK);
                v->puzzle->symmetric = v->puzzle->found && alike;
            }
        }
    }
    return FC_OK;
}

/* ---- one tensor becomes one ---- */

/* Whether the dimensions after `base`, two of which are exchanged, are those of a part. */
static bool fits_part(const solver *v, int part, int x, int y, int *differs) {
    *differs = -1;
    if (v->ndim - v->base != v->part_dims) {
        return false;
    }
    for (int d = v->base; d < v->ndim; d++) {
        const int from = d == x ? y : d == y ? x : d;
        if (v->shape[from] != v->parts[part][d - v->base]) {
            if (*differs >= 0) {
                return false;
            }
            *differs = from;
        }
    }
    return true;
}

static fc_code try_resize(const solver *v, int dim) {
    const int64_t before = v->shape[dim], after = v->parts[0][dim - v->base];
    const bool shrinks = before > after;
    const int64_t vocabulary = fc_search_size(v->s, "vocabulary");
    const char *small = vocabulary && vocabulary == (shrinks ? after : before) ? "vocabulary" : NULL;
    small = small ? small : fc_search_expression(v->s, shrinks ? after : before);
    const int64_t padded = fc_search_size(v->s, "padded");
    const int64_t larger = shrinks ? before : after;
    const char *large =
        padded == larger && small && strcmp(small, "vocabulary") == 0 ? "padded" : fc_search_expression(v->s, larger);
    FC_NEED(small && large, v->err, NULL);
    fc_sketch k = {.count = 0};
    add_op(&k,
           (fc_recipe_op){
               .kind = FC_OP_RESIZE, .dim = dim, .left = shrinks ? large : small, .right = shrinks ? small : large});
    return finish(v, k);
}

/* Divides one dimension into `count`, or merges as many, two at a time: "(experts d) -> experts d". */
static fc_code try_reshape(const solver *v, int at, int count, bool divide) {
    const int64_t *sizes = (divide ? v->parts[0] : v->shape) + at;
    fc_sketch k = {.count = 0};
    int64_t outer = 1;
    for (int i = 0; i + 1 < count; i++) {
        solver step = *v;
        step.ndim = divide ? v->ndim + i : v->ndim - 1 - i;
        outer = divide ? sizes[i] : outer * sizes[i]; /* at most the size of the one dimension */
        const char *axis = fc_search_axis(v->s, outer, merged_names);
        FC_NEED(axis, v->err, NULL);
        const char *inner = fc_arena_printf(v->s->arena, "%s d", axis),
                   *closed = fc_arena_printf(v->s->arena, "(%s d)", axis);
        FC_NEED(inner && closed, v->err, NULL);
        FC_TRY(add_rearrange(&step, &k, divide ? at + i : at, divide ? closed : inner, divide ? inner : closed));
    }
    return finish(v, k);
}

/* The shapes differ in that one has several dimensions for one of the other. */
static fc_code try_reshapes(const solver *v) {
    const bool divide = v->ndim < v->part_dims;
    const int64_t *large = divide ? v->parts[0] : v->shape, *small = divide ? v->shape : v->parts[0];
    const int least = divide ? v->ndim : v->part_dims, more = divide ? v->part_dims - v->ndim : v->ndim - v->part_dims;
    for (int at = 0; at < least && !v->puzzle->found && more < FC_SKETCH_OPS; at++) {
        int64_t product = 1;
        fc_numel(more + 1, large + at, &product); /* part of a tensor's shape, so it does not overflow */
        bool fits = small[at] == product;
        for (int d = 0; d < least && fits; d++) {
            fits = d == at || small[d] == large[d > at ? d + more : d];
        }
        FC_TRY(fits ? try_reshape(v, at, more + 1, divide) : FC_OK);
    }
    return FC_OK;
}

static fc_code solve_one(const solver *v) {
    int differs = -1;
    if (v->base == 0 && v->ndim != v->part_dims) {
        return try_reshapes(v);
    }
    if (fits_part(v, 0, -1, -1, &differs) && differs < 0) {
        FC_TRY(finish(v, (fc_sketch){.count = 0}));
    }
    for (int x = v->base; x < v->ndim && !v->puzzle->found; x++) {
        for (int y = x + 1; y < v->ndim && !v->puzzle->found; y++) {
            fc_sketch k = {.count = 0};
            add_op(&k, (fc_recipe_op){.kind = FC_OP_TRANSPOSE, .dim = x, .other = y});
            FC_TRY(fits_part(v, 0, x, y, &differs) && differs < 0 ? finish(v, k) : FC_OK);
        }
    }
    if (!v->puzzle->found && fits_part(v, 0, -1, -1, &differs)) {
        FC_TRY(differs >= 0 ? try_resize(v, differs) : FC_OK);
        for (int d = v->base; d < v->ndim && !v->puzzle->found && differs < 0; d++) {
            FC_TRY(try_permutations(v, d));
        }
    }
    return FC_OK;
}

/* ---- one tensor becomes several ---- */

/* The size along dimension `at` of the part of the one tensor whose dimensions `x` and `y` are exchanged. */
static int64_t extent_of(const solver *v, int part, int at, int x, int y) {
    const int d = at == x ? y : at == y ? x : at;
    return v->parts[part][d - v->base];
}

static const char **list_sizes(const solver *v, int at, int x, int y, int64_t unit) {
    const char **sizes = fc_arena_calloc(v->s->arena, (size_t)v->nparts + 1, sizeof *sizes);
    for (int i = 0; sizes && i < v->nparts; i++) {
        sizes[i] = fc_search_expression(v->s, extent_of(v, v->order[i], at, x, y) / unit);
        if (!sizes[i]) {
            return NULL;
        }
    }
    return sizes;
}

static bool are_equal(const solver *v, int at, int x, int y) {
    for (int i = 1; i < v->nparts; i++) {
        if (extent_of(v, i, at, x, y) != extent_of(v, 0, at, x, y)) {
            return false;
        }
    }
    return true;
}

static void add_transpose(fc_sketch *k, int x, int y) {
    if (x >= 0) {
        add_op(k, (fc_recipe_op){.kind = FC_OP_TRANSPOSE, .dim = x, .other = y});
    }
}

/* The parts follow each other along dimension `at`. */
static fc_code try_split(const solver *v, int at, int x, int y) {
    fc_sketch k = {.count = 0};
    fc_recipe_op op = {.kind = FC_OP_SPLIT, .dim = at};
    if (!are_equal(v, at, x, y)) {
        op.sizes = list_sizes(v, at, x, y, 1);
        FC_NEED(op.sizes, v->err, NULL);
    }
    add_op(&k, op);
    add_transpose(&k, x, y);
    return finish(v, k);
}

/* The same within each of `groups` groups; `head` divides what a part has of a group. */
static fc_code try_grouped(const solver *v, int at, int x, int y, int64_t groups, int64_t head) {
    static const char *const group_names[] = {"kv_heads", "heads", "experts", NULL};
    static const char *const head_names[] = {"head", NULL};
    fc_arena *arena = v->s->arena;
    const char *g = fc_search_axis(v->s, groups, group_names), *d = "d";
    fc_sketch k = {.count = 0};
    fc_recipe_op op = {.kind = FC_OP_SPLIT, .dim = at + 1, .sizes = list_sizes(v, at, x, y, groups * head)};
    d = head > 1 ? fc_search_axis(v->s, head, head_names) : "";
    FC_NEED(g && d && op.sizes, v->err, NULL);
    const char *space = *d ? " " : "";
    const char *inner = fc_arena_printf(arena, "%s r%s%s", g, space, d);
    FC_NEED(inner, v->err, NULL);
    const char *closed = fc_arena_printf(arena, "(%s)", inner);
    FC_TRY(add_rearrange(v, &k, at, closed, inner));
    add_op(&k, op);
    FC_TRY(add_rearrange(v, &k, at, inner, closed));
    add_transpose(&k, x, y);
    return finish(v, k);
}

/* All divisors of the sizes of the parts as numbers of groups. */
static fc_code try_groups(const solver *v, int at, int x, int y) {
    int64_t groups[40], heads[] = {fc_search_size(v->s, "head"), 1};
    int64_t least = extent_of(v, 0, at, x, y);
    for (int i = 1; i < v->nparts; i++) {
        least = extent_of(v, i, at, x, y) < least ? extent_of(v, i, at, x, y) : least;
    }
    size_t n = list_divisors(v, least, axis_names, groups, sizeof groups / sizeof *groups - 1);
    groups[n++] = least;
    for (size_t i = 0; i < n && !v->puzzle->found; i++) {
        for (int h = 0; h < 2 && !v->puzzle->found; h++) {
            bool fits = groups[i] > 1 && heads[h] > 0;
            for (int k = 0; k < v->nparts && fits; k++) {
                fits = extent_of(v, k, at, x, y) % (groups[i] * heads[h]) == 0;
            }
            FC_TRY(fits ? try_grouped(v, at, x, y, groups[i], heads[h]) : FC_OK);
        }
    }
    return FC_OK;
}

/* Whether the parts are the one tensor cut along `at`, with two dimensions exchanged. */
static bool cuts(const solver *v, int at, int x, int y) {
    int64_t sum = 0;
    if (v->ndim - v->base != v->part_dims) {
        return false;
    }
    for (int i = 0; i < v->nparts; i++) {
        for (int d = v->base; d < v->ndim; d++) {
            if (d != at && extent_of(v, i, d, x, y) != v->shape[d]) {
                return false;
            }
        }
        sum += extent_of(v, i, at, x, y);
    }
    return sum == v->shape[at];
}

/* Makes the next order of the parts. @return false: there is none. */
static bool next_order(int *order, int n) {
    int i = n - 2, k = n - 1;
    while (i >= 0 && order[i] > order[i + 1]) {
        i--;
    }
    if (i < 0) {
        return false;
    }
    while (order[k] < order[i]) {
        k--;
    }
    const int kept = order[i];
    order[i] = order[k];
    order[k] = kept;
    for (int a = i + 1, b = n - 1; a < b; a++, b--) {
        const int c = order[a];
        order[a] = order[b];
        order[b] = c;
    }
    return true;
}

static fc_code solve_cut(solver *v, int at, int x, int y) {
    for (int grouped = 0; grouped < 2; grouped++) {
        for (int i = 0; i < v->nparts; i++) {
            v->order[i] = i;
        }
        do {
            FC_TRY(grouped ? try_groups(v, at, x, y) : try_split(v, at, x, y));
        } while (!v->puzzle->found && next_order(v->order, v->nparts));
        if (v->puzzle->found) {
            return FC_OK;
        }
    }
    return FC_OK;
}

static fc_code solve_several(solver *v) {
    for (int at = v->base; at < v->ndim && !v->puzzle->found; at++) {
        FC_TRY(cuts(v, at, -1, -1) ? solve_cut(v, at, -1, -1) : FC_OK);
        for (int x = v->base; x < v->ndim && !v->puzzle->found; x++) {
            for (int y = x + 1; y < v->ndim && !v->puzzle->found; y++) {
                FC_TRY(cuts(v, at, x, y) ? solve_cut(v, at, x, y) : FC_OK);
            }
        }
    }
    return FC_OK;
}

static fc_code solve_inner(solver *v) {
    return v->nparts == 1 ? solve_one(v) : solve_several(v);
}

/* ---- numbered tensors ---- */

/* The tensors follow each other in one dimension: "(experts d) h -> experts h d". */
static fc_code solve_merged(const solver *old, int at, int64_t count) {
    solver v = *old;
    fc_recipe_op op = {.kind = FC_OP_REARRANGE};
    int differs = -1;
    v.ndim++;
    v.base = 1;
    v.shape[0] = count;
    for (int d = 0; d < old->ndim; d++) {
        v.shape[d + 1] = old->shape[d] / (d == at ? count : 1);
    }
    const char *axis = fc_search_axis(v.s, count, merged_names), *rest = spell_side(old, at, "d");
    const char *closed = axis ? fc_arena_printf(v.s->arena, "(%s d)", axis) : NULL;
    op.left = closed ? spell_side(old, at, closed) : NULL;
    op.right = axis && rest ? fc_arena_printf(v.s->arena, "%s %s", axis, rest) : NULL;
    FC_NEED(op.left && op.right, v.err, NULL);
    for (int x = 0; x < v.ndim && !v.puzzle->found; x++) { /* 0: nothing is exchanged */
        for (int y = x ? x + 1 : v.ndim - 1; y < v.ndim && !v.puzzle->found; y++) {
            fc_sketch k = {.count = 0};
            add_op(&k, op);
            add_transpose(&k, x ? x : -1, y);
            FC_TRY(fits_part(&v, 0, x ? x : -1, x ? y : -1, &differs) && differs < 0 ? finish(&v, k) : FC_OK);
        }
    }
    return FC_OK;
}

/* Tries the layouts that are usual. */
static fc_code try_usual(fc_search *s, fc_puzzle *puzzle, fc_error *err) {
    const fc_match *m = puzzle->match;
    const fc_tensor *one = m->one->tensor;
    const fc_thing *part = m->many[0];
    solver v = {.s = s,
                .puzzle = puzzle,
                .match = m,
                .ndim = one->ndim,
                .nparts = m->nmany,
                .part_dims = part->tensor->ndim,
                .err = err};
    puzzle->found = false;
    memcpy(v.shape, one->shape, (size_t)one->ndim * sizeof *v.shape);
    for (int i = 0; i < m->nmany; i++) {
        v.order[i] = i;
        if (m->many[i]->tensor->ndim != v.part_dims || m->many[i]->ninner != part->ninner) {
            return FC_OK;
        }
        memcpy(v.parts[i], m->many[i]->tensor->shape, (size_t)v.part_dims * sizeof **v.parts);
    }
    bool leads = one->ndim == v.part_dims + part->ninner;
    for (int i = 0; i < part->ninner && leads; i++) {
        leads = one->shape[i] == part->counts[i];
    }
    if (leads) {
        v.base = part->ninner;
        return solve_inner(&v);
    }
    if (part->ninner == 0) {
        return v.nparts == 1 ? solve_one(&v) : FC_OK;
    }
    for (int d = 0; d < one->ndim && part->ninner == 1 && v.nparts == 1 && one->ndim == v.part_dims && !puzzle->found;
         d++) {
        FC_TRY(one->shape[d] % part->counts[0] == 0 ? solve_merged(&v, d, part->counts[0]) : FC_OK);
    }
    return FC_OK;
}

fc_code fc_search_operations(fc_search *s, fc_puzzle *puzzle, fc_error *err) {
    FC_TRY(try_usual(s, puzzle, err));
    return puzzle->found ? FC_OK : fc_search_derive(s, puzzle, err);
}
