/*
 * Runs a conversion for consolidate, reshard, convert and average: fills fc_convert_options, runs with progress and
 * signals, and prints the summary.
 */
#ifndef FSDPCKPT_CLI_JOB_H
#define FSDPCKPT_CLI_JOB_H

#include "command.h"

/**
 * Converts the only operand to --output.
 * @param spec the layout of the target; NULL: one full file.
 */
fc_code job_run(cli_call *call, const fc_layout_spec *spec, fc_error *err);

/** Like job_run, for a source that `open` opens from the operands. */
fc_code job_run_opened(cli_call *call, const fc_layout_spec *spec,
                       fc_code (*open)(const cli_call *call, fc_checkpoint **out, fc_error *err), fc_error *err);

/** Like job_run, with the layout of the source. */
fc_code job_keep_layout(cli_call *call, fc_error *err);

#endif
