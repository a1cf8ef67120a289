/*
 * The cache of huggingface_hub: models--OWNER--NAME/ has blobs/HASH, the files; snapshots/COMMIT/, whose files are
 * links to blobs; and refs/main, which has the commit of the branch.
 */
#pragma once

#include "fsdpckpt/arena.h"

#include <stdbool.h>

/** Whether `target` is a blob of the cache that `directory` is a snapshot of, or is in one. Both are realpath()s. */
bool fc_is_hub_blob(const char *target, const char *directory);
