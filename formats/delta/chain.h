/*
 * The deltas that are folded: a chain of versions, and for each tensor those of them that change it.
 */
#pragma once

#include "delta/versions.h"

/** Consecutive deltas, the oldest first. Everything is in an arena. */
typedef struct fc_delta_links {
    fc_delta_version **versions;
    size_t count;
} fc_delta_links;

/** One tensor that some of the deltas change. */
typedef struct fc_delta_link {
    const char *name;
    const fc_delta_version **versions; /**< those that change it, the oldest first, */
    const fc_delta_tensor **tensors;   /**< and their frames */
    size_t count;
} fc_delta_link;

/**
 * Finds the deltas that are folded, and reads their headers.
 * @param sources see fc_delta_fold.
 * @param wanted  the last version in a directory of versions; FC_DELTA_NO_NUMBER: the newest one.
 * @param have    the version that the deltas are applied to: those up to it are left out, and there may be none;
 *                FC_DELTA_NO_NUMBER: unknown.
 */
fc_code fc_delta_links_find(fc_arena *arena, const char *const *sources, size_t count, int64_t wanted, int64_t have,
                            fc_delta_links *out, fc_error *err);

/** Lists the tensors that the deltas change, by name. @param out receives them, in the arena. */
fc_code fc_delta_links_tensors(fc_arena *arena, const fc_delta_links *links, fc_delta_link **out, size_t *count,
                               fc_error *err);
