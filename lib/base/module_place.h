/*
 * Whether a file is in a place where only this user and root can change it.
 */
#pragma once

#include "fsdpckpt/error.h"

/**
 * Checks `path`, which is absolute and has no symbolic links. Every directory on the way and the file
 * must belong to root or to this user, and nobody else may write to them. Others may write to a directory with the
 * sticky bit, such as /tmp, because they cannot replace what is not theirs in it.
 * @return FC_EUNSUPPORTED with the component that others can change.
 */
fc_code fc_module_place_check(const char *path, fc_error *err);
