/*
 * Opens the source of a command with --follow-external, --schema, --tp-plan and --model-only.
 */
#pragma once

#include "options/command.h"

#include "fsdpckpt/checkpoint.h"
#include "fsdpckpt/select.h"

/** The help of --tp-plan for commands without --tp. */
#define SOURCE_TP_PLAN_HELP                                                                                            \
    "how tensor parallelism sharded SRC, if SRC is one torch.save file per rank with plain tensors, which do not "     \
    "record it: 'auto', which knows the names of Llama, Qwen, Mistral, GPT-2 and GPT-NeoX, or a JSON file in the "     \
    "form of Hugging Face's base_model_tp_plan"

/** Opens the file of --schema, a schema or a checkpoint of the model. @param out receives NULL without the option. */
fc_code source_model(const cli_call *call, fc_checkpoint **out, fc_error *err);

/**
 * Opens the checkpoint at `path`. With --schema it must have flat parameters, which are split into the parameters of
 * the model. With --tp-plan, but without --tp, it must be files of ranks with plain tensors that the plan shards, which
 * are merged. With --model-only it is replaced by its model.
 * @param headers_only as in fc_open_options.
 */
fc_code source_open(const cli_call *call, const char *path, bool headers_only, fc_checkpoint **out, fc_error *err);

/** Adds a line to call->notes, unless it is there or there is no memory for it. */
void source_add_note(const cli_call *call, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

/** With --model-only: replaces a checkpoint, which the caller closes in any case, by its model. Notes what is left out.
 */
fc_code source_take_model(const cli_call *call, fc_checkpoint **checkpoint, fc_error *err);

/** @return what --include, --exclude, --strip-prefix and --rename select and rename. */
fc_selection source_selection(const options *o);

/** Notes a glob of --exclude that matches nothing, and, if `names`, what --include and --exclude leave out. */
fc_code source_note_selection(const cli_call *call, const fc_checkpoint *source, bool names, fc_error *err);

/**
 * Lists the files and directories that the command line names as inputs. The caller frees the list.
 * @param operands whether to include the operands.
 * @return a NULL-terminated list, or NULL when out of memory.
 */
const char **source_inputs(const options *o, bool operands);

/**
 * Finds the model's config.json: the one of --config, or the one in the folder of the source or of its file.
 * @param out receives the path, in `arena` or borrowed; NULL if there is none.
 */
fc_code source_config(const options *o, const fc_checkpoint *source, fc_arena *arena, const char **out, fc_error *err);

/** Refuses a target that is one of these inputs or contains one. */
fc_code source_spare(const options *o, const char *target, fc_error *err);

/**
 * The fc_reporter of the command: reports on stderr how the remains of an interrupted run were cleaned up. @param
 * unused NULL.
 */
void source_note(void *unused, const char *line);

/** Returns fc_open_options.others: after the command, main reports which checkpoints next to a source were not read. */
fc_reporter source_others(const cli_call *call);

/** With --verbose: reports the opened checkpoint on stderr. Only one of several processes calls this. */
void source_report(const options *o, const fc_checkpoint *source);
