/*
 * Records the order in which units run, for prefetching: the pre-forward order of the first iteration, and the
 * post-forward order of each one. It also checks that all ranks run the units in the same order.
 */
#include "train/state.h"

#include "base/grow.h"
#include "fsdpckpt/try.h"

#include <stdio.h>
#include <stdlib.h>

static fc_code append(fc_unit_list *list, fc_fsdp_unit *unit, fc_error *err) {
    FC_NEED(fc_grow(&list->units, &list->capacity, (size_t)list->count + 1, sizeof *list->units), err,
            "the execution order");
    list->units[list->count++] = unit;
    return FC_OK;
}

static const char *unit_name(const fc_fsdp *fsdp, int64_t index) {
    for (const fc_fsdp_unit *u = fsdp->units; u; u = u->next) {
        if (u->index == index) {
            return u->name;
        }
    }
    return "(unknown)";
}

/* First iteration: the ranks compare the units that they are about to gather. */
static fc_code compare_ranks(fc_fsdp_unit *unit, int64_t *all, fc_error *err) {
    fc_fsdp *fsdp = unit->fsdp;
    fc_device *device = fsdp->device;
    fc_stream *stream = fsdp->streams[FC_STREAM_COMPUTE];
    size_t one = sizeof(int64_t), bytes = one * (size_t)fsdp->shard->size;
    fc_block *block = NULL;
    FC_TRY(fc_pool_take(&fsdp->pool, bytes, stream, &block, err));
    char *mine = (char *)block->memory + one * (size_t)fsdp->shard->rank;
    FC_TRY(device->copy(device, mine, &unit->index, one, stream, err));
    FC_TRY(fc_all_gather(fsdp->shard, mine, block->memory, one, stream, err));
    FC_TRY(fc_comm_wait(fsdp->shard, stream, err));
    FC_TRY(device->copy(device, all, block->memory, bytes, stream, err));
    FC_TRY(fc_comm_wait(fsdp->shard, stream, err));
    FC_TRY(fc_pool_give(&fsdp->pool, &block, stream, err));
    for (int r = 1; r < fsdp->shard->size; r++) {
        if (all[r] != all[0]) {
            return fc_fail(err, FC_EUSAGE,
                           "forward order differs across ranks: rank 0 is all-gathering parameters for '%s' while "
                           "rank %d is all-gathering parameters for '%s'",
                           unit_name(fsdp, all[0]), r, unit_name(fsdp, all[r]));
        }
    }
    return FC_OK;
}

static fc_code check_across_ranks(fc_fsdp_unit *unit, fc_error *err) {
    int64_t *all = calloc((size_t)unit->fsdp->shard->size, sizeof *all);
    fc_code rc = all ? compare_ranks(unit, all, err) : fc_no_memory(err, NULL);
    free(all);
    return rc;
}

/* Later iterations: compares the order with the first iteration on this rank. Warns only in the first one that differs.
 */
static void check_with_first(fc_fsdp_unit *unit) {
    fc_fsdp *fsdp = unit->fsdp;
    const fc_unit_list *order = &fsdp->pre_forward_order;
    char difference[512] = "", message[1024];
    if (fsdp->warning == FC_ORDER_WARNED) {
        return;
    }
    if (fsdp->current_index >= order->count) {
        snprintf(difference, sizeof difference,
                 "expected to not all-gather any more parameters in the forward but trying to all-gather parameters "
                 "for '%s'",
                 unit->name);
    } else if (order->units[fsdp->current_index] != unit) {
        snprintf(difference, sizeof difference,
                 "expected to all-gather for '%s' but trying to all-gather parameters for '%s'",
                 order->units[fsdp->current_index]->name, unit->name);
    }
    if (difference[0]) {
        snprintf(message, sizeof message,
                 "forward order differs from that of the first iteration on rank %d; collectives are unchecked and may "
                 "give incorrect results or hang: %s",
                 fsdp->shard->rank, difference);
        fsdp->options.warn(fsdp->options.context, message);
        fsdp->warning = FC_ORDER_WARNING;
    }
    fsdp->current_index++;
}

fc_code fc_order_pre_forward(fc_fsdp_unit *unit, bool training, fc_error *err) {
    fc_fsdp *fsdp = unit->fsdp;
    if (!unit->handles) {
        return FC_OK;
    }
    /* In eval mode no backward marks the end of an iteration. */
    if (training && fsdp->options.check_order) {
        if (fsdp->iteration == 0) {
            FC_TRY(check_across_ranks(unit, err));
        } else {
            check_with_first(unit);
        }
    }
    if (fsdp->iteration > 0 || unit->pre_forward_index != NOT_IN_ORDER) {
        return FC_OK;
    }
    unit->pre_forward_index = fsdp->pre_forward_order.count;
    return append(&fsdp->pre_forward_order, unit, err);
}

/* A unit that runs twice is recorded twice, and keeps the index of its first run. */
fc_code fc_order_post_forward(fc_fsdp_unit *unit, fc_error *err) {
    if (!unit->handles) {
        return FC_OK;
    }
    if (unit->post_forward_index == NOT_IN_ORDER) {
        unit->post_forward_index = unit->fsdp->post_forward_order.count;
    }
    return append(&unit->fsdp->post_forward_order, unit, err);
}

void fc_order_next_iteration(fc_fsdp *fsdp) {
    fsdp->iteration++;
    fsdp->post_forward_order.count = 0;
    fsdp->current_index = 0;
    if (fsdp->warning == FC_ORDER_WARNING) {
        fsdp->warning = FC_ORDER_WARNED;
    }
}

void fc_order_free(fc_fsdp *fsdp) {
    free(fsdp->pre_forward_order.units);
    free(fsdp->post_forward_order.units);
}
