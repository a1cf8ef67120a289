/*
 * What the ranks of the backend `local` share: the world, its groups, and what a rank shows while a collective runs.
 */
#ifndef FSDPCKPT_COMM_LOCAL_MEET_H
#define FSDPCKPT_COMM_LOCAL_MEET_H

#ifndef FSDPCKPT_PRIVATE
#error "this header is private to fsdpckpt: include <fsdpckpt/...> instead"
#endif

#include "fsdpckpt/comm.h"

#include <pthread.h>

/* All ranks of a run. */
typedef struct local_world {
    pthread_mutex_t lock; /* guards all of it and the groups' counters */
    pthread_cond_t wake;
    int size;
    bool *gone;     /* ranks that have returned */
    bool failed;    /* `error` is the first one; nobody waits any more */
    fc_error error; /* names the rank */
} local_world;

typedef enum local_kind {
    LOCAL_ALL_GATHER,
    LOCAL_ALL_GATHER_V,
    LOCAL_REDUCE_SCATTER,
    LOCAL_ALL_REDUCE,
    LOCAL_BROADCAST,
    LOCAL_BARRIER,
    LOCAL_SPLIT
} local_kind;

typedef struct local_group local_group;

/* What a rank shows the others while a collective runs. */
typedef struct local_slot {
    local_kind kind;
    const void *send;
    size_t count; /* what must be equal on all ranks: bytes or elements; and with `counts` each of them */
    const size_t *counts;
    fc_dtype dtype;
    fc_reduce op;
    int root, color;
    local_group *made; /* LOCAL_SPLIT: by the lowest rank of a color */
} local_slot;

/* A communicator: some ranks of the world. */
struct local_group {
    local_world *world;
    int size, users;
    int *members; /* their ranks in the world */
    local_slot *slots;
    int arrived;
    unsigned generation; /* of the barrier */
    bool broken;         /* the run had failed when the last one came */
};

/** @return NULL: out of memory. */
local_group *fc_local_group_new(local_world *w, int size);
void fc_local_group_free(local_group *g);
/** A rank leaves it; the last one frees it. */
void fc_local_group_drop(local_group *g);

/** The first failure is everybody's. The caller has the lock. */
void fc_local_fail(local_world *w, int rank, fc_code code, const char *message);

/**
 * Shows `mine` and waits for the others. After FC_OK the slots may be read until fc_local_leave. When the calls do not
 * agree, everybody has left.
 */
fc_code fc_local_enter(fc_comm *comm, const local_slot *mine, fc_error *err);

fc_code fc_local_leave(fc_comm *comm, fc_error *err);

/** A rank that could not do its part says so, and all return its error. */
fc_code fc_local_leave_with(fc_comm *comm, fc_code rc, fc_error *err);

#endif
