/*
 * Progress on stderr: a thread that looks at fc_progress a few times a second and shows it as --progress wants. The
 * workers only count.
 */
#ifndef FSDPCKPT_CLI_PROGRESS_H
#define FSDPCKPT_CLI_PROGRESS_H

#include "options.h"

#include "fsdpckpt/progress.h"

typedef struct progress_view progress_view;

/** Seconds of a clock that nobody sets. */
double progress_now(void);

/**
 * Starts showing `progress`; to be called before other threads are started.
 * @param started of the command, by progress_now.
 * @return NULL when there is nothing to show; failing to start is not an error of the job.
 */
progress_view *progress_start(fc_progress *progress, const options *o, double started);

/** Stops, removes the line from the terminal, frees. NULL is allowed. */
void progress_stop(progress_view *view);

#endif
