/*
 * The first bytes of the frames of deltas on servers, which say how much memory decoding needs. They are asked for at
 * once: one after the other, each would take a round trip to the server.
 */
#pragma once

#include "delta/versions.h"

/** Reads the heads of all frames of the versions that are on servers. What cannot be read is left to fc_delta_window,
 * which reports why. */
void fc_delta_heads_read(fc_delta_version *const *versions, size_t count);
