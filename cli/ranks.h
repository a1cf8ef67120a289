/*
 * Several processes for one command: found to be started by mpirun, joined, and made to speak with one voice.
 */
#ifndef FSDPCKPT_CLI_RANKS_H
#define FSDPCKPT_CLI_RANKS_H

#include "options.h"

#include "fsdpckpt/comm.h"
#include "fsdpckpt/move.h"

typedef struct ranks {
    fc_device *device;
    fc_comm *comm; /**< NULL: this process alone */
} ranks;

/**
 * Joins the other ranks if there are any and --comm wants them. To be called after what forks: some MPI libraries
 * cannot bear it later.
 * @param mine     what this rank has done before; all return the same.
 * @param progress whose `cancel` frees a rank that waits for others.
 */
fc_code ranks_begin(ranks *r, const options *o, const fc_progress *progress, fc_code mine, fc_error *err);

/**
 * --local: brings the files of all ranks' directories `source` together next to `target` on rank 0. All return the
 * same.
 * @param gathered receives the temporary directory on rank 0, to be given to fc_commit_abort; NULL on the others.
 */
fc_code ranks_gather(ranks *r, const options *o, const char *source, const char *target, fc_commit **gathered,
                     fc_error *err);

/** Whether this is the launcher's first process, or there is no launcher. Known before ranks_begin. */
bool ranks_is_launched_first(void);

/** Whether this rank prints: one of them does. */
bool ranks_speaks(const ranks *r);

/**
 * Leaves the others. An outcome on which all have agreed is rank 0's to tell, and to end with: mpirun would end rank 0,
 * perhaps before it has spoken, if another rank ended with an error first.
 * @return `rc`, or FC_OK where rank 0 tells.
 */
fc_code ranks_end(ranks *r, fc_code rc);

#endif
