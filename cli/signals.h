/*
 * Handles SIGINT, SIGTERM and SIGHUP (a lost terminal): the first signal cancels the job, which removes its partial
 * output; a second one kills the process.
 */
#pragma once

#include "fsdpckpt/progress.h"

/** Installs the handlers and ignores SIGPIPE and SIGXFSZ. Without a job (below), a signal ends the program. */
void signals_install(void);

/** From now on a signal sets progress->cancel. With NULL, a signal ends the process again. */
void signals_cancel(fc_progress *progress);
