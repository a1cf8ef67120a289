/*
 * Computes how many bytes each rank's file will store, for the report of a dry run. Laying out every rank's file would
 * take minutes on a large mesh. But a model has thousands of tensors and few shapes, and tensors with the same shape,
 * element size, placements and owner add the same load, so each kind is laid out once.
 */
#include "fsdpckpt/order.h"
#include "fsdpckpt/replica_owner.h"
#include "fsdpckpt/select.h"

#include "base/checked.h"
#include "fsdpckpt/try.h"

#include <stdlib.h>
#include <string.h>

static int compare_placements(const fc_placement *a, const fc_placement *b, int count) {
    for (int m = 0; m < count; m++) {
        FC_ORDER_BY(a[m].kind, b[m].kind);
        FC_ORDER_BY(a[m].dim, b[m].dim);
        FC_ORDER_BY(a[m].split_factor, b[m].split_factor);
    }
    return 0;
}

/* @return 0 for two tensors that add the same load to every rank. */
static int compare_alike(const void *pa, const void *pb, void *context) {
    const fc_target *target = context;
    const fc_target_tensor *a = &target->tensors[*(const uint32_t *)pa], *b = &target->tensors[*(const uint32_t *)pb];
    FC_ORDER_BY(a->source->ndim, b->source->ndim);
    const int order = fc_order_row(a->source->shape, b->source->shape, (size_t)a->source->ndim);
    FC_ORDER_BY(order, 0);
    FC_ORDER_BY(fc_dtype_size(a->dtype), fc_dtype_size(b->dtype));
    FC_ORDER_BY(a->owner_offset, b->owner_offset);
    return compare_placements(a->placements, b->placements, target->mesh->ndim);
}

static fc_code too_large(const fc_target *target, fc_error *err) {
    return fc_fail(err, FC_ECORRUPT, "%s: the total size of its tensors exceeds 64 bits", target->source->path);
}

/* Steps to the next stored box. Mesh dimensions that replicate keep the owner's coordinate, unless every rank stores
   its own copy. @return false after the last. */
static bool next_box(const fc_target *target, const fc_placement *placements, int64_t *coordinate) {
    const fc_mesh *mesh = target->mesh;
    for (int m = mesh->ndim - 1; m >= 0; m--) {
        if (placements[m].kind == FC_REPLICATE && !target->self_contained) {
            continue;
        }
        if (++coordinate[m] < mesh->sizes[m]) {
            return true;
        }
        coordinate[m] = 0;
    }
    return false;
}

/* Adds the boxes of `t`, `times` times, to the loads of the ranks that store them. */
static fc_code add_boxes(const fc_target *target, const fc_target_tensor *t, uint64_t times, uint64_t *loads,
                         fc_error *err) {
    const fc_mesh *mesh = target->mesh;
    int64_t coordinate[FC_MAX_MESH_DIMS] = {0}, offsets[FC_MAX_DIMS], sizes[FC_MAX_DIMS];
    const fc_tensor *source = t->source;
    const fc_box box = {source->ndim, offsets, sizes};
    if (!target->self_contained) {
        fc_mesh_coordinate(mesh, fc_replica_owner(mesh, t->placements, coordinate, t->owner_offset), coordinate);
    }
    do {
        FC_TRY_CONTEXT(fc_local_box(source->ndim, source->shape, mesh, t->placements, coordinate, offsets, sizes, err),
                       err, "tensor '%s'", t->name);
        uint64_t bytes, *load = &loads[fc_mesh_rank(mesh, coordinate)];
        if (!fc_mul_u64((uint64_t)fc_box_volume(&box), fc_dtype_size(t->dtype), &bytes) ||
            !fc_mul_u64(bytes, times, &bytes) || !fc_add_u64(*load, bytes, load)) {
            return too_large(target, err);
        }
    } while (next_box(target, t->placements, coordinate));
    return FC_OK;
}

/* Adds a value that is not sharded: an object, or anything when there is no mesh. */
static fc_code add_whole(const fc_target *target, const fc_target_tensor *t, uint64_t *loads, fc_error *err) {
    const fc_box whole = {t->source->ndim, t->source->shape, t->source->shape};
    int64_t holders = target->self_contained ? fc_mesh_ranks(target->mesh) : 1;
    uint64_t bytes;
    if (!fc_mul_u64((uint64_t)fc_box_volume(&whole), fc_dtype_size(t->dtype), &bytes)) {
        return too_large(target, err);
    }
    for (int64_t rank = 0; rank < holders; rank++) {
        if (!fc_add_u64(loads[rank], bytes, &loads[rank])) {
            return too_large(target, err);
        }
    }
    return FC_OK;
}

fc_code fc_target_loads(const fc_target *target, uint64_t *loads, fc_error *err) {
    size_t count = 0;
    fc_code rc = FC_OK;
    uint32_t *order = malloc((target->ntensors ? target->ntensors : 1) * sizeof *order);
    FC_NEED(order, err, target->source->path);
    memset(loads, 0, (size_t)fc_mesh_ranks(target->mesh) * sizeof *loads);
    for (size_t i = 0; i < target->ntensors; i++) {
        const fc_target_tensor *t = &target->tensors[i];
        if (target->mesh->ndim == 0 || t->source->object) {
            FC_TRY_GOTO(add_whole(target, t, loads, err), rc, out);
        } else {
            order[count++] = (uint32_t)i;
        }
    }
    fc_sort_items_by(order, count, sizeof *order, compare_alike, (void *)(uintptr_t)target);
    for (size_t i = 0, end; i < count; i = end) {
        for (end = i + 1; end < count && compare_alike(&order[i], &order[end], (void *)(uintptr_t)target) == 0; end++) {
        }
        FC_TRY_GOTO(add_boxes(target, &target->tensors[order[i]], end - i, loads, err), rc, out);
    }
out:
    free(order);
    return rc;
}

uint64_t fc_target_boxes(const fc_target *target) {
    uint64_t total = 0;
    for (size_t i = 0; i < target->ntensors; i++) {
        const fc_target_tensor *t = &target->tensors[i];
        uint64_t boxes = 1;
        for (int m = 0; !t->source->object && m < target->mesh->ndim; m++) {
            /* At most 2^20 ranks, so this does not overflow. */
            boxes *= t->placements[m].kind == FC_REPLICATE ? 1 : (uint64_t)target->mesh->sizes[m];
        }
        total = fc_add_u64(total, boxes, &total) ? total : UINT64_MAX;
    }
    return total;
}
