/*
 * Records which files a checkpoint was opened from. Data is read later, through names. If a file was replaced or
 * rewritten in the meantime, this would give values of another checkpoint under the names of this one. After the last
 * byte, fc_checkpoint_unchanged (fsdpckpt/checkpoint.h) compares all files.
 */
#pragma once

#include "fsdpckpt/checkpoint.h"

struct fc_comm;

/**
 * Records device, inode, size and times of each file of `checkpoint`; keeps those that it already has. A missing file
 * has none. A format calls this when it knows its files, before it reads their headers. fc_checkpoint_open calls it for
 * files that the format added later. Does nothing with options->headers_only, because nobody reads data then.
 */
fc_code fc_identities_take(fc_checkpoint *checkpoint, const fc_open_options *options, fc_error *err);

/** Records `path`, a file that describes the others and is not among them. Call this before it is read. */
fc_code fc_identities_add_header(fc_checkpoint *checkpoint, const char *path, const fc_open_options *options,
                                 fc_error *err);

/**
 * Lists the files that describe the others and are not among them, newest first, in an array of the caller, who frees
 * it. @return NULL if out of memory.
 */
const char **fc_identities_headers(const fc_checkpoint *checkpoint, size_t *count);

/** Gives `checkpoint`, whose files are those of all `parts` in order, the identities of the parts. */
fc_code fc_identities_gather(fc_checkpoint *checkpoint, const fc_checkpoint *parts, size_t nparts, fc_error *err);

/**
 * Gives `made` the files of all sources in order, after `own` unless it is NULL, and the files that describe them: none
 * of them may be the target.
 * @param made owns the list in its arena.
 */
fc_code fc_files_gather(fc_checkpoint *made, const fc_file *own, fc_checkpoint *const *sources, size_t count,
                        fc_error *err);

/**
 * After the last byte was read: lets `source`, which may be made from others, compare what was read of these, or checks
 * that it is unchanged. Collective over `comm`, which may be NULL.
 */
fc_code fc_checkpoint_check_inputs(const fc_checkpoint *source, struct fc_comm *comm, fc_error *err);

/** Returns fc_checkpoint_forbidden of one file, or of a directory that has it. */
unsigned fc_path_forbidden(const char *path);

/** Opens file `index` like fc_open_input and checks that it is still the same, unchanged. */
fc_code fc_identity_open(const fc_checkpoint *checkpoint, size_t index, int *fd, fc_error *err);

/** Checks that the open file `fd` is still file `index`, unchanged. @return FC_ECORRUPT if not. */
fc_code fc_identity_check(const fc_checkpoint *checkpoint, size_t index, int fd, fc_error *err);
