/*
 * Several processes for one command: detects mpirun, joins the ranks, and lets one rank print for all.
 */
#pragma once

#include "options/options.h"

#include "fsdpckpt/comm.h"
#include "fsdpckpt/move.h"

typedef struct ranks {
    fc_comm *comm; /**< NULL: a single process */
} ranks;

/**
 * Joins the other ranks, if there are any and --comm allows it. Call it after all forks, because some MPI libraries do
 * not support fork later.
 * @param mine     the result of this rank so far. All ranks return the same code.
 * @param progress its `cancel` releases a rank that waits for others.
 */
fc_code ranks_begin(ranks *r, const options *o, const fc_progress *progress, fc_code mine, fc_error *err);

/**
 * --local: copies the files in the directories `source` of all ranks to rank 0, next to `target`. All ranks return the
 * same code.
 * @param gathered receives the temporary directory on rank 0, to be given to fc_commit_abort; NULL on the others.
 */
fc_code ranks_gather(ranks *r, const char *source, const char *target, fc_commit **gathered, fc_error *err);

/** Whether this is the launcher's first process, or there is no launcher. Works before ranks_begin. */
bool ranks_is_launched_first(void);

/** Whether this rank prints; exactly one does. */
bool ranks_speaks(const ranks *r);

/**
 * Leaves the other ranks. Only rank 0 reports an agreed result and exits with it: if another rank exited with an error
 * first, mpirun would end rank 0, perhaps before its report.
 * @return `rc` on rank 0, FC_OK on the others.
 */
fc_code ranks_end(ranks *r, fc_code rc);
