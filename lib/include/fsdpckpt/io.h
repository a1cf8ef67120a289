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

/** Receives lines for a person about files that an earlier run left. NULL members: nobody wants to know. */
typedef struct fc_teller {
    void (*tell)(void *context, const char *line);
    void *context;
} fc_teller;

/** What is to be made, and what may be replaced by it. */
typedef struct fc_commit_options {
    const char *path;
    bool is_directory;
    bool force;       /**< replaces a checkpoint file, or a directory with nothing but files that this program writes */
    bool any_content; /**< of one file: `force` replaces it whatever it holds */
    uint64_t bytes;   /**< how much will be written; 0: not known */
    fc_teller teller;
} fc_commit_options;

/**
 * Whether a target could be started, changing nothing.
 * Refuses an existing target without `force` (FC_EUSAGE) and one whose parent directory is missing; with `force`, a
 * target of another kind, a mount point, and what `force` must not replace. FC_EIO: the file system has less space.
 */
fc_code fc_commit_check(const fc_commit_options *how, fc_error *err);

/**
 * A target being made: a temporary file or directory in a staging directory next to the target,
 * ".<name>.fsdpckpt-XXXXXX". A symbolic link as the target is followed: what it points to is replaced.
 */
typedef struct fc_commit fc_commit;

/**
 * Checks as fc_commit_check does and makes the staging directory. First finishes or undoes what runs that died left
 * next to the target, and removes it; what live runs have there is left alone.
 */
fc_code fc_commit_begin(const fc_commit_options *how, fc_commit **out, fc_error *err);

/** Only a staging directory for `target`, with an empty directory in it, whatever there is: for files that are needed
 *  next to a target as long as it is made. To be ended by fc_commit_abort. */
fc_code fc_commit_scratch(const char *target, fc_commit **out, fc_error *err);

/** The temporary path to write to: a file that does not exist yet, or an existing empty directory. */
const char *fc_commit_path(const fc_commit *commit);

/**
 * Gives a replacement the permissions and owner of what it replaces, fsync of everything below the temporary path,
 * rename onto the target, fsync of the parent; frees `commit`, also when it fails. Until the rename has succeeded the
 * old target is untouched. A target that appeared meanwhile is refused without `force`.
 */
fc_code fc_commit_finish(fc_commit *commit, fc_error *err);

/** Removes everything temporary and frees `commit`. NULL is allowed. */
void fc_commit_abort(fc_commit *commit);

/**
 * Whether `path` is missing only because a run died between the two renames that replace it where the file system
 * cannot exchange two names: then the replacement is put in place. Waits for a live run that is just there.
 */
fc_code fc_commit_recover(const char *path, const fc_teller *teller, fc_error *err);

/** Refuses (FC_EUSAGE) a target that exists and is, or contains, one of the files and directories `inputs`, ended by
 *  NULL: known by device and inode, under whatever name.
 *  @param what they are, for the message: "a file of the checkpoint". */
fc_code fc_check_inputs(const char *target, const char *const *inputs, const char *what, fc_error *err);

/** Whether `name` is a plain relative path without "..", empty components, NUL or a leading "/". */
bool fc_path_is_safe(const char *name);

#ifdef __cplusplus
}
#endif
#endif
