/*
 * The steps by which a forked process gives up what its parent has, before it is confined. The reader of HDF5 headers
 * and the process that talks to servers share them.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <sys/resource.h>

/** Sets a resource limit, or the highest that is allowed. */
void fc_child_limit(int what, rlim_t value);

/** The parent's handlers make no sense in the child. A crash must end it with its signal; the parent handles ^C. */
void fc_child_reset_signals(void);

/** Closes all descriptors except `keep`, which is sorted, and opens /dev/null as 0, 1 and 2. */
bool fc_child_keep_only(int *keep, size_t count);
