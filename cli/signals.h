/*
 * SIGINT, SIGTERM and SIGHUP (a lost terminal): stop the job so that nothing is left behind; a second signal kills.
 */
#ifndef FSDPCKPT_CLI_SIGNALS_H
#define FSDPCKPT_CLI_SIGNALS_H

#include "fsdpckpt/progress.h"

/** Installs the handlers and ignores SIGPIPE and SIGXFSZ. Without a job (below), a signal ends the program. */
void signals_install(void);

/** From now on a signal sets progress->cancel. NULL: ends the process again. */
void signals_cancel(fc_progress *progress);

#endif
