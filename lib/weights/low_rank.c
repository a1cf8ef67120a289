/*
 * Computes blocks of weights with products added: see low_rank.h. The factors that a block needs are read once and put
 * in the order of the kernel. Then stripes of some rows are converted to float32, summed and converted back in the
 * cache.
 */
#include "weights/low_rank.h"

#include "fsdpckpt/cast.h"
#include "fsdpckpt/try.h"
#include "read/box.h"

#include <string.h>

/*
 * A block has BYTES at most. Its right factors have RIGHT elements, unless that left fewer columns than LEAST_COLUMNS.
 * A factor is read in parts of PART elements. A stripe has STRIPE rows.
 */
enum { BYTES = 1 << 20, RIGHT = 256 << 10, COLUMNS = 8192, LEAST_COLUMNS = 256, PART = 128 << 10, STRIPE = 24 };

/* The buffers of a block. */
enum { LEFT_BUFFER, RIGHT_BUFFER, PART_BUFFER, SUMS_BUFFER };

int64_t fc_low_rank_of(const fc_low_rank *term) {
    return term->a->shape[0] / (term->experts > 0 ? term->experts : 1);
}

static int64_t all_ranks(const fc_merged *m) {
    int64_t ranks = 0;
    for (size_t i = 0; i < m->nterms; i++) {
        ranks += fc_low_rank_of(&m->terms[i]);
    }
    return ranks;
}

/* @return the dimension of a weight's rows: the second if the first counts experts. */
static int row_dim(const fc_merged *m) {
    return m->nterms > 0 && m->terms[0].experts > 0 ? 1 : 0;
}

/* Limits the columns of a block, i.e. the product of all dimensions but the first. */
static int64_t most_columns(const fc_merged *m) {
    const int64_t ranks = all_ranks(m), fit = ranks > 0 ? RIGHT / ranks / FC_PANEL * FC_PANEL : COLUMNS;
    return fit < LEAST_COLUMNS ? LEAST_COLUMNS : fit > COLUMNS ? COLUMNS : fit;
}

void fc_merged_blocks(const fc_merged *m, const fc_tensor *t, int64_t *block) {
    int64_t room = most_columns(m), columns = 1;
    const int first = row_dim(m);
    for (int d = t->ndim - 1; d > first; d--) {
        block[d] = t->shape[d] < room ? t->shape[d] : room;
        columns *= block[d] > 0 ? block[d] : 1;
        room = block[d] > 0 && room / block[d] > 0 ? room / block[d] : 1;
    }
    if (t->ndim > 0) {
        const int64_t rows = BYTES / (int64_t)fc_dtype_size(t->dtype) / columns;
        block[0] = 1; /* one expert */
        block[first] = t->shape[first] < rows ? t->shape[first] : rows;
    }
}

/* The factors of all products, for a block of `rows` × `columns`. */
typedef struct factors {
    const fc_computed_block *block;
    size_t rows, columns, wide; /* wide: columns of whole panels */
    int row_dim;
    float *left, *right, *part;
} factors;

/* Keeps every `step`-th value of each row of (ranks - 1) × step + 1 values in f->part. */
static void pick(const factors *f, int64_t step, size_t ranks, size_t rows) {
    const size_t width = (ranks - 1) * (size_t)step + 1;
    for (size_t i = 0; step > 1 && i < rows; i++) {
        for (size_t k = 0; k < ranks; k++) {
            f->part[i * ranks + k] = f->part[i * width + k * (size_t)step];
        }
    }
}

/* Reads some ranks of a factor into f->part, for the places that the block has. */
static fc_code read_part(const factors *f, const fc_low_rank *term, const fc_tensor *factor, size_t first, size_t ranks,
                         fc_error *err) {
    int64_t offsets[FC_MAX_DIMS] = {0}, sizes[FC_MAX_DIMS];
    const fc_box box = {factor->ndim, offsets, sizes}, *of = &f->block->box;
    const bool is_a = factor == term->a;
    const int64_t step = term->experts > 0 && !is_a ? term->experts : 1,
                  expert = term->experts > 0 ? of->offsets[0] : 0;
    const int64_t begin = is_a ? expert * fc_low_rank_of(term) + (int64_t)first : (int64_t)first * step + expert;
    for (int d = 0; d < factor->ndim; d++) {
        const bool is_rank = d == (is_a ? 0 : 1), follows = is_a ? d > 0 : d == 0;
        const int w = (term->transposed ? 1 - d : d) + f->row_dim; /* the weight's dimension; two if it is transposed */
        sizes[d] = is_rank ? ((int64_t)ranks - 1) * step + 1 : follows ? of->sizes[w] : 1;
        offsets[d] = is_rank ? begin : follows ? of->offsets[w] : 0;
    }
    FC_TRY(fc_read_box_crc(f->block->sources[term->source], factor, &box, FC_F32, f->part, NULL, err));
    pick(f, step, ranks, is_a ? 1 : (size_t)sizes[0]);
    return FC_OK;
}

/* Puts (ranks, columns) into panels of `rank` rows, from row `first` on. */
static void pack_rows(const factors *f, float *right, size_t rank, size_t first, size_t ranks) {
    const size_t whole = f->columns / FC_PANEL * FC_PANEL;
    for (size_t k = 0; k < ranks; k++) {
        const float *row = f->part + k * f->columns;
        float *to = right + (first + k) * FC_PANEL;
        for (size_t j = 0; j < whole; j += FC_PANEL) {
            memcpy(to + j * rank, row + j, FC_PANEL * sizeof *row);
        }
        memcpy(to + whole * rank, row + whole, (f->columns - whole) * sizeof *row);
    }
}

/* Puts (columns, ranks) into panels. */
static void pack_columns(const factors *f, float *right, size_t rank, size_t first, size_t ranks) {
    for (size_t j = 0; j < f->columns; j++) {
        float *to = right + j / FC_PANEL * FC_PANEL * rank + j % FC_PANEL;
        for (size_t k = 0; k < ranks; k++) {
            to[(first + k) * FC_PANEL] = f->part[j * ranks + k];
        }
    }
}

/* Puts (rows, ranks), or (ranks, rows) if transposed, into rows of `rank`. */
static void put_left(const factors *f, bool transposed, float *left, size_t rank, size_t first, size_t ranks) {
    for (size_t i = 0; i < f->rows; i++) {
        for (size_t k = 0; k < ranks; k++) {
            left[i * rank + first + k] = f->part[transposed ? k * f->rows + i : i * ranks + k];
        }
    }
}

/* @return how many ranks of a factor are read at once, for `places` rows or columns. */
static size_t most_ranks(const fc_low_rank *term, size_t places) {
    const size_t ranks = PART / places / (term->experts > 0 ? (size_t)term->experts : 1);
    return ranks > 0 ? ranks : 1;
}

/* Reads a factor part by part. */
static fc_code read_factor(const factors *f, const fc_low_rank *term, bool right, float *to, size_t rank,
                           fc_error *err) {
    const size_t step = most_ranks(term, right ? f->columns : f->rows);
    for (size_t k = 0; k < rank; k += step) {
        const size_t ranks = rank - k < step ? rank - k : step;
        FC_TRY(read_part(f, term, term->transposed != right ? term->a : term->b, k, ranks, err));
        if (right) {
            (term->transposed ? pack_columns : pack_rows)(f, to, rank, k, ranks);
        } else {
            put_left(f, term->transposed, to, rank, k, ranks);
        }
    }
    return FC_OK;
}

/* @return whether the buffers still hold the right factors of an earlier block with the same columns and expert. */
static bool holds_right(const factors *f, const fc_merged *m) {
    const fc_box *box = &f->block->box;
    bool same = f->block->work->holds == m;
    for (int d = 0; same && d < box->ndim; d++) {
        same = d == f->row_dim ||
               (f->block->work->from[d] == box->offsets[d] && f->block->work->extent[d] == box->sizes[d]);
    }
    return same;
}

static void note_right(const factors *f, const fc_merged *m) {
    const fc_box *box = &f->block->box;
    const size_t size = (size_t)box->ndim * sizeof *box->sizes;
    f->block->work->holds = m;
    memcpy(f->block->work->from, box->offsets, size);
    memcpy(f->block->work->extent, box->sizes, size);
}

/* Reads the factors of all products, one after the other. */
static fc_code read_factors(factors *f, const fc_merged *m, fc_error *err) {
    const bool again = holds_right(f, m);
    fc_work *work = f->block->work;
    const size_t ranks = (size_t)all_ranks(m), longest = f->rows > f->columns ? f->rows : f->columns;
    const size_t rights = f->wide * ranks * sizeof(float), part = longest > PART ? longest : PART;
    f->left = fc_work_buffer(work, LEFT_BUFFER, (f->rows + FC_LEFT_SPARE * m->nterms) * ranks * sizeof(float));
    f->right = fc_work_buffer(work, RIGHT_BUFFER, rights);
    f->part = fc_work_buffer(work, PART_BUFFER, part * sizeof(float));
    FC_NEED(f->left && f->right && f->part, err, f->block->sources[0]->path);
    work->holds = NULL;
    if (f->wide > f->columns && !again) {
        memset(f->right, 0, rights); /* the last panel is padded with zeros */
    }
    float *left = f->left, *right = f->right;
    for (size_t i = 0; i < m->nterms; i++) {
        const size_t rank = (size_t)fc_low_rank_of(&m->terms[i]);
        FC_TRY(read_factor(f, &m->terms[i], false, left, rank, err));
        FC_TRY(again ? FC_OK : read_factor(f, &m->terms[i], true, right, rank, err));
        memset(left + f->rows * rank, 0, FC_LEFT_SPARE * rank * sizeof *left);
        left += (f->rows + FC_LEFT_SPARE) * rank;
        right += f->wide * rank;
    }
    note_right(f, m);
    return FC_OK;
}

/* Adds all products to rows from `first` on. */
static void add_stripe(const factors *f, const fc_merged *m, size_t first, size_t rows, float *sums) {
    const float *left = f->left, *right = f->right;
    for (size_t i = 0; i < m->nterms; i++) {
        const size_t rank = (size_t)fc_low_rank_of(&m->terms[i]);
        fc_low_rank_add(left + first * rank, right, rank, m->terms[i].scale, rows, f->columns, sums);
        left += (f->rows + FC_LEFT_SPARE) * rank;
        right += f->wide * rank;
    }
}

static fc_code add_products(const fc_computed_block *b, const fc_merged *m, fc_error *err) {
    const fc_dtype dtype = b->tensor->dtype;
    factors f = {.block = b, .row_dim = row_dim(m)};
    f.rows = (size_t)b->box.sizes[f.row_dim];
    f.columns = (size_t)fc_box_volume(&b->box) / f.rows;
    f.wide = (f.columns + FC_PANEL - 1) / FC_PANEL * FC_PANEL;
    float *sums = fc_work_buffer(b->work, SUMS_BUFFER, STRIPE * f.columns * sizeof *sums);
    FC_TRY(sums ? read_factors(&f, m, err) : fc_no_memory(err, b->sources[0]->path));
    for (size_t i = 0; i < f.rows; i += STRIPE) {
        const size_t rows = f.rows - i < STRIPE ? f.rows - i : STRIPE;
        unsigned char *at = (unsigned char *)b->out + i * f.columns * fc_dtype_size(dtype);
        fc_cast(dtype, at, FC_F32, sums, rows * f.columns);
        add_stripe(&f, m, i, rows, sums);
        fc_cast(FC_F32, sums, dtype, at, rows * f.columns);
    }
    return FC_OK;
}

fc_code fc_merged_compute(const fc_computed_block *b, fc_error *err) {
    const fc_merged *m = b->what;
    FC_TRY(fc_read_box_crc(b->sources[m->source], m->base, &b->box, b->tensor->dtype, b->out, b->crcs[m->source], err));
    return m->nterms > 0 ? add_products(b, m, err) : FC_OK;
}
