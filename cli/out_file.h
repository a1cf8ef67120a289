/*
 * A file that a command writes in addition to its result. Like every target it is committed: it appears complete or not
 * at all.
 */
#pragma once

#include "options/command.h"

#include "fsdpckpt/checkpoint.h"

/** Writes the content to `out`. The caller reports errors of `out` itself. */
typedef fc_code out_file_write(void *context, text_out *out, fc_error *err);

/**
 * Creates `path` with the content that `write` produces. Refuses to replace what is being read, even with `force`:
 * `source` (may be NULL) and the files that are named on the command line.
 * @param bytes the approximate size, to check the free space.
 */
fc_code out_file(const options *o, const fc_checkpoint *source, const char *path, bool force, uint64_t bytes,
                 out_file_write *write, void *context, fc_error *err);

/** Writes to the file of -o, or to standard output without -o or with "-o -". */
fc_code out_result(const cli_call *call, const fc_checkpoint *source, uint64_t bytes, out_file_write *write,
                   void *context, fc_error *err);
