/*
 * Whether factors fit a weight: see low_rank.h.
 */
#include "weights/low_rank.h"

bool fc_low_rank_fits_experts(const fc_tensor *w, const fc_tensor *a, const fc_tensor *b, bool *straight,
                              bool *across) {
    *straight = *across = false;
    if (w->ndim == 3 && a->ndim == 2 && b->ndim == 2 && w->shape[0] > 0 && a->shape[0] % w->shape[0] == 0 &&
        b->shape[1] == a->shape[0]) {
        *straight = a->shape[1] == w->shape[2] && b->shape[0] == w->shape[1];
        *across = a->shape[1] == w->shape[1] && b->shape[0] == w->shape[2];
    }
    return *straight || *across;
}

static bool has_shape(const fc_tensor *t, int64_t rows, int64_t columns) {
    return t->ndim == 2 && t->shape[0] == rows && t->shape[1] == columns;
}

bool fc_low_rank_fits(const fc_tensor *w, const fc_low_rank *term) {
    const fc_tensor *a = term->a, *b = term->b;
    bool good = w->ndim >= 2 && a->ndim == w->ndim && b->ndim == w->ndim && b->shape[0] == w->shape[0] &&
                b->shape[1] == a->shape[0];
    for (int d = 1; good && d < w->ndim; d++) {
        good = a->shape[d] == w->shape[d] && (d == 1 || b->shape[d] == 1);
    }
    return good;
}

bool fc_low_rank_fits_transposed(const fc_tensor *w, const fc_low_rank *term) {
    const int64_t rank = term->a->ndim == 2 ? term->a->shape[0] : 0;
    return w->ndim == 2 && has_shape(term->a, rank, w->shape[0]) && has_shape(term->b, w->shape[1], rank);
}
