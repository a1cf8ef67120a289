/*
 * Progress on stderr: a thread reads fc_progress several times a second and prints it according to --progress. The
 * workers only count.
 */
#pragma once

#include "options/options.h"

#include "fsdpckpt/progress.h"

typedef struct progress_view progress_view;

/** @return seconds of a monotonic clock. */
double progress_now(void);

/**
 * Starts to show `progress`. Call it before other threads are started.
 * @param started when the command started, from progress_now.
 * @return NULL if there is nothing to show or the thread cannot start, which is not an error.
 */
progress_view *progress_start(fc_progress *progress, const options *o, double started);

/** Stops the thread, removes the line from the terminal and frees `view`, which may be NULL. */
void progress_stop(progress_view *view);
