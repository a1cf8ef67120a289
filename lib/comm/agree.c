/*
 * fc_comm_agree, and the functions that a backend may lack. They use only the functions of fc_comm.
 */
#include "fsdpckpt/comm.h"

#include "comm/rank_error.h"
#include "fsdpckpt/try.h"

#include <stdlib.h>
#include <string.h>

void fc_comm_abort(fc_comm *comm) {
    comm->broken = true;
    if (comm->abort) {
        comm->abort(comm);
    }
}

bool fc_comm_has_failed(fc_comm *comm) {
    return comm->has_failed && comm->has_failed(comm);
}

/* The outcome of one rank, as sent to the others. */
typedef struct outcome {
    int32_t code, hint;
    char message[sizeof((fc_error *)0)->message];
    char about[sizeof((fc_error *)0)->about];
} outcome;

/* Whether all ranks failed with the same message, for example for a missing file. It then names no rank. */
static bool are_equal(const outcome *all, int size) {
    for (int r = 1; r < size; r++) {
        if (all[r].code != all[0].code || strcmp(all[r].message, all[0].message) != 0) {
            return false;
        }
    }
    return true;
}

static fc_code fail_for_rank(int rank, const outcome *theirs, bool alike, fc_error *err) {
    fc_code code = alike || fc_names_a_rank(theirs->message)
                       ? fc_fail(err, (fc_code)theirs->code, "%s", theirs->message)
                       : fc_fail(err, (fc_code)theirs->code, "rank %d: %s", rank, theirs->message);
    return fc_advise(err, code, (fc_hint)theirs->hint, theirs->about);
}

/* Whether a rank has failed. Nearly always none has, and then no messages need to be sent. */
static fc_code find_failure(fc_comm *comm, fc_code mine, bool *failed, fc_error *err) {
    uint64_t worst = (uint64_t)mine;
    *failed = true;
    if (!comm->all_reduce) { /* a backend for GPUs */
        return FC_OK;
    }
    FC_TRY(comm->all_reduce(comm, &worst, 1, FC_U64, FC_REDUCE_MAX, err));
    *failed = worst != FC_OK;
    return FC_OK;
}

fc_code fc_comm_agree(fc_comm *comm, fc_code mine, fc_error *err) {
    if (comm->size == 1 || (comm->broken && mine != FC_OK)) {
        return mine;
    }
    bool failed;
    fc_error lost = {0}; /* `err` keeps this rank's own message */
    fc_code reached = find_failure(comm, mine, &failed, &lost);
    if (reached != FC_OK || !failed) {
        if (reached != FC_OK && err) {
            *err = lost;
        }
        return reached;
    }
    outcome own = {.code = (int32_t)mine};
    if (mine != FC_OK) {
        /* Without an fc_error there is no message to send. */
        memcpy(own.message, err ? err->message : "failed", err ? sizeof err->message : sizeof "failed");
        if (err) {
            own.hint = (int32_t)err->hint;
            memcpy(own.about, err->about, sizeof own.about);
        }
    }
    outcome *all = calloc((size_t)comm->size, sizeof *all);
    FC_NEED(all, err, NULL);
    fc_code rc = comm->all_gather(comm, &own, all, sizeof own, err);
    bool alike = rc == FC_OK && are_equal(all, comm->size);
    for (int rank = 0; rc == FC_OK && rank < comm->size; rank++) {
        if (all[rank].code != FC_OK) {
            rc = fail_for_rank(rank, &all[rank], alike, err);
        }
    }
    free(all);
    return rc;
}
