/*
 * A delta or a directory of versions as the operand of inspect, check and verify.
 */
#pragma once

#include "options/command.h"

#include "fsdpckpt/delta.h"

/**
 * Finds out whether the operand is a delta or a directory of versions, and the command looks at it as such. With
 * --delta and the like the operand is a model.
 * @param allowed TAKES bits of the options that apply to versions; others are refused.
 */
fc_code versions_meant(const cli_call *call, option_set allowed, bool *meant, fc_error *err);

/** What is wrong with versions, as fc_delta_look reports it. */
typedef struct versions_faults {
    fc_arena *arena;
    fc_delta_fault *items; /**< in the arena, like their strings */
    size_t count, capacity;
    bool no_memory;
} versions_faults;

/** Looks at the versions of the operand, and cancels after a signal. */
fc_code versions_look(const cli_call *call, fc_delta_depth depth, versions_faults *faults, fc_delta_survey *out,
                      fc_error *err);

/** Prints a table of the versions, or with --json a document. */
fc_code versions_inspect(cli_call *call, fc_error *err);

/** Verifies what can be without the model, and says what cannot. */
fc_code versions_verify(cli_call *call, fc_error *err);
