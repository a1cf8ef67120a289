/*
 * What is in the folder of a checkpoint and no part of it.
 */
#ifndef FSDPCKPT_CHECKPOINT_OTHER_FILES_H
#define FSDPCKPT_CHECKPOINT_OTHER_FILES_H

#ifndef FSDPCKPT_PRIVATE
#error "this header is private to fsdpckpt: include <fsdpckpt/...> instead"
#endif

#include "fsdpckpt/checkpoint.h"

/** Whether a file of that name may hold tensors or a trainer's state. */
bool fc_holds_data(const char *name);

/** Adds a line about the data files in `directory` that are not in checkpoint->files to the checkpoint's note. */
fc_code fc_note_beside(fc_checkpoint *checkpoint, const char *directory, fc_error *err);

#endif
