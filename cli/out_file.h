/*
 * A file that a command writes beside its results: it goes through a commit as every target does, complete or not
 * there.
 */
#ifndef FSDPCKPT_CLI_OUT_FILE_H
#define FSDPCKPT_CLI_OUT_FILE_H

#include "text.h"

#include "fsdpckpt/error.h"

/** Writes the content; what text_out cannot write is reported by the caller of this. */
typedef fc_code out_file_write(void *context, text_out *out, fc_error *err);

/**
 * Makes `path` with what `write` writes.
 * @param bytes about how many, for the check of the free space.
 */
fc_code out_file(const char *path, bool force, uint64_t bytes, out_file_write *write, void *context, fc_error *err);

#endif
