/*
 * Compares the data of two checkpoints, which fc_scan_run reads in parallel. See compare_data.h.
 */
#include "diff/compare_data.h"

#include "diff/values.h"
#include "fsdpckpt/try.h"
#include "read/box.h"
#include "read/scan.h"
#include "read/stored_chunk.h"

typedef struct job {
    const fc_compare_options *options;
    fc_compare_report *report;
    const size_t *items;
    bool stopped;
    fc_scan scan;
} job;

static fc_code diff_begin_pair(void *context, fc_scan_item *item, fc_error *err) {
    static const int64_t origin[FC_MAX_DIMS];
    const job *j = context;
    fc_compared *pair = &j->report->items[j->items[item->index]];
    fc_compared **state = item->state;
    (void)err;
    *state = pair;
    item->tensors[0] = pair->a;
    item->tensors[1] = pair->b;
    item->box = (fc_box){pair->a->ndim, origin, pair->a->shape};
    item->large_tiles = fc_gains_from_large_tiles(j->scan.checkpoints[0], pair->a) ||
                        fc_gains_from_large_tiles(j->scan.checkpoints[1], pair->b);
    pair->read = true;
    return FC_OK;
}

static fc_code diff_compare_tile(void *context, const fc_scan_tile *tile, fc_error *err) {
    const fc_compare_options *o = ((const job *)context)->options;
    const fc_tensor *const *tensors = tile->item->tensors;
    const fc_value_rule rule = {.a = tensors[0]->dtype,
                                .b = tensors[1]->dtype,
                                .tolerant = o->tolerant,
                                .equal_nan = o->equal_nan,
                                .rtol = o->rtol,
                                .atol = o->atol};
    fc_deviation *found = tile->scratch;
    (void)err;
    *found = (fc_deviation){0};
    fc_values_compare(&rule, tile->bytes[0], tile->bytes[1], tile->count, found);
    fc_deviation_place(found, tile->times, &tile->box, tensors[0]->shape);
    return FC_OK;
}

static bool diff_add_tile(void *context, const fc_scan_tile *tile) {
    job *j = context;
    fc_compared *pair = *(fc_compared **)tile->item->state;
    const fc_deviation *found = tile->scratch;
    fc_deviation_add(&pair->deviation, found);
    /* objects with different bytes may have equal values */
    j->stopped = j->stopped || (found->different > 0 && j->options->quick && !pair->a->object);
    return !j->stopped;
}

/* Reads both sides, and compares what was read with the recorded CRCs. Damage is a result, not a failure. */
static fc_code diff_scan(job *j, fc_error *err) {
    fc_compare_report *r = j->report;
    FC_TRY(fc_scan_run(&j->scan, &j->options->work, err));
    for (int i = 0; i < 2 && r->damage == FC_OK; i++) {
        r->damage = fc_source_crc_check(j->scan.crcs[i], NULL, fc_read_crc64, &r->damaged);
    }
    if (r->damage == FC_OK || r->damage == FC_ECORRUPT) {
        return FC_OK;
    }
    if (err) {
        *err = r->damaged;
    }
    return r->damage;
}

fc_code fc_compare_data(const fc_checkpoint *a, const fc_checkpoint *b, const fc_compare_options *options,
                        fc_compare_report *report, const size_t *items, size_t count, bool *stopped, fc_error *err) {
    job j = {.options = options,
             .report = report,
             .items = items,
             .scan = {.count = count,
                      .sides = 2,
                      .checkpoints = {a, b},
                      .check_objects = true,
                      .phase = FC_PHASE_COMPARING,
                      .read = &report->bytes,
                      .state = sizeof(fc_compared *),
                      .scratch = sizeof(fc_deviation),
                      .context = &j,
                      .begin = diff_begin_pair,
                      .look = diff_compare_tile,
                      .add = diff_add_tile}};
    fc_code rc;
    for (size_t i = 0; i < count; i++) {
        fc_scan_add_bytes(&j.scan.total, report->items[items[i]].a);
        fc_scan_add_bytes(&j.scan.total, report->items[items[i]].b);
    }
    FC_TRY_GOTO(fc_source_crc_new(a, a->tensors, a->ntensors, &j.scan.crcs[0], err), rc, out);
    FC_TRY_GOTO(fc_source_crc_new(b, b->tensors, b->ntensors, &j.scan.crcs[1], err), rc, out);
    rc = diff_scan(&j, err);
    *stopped = j.stopped;
out:
    fc_source_crc_free(j.scan.crcs[0]);
    fc_source_crc_free(j.scan.crcs[1]);
    return rc;
}
