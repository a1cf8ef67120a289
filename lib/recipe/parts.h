/*
 * Tensors that are made of parts of other tensors: which element is where. Operations change the parts; nothing is
 * read.
 *
 * A part is a box whose element (i0, i1, …), counted along its axes, is at place tbase + Σ i × tstep of the tensor and
 * at place sbase + Σ i × sstep of its source, each axis along one dimension of both. Every operation keeps this form.
 */
#pragma once

#include "checkpoint/list_budget.h"
#include "recipe/recipe.h"

enum { FC_PART_DIMS = 8, FC_PART_AXES = 16 };

typedef struct fc_part_axis {
    int64_t size;         /**< more than 1 */
    int64_t tstep, sstep; /**< in elements, at least 1 */
    int tdim, sdim;
} fc_part_axis;

typedef struct fc_part {
    const fc_tensor *source; /**< NULL: zeros */
    int naxes;
    fc_part_axis axes[FC_PART_AXES];
    int64_t tbase[FC_PART_DIMS], sbase[FC_PART_DIMS];
} fc_part;

/** A tensor of parts, which cover it exactly once. `parts` is from malloc. */
typedef struct fc_parted {
    int ndim;
    int64_t shape[FC_PART_DIMS];
    fc_dtype dtype;
    fc_part *parts;
    size_t nparts, capacity;
    fc_list_budget *budget; /**< of the parts; NULL: they are not counted */
} fc_parted;

/** Frees the parts. */
void fc_parted_free(fc_parted *t);

/** Makes the one part that is all of `source`. What is made of it has the same budget. */
fc_code fc_parted_from(const fc_tensor *source, fc_list_budget *budget, fc_parted *out, fc_error *err);

/** Computes the smallest box of the source that contains a part. */
void fc_part_hull(const fc_part *part, int64_t *offsets, int64_t *sizes);

/** Removes axis `a` of a part: one index of it remains. */
void fc_part_remove_axis(fc_part *part, int a);

/** Returns whether the tensor is its source, unchanged. */
bool fc_parted_is_same(const fc_parted *t);

/** Joins `count` tensors along `dim`. Their parts move to `out`. */
fc_code fc_parted_concatenate(fc_parted *const *tensors, size_t count, int dim, fc_parted *out, fc_error *err);

/** Joins `count` tensors along a new dimension `dim`. */
fc_code fc_parted_stack(fc_parted *const *tensors, size_t count, int dim, fc_parted *out, fc_error *err);

/** Makes the part of `t` with places `low` … `high` - 1 along `dim`. `unstack` removes this dimension. */
fc_code fc_parted_slice(const fc_parted *t, int dim, int64_t low, int64_t high, bool unstack, fc_parted *out,
                        fc_error *err);

fc_code fc_parted_transpose(fc_parted *t, int dim, int other, fc_error *err);

/** Trims `dim` to `size`, or pads it with zeros. */
fc_code fc_parted_resize(fc_parted *t, int dim, int64_t size, fc_error *err);

/** einops' rearrange. */
fc_code fc_parted_rearrange(fc_parted *t, const fc_recipe *recipe, const fc_recipe_op *op, fc_error *err);

/** Turns a dimension that counts from the end into one that counts from the start. */
fc_code fc_parted_dim(int dim, int ndim, int *out, fc_error *err);
