/*
 * The calls about paths that readers of checkpoints make, also for names of files on servers (net/remote.h). What is
 * written is always on a file system, and is examined with the calls of the system.
 */
#pragma once

#include "fsdpckpt/io.h"

#include <limits.h>
#include <stdbool.h>
#include <sys/stat.h>

/** Stores whether `path` exists, and what it is. @return an error only if that cannot be found out */
fc_code fc_stat_path(const char *path, struct stat *st, bool *found, fc_error *err);

/** Like the calls of the same names. There are no links on servers. */
int fc_lstat(const char *path, struct stat *st);
int fc_fstat(int fd, struct stat *st);
char *fc_realpath(const char *path, char out[PATH_MAX]);
