/*
 * What happens in a bucket before a target is made there, and after: see staged_publish.c.
 */
#pragma once

#include "fsdpckpt/io.h"
#include "io/staged_objects.h"

/** Checks that something can be written to a name, without a request. */
fc_code fc_staged_check(const char *name, fc_error *err);

/** Deletes the files of the old target that `how` allows to replace and that the new one does not have. */
fc_code fc_staged_replace(const fc_staged_target *target, const fc_commit_options *how, fc_error *err);

/**
 * Removes what dead runs left at `name`: uploads that were not completed, and, if one died while it made its target
 * visible, what is visible of that target.
 * @param reporter receives a line for each of these two, and one if uploads cannot be listed
 */
fc_code fc_staged_clear(const char *name, bool is_folder, const fc_reporter *reporter, fc_error *err);
