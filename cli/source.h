/*
 * Opening what a command works on, as --follow-external and --schema ask for.
 */
#ifndef FSDPCKPT_CLI_SOURCE_H
#define FSDPCKPT_CLI_SOURCE_H

#include "options.h"

#include "fsdpckpt/checkpoint.h"

/** Opens --schema's FILE, a schema or a checkpoint of the model. @param out NULL where the option was not given. */
fc_code source_model(const options *o, fc_checkpoint **out, fc_error *err);

/**
 * Opens the checkpoint at `path`. With --schema it must have flat parameters, which are taken apart.
 * @param headers_only as in fc_open_options.
 */
fc_code source_open(const options *o, const char *path, bool headers_only, fc_checkpoint **out, fc_error *err);

/** With --verbose: tells the person at the terminal what was opened. Of several processes one calls this. */
void source_tell(const options *o, const fc_checkpoint *source);

#endif
