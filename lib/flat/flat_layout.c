/*
 * The layout of flat parameters: order, alignment, shared parameters, and the elements in each rank's shard. It is
 * computed from the descriptions of a unit's parameters alone; train/flat_data.c moves the data.
 */
#include "fsdpckpt/flat_param.h"

#include "base/checked.h"
#include "fsdpckpt/try.h"
#include "sharding/flat_runs.h"

#include <string.h>

enum { ALIGNMENT = 16 }; /* bytes, as TorchInductor wants it */

/* The tables of a layout while they are filled. Each is allocated for the worst case. */
typedef struct builder {
    fc_flat_layout *out;
    fc_flat_param *params;
    fc_flat_shared *shared;
    int64_t *numels;
    bool *is_padding;
    int64_t *flattened; /* the index in `params` of each described parameter, or -1 if it is shared */
} builder;

static fc_code check_uniform(const fc_flat_desc *descs, size_t count, bool use_orig_params, fc_error *err) {
    if (count == 0) {
        return fc_fail(err, FC_EUSAGE, "a flat parameter needs at least one parameter");
    }
    for (size_t i = 0; i < count; i++) {
        const fc_flat_desc *d = &descs[i];
        if (fc_dtype_get(d->dtype)->cls != FC_CLASS_FLOAT) {
            return fc_fail(err, FC_EUSAGE, "%s: cannot flatten tensors of %s", d->fqn,
                           fc_dtype_get(d->dtype)->torch_name);
        }
        if (d->dtype != descs[0].dtype) {
            return fc_fail(err, FC_EUSAGE, "%s: must flatten tensors with uniform dtype but got %s and %s", d->fqn,
                           fc_dtype_get(descs[0].dtype)->torch_name, fc_dtype_get(d->dtype)->torch_name);
        }
        if (!use_orig_params && d->requires_grad != descs[0].requires_grad) {
            return fc_fail(err, FC_EUSAGE,
                           "%s: must flatten tensors with uniform requires_grad when use_orig_params=False", d->fqn);
        }
        if (d->ndim < 0 || d->ndim > FC_MAX_DIMS) {
            return fc_fail(err, FC_EUNSUPPORTED, "%s: has %d dimensions, at most %d are supported", d->fqn, d->ndim,
                           FC_MAX_DIMS);
        }
    }
    return FC_OK;
}

/* Whether the strides are a permutation of row-major strides: no gaps, and each element once. */
static bool is_dense(int ndim, const int64_t *sizes, const int64_t *strides) {
    int order[FC_MAX_DIMS], n = 0;
    for (int d = 0; d < ndim; d++) {
        if (sizes[d] == 1) {
            continue; /* its stride has no effect */
        }
        int at = n++;
        for (; at > 0 && strides[order[at - 1]] > strides[d]; at--) {
            order[at] = order[at - 1];
        }
        order[at] = d;
    }
    int64_t expected = 1;
    for (int i = 0; i < n; i++) {
        if (strides[order[i]] != expected || !fc_mul_i64(expected, sizes[order[i]], &expected)) {
            return false;
        }
    }
    return true;
}

static fc_code add_entry(builder *b, int64_t numel, bool padding, fc_error *err) {
    fc_flat_layout *out = b->out;
    if (!fc_add_i64(out->numel, numel, &out->numel)) {
        return fc_fail(err, FC_EUNSUPPORTED, "the flat parameter is larger than 64-bit sizes allow");
    }
    b->numels[out->nentries] = numel;
    b->is_padding[out->nentries++] = padding;
    return FC_OK;
}

/* Pads to the next multiple of `unit` elements. */
static fc_code align(builder *b, int64_t unit, fc_error *err) {
    int64_t rest = b->out->numel % unit;
    return rest == 0 ? FC_OK : add_entry(b, unit - rest, true, err);
}

static fc_code describe_param(const fc_flat_desc *d, fc_arena *arena, fc_flat_param *p, fc_error *err) {
    int64_t *dims = fc_arena_calloc(arena, 2 * (size_t)d->ndim, sizeof *dims);
    FC_NEED(dims, err, d->fqn);
    int64_t *shape = dims, *strides = dims + d->ndim;
    if (!fc_numel(d->ndim, d->shape, &p->numel) || !fc_row_major_strides(d->ndim, d->shape, strides)) {
        return fc_fail(err, FC_EUSAGE, "%s: a size is negative, or the parameter is too large", d->fqn);
    }
    p->contiguous = true;
    for (int i = 0; i < d->ndim; i++) {
        shape[i] = d->shape[i];
        if (d->strides && p->numel > 0 && d->shape[i] != 1 && d->strides[i] != strides[i]) {
            p->contiguous = false;
        }
    }
    if (!p->contiguous) {
        if (!is_dense(d->ndim, d->shape, d->strides)) {
            return fc_fail(err, FC_EUSAGE, "%s: its strides leave gaps or overlap; make it contiguous first", d->fqn);
        }
        memcpy(strides, d->strides, (size_t)d->ndim * sizeof *strides);
    }
    p->fqn = d->fqn;
    p->ndim = d->ndim;
    p->shape = shape;
    p->strides = strides;
    p->requires_grad = d->requires_grad;
    return FC_OK;
}

static fc_code add_param(builder *b, const fc_flat_desc *descs, size_t i, fc_arena *arena, fc_error *err) {
    fc_flat_layout *out = b->out;
    const fc_flat_desc *d = &descs[i];
    if (d->shared_with >= 0) {
        if ((size_t)d->shared_with >= i || b->flattened[d->shared_with] < 0) {
            return fc_fail(err, FC_EUSAGE, "%s: shared with parameter %lld, which is not an earlier one", d->fqn,
                           (long long)d->shared_with);
        }
        b->flattened[i] = -1;
        b->shared[out->nshared++] = (fc_flat_shared){d->fqn, (size_t)b->flattened[d->shared_with]};
        return FC_OK;
    }
    fc_flat_param *p = &b->params[out->nparams];
    if (out->aligned_numel > 0) {
        FC_TRY(align(b, out->aligned_numel, err));
    }
    FC_TRY(describe_param(d, arena, p, err));
    p->offset = out->numel;
    FC_TRY(add_entry(b, p->numel, false, err));
    out->requires_grad = out->requires_grad || d->requires_grad;
    b->flattened[i] = (int64_t)out->nparams++;
    return FC_OK;
}

static fc_code new_builder(builder *b, size_t count, fc_arena *arena, fc_error *err) {
    b->params = fc_arena_calloc(arena, count, sizeof *b->params);
    b->shared = fc_arena_calloc(arena, count, sizeof *b->shared);
    b->numels = fc_arena_calloc(arena, 2 * count + 1, sizeof *b->numels);
    b->is_padding = fc_arena_calloc(arena, 2 * count + 1, sizeof *b->is_padding);
    b->flattened = fc_arena_calloc(arena, count, sizeof *b->flattened);
    if (!b->params || !b->shared || !b->numels || !b->is_padding || !b->flattened) {
        return fc_fail(err, FC_ENOMEM, "out of memory for a flat parameter of %zu parameters", count);
    }
    return FC_OK;
}

fc_code fc_flat_layout_new(const fc_flat_desc *descs, size_t count, int64_t world_size, bool use_orig_params,
                           fc_dtype compute_dtype, fc_arena *arena, fc_flat_layout *out, fc_error *err) {
    builder b = {.out = out};
    FC_TRY(check_uniform(descs, count, use_orig_params, err));
    if (world_size < 1) {
        return fc_fail(err, FC_EUSAGE, "a flat parameter needs at least one rank, not %lld", (long long)world_size);
    }
    FC_TRY(new_builder(&b, count, arena, err));
    *out = (fc_flat_layout){.dtype = descs[0].dtype, .world_size = world_size};
    out->aligned_numel = use_orig_params ? ALIGNMENT / (int64_t)fc_dtype_size(compute_dtype) : 0;
    for (size_t i = 0; i < count; i++) {
        FC_TRY(add_param(&b, descs, i, arena, err));
    }
    if (use_orig_params) {
        FC_TRY(align(&b, world_size, err)); /* the reduce-scatter of the gradient then needs no copy */
    }
    if (out->numel == 0) {
        return fc_fail(err, FC_EUSAGE, "%s: a flat parameter without elements has no shards", descs[0].fqn);
    }
    int64_t all;
    out->shard_numel = out->numel / world_size + (out->numel % world_size != 0);
    if (!fc_mul_i64(out->shard_numel, world_size, &all)) {
        return fc_fail(err, FC_EUNSUPPORTED, "the flat parameter is larger than 64-bit sizes allow");
    }
    out->params = b.params;
    out->shared = b.shared;
    out->numels_with_padding = b.numels;
    out->is_padding = b.is_padding;
    return FC_OK;
}

static int64_t least(int64_t a, int64_t b) {
    return a < b ? a : b;
}

/* The ends are inclusive, as in torch, so a parameter without elements ends before it starts. */
fc_flat_shard_info fc_flat_shard_of(const fc_flat_layout *layout, size_t param, int64_t rank) {
    const fc_flat_param *p = &layout->params[param];
    int64_t start = layout->shard_numel * rank, end = start + layout->shard_numel - 1;
    int64_t first = p->offset, last = p->offset + p->numel - 1;
    fc_flat_shard_info info = {0};
    if (start > last || end < first) {
        return info;
    }
    info.in_shard = true;
    info.intra_param_start = start <= first ? 0 : start - first;
    info.offset_in_shard = start <= first ? first - start : 0;
    info.intra_param_end = least(last, end) - first;
    info.numel_in_shard = info.intra_param_end - info.intra_param_start + 1;
    return info;
}

/* Orders the dimensions as the elements are in memory: by descending stride. */
static void memory_order(const fc_flat_param *p, int *order, int64_t *shape) {
    for (int d = 0; d < p->ndim; d++) {
        int at = d;
        for (; !p->contiguous && at > 0 && p->strides[order[at - 1]] < p->strides[d]; at--) {
            order[at] = order[at - 1];
        }
        order[at] = d;
    }
    for (int d = 0; d < p->ndim; d++) {
        shape[d] = p->shape[order[d]];
    }
}

fc_code fc_flat_shard_visit(const fc_flat_layout *layout, size_t param, int64_t rank,
                            fc_code (*visit)(void *context, const fc_flat_box *box, fc_error *err), void *context,
                            fc_error *err) {
    const fc_flat_param *p = &layout->params[param];
    const fc_flat_shard_info info = fc_flat_shard_of(layout, param, rank);
    const int64_t end = info.intra_param_start + info.numel_in_shard;
    int64_t shape[FC_MAX_DIMS], dims[2 * FC_MAX_DIMS], strides[FC_MAX_DIMS], start;
    int order[FC_MAX_DIMS];
    fc_flat_run run;
    memory_order(p, order, shape);
    if (!info.in_shard || !fc_flat_run_start(&run, p->ndim, shape, info.intra_param_start, end)) {
        return FC_OK;
    }
    while (fc_flat_run_next(&run, dims, &start)) {
        fc_flat_box box = {.at = info.offset_in_shard + start - info.intra_param_start};
        fc_row_major_strides(p->ndim, dims + p->ndim, strides);
        for (int d = 0; d < p->ndim; d++) {
            box.offsets[order[d]] = dims[d];
            box.sizes[order[d]] = dims[p->ndim + d];
            box.strides[order[d]] = strides[d];
        }
        FC_TRY(visit(context, &box, err));
    }
    return FC_OK;
}

int64_t fc_flat_shard_padding(const fc_flat_layout *layout, int64_t rank) {
    int64_t left = layout->numel - layout->shard_numel * rank;
    return layout->shard_numel - (left < 0 ? 0 : least(left, layout->shard_numel));
}
