/*
 * einops' rearrange on tensors of parts: "(h d two) c -> (h two d) c". Dimensions are split into the axes of the left
 * side, and the axes are merged into the dimensions of the right side.
 */
#include "base/checked.h"
#include "fsdpckpt/try.h"
#include "recipe/parts.h"

#include <ctype.h>
#include <string.h>

/* The names of one side, and the dimension that each is part of. */
typedef struct side {
    int count, ndim;
    const char *names[FC_PART_DIMS];
    size_t lengths[FC_PART_DIMS];
    int dims[FC_PART_DIMS];
} side;

static fc_code wrong(const fc_recipe *recipe, const fc_recipe_op *op, const char *why, fc_error *err) {
    return fc_fail(err, FC_EUSAGE, "%s: rearrange \"%s->%s\": %s", recipe->label, op->left, op->right, why);
}

static fc_code parse_side(const fc_recipe *recipe, const fc_recipe_op *op, const char *text, side *out, fc_error *err) {
    bool grouped = false;
    *out = (side){0};
    for (const char *s = text; *s;) {
        if (*s == '(' || *s == ')') {
            if (grouped == (*s == '(')) {
                return wrong(recipe, op, "its parentheses do not match", err);
            }
            if (out->ndim == FC_PART_DIMS) {
                return wrong(recipe, op, "it has more than 8 axes", err);
            }
            grouped = *s++ == '(';
            out->ndim += grouped ? 0 : 1;
        } else if (isalnum((unsigned char)*s) || *s == '_') {
            if (out->count == FC_PART_DIMS || out->ndim == FC_PART_DIMS) {
                return wrong(recipe, op, "it has more than 8 axes", err);
            }
            const char *name = s;
            while (isalnum((unsigned char)*s) || *s == '_') {
                s++;
            }
            out->names[out->count] = name;
            out->lengths[out->count] = (size_t)(s - name);
            out->dims[out->count++] = out->ndim;
            out->ndim += grouped ? 0 : 1;
        } else if (*s++ != ' ') {
            return wrong(recipe, op, "it has a character that belongs to no name, blank or parenthesis", err);
        }
    }
    return grouped ? wrong(recipe, op, "a ')' is missing", err) : FC_OK;
}

static int find_name(const side *s, const char *name, size_t len) {
    for (int i = 0; i < s->count; i++) {
        if (s->lengths[i] == len && memcmp(s->names[i], name, len) == 0) {
            return i;
        }
    }
    return -1;
}

/* Both sides must have the same names, each once. `order` receives the place on the left of each name on the right. */
static fc_code match_sides(const fc_recipe *recipe, const fc_recipe_op *op, const side *left, const side *right,
                           int *order, fc_error *err) {
    bool same = left->count == right->count;
    for (int i = 0; i < right->count && same; i++) {
        order[i] = find_name(left, right->names[i], right->lengths[i]);
        same = order[i] >= 0 && find_name(right, right->names[i], right->lengths[i]) == i &&
               find_name(left, left->names[i], left->lengths[i]) == i;
    }
    return same ? FC_OK : wrong(recipe, op, "its sides do not have the same names, each once", err);
}

/* Computes the size of the axis `i` if the recipe has it; 0: unknown. */
static fc_code size_of(const fc_recipe *recipe, const side *left, int i, int64_t *out, fc_error *err) {
    char name[64];
    const char *unknown;
    *out = 0;
    if (!fc_recipe_has_size(recipe, left->names[i], left->lengths[i]) || left->lengths[i] >= sizeof name) {
        return FC_OK;
    }
    memcpy(name, left->names[i], left->lengths[i]);
    name[left->lengths[i]] = '\0';
    FC_TRY(fc_recipe_evaluate(recipe, name, out, &unknown, err));
    return *out > 0 ? FC_OK : fc_fail(err, FC_EUSAGE, "%s: size '%s' is not positive", recipe->label, name);
}

/* Computes the sizes of all axes on the left: of each dimension, one may be unknown. */
static fc_code axis_sizes(const fc_parted *t, const fc_recipe *recipe, const fc_recipe_op *op, const side *left,
                          int64_t *sizes, fc_error *err) {
    if (left->ndim != t->ndim) {
        return fc_fail(err, FC_EUSAGE, "%s: rearrange \"%s->%s\" is for %d dimensions, but there are %d", recipe->label,
                       op->left, op->right, left->ndim, t->ndim);
    }
    for (int d = 0; d < t->ndim; d++) {
        int64_t known = 1;
        int unknown = -1;
        for (int i = 0; i < left->count; i++) {
            if (left->dims[i] != d) {
                continue;
            }
            FC_TRY(size_of(recipe, left, i, &sizes[i], err));
            if (sizes[i] == 0 && unknown >= 0) {
                return wrong(recipe, op, "two sizes of one dimension are unknown; give one under \"sizes\"", err);
            }
            unknown = sizes[i] == 0 ? i : unknown;
            if (sizes[i] > 0 && !fc_mul_i64(known, sizes[i], &known)) {
                return wrong(recipe, op, "its sizes exceed 64 bits", err);
            }
        }
        if (unknown >= 0 ? t->shape[d] % known != 0 : t->shape[d] != known) {
            return fc_fail(err, FC_EUSAGE, "%s: rearrange \"%s->%s\": dimension %d has %lld elements, which %s %lld",
                           recipe->label, op->left, op->right, d, (long long)t->shape[d],
                           unknown >= 0 ? "is no multiple of" : "are not", (long long)known);
        }
        if (unknown >= 0) {
            sizes[unknown] = t->shape[d] / known;
        }
    }
    return FC_OK;
}

/* A dimension of the old tensor as a number: each axis that it is split into is one digit. */
typedef struct digits {
    int count, axes[FC_PART_DIMS]; /* from the innermost */
    int64_t places[FC_PART_DIMS];  /* of each digit */
} digits;

static digits digits_of(const side *left, const int64_t *sizes, int dim) {
    digits g = {0};
    int64_t place = 1;
    for (int i = left->count - 1; i >= 0; i--) {
        if (left->dims[i] == dim) {
            g.axes[g.count] = i;
            g.places[g.count++] = place;
            place *= sizes[i];
        }
    }
    return g;
}

/*
 * Splits an axis into one axis per digit. It must lie within one digit, or fill some digits and take a range of the
 * next one.
 */
static bool split_axis(const fc_part_axis *x, const digits *g, const int64_t *sizes, fc_part *out) {
    int64_t size = x->size, sstep = x->sstep, step = x->tstep;
    for (int k = 0; k < g->count && size > 1; k++) {
        const int64_t range = sizes[g->axes[k]];
        if (range == 1 || step >= g->places[k] * range) {
            continue;
        }
        if (step % g->places[k] != 0 || out->naxes == FC_PART_AXES) {
            return false;
        }
        const int64_t within = step / g->places[k];
        if ((size - 1) * within < range) {
            out->axes[out->naxes++] = (fc_part_axis){size, within, sstep, g->axes[k], x->sdim};
            return true;
        }
        if (range % within != 0 || size % (range / within) != 0) {
            return false;
        }
        const int64_t here = range / within; /* steps until the digit is full */
        if (here > 1) {
            out->axes[out->naxes++] = (fc_part_axis){here, within, sstep, g->axes[k], x->sdim};
        }
        size /= here;
        sstep *= here;
        step *= here;
    }
    return size == 1;
}

/* No digit may carry into the next one while the axes are counted. */
static bool carries(const fc_part *p, int axis, int64_t size) {
    int64_t last = p->tbase[axis];
    for (int a = 0; a < p->naxes; a++) {
        last += p->axes[a].tdim == axis ? (p->axes[a].size - 1) * p->axes[a].tstep : 0;
    }
    return last >= size;
}

/* Splits the dimensions of a part into the axes of the left side. */
static bool split_part(const fc_part *p, const side *left, const int64_t *sizes, fc_part *out) {
    *out = (fc_part){.source = p->source};
    memcpy(out->sbase, p->sbase, sizeof out->sbase);
    for (int d = 0; d < left->ndim; d++) {
        const digits g = digits_of(left, sizes, d);
        for (int k = 0; k < g.count; k++) {
            out->tbase[g.axes[k]] = p->tbase[d] / g.places[k] % sizes[g.axes[k]];
        }
        for (int a = 0; a < p->naxes; a++) {
            if (p->axes[a].tdim == d && !split_axis(&p->axes[a], &g, sizes, out)) {
                return false;
            }
        }
    }
    for (int i = 0; i < left->count; i++) {
        if (carries(out, i, sizes[i])) {
            return false;
        }
    }
    return true;
}

/* Joins two axes where one continues the other. */
static void join_axes(fc_part *p) {
    for (int a = 0; a < p->naxes; a++) {
        for (int b = 0; b < p->naxes; b++) {
            fc_part_axis *in = &p->axes[a], *over = &p->axes[b];
            if (a != b && in->tdim == over->tdim && in->sdim == over->sdim && over->tstep == in->tstep * in->size &&
                over->sstep == in->sstep * in->size) {
                in->size *= over->size;
                *over = p->axes[--p->naxes];
                a = -1; /* from the start */
                break;
            }
        }
    }
}

/* Merges the axes of a part into the dimensions of the right side. */
static void merge_part(fc_part *p, const side *right, const int *order, const int64_t *sizes) {
    int64_t place[FC_PART_DIMS] = {0}, base[FC_PART_DIMS] = {0};
    int dim[FC_PART_DIMS] = {0};
    for (int i = right->count - 1; i >= 0; i--) {
        const int axis = order[i];
        const bool inner = i + 1 < right->count && right->dims[i + 1] == right->dims[i];
        place[axis] = inner ? place[order[i + 1]] * sizes[order[i + 1]] : 1;
        dim[axis] = right->dims[i];
        base[right->dims[i]] += p->tbase[axis] * place[axis];
    }
    for (int a = 0; a < p->naxes; a++) {
        const int axis = p->axes[a].tdim;
        p->axes[a].tdim = dim[axis];
        p->axes[a].tstep *= place[axis];
    }
    memcpy(p->tbase, base, sizeof base);
    join_axes(p);
}

fc_code fc_parted_rearrange(fc_parted *t, const fc_recipe *recipe, const fc_recipe_op *op, fc_error *err) {
    side left, right;
    int order[FC_PART_DIMS] = {0};
    int64_t sizes[FC_PART_DIMS] = {0};
    FC_TRY(parse_side(recipe, op, op->left, &left, err));
    FC_TRY(parse_side(recipe, op, op->right, &right, err));
    FC_TRY(match_sides(recipe, op, &left, &right, order, err));
    FC_TRY(axis_sizes(t, recipe, op, &left, sizes, err));
    for (size_t p = 0; p < t->nparts; p++) {
        fc_part split;
        if (!split_part(&t->parts[p], &left, sizes, &split)) {
            return wrong(recipe, op, "it would cut through joined tensors; rearrange them before they are joined", err);
        }
        merge_part(&split, &right, order, sizes);
        t->parts[p] = split;
    }
    t->ndim = right.ndim;
    for (int d = 0; d < right.ndim; d++) {
        t->shape[d] = 1;
    }
    for (int i = 0; i < right.count; i++) {
        t->shape[right.dims[i]] *= sizes[order[i]];
    }
    return FC_OK;
}
