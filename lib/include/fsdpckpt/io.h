/*
 * Files of a target: the commit, after which either the old target or the complete new one exists.
 */
#pragma once

#include "fsdpckpt/arena.h"
#include "fsdpckpt/error.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

FC_BEGIN_DECLS

struct fc_progress; /* progress.h */
struct stat;

/** Files of one kind in a target directory. */
typedef struct fc_own_file {
    const char *glob; /**< of the name relative to the target; "*" matches no "/" */
    /** Stores whether the regular file `path`, which is not empty, has the content of such a file. */
    fc_code (*is_ours)(const char *path, bool *ours, fc_error *err);
} fc_own_file;

/** Like stat(2) and access(2), also for names of files on servers, such as https://host/model.safetensors. */
int fc_stat(const char *path, struct stat *st);
int fc_access(const char *path, int mode);

/**
 * Hides the query of a URL, which may be a secret, as in presigned URLs. fc_checkpoint_open does that itself; other
 * calls refuse a URL with a query.
 * @param name receives the name that stands for the URL in this process from now on, which shows "?..." in place of the
 * query; malloc'ed, owned by the caller. NULL: `path` has no query
 */
fc_code fc_hide_query(const char *path, char **name, fc_error *err);

/** Like open(2) with O_CLOEXEC, also for what fc_commit_path names for a target in a bucket. Not for files on servers:
 *  these are checkpoints, which fc_checkpoint_open opens. */
int fc_open(const char *path, int flags, unsigned mode);

/**
 * Checks that a file or directory that the caller named in addition to the checkpoint, such as a plan, exists.
 * @param what what it should be, for the message: "a TP plan".
 * @return FC_EUSAGE if there is nothing of this name.
 */
fc_code fc_check_given(const char *path, const char *what, fc_error *err);

/**
 * Checks that `given`, which is not a known name, is the name of a file. The other parameters are for the message.
 * @param as      what messages call the file, such as "--policy" for a command.
 * @param kind    the kind of value, such as "policy".
 * @param known   the known names: "known are …".
 * @param example an example of the content of such a file.
 * @return FC_EUSAGE, with what else was possible.
 */
fc_code fc_check_named(const char *as, const char *kind, const char *given, const char *known, const char *example,
                       fc_error *err);

/**
 * If the directory `path` is a model in the cache of huggingface_hub, models--OWNER--NAME/, finds the snapshot that its
 * refs/main names. If it is a name of the hub, hf://OWNER/NAME[@REVISION][/FILE], finds what it means in the cache.
 * @param out receives the path of the snapshot or the file, in `arena`; NULL if it is another directory, or if the
 * cache does not have all files of the snapshot.
 */
fc_code fc_hub_snapshot(const char *path, fc_arena *arena, const char **out, fc_error *err);

/** Receives lines for people about files that an earlier run left behind. All members NULL: they are not reported. */
typedef struct fc_reporter {
    void (*report)(void *context, const char *line);
    void *context;
} fc_reporter;

/** The target of a commit, and what it may replace. */
typedef struct fc_commit_options {
    const char *path;
    bool is_directory;
    bool force;       /**< replace an existing target that contains only files that `is_own_file` accepts */
    bool keep_others; /**< for a directory: files that `is_own_file` does not accept are kept next to the new ones */
    /** With keep_others: the names that files of the target have, ended by one without a glob. A file that has such a
     *  name, but that `is_own_file` does not accept, is refused before anything is written. NULL: they are unknown. */
    const fc_own_file *names;
    bool any_content; /**< for a single file: `force` replaces it whatever it contains */
    uint64_t bytes;   /**< bytes that will be written; 0: unknown */
    bool resumable; /**< the staging directory has a name of its own, by which the next run finds what a dead or failed
                       run has written. What is in it, is up to the caller (lib/move/resume.h) */
    /** Stores whether `force` may replace the regular file `path`. `name`: its name relative to a target that is a
     *  directory; NULL: the target is this file. NULL: no file may be replaced. */
    fc_code (*is_own_file)(const char *path, const char *name, bool *own, fc_error *err);
    unsigned forbidden;      /**< permission bits that no file of the target gets: fc_checkpoint_forbidden */
    const char *const *also; /**< names of further files that it may replace, ended by NULL. NULL: none */
    fc_reporter reporter;
} fc_commit_options;

/**
 * Checks whether a target could be created; changes nothing. Refuses an existing target without `force`, a target whose
 * parent directory is missing, a mount point, and with `force` a target of another kind or with content that `force`
 * does not replace.
 * @return FC_EUSAGE for a refused target, FC_EIO if the file system has less space.
 */
fc_code fc_commit_check(const fc_commit_options *how, fc_error *err);

/**
 * A target that is being made: a file or directory in the staging directory ".<name>.fsdpckpt-XXXXXX" next to the
 * target. If the target is a symbolic link, the file or directory that it points to is replaced.
 */
typedef struct fc_commit fc_commit;

/**
 * Checks like fc_commit_check and makes the staging directory. Before that it finishes or undoes what dead runs left
 * next to the target and removes their staging directories; those of live runs stay.
 */
fc_code fc_commit_begin(const fc_commit_options *how, fc_commit **out, fc_error *err);

/**
 * Makes a staging directory for `target` with an empty directory in it, for files that are needed only during the
 * conversion. Checks nothing. End it with fc_commit_abort.
 */
fc_code fc_commit_scratch(const char *target, fc_commit **out, fc_error *err);

/**
 * Lets this process write files of a target that another one has begun. Only a target in a bucket needs that: each
 * process sends its own files, and the one that has begun the target makes all of them visible (fsdpckpt/shards.h).
 * @param path what fc_commit_path returned in the other process
 * @param out ends with fc_commit_abort, after the other process has ended its own: that aborts only what is not visible
 * by then. NULL: there is nothing to end, because the target is on this machine or was begun in this process
 */
fc_code fc_commit_join(const char *path, fc_commit **out, fc_error *err);

/** Returns the path to write to: a file that does not exist yet, or an existing empty directory. */
const char *fc_commit_path(const fc_commit *commit);

/**
 * Gives the new target the permissions and the owner of the old one, takes those away that are forbidden, syncs
 * everything that was written, renames it to the target, and syncs the parent directory. The old target is untouched
 * until the rename has succeeded. Without `force`, a target that has appeared in the meantime is refused. Frees
 * `commit` in any case.
 */
fc_code fc_commit_finish(fc_commit *commit, fc_error *err);

/** Removes the staging directory and frees `commit`. NULL is allowed. */
void fc_commit_abort(fc_commit *commit);

/** A file that is written from its first byte to its last one. In a bucket, it is sent in parts meanwhile. */
typedef struct fc_appender fc_appender;

/** @param path what fc_commit_path returns. @param out receives the file, also after a failure */
fc_code fc_appender_new(const char *path, fc_appender **out, fc_error *err);

/** Appends bytes. */
fc_code fc_appender_add(fc_appender *appender, const void *bytes, size_t size, fc_error *err);

/** Ends the file, before fc_commit_finish. */
fc_code fc_appender_finish(fc_appender *appender, fc_error *err);

/** NULL is allowed. */
void fc_appender_free(fc_appender *appender);

/**
 * Refuses (FC_EUSAGE) a target that exists and is, or contains, one of the files and directories `inputs`. Files are
 * compared by device and inode.
 * @param inputs ended by NULL.
 * @param what   names the inputs in the message: "a file of the checkpoint".
 */
fc_code fc_check_inputs(const char *target, const char *const *inputs, const char *what, fc_error *err);

FC_END_DECLS
