/*
 * From --policy, --classes and --ignore to FSDP units: what units prints and reshard makes flat parameters of.
 */
#ifndef FSDPCKPT_CLI_UNIT_PLAN_H
#define FSDPCKPT_CLI_UNIT_PLAN_H

#include "options.h"
#include "text.h"

#include "fsdpckpt/wrap_policy.h"

/* One call: what was asked for, and what came of it. */
typedef struct unit_plan {
    const options *o;
    text_out *out; /* of a command that prints them */
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
 * Makes the units of plan->source; `o`, `source` and `arena` are set. Warnings are kept, to be printed.
 * @param model whose order the tensors get; NULL: their own.
 */
fc_code unit_plan_make(unit_plan *plan, const fc_checkpoint *model, fc_error *err);

#endif
