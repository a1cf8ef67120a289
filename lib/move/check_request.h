/*
 * The conditions on a request for a conversion that do not depend on what the source contains.
 */
#pragma once

#include "fsdpckpt/move.h"

/** Whether the target is a directory in this format. */
bool fc_target_is_directory(const fc_target *target, const fc_format *format);

/** Rejects options that do not fit together, the source's kind or the target's place. @param path may be NULL */
fc_code fc_check_request(const fc_checkpoint *source, const char *path, const fc_convert_options *options,
                         fc_error *err);

/** Refuses to make a directory under the name of a file. */
fc_code fc_check_target_name(const fc_target *target, const char *path, const fc_format *format, fc_error *err);
