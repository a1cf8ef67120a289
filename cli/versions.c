/*
 * Looks at versions for inspect and verify: see versions.h.
 */
#include "versions.h"

#include "signals.h"

#include "fsdpckpt/order.h"
#include "fsdpckpt/try.h"

#include <stdlib.h>
#include <string.h>

fc_code versions_meant(const cli_call *call, option_set allowed, bool *meant, fc_error *err) {
    const options *o = call->options;
    fc_delta_place place;
    *meant = false;
    if (o->delta.count > 0) {
        return FC_OK;
    }
    FC_TRY(fc_delta_recognise(o->operands[0], &place, err));
    *meant = place != FC_DELTA_NOWHERE;
    const option_set others = o->given & ~(allowed | TAKES_COMMON);
    for (int id = 0; *meant && id < OPT_COUNT; id++) {
        if (others & TAKES(id)) {
            return fc_fail(err, FC_EUSAGE,
                           "%s: this is a %s, to which --%s does not apply; to see the model that it makes, give the "
                           "model, and this as --delta",
                           o->operands[0], place == FC_DELTA_VERSION ? "delta" : "directory of versions",
                           option_table[id].name);
        }
    }
    return FC_OK;
}

static const char *copy_text(versions_faults *f, const char *text) {
    const char *copy = text ? fc_arena_strndup(f->arena, text, strlen(text)) : NULL;
    f->no_memory |= text && !copy;
    return copy;
}

static void add_fault(void *context, const fc_delta_fault *fault) {
    versions_faults *f = context;
    if (f->count == f->capacity) {
        const size_t capacity = 2 * f->capacity + 8;
        fc_delta_fault *grown = fc_arena_calloc(f->arena, capacity, sizeof *grown);
        if (!grown) {
            f->no_memory = true;
            return;
        }
        if (f->count > 0) {
            memcpy(grown, f->items, f->count * sizeof *grown);
        }
        f->items = grown;
        f->capacity = capacity;
    }
    fc_delta_fault *added = &f->items[f->count++];
    *added = *fault;
    added->path = copy_text(f, fault->path);
    added->tensor = copy_text(f, fault->tensor);
    added->message = copy_text(f, fault->message);
}

/* Frames are read by several threads. */
static int order_faults(const void *a, const void *b) {
    const fc_delta_fault *x = a, *y = b;
    if (x->number != y->number) {
        return x->number < y->number ? -1 : 1;
    }
    return strcmp(x->tensor ? x->tensor : "", y->tensor ? y->tensor : "");
}

fc_code versions_look(const cli_call *call, fc_delta_depth depth, versions_faults *faults, fc_delta_survey *out,
                      fc_error *err) {
    const options *o = call->options;
    const fc_delta_look_options how = {
        .depth = depth,
        .report = add_fault,
        .context = faults,
        .work = {.threads = (int)o->jobs, .memory = o->memory, .progress = call->progress}};
    faults->arena = call->arena;
    signals_cancel(call->progress);
    const fc_code rc = fc_delta_look(o->operands[0], &how, call->arena, out, err);
    signals_cancel(NULL);
    FC_TRY(rc);
    FC_NEED(!faults->no_memory, err, o->operands[0]);
    fc_sort_items(faults->items, faults->count, sizeof *faults->items, order_faults);
    return FC_OK;
}
