/*
 * Opens a checkpoint with a format that the caller knows.
 */
#pragma once

#include "fsdpckpt/format.h"

/** Opens a checkpoint that is known to have this format, or, with NULL, one that is recognised. Unlike
 * fc_checkpoint_open, it does not look for the remains of an interrupted replacement. */
fc_code fc_format_open(const fc_format *format, const char *path, const fc_open_options *options, fc_checkpoint **out,
                       fc_error *err);
