/*
 * Progress on stderr: a thread that looks at fc_progress a few times a second. The workers only count.
 */
#ifndef FSDPCKPT_CLI_PROGRESS_H
#define FSDPCKPT_CLI_PROGRESS_H

#include "options.h"

#include "fsdpckpt/move.h"

typedef struct progress_view progress_view;

/**
 * Starts showing `progress`. In the mode auto only where stderr is a terminal. Work of less than a second
 * shows nothing. @return NULL when there is nothing to show; failing to start is not an error of the job.
 */
progress_view *progress_start(fc_progress *progress, progress_mode mode);

/** Stops, removes the line from the terminal, frees. NULL is allowed. */
void progress_stop(progress_view *view);

#endif
