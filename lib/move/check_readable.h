/*
 * Fails for the values of a target that cannot be read, all at once: a user who learns of one at a time needs as many
 * runs as there are.
 */
#pragma once

#include "fsdpckpt/target.h"

/**
 * Checks by the manifest that all values of the target can be read.
 * @return the code of the first one that cannot, with a line that names several, and globs that leave all of them out.
 */
fc_code fc_check_all_readable(const fc_target *target, fc_error *err);
