/*
 * Operations on tensors of parts: see parts.h. rearrange.c has the remaining one.
 */
#include "recipe/parts.h"

#include "base/checked.h"
#include "base/grow.h"
#include "fsdpckpt/try.h"

#include <stdlib.h>
#include <string.h>

void fc_parted_free(fc_parted *t) {
    fc_list_budget_give(t->budget, t->nparts, sizeof *t->parts);
    free(t->parts);
    *t = (fc_parted){0};
}

fc_code fc_parted_dim(int dim, int ndim, int *out, fc_error *err) {
    *out = dim < 0 ? dim + ndim : dim;
    return *out >= 0 && *out < ndim
               ? FC_OK
               : fc_fail(err, FC_EUSAGE, "a tensor of %d dimensions has no dimension %d", ndim, dim);
}

static fc_part *add_part(fc_parted *t) {
    if (!fc_grow(&t->parts, &t->capacity, t->nparts + 1, sizeof *t->parts)) {
        return NULL;
    }
    return &t->parts[t->nparts++];
}

static fc_code add_copy(fc_parted *t, const fc_part *part, fc_error *err) {
    FC_TRY(fc_list_budget_take(t->budget, 1, sizeof *part, err));
    fc_part *added = add_part(t);
    FC_NEED(added, err, NULL);
    *added = *part;
    return FC_OK;
}

/* Adds a part that is a whole box of `shape`, of a tensor of the same shape or of zeros. */
static fc_code add_whole(fc_parted *t, const fc_tensor *source, const int64_t *shape, fc_error *err) {
    fc_part whole = {.source = source};
    for (int d = 0; d < t->ndim; d++) {
        if (shape[d] == 0) {
            return FC_OK;
        }
        if (shape[d] > 1) {
            whole.axes[whole.naxes++] = (fc_part_axis){shape[d], 1, 1, d, d};
        }
    }
    return add_copy(t, &whole, err);
}

fc_code fc_parted_from(const fc_tensor *source, fc_list_budget *budget, fc_parted *out, fc_error *err) {
    *out = (fc_parted){.ndim = source->ndim, .dtype = source->dtype, .budget = budget};
    if (source->ndim > FC_PART_DIMS) {
        return fc_fail(err, FC_EUNSUPPORTED, "tensor %.256s has %d dimensions; recipes rearrange at most %d",
                       source->name, source->ndim, FC_PART_DIMS);
    }
    for (int d = 0; d < source->ndim; d++) {
        out->shape[d] = source->shape[d];
    }
    return add_whole(out, source, out->shape, err);
}

bool fc_parted_is_same(const fc_parted *t) {
    const fc_part *p = t->nparts == 1 ? t->parts : NULL;
    if (!p || !p->source || p->source->ndim != t->ndim) {
        return false;
    }
    for (int d = 0; d < t->ndim; d++) {
        if (t->shape[d] != p->source->shape[d]) {
            return false;
        }
    }
    for (int a = 0; a < p->naxes; a++) {
        const fc_part_axis *x = &p->axes[a];
        if (x->tdim != x->sdim || x->tstep != x->sstep || x->tstep != 1) {
            return false;
        }
    }
    return true;
}

static fc_code check_alike(const fc_parted *a, const fc_parted *b, int except, fc_error *err) {
    bool alike = a->ndim == b->ndim && a->dtype == b->dtype;
    for (int d = 0; d < a->ndim && alike; d++) {
        alike = d == except || a->shape[d] == b->shape[d];
    }
    return alike ? FC_OK
                 : fc_fail(err, FC_EUSAGE, "tensors that it joins have different %s",
                           a->dtype != b->dtype ? "dtypes" : "shapes");
}

fc_code fc_parted_concatenate(fc_parted *const *tensors, size_t count, int dim, fc_parted *out, fc_error *err) {
    *out = *tensors[0];
    out->parts = NULL;
    out->nparts = out->capacity = 0;
    FC_TRY(fc_parted_dim(dim, out->ndim, &dim, err));
    out->shape[dim] = 0;
    for (size_t i = 0; i < count; i++) {
        FC_TRY(check_alike(tensors[0], tensors[i], dim, err));
        for (size_t p = 0; p < tensors[i]->nparts; p++) {
            FC_TRY(add_copy(out, &tensors[i]->parts[p], err));
            out->parts[out->nparts - 1].tbase[dim] += out->shape[dim];
        }
        if (!fc_add_i64(out->shape[dim], tensors[i]->shape[dim], &out->shape[dim])) {
            return fc_fail(err, FC_EUSAGE, "a shape exceeds 64 bits");
        }
    }
    return FC_OK;
}

/* Makes room for a new dimension `dim`. */
static void insert_dim(int64_t *values, int ndim, int dim, int64_t value) {
    memmove(values + dim + 1, values + dim, (size_t)(ndim - dim) * sizeof *values);
    values[dim] = value;
}

fc_code fc_parted_stack(fc_parted *const *tensors, size_t count, int dim, fc_parted *out, fc_error *err) {
    const int ndim = tensors[0]->ndim;
    *out = (fc_parted){.ndim = ndim + 1, .dtype = tensors[0]->dtype, .budget = tensors[0]->budget};
    FC_TRY(fc_parted_dim(dim, ndim + 1, &dim, err));
    if (ndim == FC_PART_DIMS) {
        return fc_fail(err, FC_EUNSUPPORTED, "a tensor would have more than %d dimensions", FC_PART_DIMS);
    }
    memcpy(out->shape, tensors[0]->shape, sizeof out->shape);
    insert_dim(out->shape, ndim, dim, (int64_t)count);
    for (size_t i = 0; i < count; i++) {
        FC_TRY(check_alike(tensors[0], tensors[i], -1, err));
        for (size_t p = 0; p < tensors[i]->nparts; p++) {
            FC_TRY(add_copy(out, &tensors[i]->parts[p], err));
            fc_part *part = &out->parts[out->nparts - 1];
            insert_dim(part->tbase, ndim, dim, (int64_t)i);
            for (int a = 0; a < part->naxes; a++) {
                part->axes[a].tdim += part->axes[a].tdim >= dim;
            }
        }
    }
    return FC_OK;
}

/* ---- slices ---- */

void fc_part_hull(const fc_part *p, int64_t *offsets, int64_t *sizes) {
    for (int d = 0; d < p->source->ndim; d++) {
        offsets[d] = p->sbase[d];
        sizes[d] = 1;
    }
    for (int a = 0; a < p->naxes; a++) {
        sizes[p->axes[a].sdim] += (p->axes[a].size - 1) * p->axes[a].sstep;
    }
}

void fc_part_remove_axis(fc_part *p, int a) {
    p->naxes--;
    memmove(p->axes + a, p->axes + a + 1, (size_t)(p->naxes - a) * sizeof *p->axes);
}

/* @return the axis with the largest step along `dim`, or -1. */
static int outermost(const fc_part *p, int dim) {
    int found = -1;
    for (int a = 0; a < p->naxes; a++) {
        if (p->axes[a].tdim == dim && (found < 0 || p->axes[a].tstep > p->axes[found].tstep)) {
            found = a;
        }
    }
    return found;
}

/* @return the distance from the first place along `dim` to the last, without axis `except`. */
static int64_t reach(const fc_part *p, int dim, int except) {
    int64_t sum = 0;
    for (int a = 0; a < p->naxes; a++) {
        sum += a != except && p->axes[a].tdim == dim ? (p->axes[a].size - 1) * p->axes[a].tstep : 0;
    }
    return sum;
}

/* The part with indices `first` … `last` of axis `a`. */
static fc_part narrow(const fc_part *p, int a, int64_t first, int64_t last) {
    fc_part out = *p;
    const fc_part_axis *x = &p->axes[a];
    out.tbase[x->tdim] += first * x->tstep;
    out.sbase[x->sdim] += first * x->sstep;
    out.axes[a].size = last - first + 1;
    if (first == last) {
        fc_part_remove_axis(&out, a);
    }
    return out;
}

/*
 * Adds the elements of `p` in [low, high) along `dim`. Axes along one dimension are nested: the inner ones reach less
 * far than a step of the outer one. So at most the first and the last step of the outer one are cut.
 */
static fc_code add_slice(fc_parted *out, const fc_part *p, int dim, int64_t low, int64_t high,
                         fc_error *err) { // NOLINT(misc-no-recursion): one level per axis
    const int64_t first = p->tbase[dim], last = first + reach(p, dim, -1);
    if (last < low || first >= high) {
        return FC_OK;
    }
    if (first >= low && last < high) {
        FC_TRY(add_copy(out, p, err));
        out->parts[out->nparts - 1].tbase[dim] -= low;
        return FC_OK;
    }
    const int a = outermost(p, dim);
    const int64_t step = p->axes[a].tstep, size = p->axes[a].size, inner = reach(p, dim, a);
    int64_t from = first >= low ? 0 : (low - first + step - 1) / step; /* the first step that is not cut below */
    int64_t to = high - 1 - inner - first >= 0 ? (high - 1 - inner - first) / step : -1; /* likewise above */
    from = from > size ? size : from;
    to = to >= size ? size - 1 : to;
    if (from <= to) {
        const fc_part whole = narrow(p, a, from, to);
        FC_TRY(add_slice(out, &whole, dim, low, high, err));
    }
    if (from > 0 && inner > 0) {
        const fc_part edge = narrow(p, a, from - 1, from - 1);
        FC_TRY(add_slice(out, &edge, dim, low, high, err));
    }
    for (int64_t i = to + 1 > from ? to + 1 : from; inner > 0 && i < size && i <= to + 1; i++) {
        const fc_part edge = narrow(p, a, i, i);
        FC_TRY(add_slice(out, &edge, dim, low, high, err));
    }
    return FC_OK;
}

fc_code fc_parted_slice(const fc_parted *t, int dim, int64_t low, int64_t high, bool unstack, fc_parted *out,
                        fc_error *err) {
    *out = (fc_parted){.ndim = t->ndim, .dtype = t->dtype, .budget = t->budget};
    memcpy(out->shape, t->shape, sizeof out->shape);
    FC_TRY(fc_parted_dim(dim, t->ndim, &dim, err));
    out->shape[dim] = high - low;
    for (size_t p = 0; p < t->nparts; p++) {
        FC_TRY(add_slice(out, &t->parts[p], dim, low, high, err));
    }
    if (!unstack) {
        return FC_OK;
    }
    out->ndim--;
    memmove(out->shape + dim, out->shape + dim + 1, (size_t)(out->ndim - dim) * sizeof *out->shape);
    for (size_t p = 0; p < out->nparts; p++) {
        fc_part *part = &out->parts[p];
        memmove(part->tbase + dim, part->tbase + dim + 1, (size_t)(out->ndim - dim) * sizeof *part->tbase);
        for (int a = 0; a < part->naxes; a++) {
            part->axes[a].tdim -= part->axes[a].tdim > dim;
        }
    }
    return FC_OK;
}

fc_code fc_parted_transpose(fc_parted *t, int dim, int other, fc_error *err) {
    FC_TRY(fc_parted_dim(dim, t->ndim, &dim, err));
    FC_TRY(fc_parted_dim(other, t->ndim, &other, err));
    const int64_t size = t->shape[dim];
    t->shape[dim] = t->shape[other];
    t->shape[other] = size;
    for (size_t p = 0; p < t->nparts; p++) {
        fc_part *part = &t->parts[p];
        const int64_t base = part->tbase[dim];
        part->tbase[dim] = part->tbase[other];
        part->tbase[other] = base;
        for (int a = 0; a < part->naxes; a++) {
            const int d = part->axes[a].tdim;
            part->axes[a].tdim = d == dim ? other : d == other ? dim : d;
        }
    }
    return FC_OK;
}

fc_code fc_parted_resize(fc_parted *t, int dim, int64_t size, fc_error *err) {
    FC_TRY(fc_parted_dim(dim, t->ndim, &dim, err));
    if (size < 0) {
        return fc_fail(err, FC_EUSAGE, "a dimension would have %lld elements", (long long)size);
    }
    if (size < t->shape[dim]) {
        fc_parted less;
        fc_code rc = fc_parted_slice(t, dim, 0, size, false, &less, err);
        fc_parted_free(t);
        *t = less;
        return rc;
    }
    int64_t added[FC_PART_DIMS];
    memcpy(added, t->shape, sizeof added);
    added[dim] = size - t->shape[dim];
    const size_t before = t->nparts;
    FC_TRY(add_whole(t, NULL, added, err));
    if (t->nparts > before) {
        t->parts[before].tbase[dim] = t->shape[dim];
    }
    t->shape[dim] = size;
    return FC_OK;
}
