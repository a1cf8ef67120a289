/*
 * What conversions need of a commit beyond fsdpckpt/io.h.
 */
#pragma once

#include "fsdpckpt/io.h"

/** Makes fc_commit_finish count the files that it syncs, as FC_PHASE_SYNCING, and stop if `progress` is cancelled. */
void fc_commit_count(fc_commit *commit, struct fc_progress *progress);

/** With fc_commit_options.resumable: whether the staging directory stays if the commit is aborted or fails. An abort
 * says so. At first, it stays if it was there before, and nothing is said: the error tells why it is of no use. */
void fc_commit_keep(fc_commit *commit, bool keeps);

/** Returns the path of the staging directory, or of the tile journal of a target in a bucket (io/staged_kept.h). */
const char *fc_commit_folder(const fc_commit *commit);

/**
 * Where the file system cannot exchange two names, a run that dies between its two renames leaves no target. If `path`
 * is missing for that reason, this puts the new target in place. It waits for a live run between its two renames.
 */
fc_code fc_commit_recover(const char *path, const fc_reporter *reporter, fc_error *err);
