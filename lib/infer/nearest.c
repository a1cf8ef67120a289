/*
 * Lists what a recipe does not explain, with the tensor of the other side that comes nearest.
 */
#include "fsdpckpt/box.h"
#include "fsdpckpt/try.h"
#include "infer/search.h"

#include <stdlib.h>
#include <string.h>

enum { MOST_READ = 1 << 20, MOST_COMPARED = 64, MOST_TRIED = 4096 };

/* Finds the first element that differs, as far as a block of the first rows goes. */
static fc_code compare_first(const fc_search *s, const fc_tensor *a, const fc_tensor *b, fc_unexplained *out,
                             fc_error *err) {
    int64_t offsets[FC_MAX_DIMS] = {0}, sizes[FC_MAX_DIMS], elements = 1;
    const size_t size = fc_dtype_size(b->dtype);
    for (int d = b->ndim - 1; d >= 0; d--) {
        const int64_t most = MOST_READ / (int64_t)size / elements;
        sizes[d] = most < 1 ? 1 : b->shape[d] < most ? b->shape[d] : most;
        elements *= sizes[d];
    }
    const fc_box box = {b->ndim, offsets, sizes};
    unsigned char *x = malloc((size_t)elements * size), *y = malloc((size_t)elements * size);
    fc_code rc = x && y ? FC_OK : fc_no_memory(err, b->name);
    FC_TRY_GOTO(rc, rc, out);
    FC_TRY_GOTO(fc_read_box(s->a.checkpoint, a, &box, b->dtype, x, err), rc, out);
    FC_TRY_GOTO(fc_read_box(s->b.checkpoint, b, &box, b->dtype, y, err), rc, out);
    for (int64_t i = 0; i < elements && !out->differs; i++) {
        out->differs = memcmp(x + (size_t)i * size, y + (size_t)i * size, size) != 0;
        out->first = (uint64_t)i;
    }
out:
    free(x);
    free(y);
    return rc;
}

static bool can_compare(const fc_tensor *a, const fc_tensor *b) {
    const bool floats = fc_dtype_get(a->dtype)->cls == FC_CLASS_FLOAT && fc_dtype_get(b->dtype)->cls == FC_CLASS_FLOAT;
    return a->dtype == b->dtype || floats;
}

/* Finds the tensor of the same shape whose name is most alike. */
static const fc_tensor *find_nearest(const fc_side *side, const fc_tensor *t, bool free_only) {
    const fc_tensor *nearest = NULL;
    long best = 0;
    for (size_t i = 0, tried = 0; i < side->count && tried < MOST_TRIED; i++) {
        const fc_tensor *u = side->tensors[i];
        if (!fc_same_sizes(t->ndim, t->shape, u->ndim, u->shape) || !can_compare(u, t) ||
            (free_only && side->taken[i])) {
            continue;
        }
        const long like = fc_search_likeness(u->name, t->name);
        tried++;
        if (!nearest || like > best) {
            nearest = u;
            best = like;
        }
    }
    return nearest;
}

/* Whether all elements are zero: the sums of others are hardly so. */
static bool is_zero(const fc_thing *t, int ntypes) {
    bool zero = t->known != 0;
    for (int i = 0; i < ntypes; i++) {
        zero = zero && (!(t->known >> i & 1) || t->sums[i] == 0);
    }
    return zero;
}

static fc_code describe(const fc_search *s, size_t index, bool in_a, bool compare, fc_unexplained *out, fc_error *err) {
    const fc_side *side = in_a ? &s->a : &s->b;
    const fc_tensor *t = side->tensors[index];
    if (is_zero(&side->things[index], s->ntypes)) {
        *out = (fc_unexplained){.name = t->name, .tensor = t, .in_a = in_a, .why = "all of it is zero"};
        return FC_OK;
    }
    const fc_side *other = in_a ? &s->b : &s->a;
    const fc_tensor *nearest = find_nearest(other, t, true);
    nearest = nearest ? nearest : find_nearest(other, t, false);
    *out = (fc_unexplained){.name = t->name, .tensor = t, .in_a = in_a, .nearest = nearest ? nearest->name : NULL};
    return nearest && compare ? compare_first(s, in_a ? t : nearest, in_a ? nearest : t, out, err) : FC_OK;
}

fc_code fc_search_unexplained(const fc_search *s, const bool *explained, fc_infer_report *report, fc_error *err) {
    fc_unexplained *all = fc_arena_calloc(s->arena, s->a.count + s->b.count + 1, sizeof *all);
    FC_NEED(all, err, NULL);
    size_t count = 0;
    for (size_t i = 0; i < s->b.count; i++) {
        if (!explained[i]) {
            FC_TRY(describe(s, i, false, count < MOST_COMPARED, &all[count], err));
            count++;
        }
    }
    for (size_t i = 0; i < s->a.count; i++) {
        if (!s->a.taken[i]) {
            FC_TRY(describe(s, i, true, count < MOST_COMPARED, &all[count], err));
            count++;
        }
    }
    report->unexplained = all;
    report->nunexplained = count;
    return FC_OK;
}
