/*
 * For formats that say which files a target may replace: fc_own_file.is_ours and fc_format_target.is_checkpoint.
 */
#pragma once

#include "fsdpckpt/error.h"

#include <stdbool.h>

/** Sets `*own` to whether the format could read a file, given what reading it returned. @return the errors that say
 *  nothing about the file. */
fc_code fc_own_if_read(fc_code read, bool *own);
