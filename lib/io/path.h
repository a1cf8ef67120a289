/*
 * The calls about paths that readers of checkpoints make, also for names of files on servers (net/remote.h). What is
 * written is examined with the same calls.
 */
#pragma once

#include "fsdpckpt/io.h"

#include <limits.h>
#include <stdbool.h>
#include <sys/stat.h>

/** Says that a file will soon be examined or opened: if it is on a server, that is asked for it now. */
void fc_expect(const char *path);

/** Stores whether `path` exists, and what it is. @return an error only if that cannot be found out */
fc_code fc_stat_path(const char *path, struct stat *st, bool *found, fc_error *err);

/**
 * Like the calls of the same names, also for what is being made in a bucket (staged_objects.h). On servers there are no
 * links and no permissions, and a folder need not be made. fc_open sets O_CLOEXEC; `mode` matters with O_CREAT only.
 */
int fc_mkdir(const char *path);
int fc_lstat(const char *path, struct stat *st);
int fc_fstat(int fd, struct stat *st);
char *fc_realpath(const char *path, char out[PATH_MAX]);
