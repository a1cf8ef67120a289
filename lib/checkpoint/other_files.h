/*
 * Files that are in the directory of a checkpoint but are not part of it.
 */
#pragma once

#include "fsdpckpt/checkpoint.h"

/** @return whether a file called `name` may contain tensors or a trainer's state. */
bool fc_holds_data(const char *name);

/**
 * Adds to the checkpoint's note which data files in `directory` are not in checkpoint->files.
 * @return FC_OK or FC_ENOMEM.
 */
fc_code fc_note_other_files(fc_checkpoint *checkpoint, const char *directory, fc_error *err);
