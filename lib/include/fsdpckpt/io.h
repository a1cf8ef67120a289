/*
 * Files: complete reads and writes, and the commit that leaves either the old target or the complete new one.
 */
#ifndef FSDPCKPT_IO_H
#define FSDPCKPT_IO_H

#include "fsdpckpt/error.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

struct fc_progress; /* progress.h */

/** Opens `path` read-only, close-on-exec. Refuses what is no regular file (FC_ECORRUPT), so a FIFO cannot hang us. */
fc_code fc_open_input(const char *path, int *fd, uint64_t *size, fc_error *err);

/**
 * Refuses (FC_ECORRUPT) a file of a checkpoint that a symbolic link puts outside the checkpoint's directory; links to
 * another place within it are fine, and so is a missing file.
 * @param path the file; @param name its name relative to the directory; @param root realpath() of the directory.
 */
fc_code fc_check_link(const char *path, const char *name, const char *root, fc_error *err);

/**
 * Whether `given`, which is no known name, is a file: else FC_EUSAGE, with what else it could have been.
 * @param as      for the message, what it was given as: "--policy".
 * @param kind    of what: "policy".
 * @param known   "known are …".
 * @param example of what is in such a file.
 */
fc_code fc_check_named(const char *as, const char *kind, const char *given, const char *known, const char *example,
                       fc_error *err);

/** Reads exactly `size` bytes at `offset`. The end of the file before that is FC_ECORRUPT ("truncated"). */
fc_code fc_pread_full(int fd, void *buf, size_t size, uint64_t offset, const char *path, fc_error *err);

/**
 * Reads a whole file of at most `most` bytes; a larger one is FC_EUNSUPPORTED.
 * @param what for that message: "a schema".
 * @param text malloc'ed; NULL after a failure.
 */
fc_code fc_read_whole(const char *path, const char *what, uint64_t most, char **text, size_t *size, fc_error *err);

/** Writes exactly `size` bytes at `offset`. */
fc_code fc_pwrite_full(int fd, const void *buf, size_t size, uint64_t offset, const char *path, fc_error *err);

/**
 * Whether a target could be started, changing nothing.
 * Refuses an existing target without `force` (FC_EUSAGE) and one whose parent directory is missing; with `force`, a
 * target of another kind, and a directory that holds anything but files that this program writes.
 * @param bytes how much will be written; FC_EIO when the file system has less free.
 */
fc_code fc_commit_check(const char *target, bool is_directory, bool force, uint64_t bytes, fc_error *err);

/**
 * A target being made: a temporary file or directory in a staging directory beside the target,
 * ".<name>.fsdpckpt-XXXXXX". A symbolic link as the target is followed: what it points to is replaced.
 */
typedef struct fc_commit fc_commit;

/** Checks as fc_commit_check does and makes the staging directory. */
fc_code fc_commit_begin(const char *target, bool is_directory, bool force, uint64_t bytes, fc_commit **out,
                        fc_error *err);

/** The temporary path to write to: a file that does not exist yet, or an existing empty directory. */
const char *fc_commit_path(const fc_commit *commit);

/** fc_commit_finish is to count the files it syncs, as FC_PHASE_SYNCING, and to stop where `progress` says so. */
void fc_commit_count(fc_commit *commit, struct fc_progress *progress);

/**
 * fsync of everything below the temporary path, rename onto the target, fsync of the parent; frees `commit`, also
 * when it fails. Until the rename has succeeded the old target is untouched. A target that appeared meanwhile is
 * refused without `force`.
 */
fc_code fc_commit_finish(fc_commit *commit, fc_error *err);

/** Removes everything temporary and frees `commit`. NULL is allowed. */
void fc_commit_abort(fc_commit *commit);

/** Whether `name` is a plain relative path without "..", empty components, NUL or a leading "/". */
bool fc_path_is_safe(const char *name);

#ifdef __cplusplus
}
#endif
#endif
