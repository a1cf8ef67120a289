/*
 * Opening what a command works on, as --follow-external, --schema and --tp-plan ask for.
 */
#ifndef FSDPCKPT_CLI_SOURCE_H
#define FSDPCKPT_CLI_SOURCE_H

#include "command.h"

#include "fsdpckpt/checkpoint.h"

/** What --tp-plan means to a command that has no --tp. */
#define SOURCE_TP_PLAN_HELP                                                                                            \
    "how tensor parallelism cut SRC, where it is files of torch.save, one a rank, that hold plain tensors and do not " \
    "say it: Hugging Face's base_model_tp_plan as JSON, or 'auto', which knows the names of Llama, Qwen, Mistral, "    \
    "GPT-2 and GPT-NeoX"

/** Opens --schema's FILE, a schema or a checkpoint of the model. @param out NULL where the option was not given. */
fc_code source_model(const cli_call *call, fc_checkpoint **out, fc_error *err);

/**
 * Opens the checkpoint at `path`. With --schema it must have flat parameters, which are taken apart; with --tp-plan,
 * but without --tp, files of ranks whose plain tensors the plan cuts, which are put together.
 * @param headers_only as in fc_open_options.
 */
fc_code source_open(const cli_call *call, const char *path, bool headers_only, fc_checkpoint **out, fc_error *err);

/** The files and directories that the command line names to be read, ended by NULL, to be freed.
 *  @param operands whether the operands are among them. @return NULL without memory. */
const char **source_inputs(const options *o, bool operands);

/** Refuses a target that is or contains one of them. */
fc_code source_spare(const options *o, const char *target, fc_error *err);

/** Tells the person at the terminal what was done about a run that died: for fc_teller. @param unused NULL. */
void source_note(void *unused, const char *line);

/** With --verbose: tells the person at the terminal what was opened. Of several processes one calls this. */
void source_tell(const options *o, const fc_checkpoint *source);

#endif
