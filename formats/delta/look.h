/*
 * Looking at versions without the model: what look.c, which reads headers, and frames.c, which looks at frames, share.
 */
#pragma once

#include "delta/chain.h"
#include "delta/model.h"

/** What is known of a version besides its headers. */
typedef struct fc_delta_looked {
    const fc_delta_version *version;
    fc_delta_seen *seen;
    const fc_sync_model *full; /**< of a full version */
    size_t root;               /**< of a delta: the full version that its chain begins with; FC_DELTA_NO_ROOT: none */
} fc_delta_looked;

#define FC_DELTA_NO_ROOT SIZE_MAX

typedef struct fc_delta_looking {
    const fc_delta_look_options *options;
    fc_arena *arena, *headers;
    fc_delta_versions all;
    fc_delta_looked *looked; /**< one per version */
    uint64_t bytes_read;
} fc_delta_looking;

/** Reads the frames as far as the options say. */
fc_code fc_delta_look_at_frames(fc_delta_looking *looking, fc_error *err);
