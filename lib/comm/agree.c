/*
 * Agreeing on an outcome, whatever the backend: written with nothing but the functions of fc_comm and its device.
 */
#include "fsdpckpt/comm.h"

#include "base/try.h"
#include "comm/rank_error.h"

#include <stdlib.h>
#include <string.h>

/* What a rank tells the others of its outcome. */
typedef struct outcome {
    int32_t code, hint;
    char message[sizeof((fc_error *)0)->message];
    char about[sizeof((fc_error *)0)->about];
} outcome;

/* all_gather of host memory, by way of the device where that is another. */
static fc_code gather_from_host(fc_comm *comm, const void *send, void *recv, size_t bytes, fc_error *err) {
    fc_device *device = comm->device;
    if (device->is_host) {
        return comm->all_gather(comm, send, recv, bytes, NULL, err);
    }
    void *memory;
    size_t all = bytes * (size_t)comm->size;
    FC_TRY(device->alloc(device, all, &memory, err));
    char *mine = (char *)memory + bytes * (size_t)comm->rank;
    fc_code rc = device->copy(device, mine, send, bytes, NULL, err);
    rc = rc == FC_OK ? comm->all_gather(comm, mine, memory, bytes, NULL, err) : rc;
    rc = rc == FC_OK ? device->copy(device, recv, memory, all, NULL, err) : rc;
    rc = rc == FC_OK ? device->synchronize(device, NULL, err) : rc;
    device->release(device, memory);
    return rc;
}

/* What all ranks say alike is not one rank's trouble: a file that does not exist. */
static bool all_alike(const outcome *all, int size) {
    for (int r = 1; r < size; r++) {
        if (all[r].code != all[0].code || strcmp(all[r].message, all[0].message) != 0) {
            return false;
        }
    }
    return true;
}

static fc_code report(int rank, const outcome *of, bool alike, fc_error *err) {
    fc_code code = alike || fc_names_a_rank(of->message)
                       ? fc_fail(err, (fc_code)of->code, "%s", of->message)
                       : fc_fail(err, (fc_code)of->code, "rank %d: %s", rank, of->message);
    return fc_advise(err, code, (fc_hint)of->hint, of->about);
}

fc_code fc_comm_agree(fc_comm *comm, fc_code mine, fc_error *err) {
    if (comm->size == 1 || (comm->broken && mine != FC_OK)) {
        return mine;
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
    if (!all) {
        return fc_no_memory(err, NULL);
    }
    fc_code rc = gather_from_host(comm, &own, all, sizeof own, err);
    bool alike = rc == FC_OK && all_alike(all, comm->size);
    for (int rank = 0; rc == FC_OK && rank < comm->size; rank++) {
        if (all[rank].code != FC_OK) {
            rc = report(rank, &all[rank], alike, err);
        }
    }
    free(all);
    return rc;
}
