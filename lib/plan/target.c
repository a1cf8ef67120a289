/*
 * Builds the target from a source's manifest: selects values by glob, renames them, and sets their dtype and
 * placements. Also lists what one rank's file contains. No I/O.
 */
#include "fsdpckpt/order.h"
#include "fsdpckpt/replica_owner.h"
#include "fsdpckpt/select.h"

#include "base/checked.h"
#include "fsdpckpt/sharding.h"
#include "fsdpckpt/try.h"
#include "plan/dtypes.h"
#include "plan/globs.h"
#include "plan/rename.h"
#include "plan/target_file.h"
#include "sharding/tp_plan.h"

#include <stdlib.h>
#include <string.h>

/* A source's names are unique, so only renaming can make two of them equal. */
static fc_code check_unique(const fc_target_tensor *tensors, size_t count, fc_error *err) {
    const fc_target_tensor **sorted = fc_list_named(tensors, count, sizeof *tensors);
    FC_NEED(sorted, err, NULL);
    fc_code rc = FC_OK;
    for (size_t i = 1; i < count && rc == FC_OK; i++) {
        if (strcmp(sorted[i - 1]->name, sorted[i]->name) == 0) {
            rc = fc_fail(err, FC_EUSAGE, "'%s' and '%s' would both be renamed to '%s'", sorted[i - 1]->source->name,
                         sorted[i]->source->name, sorted[i]->name);
        }
    }
    free(sorted);
    return rc;
}

static fc_code select_each(const fc_checkpoint *source, const fc_selection *selection, fc_rename *rename,
                           fc_arena *arena, fc_target_tensor *tensors, fc_selected *counts, fc_error *err) {
    size_t n = 0;
    bool renamed = false;
    for (size_t i = 0; i < source->ntensors; i++) {
        const fc_tensor *t = &source->tensors[i];
        if (!fc_selects(selection, t->name)) {
            counts->left_out++;
            continue;
        }
        fc_target_tensor *w = &tensors[n++];
        w->source = t;
        FC_TRY(fc_rename_apply(rename, t, arena, &w->name, &w->path, &renamed, err));
        *(t->object ? &counts->objects : &counts->tensors) += 1;
    }
    if (n == 0 && source->ntensors == 0) {
        return FC_OK;
    }
    if (n == 0) {
        return fc_fail(err, FC_EUSAGE, "%s: nothing is selected: all %zu names are excluded", source->path,
                       source->ntensors);
    }
    FC_TRY(fc_rename_check_used(rename, source->path, tensors[0].name, err));
    FC_TRY(fc_choose_dtypes(source, selection, tensors, n, err));
    return renamed ? check_unique(tensors, n, err) : FC_OK;
}

static fc_code select_tensors(const fc_checkpoint *source, const fc_selection *selection, fc_arena *arena,
                              fc_target_tensor **out, fc_selected *counts, fc_error *err) {
    fc_rename *rename = NULL;
    if (source->ntensors == 0 && !selection->may_be_empty) {
        return fc_fail(err, FC_EUSAGE, "%s: nothing to write: the checkpoint has no tensors and no objects",
                       source->path);
    }
    *out = fc_arena_calloc(arena, source->ntensors + 1, sizeof **out);
    FC_NEED(*out, err, source->path);
    FC_TRY(fc_rename_new(selection, &rename, err));
    fc_code rc = select_each(source, selection, rename, arena, *out, counts, err);
    fc_rename_free(rename);
    return rc;
}

/* In the order of the sections, and of the source within each. */
static int compare_sections(const void *a, const void *b) {
    const fc_target_tensor *x = a, *y = b;
    FC_ORDER_BY(x->section, y->section);
    return FC_ORDER(x->source, y->source);
}

static fc_code arrange_sections(const fc_checkpoint *source, const fc_selection *selection, fc_target_tensor *tensors,
                                size_t count, fc_error *err) {
    if (!selection->traits || !selection->traits->set_sections) {
        return FC_OK;
    }
    FC_TRY_CONTEXT(selection->traits->set_sections(tensors, count, err), err, "%s", source->path);
    fc_sort_items(tensors, count, sizeof *tensors, compare_sections);
    return FC_OK;
}

/* With more than one TP rank, a plan that shards no tensor must be the wrong plan. */
static fc_code check_tp(const fc_target *target, const fc_tp_plan *plan, const fc_selected *counts, fc_error *err) {
    const int64_t tp = fc_mesh_size(target->mesh, "tp");
    const char *like[2] = {"", ""};
    int found = 0;
    if (tp == 1 || counts->tp_sharded > 0) {
        return FC_OK;
    }
    for (size_t i = 0; i < target->ntensors && found < 2; i++) {
        if (!target->tensors[i].source->object && target->tensors[i].source->ndim > 0) {
            like[found++] = target->tensors[i].name;
        }
    }
    fc_code rc = fc_fail(
        err, FC_EUSAGE, "%s: the TP plan '%s' shards none of the %zu tensors over %lld ranks%s%s%s%s%s",
        target->source->path, plan ? fc_tp_plan_name(plan) : "none", counts->tensors, (long long)tp,
        found > 0 ? "; names are like '" : "", like[0], found > 1 ? "' and '" : "", like[1], found > 0 ? "'" : "");
    return fc_advise(err, rc, FC_HINT_TP_PLAN, NULL);
}

/* Counts the rules that apply to no tensor. The built-in plan is exempt, because its rules are for many models. */
static fc_code find_idle_rules(const fc_target *target, const fc_tp_plan *plan, fc_selected *counts, fc_error *err) {
    if (!plan || strcmp(fc_tp_plan_name(plan), "auto") == 0) {
        return FC_OK;
    }
    size_t rules = fc_tp_plan_rules(plan);
    bool *decides = calloc(rules ? rules : 1, sizeof *decides);
    FC_NEED(decides, err, target->source->path);
    for (size_t i = 0; i < target->ntensors; i++) {
        int64_t rule = target->tensors[i].source->object ? -1 : fc_tp_plan_rule_of(plan, target->tensors[i].name);
        if (rule >= 0) {
            decides[rule] = true;
        }
    }
    for (size_t rule = rules; rule-- > 0;) {
        if (!decides[rule]) {
            counts->idle_rules++;
            counts->idle_rule = fc_tp_plan_pattern(plan, rule);
        }
    }
    free(decides);
    return FC_OK;
}

/* Computes the placements from the mesh and the TP plan. */
static fc_code plan_placements(const fc_target *target, const fc_selection *selection, fc_arena *arena,
                               fc_selected *counts, fc_placement **out, fc_error *err) {
    size_t n = target->ntensors, width = (size_t)target->mesh->ndim;
    fc_placement *placements = fc_arena_calloc(arena, n * width, sizeof *placements);
    FC_NEED(placements, err, target->source->path);
    for (size_t i = 0; i < n; i++) {
        const fc_tensor *t = target->tensors[i].source;
        fc_tp_style style = FC_TP_NONE;
        int tp_dim = -1;
        if (selection->tp_plan && !t->object) {
            tp_dim = fc_tp_plan_dim(selection->tp_plan, target->tensors[i].name, t->ndim, &style);
        }
        if (!t->object && (!selection->flat_state || selection->is_sharded(target->source, t))) {
            /* Otherwise Replicate along all dimensions: rank 0's file contains every object. */
            fc_layout_placements(target->mesh, t->ndim, tp_dim, &placements[i * width]);
        }
        counts->tp_sharded += tp_dim >= 0;
    }
    *out = placements;
    FC_TRY(check_tp(target, selection->tp_plan, counts, err));
    return find_idle_rules(target, selection->tp_plan, counts, err);
}

/* Sets the placements of each value, and which rank stores it if it is replicated. */
static fc_code place_tensors(const fc_target *target, fc_placement *placements, const uint32_t *given,
                             fc_target_tensor *tensors, fc_error *err) {
    size_t n = target->ntensors, width = (size_t)target->mesh->ndim;
    uint64_t *bytes = calloc(n + 1, sizeof *bytes);
    uint32_t *owners = calloc(n + 1, sizeof *owners);
    fc_code rc = FC_OK;
    FC_TRY_GOTO(bytes && owners ? FC_OK : fc_no_memory(err, target->source->path), rc, out);
    for (size_t i = 0; i < n; i++) {
        const fc_tensor *t = tensors[i].source;
        int64_t numel = 0;
        if (!fc_numel(t->ndim, t->shape, &numel) ||
            !fc_mul_u64((uint64_t)numel, fc_dtype_size(tensors[i].dtype), &bytes[i])) {
            rc = fc_fail(err, FC_ECORRUPT, "%s: tensor '%s': its size exceeds 64 bits", target->source->path, t->name);
            goto out;
        }
        tensors[i].placements = &placements[i * width];
    }
    FC_TRY_GOTO(given ? FC_OK : fc_spread_owners(target->mesh, n, bytes, placements, owners, err), rc, out);
    for (size_t i = 0; i < n; i++) {
        const uint32_t owner = given ? given[tensors[i].source - target->source->tensors] : owners[i];
        tensors[i].owner_offset = tensors[i].source->object ? 0 : owner;
    }
out:
    free(bytes);
    free(owners);
    return rc;
}

/* Takes the mesh and the placements from the source. */
static fc_code keep_layout(fc_target *target, fc_arena *arena, fc_placement **placements, fc_error *err) {
    const fc_tensor **sources = fc_arena_calloc(arena, target->ntensors + 1, sizeof *sources);
    fc_mesh *mesh = fc_arena_calloc(arena, 1, sizeof *mesh);
    FC_NEED(sources && mesh, err, target->source->path);
    for (size_t i = 0; i < target->ntensors; i++) {
        sources[i] = target->tensors[i].source;
    }
    target->mesh = mesh;
    return fc_recognise_layout(target->source, target->ntensors, sources, arena, mesh, placements, err);
}

fc_code fc_target_adapt(const fc_checkpoint *source, const fc_format *format, fc_selection *selection, size_t *left_out,
                        fc_checkpoint **out, fc_error *err) {
    *out = NULL;
    if (!format->target.adapt) {
        return FC_OK;
    }
    FC_TRY(format->target.adapt(source, selection, left_out, out, err));
    selection->include = selection->exclude = selection->rename = NULL;
    selection->strip_prefix = NULL;
    return FC_OK;
}

fc_code fc_target_new(const fc_checkpoint *source, const fc_selection *selection, fc_arena *arena, fc_target *out,
                      fc_selected *counts, fc_error *err) {
    static const fc_mesh no_mesh = {0};
    fc_target_tensor *tensors = NULL;
    memset(counts, 0, sizeof *counts);
    FC_TRY(fc_check_includes(source, selection->include, err));
    FC_TRY(select_tensors(source, selection, arena, &tensors, counts, err));
    FC_TRY(arrange_sections(source, selection, tensors, counts->tensors + counts->objects, err));
    if (selection->arrange) {
        FC_TRY(selection->arrange(selection->arrange_context, tensors, counts->tensors + counts->objects, err));
    }
    out->source = source;
    out->mesh = selection->mesh ? selection->mesh : &no_mesh;
    out->tensors = tensors;
    out->ntensors = counts->tensors + counts->objects;
    out->compress = selection->compress;
    out->self_contained = selection->traits && selection->traits->self_contained;
    out->flat_state = selection->flat_state;
    out->max_file_bytes = selection->max_file_bytes;
    fc_placement *placements = NULL;
    if (selection->keep_layout) {
        FC_TRY(keep_layout(out, arena, &placements, err));
    } else if (out->mesh->ndim > 0) {
        FC_TRY(plan_placements(out, selection, arena, counts, &placements, err));
    }
    return placements ? place_tensors(out, placements, selection->owner_offsets, tensors, err) : FC_OK;
}

fc_code fc_target_item_of(const fc_target *target, uint32_t tensor, uint32_t rank, int64_t *dims, fc_target_item *item,
                          fc_error *err) {
    const fc_target_tensor *t = &target->tensors[tensor];
    int64_t coordinate[FC_MAX_MESH_DIMS];
    int ndim = t->source->ndim;
    *item = (fc_target_item){.tensor = tensor, .owner = rank, .owned = true, .dims = dims};
    if (target->mesh->ndim == 0 || t->source->object) {
        item->owner = 0;
        for (int d = 0; d < ndim; d++) { /* not memcpy: the shape of a scalar may be NULL */
            dims[d] = 0;
            dims[ndim + d] = t->source->shape[d];
        }
        return FC_OK;
    }
    fc_mesh_coordinate(target->mesh, rank, coordinate);
    FC_TRY_CONTEXT(
        fc_local_box(ndim, t->source->shape, target->mesh, t->placements, coordinate, dims, dims + ndim, err), err,
        "tensor '%s'", t->name);
    if (!fc_is_empty(ndim, dims + ndim)) {
        item->owner = (uint32_t)fc_replica_owner(target->mesh, t->placements, coordinate, t->owner_offset);
        item->owned = item->owner == rank || target->self_contained;
    }
    return FC_OK;
}

bool fc_target_chunk(int ndim, const int64_t *sizes, uint32_t element, int64_t *chunk) {
    int64_t room = FC_CHUNK_BYTES / element, volume;
    if (ndim == 0 || !fc_numel(ndim, sizes, &volume) || volume < (FC_CHUNK_LEAST + element - 1) / element) {
        return false;
    }
    for (int d = ndim - 1; d >= 0; d--) {
        int64_t most = room < 1 ? 1 : room;
        int64_t chunks = (sizes[d] - 1) / most + 1;
        chunk[d] = (sizes[d] - 1) / chunks + 1; /* evenly: little padding in the last one */
        room = chunks > 1 ? 1 : room / sizes[d];
    }
    return true;
}

fc_code fc_target_file_of(const fc_target *target, uint32_t rank, fc_arena *arena, fc_target_file *out, fc_error *err) {
    size_t ndims = 0;
    for (size_t i = 0; i < target->ntensors; i++) {
        ndims += (target->compress ? 3 : 2) * (size_t)target->tensors[i].source->ndim;
    }
    memset(out, 0, sizeof *out);
    out->rank = rank;
    out->items = fc_arena_calloc(arena, target->ntensors, sizeof *out->items);
    int64_t *dims = fc_arena_calloc(arena, ndims, sizeof *dims);
    FC_NEED(out->items && dims, err, target->source->path);
    for (size_t i = 0; i < target->ntensors; i++) {
        const fc_tensor *t = target->tensors[i].source;
        if (t->object && rank != 0 && !target->self_contained) {
            continue;
        }
        fc_target_item *item = &out->items[out->nitems++];
        FC_TRY(fc_target_item_of(target, (uint32_t)i, rank, dims, item, err));
        const int64_t *sizes = dims + t->ndim;
        dims += 2 * (size_t)t->ndim;
        if (target->compress && item->owned && !t->object) {
            bool chunked = fc_target_chunk(t->ndim, sizes, fc_dtype_size(target->tensors[i].dtype), dims);
            item->chunk = chunked ? dims : NULL;
            dims += t->ndim;
        }
    }
    return FC_OK;
}

uint64_t fc_target_item_bytes(const fc_target *target, const fc_target_item *item) {
    const fc_target_tensor *t = &target->tensors[item->tensor];
    fc_box box = {t->source->ndim, item->dims, item->dims + t->source->ndim};
    return (uint64_t)fc_box_volume(&box) * fc_dtype_size(t->dtype);
}
