/*
 * What consolidate, reshard and convert have in common: options into fc_convert_options, the run with progress and
 * signals, the summary.
 */
#ifndef FSDPCKPT_CLI_JOB_H
#define FSDPCKPT_CLI_JOB_H

#include "command.h"

/**
 * Converts the one operand into --output.
 * @param spec the wanted cut; NULL: one full file.
 */
fc_code job_run(cli_call *call, const fc_layout_spec *spec, fc_error *err);

/** The same for a source that `open` opens from the operands. */
fc_code job_run_opened(cli_call *call, const fc_layout_spec *spec,
                       fc_code (*open)(const cli_call *call, fc_checkpoint **out, fc_error *err), fc_error *err);

/** The same, with the layout of the source. */
fc_code job_keep_layout(cli_call *call, fc_error *err);

#endif
