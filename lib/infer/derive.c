/*
 * Derives operations from the places of elements: axes of the one tensor are separated, at most one is divided among
 * the parts, and those of each part are merged.
 */
#include "fsdpckpt/try.h"
#include "infer/locate.h"
#include "infer/sketch.h"

#include <string.h>

enum { NOWHERE = -1, LAST = 1000 };

static const char *const axis_names[] = {"heads", "kv_heads", "experts", "head", NULL};

/* An axis of the one tensor. Of those of a dimension, the outer ones come first. */
typedef struct label {
    int from, to; /* the dimensions of the one tensor and of a part */
    int place;    /* among the axes of a part; the outermost first */
    int64_t size; /* of the first part */
    bool free;    /* it can have no size, because the parts have different ones */
    bool divided; /* among the parts */
    const char *name;
} label;

typedef struct deriver {
    fc_search *s;
    fc_puzzle *puzzle;
    int ndim, to_dims, nparts, base;
    int64_t shape[FC_MAX_DIMS], strides[FC_MAX_DIMS];
    fc_located parts[FC_SEARCH_PARTS];
    int order[FC_SEARCH_PARTS];
    label labels[FC_LOCATE_AXES];
    int nlabels;
    int split;     /* the dimension that is divided; NOWHERE: none */
    int64_t block; /* the size of what is divided in it */
    int64_t lengths[FC_SEARCH_PARTS], offsets[FC_SEARCH_PARTS];
    int64_t unit; /* of the sizes of a divided axis */
    fc_error *err;
} deriver;

/* ---- axes ---- */

static bool add_axis(fc_located *out, int64_t size, int64_t stride, int to) {
    if (out->count == FC_LOCATE_AXES) {
        return false;
    }
    out->axes[out->count++] = (fc_located_axis){.size = size, .stride = stride, .to = to};
    return true;
}

/* Divides axes where a dimension of the part ends. */
static bool cut_at_dimensions(fc_located *x, int ndim, const int64_t *shape) {
    fc_located out = {.base = x->base};
    int at = 0;
    for (int d = ndim - 1; d >= 0; d--) {
        for (int64_t left = shape[d]; left > 1;) {
            fc_located_axis *axis = &x->axes[at];
            if (at == x->count || (left % axis->size != 0 && axis->size % left != 0)) {
                return false;
            }
            const int64_t size = axis->size < left ? axis->size : left;
            if (!add_axis(&out, size, axis->stride, d)) {
                return false;
            }
            left /= size;
            axis->stride *= size;
            axis->size /= size;
            at += axis->size == 1;
        }
    }
    out.base = at == x->count ? x->base : NOWHERE;
    *x = out;
    return out.base >= 0;
}

/* Divides axes where a dimension of the one tensor ends, and makes strides those within it. */
static bool cut_at_sources(const deriver *v, fc_located *x) {
    fc_located out = {.base = x->base};
    for (int i = 0; i < x->count; i++) {
        fc_located_axis axis = x->axes[i];
        while (axis.size > 1) {
            int d = 0;
            while (d < v->ndim && (v->shape[d] == 1 || v->strides[d] > axis.stride)) {
                d++;
            }
            if (d == v->ndim || axis.stride % v->strides[d] != 0 || v->shape[d] % (axis.stride / v->strides[d]) != 0) {
                return false;
            }
            const int64_t within = axis.stride / v->strides[d], room = v->shape[d] / within;
            const int64_t size = axis.size < room ? axis.size : room;
            if (size < 2 || axis.size % size != 0 || !add_axis(&out, size, within, axis.to)) {
                return false;
            }
            out.axes[out.count - 1].from = d;
            axis.size /= size;
            axis.stride *= size;
        }
    }
    *x = out;
    return true;
}

/* Lists the axes of a part in a dimension of the one tensor; the outermost first. */
static int list_axes(const fc_located *x, int from, const fc_located_axis **out) {
    int count = 0;
    for (int i = 0; i < x->count; i++) {
        if (x->axes[i].from == from) {
            int at = count++;
            for (; at > 0 && out[at - 1]->stride < x->axes[i].stride; at--) {
                out[at] = out[at - 1];
            }
            out[at] = &x->axes[i];
        }
    }
    return count;
}

static int64_t product_in(const fc_located *x, int from) {
    int64_t product = 1;
    for (int i = 0; i < x->count; i++) {
        product *= x->axes[i].from == from ? x->axes[i].size : 1;
    }
    return product;
}

/* ---- labels ---- */

static label *add_label(deriver *v, const fc_located_axis *axis, int from) {
    label *l = v->nlabels < FC_LOCATE_AXES ? &v->labels[v->nlabels++] : NULL;
    if (l) {
        const int place = axis ? 4 * (FC_LOCATE_AXES - (int)(axis - v->parts[0].axes)) : LAST;
        *l = (label){.from = from, .to = axis ? axis->to : NOWHERE, .place = place, .size = axis ? axis->size : 1};
    }
    return l;
}

/* All parts have all of a dimension, in the same axes. */
static bool label_whole(deriver *v, int from) {
    const fc_located_axis *mine[FC_LOCATE_AXES], *other[FC_LOCATE_AXES];
    const int count = list_axes(&v->parts[0], from, mine);
    int64_t inner = v->shape[from];
    for (int p = 1; p < v->nparts; p++) {
        bool same = list_axes(&v->parts[p], from, other) == count;
        for (int i = 0; i < count && same; i++) {
            same =
                mine[i]->size == other[i]->size && mine[i]->stride == other[i]->stride && mine[i]->to == other[i]->to;
        }
        if (!same) {
            return false;
        }
    }
    for (int i = 0; i < count; i++) {
        if (mine[i]->size * mine[i]->stride != inner || !add_label(v, mine[i], from)) {
            return false;
        }
        inner = mine[i]->stride;
    }
    return count > 0 ? inner == 1 : add_label(v, NULL, from) != NULL;
}

/* Sorts the parts by their offsets, which must follow each other. */
static bool order_parts(deriver *v) {
    int64_t end = 0;
    for (int i = 0; i < v->nparts; i++) {
        int at = i;
        for (; at > 0 && v->offsets[v->order[at - 1]] > v->offsets[i]; at--) {
            v->order[at] = v->order[at - 1];
        }
        v->order[at] = i;
    }
    for (int i = 0; i < v->nparts; i++) {
        if (v->offsets[v->order[i]] != end) {
            return false;
        }
        end += v->lengths[v->order[i]];
    }
    return end == v->block;
}

static int64_t common_divisor(const deriver *v) {
    int64_t divisor = v->lengths[0];
    for (int p = 1; p < v->nparts; p++) {
        for (int64_t rest = v->lengths[p]; rest > 0;) {
            const int64_t next = divisor % rest;
            divisor = rest;
            rest = next;
        }
    }
    return divisor;
}

/* Adds the axis that is divided, before the inner axis. */
static bool add_divided(deriver *v, int from, const fc_located_axis *around, const fc_located_axis *inner) {
    label *l = add_label(v, NULL, from);
    const fc_located_axis *next = inner ? inner : around;
    if (l) {
        l->to = next->to;
        l->place = 4 * (FC_LOCATE_AXES - (int)(next - v->parts[0].axes)) + (inner ? -1 : 1);
        l->free = l->divided = true;
    }
    return l != NULL;
}

/* The axes of each part in the divided dimension; the first ones are around what is divided. */
typedef struct axes_of {
    const fc_located_axis *list[FC_SEARCH_PARTS][FC_LOCATE_AXES];
    int counts[FC_SEARCH_PARTS], around;
} axes_of;

/* Finds the axes around what is divided, which all parts have. */
static bool label_around(deriver *v, int from, axes_of *x) {
    for (int p = 0; p < v->nparts; p++) {
        x->counts[p] = list_axes(&v->parts[p], from, x->list[p]);
        if (x->counts[p] != x->counts[0]) {
            return false;
        }
    }
    for (x->around = 0; x->around < x->counts[0]; x->around++) {
        const fc_located_axis *mine = x->list[0][x->around];
        bool same = mine->size * mine->stride == v->block;
        for (int p = 1; p < v->nparts; p++) {
            const fc_located_axis *other = x->list[p][x->around];
            same = same && other->size == mine->size && other->stride == mine->stride && other->to == mine->to;
        }
        if (!same) {
            return true;
        }
        if (!add_label(v, mine, from)) {
            return false;
        }
        v->block = mine->stride;
    }
    return true;
}

/* Measures what each part has of the block. @return false: it does not follow itself. */
static bool measure_parts(deriver *v, int from, const axes_of *x) {
    for (int p = 0; p < v->nparts; p++) {
        v->lengths[p] = 1;
        v->offsets[p] = v->parts[p].base / v->strides[from] % v->shape[from] % v->block;
        for (int i = x->counts[p] - 1; i >= x->around; i--) {
            if (x->list[p][i]->stride != v->lengths[p] || x->list[p][i]->to != x->list[0][i]->to) {
                return false;
            }
            v->lengths[p] *= x->list[p][i]->size;
        }
    }
    return order_parts(v);
}

/* The axes of one dimension that the parts divide. */
static bool label_divided(deriver *v, int from) {
    axes_of x;
    v->split = from;
    v->block = v->shape[from];
    if (!label_around(v, from, &x) || !measure_parts(v, from, &x)) {
        return false;
    }
    v->unit = common_divisor(v);
    const int inner = x.counts[0] - x.around;
    const bool equal = v->unit == v->lengths[0] && v->unit * v->nparts == v->block;
    if (x.around > 0 && (equal || inner == 1) &&
        !add_divided(v, from, x.list[0][x.around - 1], inner ? x.list[0][x.around] : NULL)) {
        return false;
    }
    for (int i = x.around; i < x.counts[0]; i++) {
        label *l = add_label(v, x.list[0][i], from);
        bool varies = false;
        for (int p = 1; p < v->nparts; p++) {
            varies = varies || x.list[p][i]->size != x.list[0][i]->size;
        }
        if (!l || (varies && i > x.around)) {
            return false;
        }
        if (x.around > 0 && varies && inner == 1) {
            l->size = v->unit;
        } else if (x.around > 0 && varies) {
            l->free = l->divided = true;
            v->unit = v->lengths[0] / l->size;
        } else {
            l->free = varies;
        }
    }
    return true;
}

static bool label_all(deriver *v) {
    v->split = NOWHERE;
    for (int d = 0; d < v->ndim; d++) {
        bool whole = true;
        for (int p = 0; p < v->nparts; p++) {
            whole = whole && product_in(&v->parts[p], d) == v->shape[d];
        }
        if (whole ? !label_whole(v, d) : v->split != NOWHERE || !label_divided(v, d)) {
            return false;
        }
    }
    return (v->split != NOWHERE) == (v->nparts > 1) && v->to_dims > 0;
}

/* Axes of one element, which only one side has, go next to others. */
static bool place_single(deriver *v) {
    for (int d = 0; d < v->to_dims; d++) {
        bool has = false;
        label *spare = NULL;
        for (int i = 0; i < v->nlabels; i++) {
            has = has || v->labels[i].to == d;
            spare = v->labels[i].to == NOWHERE && !spare ? &v->labels[i] : spare;
        }
        spare = has || spare ? spare : add_label(v, NULL, 0);
        if (!has && !spare) {
            return false;
        }
        if (!has) {
            spare->to = d;
        }
    }
    for (int i = 0; i < v->nlabels; i++) {
        v->labels[i].to = v->labels[i].to == NOWHERE ? v->to_dims - 1 : v->labels[i].to;
    }
    return true;
}

/* ---- names ---- */

static int count_in(const deriver *v, const label *of, bool from) {
    int count = 0;
    for (int i = 0; i < v->nlabels; i++) {
        count += from ? v->labels[i].from == of->from : v->labels[i].to == of->to;
    }
    return count;
}

/* Gives an axis a letter, for which its size need not be known, or a size with a name. */
static fc_code name_label(const deriver *v, label *l, bool *from, bool *to, bool *done) {
    static const char *const letters[] = {"a", "b", "c", "d", "i", "j", "k", "l",
                                          "m", "o", "p", "q", "u", "v", "w", "x"};
    const bool many = count_in(v, l, true) > 1 || count_in(v, l, false) > 1;
    const bool can = !from[l->from] && !to[l->to];
    if (l->free || !many || (can && l->size > 1)) {
        *done = *done && (can || !many);
        from[l->from] = to[l->to] = true;
        l->name = letters[l - v->labels];
        return FC_OK;
    }
    l->name = fc_search_axis(v->s, l->size, axis_names);
    FC_NEED(l->name, v->err, NULL);
    return FC_OK;
}

/* Names all axes. One of each dimension has a letter. @param done false: two need one. */
static fc_code name_labels(deriver *v, bool *done) {
    bool from[FC_MAX_DIMS] = {false}, to[FC_MAX_DIMS] = {false};
    *done = true;
    for (int i = 0; i < v->nlabels; i++) {
        FC_TRY(v->labels[i].free ? name_label(v, &v->labels[i], from, to, done) : FC_OK);
    }
    for (int i = v->nlabels - 1; i >= 0; i--) {
        FC_TRY(v->labels[i].free ? FC_OK : name_label(v, &v->labels[i], from, to, done));
    }
    for (int i = 0; i < v->nlabels; i++) {
        for (int k = 0; k < i; k++) {
            *done = *done && strcmp(v->labels[i].name, v->labels[k].name) != 0;
        }
    }
    return FC_OK;
}

/* ---- operations ---- */

/* Spells the axes of one dimension. */
static const char *spell_dimension(const deriver *v, bool from, int dim, bool apart) {
    const char *text = "";
    int last = INT32_MIN, count = 0;
    for (;;) {
        const label *next = NULL;
        for (int i = 0; i < v->nlabels; i++) {
            const label *l = &v->labels[i];
            const int place = from ? i : l->place * FC_LOCATE_AXES + i;
            const int best = !next  ? 0
                             : from ? (int)(next - v->labels)
                                    : next->place * FC_LOCATE_AXES + (int)(next - v->labels);
            next = (from ? l->from : l->to) == dim && place > last && (!next || place < best) ? l : next;
        }
        if (!next || !text) {
            break;
        }
        last = from ? (int)(next - v->labels) : next->place * FC_LOCATE_AXES + (int)(next - v->labels);
        text = fc_arena_printf(v->s->arena, "%s%s%s", text, count++ > 0 ? " " : "", next->name);
    }
    return text && count > 1 && !apart ? fc_arena_printf(v->s->arena, "(%s)", text) : text;
}

/* Spells one side. @param apart the dimension whose axes are apart; NOWHERE: none. */
static const char *spell(const deriver *v, bool from, int apart) {
    const char *text = "";
    for (int d = 0; d < (from ? v->ndim : v->to_dims) && text; d++) {
        const char *inside = spell_dimension(v, from, d, d == apart);
        text = inside ? fc_arena_printf(v->s->arena, "%s%s%s", text, d ? " " : "", inside) : NULL;
    }
    return text;
}

static fc_code add_rearrange(const deriver *v, fc_sketch *k, const char *left, const char *right) {
    FC_NEED(left && right, v->err, NULL);
    if (strcmp(left, right) != 0) {
        k->ops[k->count++] = (fc_recipe_op){.kind = FC_OP_REARRANGE, .left = left, .right = right};
    }
    return FC_OK;
}

static fc_code add_split(const deriver *v, fc_sketch *k, int dim, int64_t unit) {
    fc_recipe_op op = {.kind = FC_OP_SPLIT, .dim = dim};
    bool equal = true;
    for (int p = 1; p < v->nparts; p++) {
        equal = equal && v->lengths[p] == v->lengths[0];
    }
    if (!equal) {
        const char **sizes = fc_arena_calloc(v->s->arena, (size_t)v->nparts + 1, sizeof *sizes);
        FC_NEED(sizes, v->err, NULL);
        for (int p = 0; p < v->nparts; p++) {
            sizes[p] = fc_search_expression(v->s, v->lengths[v->order[p]] / unit);
            FC_NEED(sizes[p], v->err, NULL);
        }
        op.sizes = sizes;
    }
    k->ops[k->count++] = op;
    return FC_OK;
}

/* The place of the divided axis if those of its dimension are apart; NOWHERE: the dimension itself is divided. */
static int find_divided(const deriver *v) {
    int place = v->split;
    for (int i = 0; i < v->nlabels; i++) {
        if (v->labels[i].from == v->split && v->labels[i].divided) {
            return place;
        }
        place += v->labels[i].from == v->split;
    }
    return NOWHERE;
}

static fc_code try_labels(const deriver *v) {
    const int divided = v->split == NOWHERE ? NOWHERE : find_divided(v);
    fc_sketch k = {.count = 0};
    if (v->split != NOWHERE && divided == NOWHERE) {
        FC_TRY(add_split(v, &k, v->split, 1));
    } else if (v->split != NOWHERE) {
        FC_TRY(add_rearrange(v, &k, spell(v, true, NOWHERE), spell(v, true, v->split)));
        FC_TRY(add_split(v, &k, divided, v->unit));
    }
    FC_TRY(add_rearrange(v, &k, spell(v, true, divided == NOWHERE ? NOWHERE : v->split), spell(v, false, NOWHERE)));
    for (int i = 0; i < v->base; i++) {
        k.ops[k.count++] = (fc_recipe_op){.kind = FC_OP_UNSTACK};
    }
    return fc_sketch_try(v->s, v->puzzle, v->order, &k, v->err);
}

/* ---- all of it ---- */

/* Sets the shapes, and cuts the axes that were found. */
static bool prepare(deriver *v, const fc_match *m) {
    int64_t stride = 1, to[FC_MAX_DIMS];
    for (int d = v->ndim - 1; d >= 0; d--) {
        v->shape[d] = m->one->tensor->shape[d];
        v->strides[d] = stride;
        stride *= v->shape[d];
    }
    for (int p = 0; p < v->nparts; p++) {
        const fc_thing *t = m->many[p];
        for (int d = 0; d < v->to_dims; d++) {
            to[d] = d < v->base ? t->counts[d] : t->tensor->shape[d - v->base];
        }
        if (!cut_at_dimensions(&v->parts[p], v->to_dims, to) || !cut_at_sources(v, &v->parts[p])) {
            return false;
        }
    }
    return true;
}

fc_code fc_search_derive(fc_search *s, fc_puzzle *puzzle, fc_error *err) {
    const fc_match *m = puzzle->match;
    deriver v = {.s = s,
                 .puzzle = puzzle,
                 .ndim = m->one->tensor->ndim,
                 .to_dims = m->many[0]->tensor->ndim + m->many[0]->ninner,
                 .base = m->many[0]->ninner,
                 .nparts = m->nmany,
                 .err = err};
    bool fits = v.to_dims <= FC_MAX_DIMS;
    for (int p = 1; p < v.nparts; p++) {
        fits = fits && m->many[p]->ninner == v.base && m->many[p]->tensor->ndim + v.base == v.to_dims;
    }
    FC_TRY(fits ? fc_locate(s, m, v.parts, &fits, err) : FC_OK);
    if (fits && prepare(&v, m) && label_all(&v) && place_single(&v)) {
        FC_TRY(name_labels(&v, &fits));
        return fits ? try_labels(&v) : FC_OK;
    }
    return FC_OK;
}
