/*
 * Adds products of two thin matrices to weights: what merging a LoRA adapter computes.
 */
#pragma once

#include "weights/computed.h"

/** One product: scale × B × A, or scale × (B × A) transposed. */
typedef struct fc_low_rank {
    size_t source;          /**< of a and b; index into fc_computed_block.sources */
    const fc_tensor *a, *b; /**< (rank, in, …) and (out, rank, …); NULL: there is no product */
    float scale;
    bool transposed; /**< the weight is (in, out) */
    int64_t experts; /**< 0: a plain weight. Else it is (experts, out, in), a is (experts × rank, in), and of b (out,
                        rank × experts) each expert has every column that is `experts` after the last */
} fc_low_rank;

/** @return the rank of a product: of one expert. */
int64_t fc_low_rank_of(const fc_low_rank *term);

/** A weight that gets products added. fc_computed_block.what points to it. */
typedef struct fc_merged {
    size_t source; /**< of base */
    const fc_tensor *base;
    fc_low_rank *terms;
    size_t nterms;
} fc_merged;

/** Computes the sizes of blocks of `weight` for fc_merged_compute. */
void fc_merged_blocks(const fc_merged *merged, const fc_tensor *weight, int64_t *block);

/** Computes a block of fc_merged: in float32, in the order of the terms, rounded once. */
fc_code fc_merged_compute(const fc_computed_block *block, fc_error *err);

/** Columns of the right matrix that the kernel takes at once, and readable rows that follow the last of the left. */
enum { FC_PANEL = 32, FC_LEFT_SPARE = 12 };

/**
 * Adds scale × left × right to `out`: (rows × rank) × (rank × columns). Every element is one chain of fused
 * multiply-adds in the order of the rank, so the bits are the same on all processors.
 * @param left  row-major, followed by FC_LEFT_SPARE rows of any value.
 * @param right in panels: panel p has its FC_PANEL columns of row 0, then those of row 1, …; the last one is filled up.
 * @param out   row-major.
 */
void fc_low_rank_add(const float *left, const float *right, size_t rank, float scale, size_t rows, size_t columns,
                     float *out);

/** Whether B × A has the shape of the weight; with more dimensions, each place of a convolution's kernel is one more
 * column. */
bool fc_low_rank_fits(const fc_tensor *w, const fc_low_rank *term);

/** Whether (B × A) transposed has the shape of the weight. */
bool fc_low_rank_fits_transposed(const fc_tensor *w, const fc_low_rank *term);

/**
 * Whether the factors of all experts, one below the other in A, fit a parameter (experts, out, in), which is straight,
 * or (experts, in, out), which is across.
 */
bool fc_low_rank_fits_experts(const fc_tensor *w, const fc_tensor *a, const fc_tensor *b, bool *straight, bool *across);
