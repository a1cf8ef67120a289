/*
 * Walks a directory name by name, and reports an error if the file system could not list all names. readdir reports an
 * error like the end, so half a directory would look like a smaller checkpoint.
 */
#pragma once

#include "fsdpckpt/arena.h"
#include "fsdpckpt/error.h"
#include "net/remote.h"

#include <dirent.h>
#include <limits.h>
#include <stdbool.h>
#include <sys/stat.h>

/**
 * Returns whether `path` exists. If that cannot be found out (EACCES, EIO), the answer is false and `err` has the
 * error: a file that cannot be examined must not look like one that is missing.
 * @param st receives the result of stat(); may be NULL.
 */
bool fc_path_exists(const char *path, struct stat *st, fc_error *err);

/** Sets `*is` to whether `path` is a directory. */
fc_code fc_is_directory(const char *path, bool *is, fc_error *err);

/** Like fc_path_exists for the entry `name` of `directory`. @param path receives its path. */
bool fc_find_in(const char *directory, const char *name, char path[PATH_MAX], fc_error *err);

/**
 * A walk in progress:
 *
 *     fc_dir dir;
 *     fc_code rc = fc_dir_open(&dir, path, err);
 *     for (const char *name; rc == FC_OK && (name = fc_dir_next(&dir)) != NULL;) { ... }
 *     rc = fc_dir_close(&dir, rc, err);
 */
typedef struct fc_dir {
    const char *path;      /* borrowed; for messages */
    DIR *dir;              /* NULL when not open */
    int errnum;            /* the error that ended the walk early, or 0 */
    fc_entry_names remote; /* of a folder on a server */
    size_t next;
} fc_dir;

/** Opens the directory `path`. After a failure, fc_dir_next and fc_dir_close may still be called. */
fc_code fc_dir_open(fc_dir *dir, const char *path, fc_error *err);

/** Does the same for an open descriptor, and owns it even after a failure. @param path for messages. */
fc_code fc_dir_open_at(fc_dir *dir, int fd, const char *path, fc_error *err);

/** @return the next name except "." and "..", valid until the next call; NULL at the end or after an error. */
const char *fc_dir_next(fc_dir *dir);

/** Examines the entry `name`, without following a link. */
fc_code fc_dir_stat(const fc_dir *dir, const char *name, struct stat *st, fc_error *err);

/** Returns whether the entry `name` is a directory, and not a link to one. */
fc_code fc_dir_is_folder(const fc_dir *dir, const char *name, bool *is_folder, fc_error *err);

/** Closes it. @return `rc`, or if that is FC_OK, the error that ended the walk early. */
fc_code fc_dir_close(fc_dir *dir, fc_code rc, fc_error *err);

/** Lists the entries of a directory, sorted. @param out freed by the caller, also after a failure. */
fc_code fc_dir_names(const char *path, fc_entry_names *out, fc_error *err);

/**
 * Returns whether `matches` accepts a name in the directory `path`. False if `path` is not a directory.
 * @param err set if the directory cannot be listed completely.
 */
bool fc_dir_find(const char *path, bool (*matches)(const char *name), fc_error *err);

/**
 * Lists the names in a directory that `accepts` accepts, sorted, so that nothing depends on the file system.
 * @param context passed to `accepts`
 * @param names receives the list, in the arena
 */
fc_code fc_dir_list(const char *path, bool (*accepts)(const char *name, const void *context), const void *context,
                    fc_arena *arena, const char ***names, size_t *count, fc_error *err);

/** Removes the file or tree `name` in the open directory `parent` as far as possible. Follows no links. */
void fc_remove_tree(int parent, const char *name);
