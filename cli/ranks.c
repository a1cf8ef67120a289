/*
 * Several processes for one command: see ranks.h.
 */
#include "ranks.h"

#include "fsdpckpt/gather_files.h"
#include "fsdpckpt/try.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* @return the first variable of a launcher that is set, or that of a step of Slurm with PMIx, or NULL. Slurm also sets
 * its variables for batch scripts, which are not ranks. */
static const char *launcher_value(const char *const *names, const char *condition, const char *of_slurm) {
    const char *value = NULL;
    for (; *names && !value; names++) {
        value = getenv(*names);
    }
    return value || !getenv(condition) ? value : getenv(of_slurm);
}

/* @return the number of ranks that the launcher announces; 1 without a launcher. */
static long launched_ranks(void) {
    static const char *const names[] = {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", NULL};
    const char *size = launcher_value(names, "PMIX_RANK", "SLURM_STEP_NUM_TASKS");
    return size ? strtol(size, NULL, 10) : 1;
}

bool ranks_is_launched_first(void) {
    static const char *const names[] = {"OMPI_COMM_WORLD_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK", NULL};
    const char *rank = launcher_value(names, "SLURM_STEP_NUM_TASKS", "PMIX_RANK");
    return !rank || strcmp(rank, "0") == 0;
}

static fc_code join_ranks(ranks *r, long launched, fc_error *err) {
    FC_TRY(fc_comm_mpi(&r->comm, err));
    if (launched > 1 && r->comm->size == 1) {
        return fc_fail(err, FC_EUNSUPPORTED,
                       "mpi: the launcher started %ld ranks, but this MPI library sees only one; does it belong to "
                       "another MPI? (--comm none runs every process on its own)",
                       launched);
    }
    return FC_OK;
}

fc_code ranks_begin(ranks *r, const options *o, const fc_progress *progress, fc_code mine, fc_error *err) {
    long launched = launched_ranks();
    if (o->comm == COMM_NONE || (o->comm == COMM_AUTO && launched <= 1)) {
        return o->local && mine == FC_OK
                   ? fc_fail(err, FC_EUSAGE, "--local needs mpirun, with one rank on every machine that has files")
                   : mine;
    }
    FC_TRY(join_ranks(r, launched, err)); /* replaces earlier errors: without MPI the ranks cannot agree on one */
    r->comm->cancel = &progress->cancel;
    return fc_comm_agree(r->comm, mine, err);
}

/* Rank 0 creates a scratch directory next to the target. */
static fc_code begin_gather(const ranks *r, const char *target, fc_commit **gathered, fc_error *err) {
    if (!target) {
        return fc_fail(err, FC_EUSAGE, "--local needs -o, --output DST");
    }
    return r->comm->rank == 0 ? fc_commit_scratch(target, gathered, err) : FC_OK;
}

fc_code ranks_gather(ranks *r, const char *source, const char *target, fc_commit **gathered, fc_error *err) {
    *gathered = NULL;
    FC_TRY(fc_comm_agree(r->comm, begin_gather(r, target, gathered, err), err));
    return fc_gather_files(r->comm, source, *gathered ? fc_commit_path(*gathered) : "", err);
}

bool ranks_speaks(const ranks *r) {
    return !r->comm || r->comm->rank == 0;
}

/*
 * When a job is stopped, or a rank of it has died, Open MPI's mpirun sends SIGTERM, and SIGKILL after a second or, if
 * that is earlier, when the first rank ends. So the other ranks wait, to give rank 0 the whole second to remove its
 * files.
 */
static void let_rank_0_clean_up(void) {
    struct timespec pause = {0, 900 * 1000000L};
    nanosleep(&pause, NULL);
}

fc_code ranks_end(ranks *r, fc_code rc) {
    if (r->comm) {
        if (r->comm->rank > 0 && !r->comm->broken) {
            rc = FC_OK;
            signal(SIGTERM, SIG_IGN); /* when rank 0 has failed, mpirun ends all ranks; this one exits on its own */
        }
        if (r->comm->rank > 0 && r->comm->broken) {
            let_rank_0_clean_up();
        }
        r->comm->free(r->comm);
    }
    return rc;
}
