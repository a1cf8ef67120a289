/*
 * Runs a conversion for consolidate, reshard, convert, export and average: fills fc_convert_options, runs with progress
 * and signals, and prints the summary.
 */
#pragma once

#include "options/command.h"
#include "output/json_out.h"

/** The steps of a conversion that differ between commands. */
typedef struct job_steps {
    fc_code (*open)(const cli_call *call, fc_checkpoint **out, fc_error *err); /**< NULL: opens the only operand */
    /** Replaces the opened checkpoint by the one to convert, which applies the selection. NULL: --recipe does. */
    fc_code (*change)(void *context, fc_checkpoint **source, fc_convert_options *how, size_t *left_out, fc_error *err);
    /** Print what a summary also says. `kept`: the files of the old target that are in the new one, ended by NULL.
     * NULL: nothing. */
    void (*print)(const void *context, const char *const *kept, text_out *out);
    void (*print_json)(const void *context, json_out *json);
    void *context;
} job_steps;

/**
 * Converts the only operand to --output.
 * @param spec the layout of the target; NULL: one full file.
 */
fc_code job_run(cli_call *call, const fc_layout_spec *spec, fc_error *err);

/** Like job_run, with steps of the command's own. */
fc_code job_run_steps(cli_call *call, const fc_layout_spec *spec, const job_steps *steps, fc_error *err);

/** Like job_run, with the layout of the source. */
fc_code job_keep_layout(cli_call *call, fc_error *err);

/** Adds what --dtype and --dtype-for say to a selection. */
fc_code job_choose_dtypes(const cli_call *call, fc_selection *selection, fc_error *err);
