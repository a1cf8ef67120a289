/*
 * What happens in a bucket before a target is made there, and after: see staged_publish.c.
 */
#pragma once

#include "fsdpckpt/io.h"
#include "io/staged_objects.h"

/** Deletes the files of the old target that `how` allows to replace and that the new one does not have. */
fc_code fc_staged_replace(const fc_staged_target *target, const fc_commit_options *how, fc_error *err);

/** The name of the mark in a target that is not complete. */
#define FC_STAGED_MARK ".fsdpckpt-unfinished"

/**
 * If a run died while it made its target `folder` visible, deletes what is visible of it.
 * @return FC_EUSAGE without `how->force` if that run replaced another target: what is there is not complete
 */
fc_code fc_staged_clear_mark(const char *folder, const fc_commit_options *how, fc_error *err);

/** Aborts the uploads to the target `name` that dead runs did not complete. Says so, also if they cannot be listed. */
fc_code fc_staged_clear_uploads(const char *name, const fc_commit_options *how, fc_error *err);
