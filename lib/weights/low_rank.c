/*
 * Computes blocks of weights with products added: see low_rank.h. The factors that a block needs are read and put in
 * the order of the kernel.
 */
#include "weights/low_rank.h"

#include "engine/read_box.h"
#include "fsdpckpt/cast.h"
#include "fsdpckpt/try.h"

#include <stdlib.h>
#include <string.h>

/*
 * A block has at most so many elements and columns, and so many ranks are multiplied at once: a worker holds 2 MiB of
 * sums and 2 MiB of a factor.
 */
enum { ELEMENTS = 512 << 10, COLUMNS = 8192, RANKS = 64 };

/* The tile at the edge reads as many rows of the left factor as a whole one. */
enum { SPARE_ROWS = 8 };

void fc_merged_blocks(const fc_tensor *t, int64_t *block) {
    int64_t room = COLUMNS;
    for (int d = t->ndim - 1; d >= 1; d--) {
        block[d] = t->shape[d] < room ? t->shape[d] : room;
        room = block[d] > 0 ? room / block[d] : room;
        room = room > 0 ? room : 1;
    }
    int64_t columns = 1;
    for (int d = 1; d < t->ndim; d++) {
        columns *= block[d] > 0 ? block[d] : 1;
    }
    if (t->ndim > 0) {
        const int64_t rows = ELEMENTS / columns;
        block[0] = t->shape[0] < rows ? t->shape[0] : rows;
    }
}

/* Some ranks of a product, for a block of `rows` × `columns`. */
typedef struct factors {
    size_t rank, rows, columns;
    float *left, *right, *raw; /* raw: a factor as it is stored */
} factors;

/* Reads the ranks from `first` on of a factor, for the places that the block has. */
static fc_code read_factor(const fc_computed_block *b, const fc_low_rank *term, const fc_tensor *factor, int64_t first,
                           factors *f, fc_error *err) {
    int64_t offsets[FC_MAX_DIMS] = {0}, sizes[FC_MAX_DIMS];
    const fc_box box = {factor->ndim, offsets, sizes};
    const bool is_a = factor == term->a;
    for (int d = 0; d < factor->ndim; d++) {
        const bool is_rank = d == (is_a ? 0 : 1);
        const int of = term->transposed ? 1 - d : d; /* the weight's dimension; two of them if it is transposed */
        const bool follows = is_a ? d > 0 : d == 0;
        sizes[d] = is_rank ? (int64_t)f->rank : follows ? b->box.sizes[of] : 1;
        offsets[d] = is_rank ? first : follows ? b->box.offsets[of] : 0;
    }
    return fc_read_box_crc(b->sources[term->source], factor, &box, FC_F32, f->raw, NULL, err);
}

/* Puts (rank, columns) into panels. */
static void pack_rows(const factors *f) {
    for (size_t k = 0; k < f->rank; k++) {
        const float *row = f->raw + k * f->columns;
        for (size_t j = 0; j < f->columns; j += FC_PANEL) {
            const size_t width = f->columns - j < FC_PANEL ? f->columns - j : FC_PANEL;
            memcpy(f->right + j * f->rank + k * FC_PANEL, row + j, width * sizeof *row);
        }
    }
}

/* Puts (columns, rank) into panels. */
static void pack_columns(const factors *f) {
    for (size_t j = 0; j < f->columns; j++) {
        float *to = f->right + j / FC_PANEL * FC_PANEL * f->rank + j % FC_PANEL;
        for (size_t k = 0; k < f->rank; k++) {
            to[k * FC_PANEL] = f->raw[j * f->rank + k];
        }
    }
}

/* Turns (rank, rows) around. */
static void turn_left(const factors *f) {
    for (size_t k = 0; k < f->rank; k++) {
        for (size_t i = 0; i < f->rows; i++) {
            f->left[i * f->rank + k] = f->raw[k * f->rows + i];
        }
    }
}

/* Adds some ranks of a product. */
static fc_code add_ranks(const fc_computed_block *b, const fc_low_rank *term, int64_t first, factors *f, float *sums,
                         fc_error *err) {
    const fc_tensor *left = term->transposed ? term->a : term->b, *right = term->transposed ? term->b : term->a;
    FC_TRY(read_factor(b, term, left, first, f, err));
    if (term->transposed) {
        turn_left(f);
    } else {
        memcpy(f->left, f->raw, f->rows * f->rank * sizeof *f->left);
    }
    FC_TRY(read_factor(b, term, right, first, f, err));
    (term->transposed ? pack_columns : pack_rows)(f);
    fc_low_rank_add(f->left, f->right, f->rank, term->scale, f->rows, f->columns, sums);
    return FC_OK;
}

/* Adds a product. */
static fc_code add_term(const fc_computed_block *b, const fc_low_rank *term, size_t rows, size_t columns, float *sums,
                        fc_error *err) {
    const int64_t ranks = term->a->shape[0];
    const size_t most = ranks < RANKS ? (size_t)ranks : RANKS, wide = (columns + FC_PANEL - 1) / FC_PANEL * FC_PANEL;
    factors f = {.rows = rows, .columns = columns};
    f.left = calloc((rows + SPARE_ROWS) * most + 1, sizeof *f.left);
    f.right = calloc(wide * most + 1, sizeof *f.right);
    f.raw = malloc(((rows > columns ? rows : columns) * most + 1) * sizeof *f.raw);
    fc_code rc = f.left && f.right && f.raw ? FC_OK : fc_no_memory(err, b->sources[0]->path);
    for (int64_t k = 0; rc == FC_OK && k < ranks; k += RANKS) {
        f.rank = ranks - k < RANKS ? (size_t)(ranks - k) : RANKS;
        rc = add_ranks(b, term, k, &f, sums, err);
    }
    free(f.left);
    free(f.right);
    free(f.raw);
    return rc;
}

fc_code fc_merged_compute(const fc_computed_block *b, fc_error *err) {
    const fc_merged *m = b->what;
    const size_t count = (size_t)fc_box_volume(&b->box), rows = b->box.ndim > 0 ? (size_t)b->box.sizes[0] : 1;
    float *sums = NULL;
    fc_code rc;
    if (m->nterms == 0) { /* only replaced */
        return fc_read_box_crc(b->sources[m->source], m->base, &b->box, b->tensor->dtype, b->out, b->crcs[m->source],
                               err);
    }
    sums = malloc((count + 1) * sizeof *sums);
    FC_TRY_GOTO(sums ? FC_OK : fc_no_memory(err, b->sources[0]->path), rc, out);
    FC_TRY_GOTO(fc_read_box_crc(b->sources[m->source], m->base, &b->box, FC_F32, sums, b->crcs[m->source], err), rc,
                out);
    for (size_t i = 0; i < m->nterms; i++) {
        FC_TRY_GOTO(add_term(b, &m->terms[i], rows, count / rows, sums, err), rc, out);
    }
    fc_cast(FC_F32, sums, b->tensor->dtype, b->out, count);
out:
    free(sums);
    return rc;
}
