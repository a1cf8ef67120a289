/*
 * Tied weights: of values of the target that read the same bytes of the source, one is stored, and the others become
 * views, as in torch.save. The places of their bytes in the source decide; no data is compared. A value that is
 * computed or made has no place, so it is stored for itself.
 */
#include "pt/writer.h"

#include "base/checked.h"
#include "fsdpckpt/order.h"
#include "fsdpckpt/try.h"

#include <stdlib.h>
#include <string.h>

/* An item whose source tensor may begin where another's does. */
typedef struct candidate {
    uint32_t item;
    const fc_tensor *tensor;
    const fc_chunk *chunk;
    fc_extent *extent;   /* looked up if several begin at the same place */
    uint64_t first, end; /* the range of elements that it spans in the storage */
    bool whole; /* whether it is one plain extent and used as a whole, so that it can be a view or have views */
    bool dense; /* whether its elements are in row-major order without gaps */
} candidate;

static int compare_candidate_places(const void *a, const void *b) {
    const candidate *x = a, *y = b;
    const fc_place *p = &x->chunk->place, *q = &y->chunk->place;
    FC_ORDER_BY(p->file, q->file);
    FC_ORDER_BY(p->offset, q->offset);
    FC_ORDER_BY(p->length, q->length);
    return FC_ORDER(x->item, y->item);
}

/* Sorts candidates with larger spans before those that they may contain, and row-major ones before transposed ones. */
static int compare_candidate_spans(const void *a, const void *b) {
    const candidate *x = a, *y = b;
    FC_ORDER_BY(x->first, y->first);
    FC_ORDER_BY(y->end, x->end);
    FC_ORDER_BY(y->dense, x->dense);
    return FC_ORDER(x->item, y->item);
}

static bool takes_all(const fc_target_item *item, const fc_tensor *tensor) {
    for (int i = 0; i < tensor->ndim; i++) {
        if (item->dims[i] != 0 || item->dims[tensor->ndim + i] != tensor->shape[i]) {
            return false;
        }
    }
    return true;
}

/* Looks up the candidate's extent. @return false if it cannot be shared. */
static bool measure(const fc_target *target, const fc_target_file *file, candidate *c) {
    const fc_tensor *t = c->tensor;
    if (fc_checkpoint_extent(target->source, t, 0, c->extent, NULL) != FC_OK) {
        return false; /* reading it reports the error */
    }
    const fc_extent *e = c->extent;
    uint64_t element = fc_dtype_size(t->dtype), step;
    c->whole = e->codec != FC_CODEC_INLINE && t->nchunks == 1 && e->first % element == 0 &&
               takes_all(&file->items[c->item], t);
    c->first = c->end = e->first / element;
    c->dense = !e->negate && !e->conjugate;
    int64_t expected = 1;
    for (int i = t->ndim - 1; i >= 0; i--) {
        c->dense = c->dense && (t->shape[i] == 1 || e->strides[i] == expected);
        if (!fc_mul_i64(expected, t->shape[i], &expected) ||
            !fc_mul_u64((uint64_t)(t->shape[i] - 1), (uint64_t)e->strides[i], &step) ||
            !fc_add_u64(c->end, step, &c->end)) {
            return false;
        }
    }
    c->end++;
    return true;
}

static bool same_boxes(const fc_tensor *a, const fc_tensor *b) {
    if (a->nchunks != b->nchunks) {
        return false;
    }
    for (size_t i = 0; i < a->nchunks; i++) {
        const fc_chunk *p = &a->chunks[i], *q = &b->chunks[i];
        if (!fc_chunks_share_bytes(p, q) || memcmp(p->dims, q->dims, 2 * (size_t)a->ndim * sizeof *p->dims) != 0) {
            return false;
        }
    }
    return true;
}

static bool same_extents(const fc_target *target, const fc_tensor *a, const fc_tensor *b) {
    for (size_t i = 0; i < a->nchunks; i++) {
        fc_extent x, y;
        if (fc_checkpoint_extent(target->source, a, i, &x, NULL) != FC_OK ||
            fc_checkpoint_extent(target->source, b, i, &y, NULL) != FC_OK || x.first != y.first ||
            x.negate != y.negate || x.conjugate != y.conjugate || x.codec != y.codec ||
            memcmp(x.strides, y.strides, (size_t)a->ndim * sizeof *x.strides) != 0) {
            return false;
        }
    }
    return true;
}

/* Whether both have the same elements in the same order. */
static bool is_twin(const fc_target *target, const fc_target_file *file, const candidate *a, const candidate *b) {
    const fc_tensor *x = a->tensor, *y = b->tensor;
    const fc_target_item *p = &file->items[a->item], *q = &file->items[b->item];
    bool same = x->ndim == y->ndim;
    for (int i = 0; same && i < x->ndim; i++) {
        same = x->shape[i] == y->shape[i] && p->dims[i] == q->dims[i] && p->dims[x->ndim + i] == q->dims[x->ndim + i];
    }
    return same && same_boxes(x, y) && same_extents(target, x, y);
}

static bool same_types(const fc_target *target, const fc_target_file *file, const candidate *a, const candidate *b) {
    const fc_target_tensor *x = &target->tensors[file->items[a->item].tensor];
    const fc_target_tensor *y = &target->tensors[file->items[b->item].tensor];
    return x->dtype == y->dtype && x->source->dtype == y->source->dtype;
}

static bool is_view(const candidate *root, const candidate *c) {
    return root->whole && root->dense && c->whole && !c->extent->negate && !c->extent->conjugate &&
           c->first >= root->first && c->end <= root->end;
}

static fc_code tie(const candidate *root, const candidate *c, bool twin, fc_arena *arena, fc_pt_tie *ties,
                   fc_error *err) {
    int64_t *strides = NULL;
    if (!twin) {
        strides = fc_arena_calloc(arena, (size_t)c->tensor->ndim, sizeof *strides);
        FC_NEED(strides, err, NULL);
        for (int i = 0; i < c->tensor->ndim; i++) {
            strides[i] = c->extent->strides[i];
        }
    }
    ties[c->item] = (fc_pt_tie){root->item, twin ? 0 : c->first - root->first, strides};
    return FC_OK;
}

/*
 * Ties candidates at one place, sorted by span. Each is compared with the earlier one that reaches farthest, and with
 * the last one that was not tied.
 */
static fc_code tie_group(const fc_target *target, const fc_target_file *file, candidate *group, size_t n,
                         fc_arena *arena, fc_pt_tie *ties, fc_error *err) {
    const candidate *farthest = NULL, *last = NULL;
    fc_code rc = FC_OK;
    for (size_t i = 0; i < n && rc == FC_OK; i++) {
        const candidate *c = &group[i], *roots[] = {last, farthest};
        bool tied = false;
        for (size_t r = 0; r < 2 && !tied && rc == FC_OK; r++) {
            const candidate *root = roots[r];
            bool twin = root && same_types(target, file, root, c) && is_twin(target, file, root, c);
            tied = twin || (root && same_types(target, file, root, c) && is_view(root, c));
            rc = tied ? tie(root, c, twin, arena, ties, err) : FC_OK;
        }
        if (!tied) {
            last = c;
            farthest = c->dense && (!farthest || c->end > farthest->end) ? c : farthest;
        }
    }
    return rc;
}

/* Measures the candidates at one place and ties those that share bytes. */
static fc_code tie_place(const fc_target *target, const fc_target_file *file, candidate *all, size_t n, fc_arena *arena,
                         fc_pt_tie *ties, fc_error *err) {
    fc_extent *extents = calloc(n, sizeof *extents);
    size_t kept = 0;
    FC_NEED(extents, err, NULL);
    for (size_t i = 0; i < n; i++) {
        all[i].extent = &extents[i];
        if (measure(target, file, &all[i])) {
            all[kept++] = all[i];
        }
    }
    fc_sort_items(all, kept, sizeof *all, compare_candidate_spans);
    fc_code rc = tie_group(target, file, all, kept, arena, ties, err);
    free(extents);
    return rc;
}

static size_t collect(const fc_target *target, const fc_target_file *file, candidate *all) {
    size_t n = 0;
    for (size_t i = 0; i < file->nitems; i++) {
        const fc_tensor *t = target->tensors[file->items[i].tensor].source;
        const fc_box box = {t->ndim, file->items[i].dims, file->items[i].dims + t->ndim};
        if (!t->object && t->nchunks > 0 && t->chunks[0].place.kind == FC_PLACE_BYTES && fc_box_volume(&box) > 0) {
            all[n++] = (candidate){.item = (uint32_t)i, .tensor = t, .chunk = &t->chunks[0]};
        }
    }
    return n;
}

fc_code fc_pt_find_ties(const fc_target *target, const fc_target_file *file, fc_arena *arena, fc_pt_tie **ties,
                        fc_error *err) {
    candidate *all = malloc((file->nitems + 1) * sizeof *all);
    fc_pt_tie *made = fc_arena_calloc(arena, file->nitems, sizeof *made);
    if (!all || !made) {
        free(all);
        return fc_no_memory(err, NULL);
    }
    for (size_t i = 0; i < file->nitems; i++) {
        made[i].root = (uint32_t)i;
    }
    size_t n = collect(target, file, all);
    fc_sort_items(all, n, sizeof *all, compare_candidate_places);
    fc_code rc = FC_OK;
    for (size_t i = 0; i < n && rc == FC_OK;) {
        size_t end = i + 1;
        while (end < n && fc_chunks_share_bytes(all[i].chunk, all[end].chunk)) {
            end++;
        }
        if (end - i > 1) { /* most are alone at their place, so nothing is looked up */
            rc = tie_place(target, file, all + i, end - i, arena, made, err);
        }
        i = end;
    }
    free(all);
    *ties = made;
    return rc;
}
