/*
 * How much of a strided copy one read covers.
 */
#pragma once

#include "codec/strided.h"

/** All axes from `whole` on, and `group` steps of the axis before them. */
typedef struct fc_window {
    int whole;
    int64_t group; /* 1: steps through the axis before `whole` one by one */
} fc_window;

/** Widens the window from the innermost axis outwards while gaps are small and it fits `scratch` bytes. */
fc_window fc_window_choose(const fc_strided *copy, size_t scratch);
