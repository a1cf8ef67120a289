/*
 * The communicators of the emulated NCCL. See emulate.h. As in NCCL, a rank that aborts leaves the others waiting, and
 * calls while a communicator is in progress are wrong. An abort waits for all work of the GPU, as NCCL does when it
 * frees memory; in a group, only the end of the group waits, unless NCCL is older than 2.22.
 */
#include "collectives.h"
#include "machine.h"

#include <stdio.h>

static world *worlds;

static bool fails(const char *name) {
    return emulated_fails(name);
}

/* A rank has left; frees the world with the last one. */
static void leave_world(world *w, int rank) {
    w->ranks[rank] = NULL;
    if (++w->left < w->size) {
        return;
    }
    for (world **p = &worlds; *p; p = &(*p)->next) {
        if (*p == w) {
            *p = w->next;
            break;
        }
    }
    free(w);
}

void emulated_let_go(struct ncclComm *comm) {
    struct ncclComm *parent;
    for (; comm && --comm->users == 0; comm = parent) {
        parent = comm->parent;
        if (comm->world) {
            leave_world(comm->world, comm->rank);
        }
        if (parent && parent->asked.made == comm) {
            parent->asked.made = NULL;
        }
        free(comm);
    }
}

ncclResult_t ncclGetVersion(int *version) {
    const char *given = getenv("FSDPCKPT_EMULATED_NCCL");
    *version = given ? atoi(given) : NCCL_VERSION_CODE;
    return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
    static unsigned long made;
    if (fails("ncclGetUniqueId")) {
        return ncclSystemError;
    }
    emulated_lock();
    memset(id, 0, sizeof *id);
    snprintf(id->internal, sizeof id->internal, "id %lu", ++made);
    emulated_unlock();
    return ncclSuccess;
}

static world *find_world(const char *id, int size) {
    for (world *w = worlds; w; w = w->next) {
        if (memcmp(w->id, id, sizeof w->id) == 0) {
            return w;
        }
    }
    world *w = calloc(1, sizeof *w);
    if (!w) {
        emulated_die("out of memory");
    }
    memcpy(w->id, id, sizeof w->id);
    w->size = size;
    w->next = worlds;
    worlds = w;
    return w;
}

static struct ncclComm *new_comm(const ncclConfig_t *config) {
    struct ncclComm *comm = calloc(1, sizeof *comm);
    if (!comm) {
        emulated_die("out of memory");
    }
    comm->users = 1;
    comm->nonblocking = config && config->blocking == 0;
    comm->lazy = comm->nonblocking && emulated_is_lazy();
    comm->last = &comm->first;
    comm->gpu = emulated_gpu();
    return comm;
}

/* Puts a rank into its world; the machine is locked. */
static void join(struct ncclComm *comm, const char *id, int rank, int size) {
    world *w = find_world(id, size);
    if (size > MOST_RANKS || w->size != size || w->ranks[rank]) {
        emulated_die("the ranks of a communicator disagree");
    }
    comm->world = w;
    comm->rank = rank;
    w->ranks[rank] = comm;
    w->joined++;
    emulated_changed();
}

static bool has_joined(void *argument) {
    const struct ncclComm *comm = argument;
    return comm->world && comm->world->joined == comm->world->size;
}

/* Waits for the other ranks unless the communicator is non-blocking. Unlocks the machine. */
static ncclResult_t wait_for_ranks(struct ncclComm *comm) {
    if (!comm->nonblocking) {
        emulated_wait(has_joined, comm);
    }
    bool joined = !comm->nonblocking;
    emulated_unlock();
    return joined ? ncclSuccess : ncclInProgress;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int ranks, ncclUniqueId id, int rank, ncclConfig_t *config) {
    if (fails("ncclCommInitRankConfig")) {
        return ncclSystemError;
    }
    emulated_lock();
    *comm = new_comm(config);
    join(*comm, id.internal, rank, ranks);
    return wait_for_ranks(*comm);
}

void emulated_check_idle(struct ncclComm *comm, const char *name) {
    if (comm->lazy || comm->splitting || !has_joined(comm)) {
        emulated_die("%s while the communicator is in progress", name);
    }
}

/* Returns whether all ranks have asked for the split of `comm`. */
static bool all_split(const struct ncclComm *comm) {
    for (int r = 0; r < comm->world->size; r++) {
        const struct ncclComm *other = comm->world->ranks[r];
        if (!other || other->splits < comm->splits) {
            return false;
        }
    }
    return true;
}

/* All ranks have asked. */
static void finish_split(struct ncclComm *comm) {
    char id[sizeof(ncclUniqueId)] = "";
    int size = 0, rank = 0;
    comm->splitting = false;
    for (int r = 0; r < comm->world->size; r++) {
        const split *theirs = &comm->world->ranks[r]->asked;
        size += theirs->color == comm->asked.color;
        rank += theirs->color == comm->asked.color &&
                (theirs->key < comm->asked.key || (theirs->key == comm->asked.key && r < comm->rank));
    }
    snprintf(id, sizeof id, "%.60s/%lu/%d", comm->world->id, comm->splits, comm->asked.color);
    if (comm->asked.made) {
        join(comm->asked.made, id, rank, size);
    }
}

ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t *out, ncclConfig_t *config) {
    if (fails("ncclCommSplit")) {
        return ncclSystemError;
    }
    emulated_lock();
    emulated_check_idle(comm, "ncclCommSplit");
    *out = new_comm(config);
    (*out)->parent = comm;
    comm->users++;
    comm->splits++;
    comm->splitting = true;
    comm->asked = (split){color, key, *out};
    for (int r = 0; all_split(comm) && r < comm->world->size; r++) {
        finish_split(comm->world->ranks[r]);
    }
    return wait_for_ranks(*out);
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *error) {
    if (fails("ncclCommGetAsyncError")) {
        return ncclInternalError;
    }
    emulated_lock();
    if (comm->lazy && ++comm->questions >= PATIENCE) {
        comm->lazy = false;
        for (batch *b = comm->first; b; b = b->next) {
            if (!b->launched) {
                emulated_launch(b);
            }
        }
    }
    emulated_work_on();
    bool busy =
        comm->lazy || comm->splitting || !has_joined(comm) || (comm->finalized && comm->finished < comm->issued);
    *error = busy ? ncclInProgress : ncclSuccess;
    emulated_unlock();
    return ncclSuccess;
}

static bool is_finished(void *argument) {
    const struct ncclComm *comm = argument;
    return comm->finished == comm->issued;
}

ncclResult_t ncclCommFinalize(ncclComm_t comm) {
    if (fails("ncclCommFinalize")) {
        return ncclSystemError;
    }
    emulated_lock();
    emulated_check_idle(comm, "ncclCommFinalize");
    comm->finalized = true;
    if (!comm->nonblocking) {
        emulated_wait(is_finished, comm);
    }
    emulated_unlock();
    return comm->nonblocking ? ncclInProgress : ncclSuccess;
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
    emulated_lock();
    emulated_wait(is_finished, comm);
    emulated_end_registrations(comm);
    emulated_let_go(comm);
    emulated_unlock();
    return ncclSuccess;
}

void emulated_end_abort(struct ncclComm *comm) {
    emulated_wait_for_work(comm->gpu, "ncclCommAbort waits for a collective that another communicator cannot end");
    emulated_let_go(comm);
}

/* What the rank still has on its streams ends without a result. */
ncclResult_t ncclCommAbort(ncclComm_t comm) {
    int version;
    ncclGetVersion(&version);
    emulated_lock();
    if (comm->aborted) {
        emulated_die("a communicator is aborted twice");
    }
    comm->aborted = true;
    emulated_end_registrations(comm);
    for (batch *b = comm->first, *next; b; b = next) {
        next = b->next;
        if (!b->launched) {
            emulated_drop_batch(b);
        }
    }
    emulated_changed();
    if (version < NCCL_VERSION(2, 22, 0) || !emulated_abort_in_group(comm)) {
        emulated_end_abort(comm);
    }
    emulated_unlock();
    return ncclSuccess;
}

const char *ncclGetErrorString(ncclResult_t result) {
    static const char *const texts[] = {"no error",
                                        "unhandled cuda error",
                                        "unhandled system error",
                                        "internal error",
                                        "invalid argument",
                                        "invalid usage",
                                        "remote process exited or there was a network error",
                                        "NCCL operation in progress"};
    return texts[result];
}

const char *ncclGetLastError(ncclComm_t comm) {
    (void)comm;
    return "";
}
