/*
 * Which targets --force may replace, and what the new target takes over from the old one.
 */
#pragma once

#include "fsdpckpt/io.h"

/**
 * Checks that `path`, if it exists, may be replaced with the options `how`. @return FC_EUSAGE if not.
 * @param path the target, resolved.
 */
fc_code fc_check_replaced(const fc_commit_options *how, const char *path, fc_error *err);

/** @return whether a file of the list, which may be NULL, has this name. */
bool fc_is_target_name(const fc_own_file *files, const char *name);

/**
 * Gives what the directory `old` has and `how` does not replace a second name in the directory `made`, which is about
 * to replace it, durably. @return FC_EUSAGE if `made` has a file of the same name.
 * @param late `made` has replaced `old`: move to it what it lacks, or has in an earlier state.
 */
fc_code fc_keep_others(const fc_commit_options *how, const char *old, const char *made, bool late, fc_error *err);

/** Gives `made` the permissions and the owner of `old`, which it is about to replace. Both are files, or directories of
 *  files. Nobody gets access who could not read the old one. Files that `how` keeps do not count. */
fc_code fc_keep_permissions(const fc_commit_options *how, const char *old, const char *made, fc_error *err);

/**
 * Takes the permission bits `forbidden` from the file `path`, or from all files of the directory `path`. Folders lose
 * the permissions of a class that may not read; their owner keeps his.
 */
fc_code fc_limit_permissions(const char *path, unsigned forbidden, fc_error *err);
