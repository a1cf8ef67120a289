/*
 * A file that a command writes next to its results: it goes through a commit as every target does, complete or not
 * there.
 */
#ifndef FSDPCKPT_CLI_OUT_FILE_H
#define FSDPCKPT_CLI_OUT_FILE_H

#include "command.h"

#include "fsdpckpt/checkpoint.h"

/** Writes the content; what text_out cannot write is reported by the caller of this. */
typedef fc_code out_file_write(void *context, text_out *out, fc_error *err);

/**
 * Makes `path` with what `write` writes. What is read, which is `source` (or NULL) and the files that the command line
 * names, is not replaced, also with `force`.
 * @param bytes about how many, for the check of the free space.
 */
fc_code out_file(const options *o, const fc_checkpoint *source, const char *path, bool force, uint64_t bytes,
                 out_file_write *write, void *context, fc_error *err);

/** The same with the file of -o, or, without it or with "-", to standard output. */
fc_code out_result(const cli_call *call, const fc_checkpoint *source, uint64_t bytes, out_file_write *write,
                   void *context, fc_error *err);

#endif
