/*
 * Builds FSDP units from --policy, --classes and --ignore: units prints them, and reshard builds flat parameters from
 * them.
 */
#pragma once

#include "options/options.h"
#include "output/text.h"

#include "fsdpckpt/wrap_policy.h"

/* One call: its options and its results. */
typedef struct unit_plan {
    const options *o;
    text_out *out; /* used by units only */
    fc_arena *arena;
    const fc_checkpoint *source;
    fc_target target;
    fc_selected selected;
    fc_module_tree tree;
    fc_wrap_file *file; /* NULL: another policy */
    fc_wrap_targets targets;
    const char *const *overridden; /* classes kept out of mixed precision */
    fc_units units;
    const char **warnings;
    size_t nwarnings;
} unit_plan;

/**
 * Builds the units of plan->source. The caller sets `o`, `source` and `arena`, and prints the warnings.
 * @param model the tensors are put in its order; NULL: keep their own order.
 */
fc_code unit_plan_make(unit_plan *plan, const fc_checkpoint *model, fc_error *err);
