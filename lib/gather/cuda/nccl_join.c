/*
 * Makes NCCL communicators: from a bootstrap communicator or a file, through which the ranks get NCCL's unique id, and
 * by splitting. Each rank first allocates all that it needs, then the ranks agree that they could, and only then they
 * join, so that no rank waits for one that has failed.
 *
 * This is the file with the table of the module (see comm/module.h).
 */
#include "fsdpckpt/try.h"
#include "gather/cuda/nccl_state.h"
#include "gather/module.h"

#include <stdlib.h>

static fc_code check_device(const fc_device *device, fc_error *err) {
    if (!fc_is_cuda(device)) {
        return fc_fail(err, FC_EUNSUPPORTED, "nccl: memory of %s is not supported: use a GPU", device->name);
    }
    return FC_OK;
}

/* A failure is no reason to give up the others of the family: the ranks are about to agree. */
static fc_code allocate_scratch(fc_comm *comm, size_t bytes, fc_error *err) {
    nccl_state *s = comm->state;
    fc_device *device = comm->device;
    FC_TRY(device->alloc(device, bytes, &s->scratch, err));
    FC_TRY(device->zero(device, s->scratch, bytes, NULL, err));
    return device->synchronize(device, NULL, err);
}

/* Makes a communicator without its ncclComm_t. @param family NULL: a new one. */
static fc_code comm_new(fc_device *device, nccl_family *family, int ranks, fc_comm **out, fc_error *err) {
    fc_comm *comm = malloc(sizeof *comm);
    nccl_state *s = calloc(1, sizeof *s);
    nccl_family *own = family ? family : calloc(1, sizeof *own);
    *out = NULL;
    if (!comm || !s || !own) {
        free(comm);
        free(s);
        if (!family) {
            free(own);
        }
        return fc_no_memory(err, "nccl");
    }
    *comm = fc_nccl_functions;
    comm->device = device;
    comm->state = s;
    comm->broken = own->aborted;
    s->family = own;
    s->next = own->first;
    own->first = comm;
    fc_code rc = allocate_scratch(comm, ((size_t)ranks + 1) * sizeof(nccl_split_request), err);
    if (rc != FC_OK) {
        fc_nccl_free(comm);
        return rc;
    }
    *out = comm;
    return FC_OK;
}

/* Joins the other ranks; an error frees the communicator. */
static fc_code join_ranks(fc_comm **comm, const ncclUniqueId *id, int rank, int size, fc_error *err) {
    nccl_state *s = (*comm)->state;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    int before;
    config.blocking = 0;
    (*comm)->rank = rank;
    (*comm)->size = size;
    s->family->rank = rank;
    s->family->root = *comm;
    fc_code rc = fc_nccl_begin(*comm, &before, err);
    if (rc == FC_OK) {
        ncclResult_t result = ncclCommInitRankConfig(&s->nccl, size, *id, rank, &config);
        rc = fc_nccl_end(*comm, before, fc_nccl_check(*comm, result, "joining the other ranks", err));
    }
    if (rc != FC_OK) {
        fc_nccl_free(*comm);
        *comm = NULL;
    }
    return rc;
}

static fc_code make_id(ncclUniqueId *id, fc_error *err) {
    ncclResult_t result = ncclGetUniqueId(id);
    return result == ncclSuccess ? FC_OK : fc_fail(err, FC_EIO, "nccl: %s", ncclGetErrorString(result));
}

/* Broadcasts the id from rank 0. A bootstrap communicator on a GPU needs a copy in device memory. */
static fc_code broadcast_id(fc_comm *bootstrap, ncclUniqueId *id, fc_error *err) {
    fc_device *device = bootstrap->device;
    if (device->is_host) {
        return fc_broadcast(bootstrap, id, sizeof *id, 0, NULL, err);
    }
    void *memory = NULL;
    fc_code rc;
    FC_TRY_GOTO(device->alloc(device, sizeof *id, &memory, err), rc, out);
    FC_TRY_GOTO(device->copy(device, memory, id, sizeof *id, NULL, err), rc, out);
    FC_TRY_GOTO(fc_broadcast(bootstrap, memory, sizeof *id, 0, NULL, err), rc, out);
    FC_TRY_GOTO(fc_comm_wait(bootstrap, NULL, err), rc, out);
    FC_TRY_GOTO(device->copy(device, id, memory, sizeof *id, NULL, err), rc, out);
    rc = fc_comm_wait(bootstrap, NULL, err);
out:
    if (rc != FC_OK && !bootstrap->broken) {
        fc_comm_abort(bootstrap);
    }
    device->release(device, memory);
    return rc;
}

/* What a rank needs before the ranks join. */
static fc_code prepare_comm(fc_comm *bootstrap, fc_device *device, ncclUniqueId *id, fc_comm **out, fc_error *err) {
    FC_TRY(check_device(device, err));
    if (bootstrap->rank == 0) {
        FC_TRY(make_id(id, err));
    }
    return comm_new(device, NULL, bootstrap->size, out, err);
}

static fc_code new_nccl(fc_comm *bootstrap, fc_device *device, fc_comm **out, fc_error *err) {
    ncclUniqueId id;
    fc_comm *comm = NULL;
    *out = NULL;
    fc_code rc = fc_comm_agree(bootstrap, prepare_comm(bootstrap, device, &id, &comm, err), err);
    if (rc != FC_OK || !comm) {
        goto failed;
    }
    FC_TRY_GOTO(broadcast_id(bootstrap, &id, err), rc, failed);
    ((nccl_state *)comm->state)->family->bootstrap = bootstrap;
    comm->cancel = bootstrap->cancel;
    FC_TRY(join_ranks(&comm, &id, bootstrap->rank, bootstrap->size, err));
    *out = comm;
    return FC_OK;
failed:
    if (comm) {
        fc_nccl_free(comm);
    }
    return rc;
}

/* What a rank needs before it can meet the others. */
static fc_code prepare_alone(fc_device *device, int rank, int size, ncclUniqueId *id, fc_comm **out, fc_error *err) {
    fc_code rc = comm_new(device, NULL, size, out, err);
    rc = rc == FC_OK && rank == 0 ? make_id(id, err) : rc;
    return rc == FC_OK ? rc : fc_context(err, rc, "rank %d", rank);
}

/* Makes the communicator, which owns the meeting, and shares the id. The other ranks learn of a failure. */
static fc_code prepare_at(fc_meeting *meeting, fc_device *device, int rank, int size, ncclUniqueId *id, fc_comm **out,
                          fc_error *err) {
    fc_error own = {FC_OK, ""};
    fc_code rc = prepare_alone(device, rank, size, id, out, &own);
    if (*out) {
        ((nccl_state *)(*out)->state)->family->meeting = meeting;
    }
    rc = rc == FC_OK ? fc_meeting_share(meeting, id, sizeof *id, &own) : rc;
    if (rc == FC_OK) {
        return FC_OK;
    }
    fc_meeting_fail(meeting, own.message);
    if (*out) {
        fc_nccl_free(*out);
        *out = NULL;
    } else {
        fc_meeting_leave(meeting, 0);
    }
    if (err) {
        *err = own;
    }
    return rc;
}

static fc_code new_nccl_file(const char *path, int rank, int size, int seconds, fc_device *device, fc_comm **out,
                             fc_error *err) {
    ncclUniqueId id;
    fc_meeting *meeting = NULL;
    *out = NULL;
    FC_TRY(check_device(device, err));
    if (size < 1 || rank < 0 || rank >= size) {
        return fc_fail(err, FC_EUSAGE, "nccl: rank %d does not exist among %d ranks", rank, size);
    }
    FC_TRY(fc_meeting_come(path, rank, size, seconds, &meeting, err));
    FC_TRY(prepare_at(meeting, device, rank, size, &id, out, err));
    const int timeout = (*out)->timeout;
    (*out)->timeout = seconds;
    FC_TRY(join_ranks(out, &id, rank, size, err));
    (*out)->timeout = timeout;
    fc_meeting_close(meeting);
    return FC_OK;
}

/* Gathers what each rank asks for, through device memory. */
static fc_code gather_split_requests(fc_comm *comm, const nccl_split_request *mine, nccl_split_request *all,
                                     fc_error *err) {
    nccl_state *s = comm->state;
    nccl_split_request *scratch = s->scratch, *own = scratch + comm->size;
    size_t bytes = (size_t)comm->size * sizeof *all;
    fc_device *device = comm->device;
    FC_TRY(device->copy(device, own, mine, sizeof *mine, NULL, err));
    FC_TRY(fc_all_gather(comm, own, scratch, sizeof *mine, NULL, err));
    FC_TRY(fc_nccl_wait(comm, NULL, err));
    FC_TRY(device->copy(device, all, scratch, bytes, NULL, err));
    return fc_nccl_wait(comm, NULL, err);
}

/* Finds the group of this rank in the split, if all ranks are ready. NCCL does not accept negative colors, so the first
 * rank of a color replaces it. */
static fc_code find_group(fc_comm *comm, const nccl_split_request *all, int color, int *first, fc_comm *made,
                          fc_error *err) {
    for (int r = comm->size - 1; r >= 0; r--) {
        if (all[r].failed) {
            return fc_fail(err, FC_EIO, "nccl: split: rank %d cannot take part", r);
        }
        if (all[r].color == color) {
            *first = r;
            made->rank += r < comm->rank;
            made->size++;
        }
    }
    return FC_OK;
}

/* The last step: every rank has allocated what it needs. */
static fc_code split_now(fc_comm *comm, int first, fc_comm *made, fc_error *err) {
    nccl_state *parent = comm->state, *child = made->state;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    int before;
    config.blocking = 0;
    FC_TRY(fc_nccl_begin(comm, &before, err));
    ncclResult_t result = ncclCommSplit(parent->nccl, first, comm->rank, &child->nccl, &config);
    fc_code rc = fc_nccl_check(comm, result, "split", err);
    rc = rc == FC_OK ? fc_nccl_check(made, ncclInProgress, "split", err) : rc;
    return fc_nccl_end(comm, before, rc);
}

fc_code fc_nccl_split(fc_comm *comm, int color, fc_comm **out, fc_error *err) {
    nccl_family *family = ((nccl_state *)comm->state)->family;
    nccl_split_request mine = {.color = color}, *all = malloc((size_t)comm->size * sizeof *all);
    fc_comm *made = NULL;
    int first = 0;
    *out = NULL;
    fc_code rc = all ? comm_new(comm->device, family, comm->size, &made, err) : fc_no_memory(err, "split");
    mine.failed = rc != FC_OK;
    fc_error other = {FC_OK, ""};
    fc_code exchanged = all ? gather_split_requests(comm, &mine, all, rc == FC_OK ? err : &other) : rc;
    if (exchanged != FC_OK && !comm->broken) {
        fc_comm_abort(comm);
    }
    FC_TRY_GOTO(rc == FC_OK ? exchanged : rc, rc, out);
    made->cancel = comm->cancel;
    made->timeout = comm->timeout;
    FC_TRY_GOTO(find_group(comm, all, color, &first, made, err), rc, out);
    FC_TRY_GOTO(split_now(comm, first, made, err), rc, out);
    *out = made;
    made = NULL;
out:
    if (made) {
        fc_nccl_free(made);
    }
    free(all);
    return rc;
}

FC_MODULE_EXPORT extern const fc_module FC_MODULE_SYMBOL;
static const struct fc_device_module devices = {.nccl = new_nccl, .nccl_file = new_nccl_file};
const fc_module FC_MODULE_SYMBOL = {FC_MODULE_HEAD, .device_size = sizeof(fc_device), .devices = &devices};
