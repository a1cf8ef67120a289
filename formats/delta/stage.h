/*
 * A full version replaces the files of a model: they are copied next to it, and the journal gives them their names.
 */
#pragma once

#include "delta/journal.h"
#include "fsdpckpt/progress.h"

/** Copies the files of the version in the folder `version` to SYNC_STAGED of the model, which is emptied first. */
fc_code fc_stage_version(const char *version, const char *model, fc_progress *progress, fc_error *err);

/** Makes the copies durable, and adds to the journal that they replace the files and the weights of the model. */
fc_code fc_stage_finish(const char *model, fc_journal *journal, fc_progress *progress, fc_error *err);

/** Removes the copies, if there are any. */
void fc_stage_remove(const char *model);
