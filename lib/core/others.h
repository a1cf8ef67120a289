/*
 * Files of data beside a checkpoint's own.
 */
#ifndef FSDPCKPT_CORE_OTHERS_H
#define FSDPCKPT_CORE_OTHERS_H

#include "fsdpckpt/checkpoint.h"

/** Sets checkpoint->note, where files that hold data are in `directory` that are none of checkpoint->files. */
fc_code fc_note_others(fc_checkpoint *checkpoint, const char *directory, fc_error *err);

#endif
