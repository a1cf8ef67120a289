/*
 * Syncs files and directories. sync.c begins with the order in which a commit does that.
 */
#pragma once

#include "fsdpckpt/progress.h"

/** Syncs the file or directory `name` in the open directory `parent`. @param shown its name in messages. */
fc_code fc_sync_path(int parent, const char *name, const char *shown, fc_error *err);

/** Syncs a directory with everything below it, and counts each file in `progress`, which may be NULL. */
fc_code fc_sync_tree(const char *path, fc_progress *progress, fc_error *err);

/** Returns how many files and folders fc_sync_tree will count. */
uint64_t fc_sync_count(const char *path);
