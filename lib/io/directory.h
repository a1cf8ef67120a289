/*
 * Walking a directory: names one by one, and an error where the file system could not give all of them. readdir alone
 * reports an error like the end, and a checkpoint whose directory is read half looks like a smaller one.
 */
#ifndef FSDPCKPT_IO_DIRECTORY_H
#define FSDPCKPT_IO_DIRECTORY_H

#ifndef FSDPCKPT_PRIVATE
#error "this header is private to fsdpckpt: include <fsdpckpt/...> instead"
#endif

#include "fsdpckpt/error.h"

#include <dirent.h>
#include <stdbool.h>

/**
 * A walk in progress:
 *
 *     fc_dir dir;
 *     fc_code rc = fc_dir_open(&dir, path, err);
 *     for (const char *name; rc == FC_OK && (name = fc_dir_next(&dir)) != NULL;) { ... }
 *     rc = fc_dir_close(&dir, rc, err);
 */
typedef struct fc_dir {
    const char *path; /* borrowed; for messages */
    DIR *dir;         /* NULL: not open */
    int errnum;       /* what ended the walk early; 0: nothing */
} fc_dir;

/** Opens the directory `path`. On failure the other two may still be called. */
fc_code fc_dir_open(fc_dir *dir, const char *path, fc_error *err);

/** The same for an open descriptor, which this takes, also on failure. @param path for messages. */
fc_code fc_dir_open_at(fc_dir *dir, int fd, const char *path, fc_error *err);

/** The next name, without "." and "..". @return NULL at the end and after an error; valid until the next call. */
const char *fc_dir_next(fc_dir *dir);

/** Returns whether the entry `name` is a directory, and not a link to one. */
bool fc_dir_is_folder(const fc_dir *dir, const char *name);

/** Closes it. @return `rc`, or where that is FC_OK what kept the walk from the end. */
fc_code fc_dir_close(fc_dir *dir, fc_code rc, fc_error *err);

/**
 * Returns whether a name in the directory `path` is one that `matches`. What is no directory has none.
 * @param err set if the directory cannot be listed or not be read to its end.
 */
bool fc_dir_find(const char *path, bool (*matches)(const char *name), fc_error *err);

/** Removes the file or tree `name` of the open directory `parent`, as far as that is possible; no link is followed. */
void fc_remove_tree(int parent, const char *name);

#endif
