/*
 * The shared state of the ranks of the backend `local`: the run, its groups, and what a rank publishes in a collective.
 */
#pragma once

#include "fsdpckpt/comm.h"

#include <pthread.h>

/** All ranks of a run. */
typedef struct local_world {
    pthread_mutex_t lock; /**< guards this struct and the counters of all groups */
    pthread_cond_t wake;  /**< signalled when a rank arrives, fails or returns */
    int size;
    bool *gone;     /**< per rank: whether it has returned */
    bool failed;    /**< whether a rank has failed; then no rank waits for others */
    fc_error error; /**< the first failure, which names its rank */
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

/** What a rank publishes while a collective runs. */
typedef struct local_slot {
    local_kind kind;
    const void *send;
    size_t count;         /**< bytes or elements; equal on all ranks */
    const size_t *counts; /**< LOCAL_ALL_GATHER_V: bytes from each rank; equal on all ranks */
    fc_dtype dtype;
    fc_reduce op;
    int root, color;
    local_group *made; /**< LOCAL_SPLIT: the group of the color, made by its lowest rank */
} local_slot;

/** The ranks of a communicator. */
struct local_group {
    local_world *world;
    int size;
    int users;           /**< ranks that have not freed their communicator */
    int *members;        /**< their ranks in the world */
    local_slot *slots;   /**< one per rank of the group */
    int arrived;         /**< ranks that wait at the meeting point */
    unsigned generation; /**< counts the meetings */
    bool broken;         /**< whether the run had failed when the last rank arrived */
};

/** Makes a group of `size` ranks without members. @return NULL if memory runs out. */
local_group *fc_local_group_new(local_world *w, int size);
void fc_local_group_free(local_group *g);
/** Drops one rank's reference to the group. The last one frees it. */
void fc_local_group_drop(local_group *g);

/** Makes this failure the outcome of the run, unless there is an earlier one. The caller holds the lock. */
void fc_local_fail(local_world *w, int rank, fc_code code, const char *message);

/**
 * Publishes `mine` and waits for the other ranks. After FC_OK, the slots may be read until fc_local_leave. If the calls
 * of the ranks differ, all ranks get an error and have left already.
 */
fc_code fc_local_enter(fc_comm *comm, const local_slot *mine, fc_error *err);

/** Waits until all ranks have finished reading the slots. */
fc_code fc_local_leave(fc_comm *comm, fc_error *err);

/** Leaves with this rank's outcome `rc`. If a rank fails, all ranks return its error. */
fc_code fc_local_leave_with(fc_comm *comm, fc_code rc, fc_error *err);

/** Reduces elements [first, first + count) of the published buffers into `out`, in local.c. */
fc_code fc_local_reduce(const local_group *g, fc_dtype dtype, fc_reduce op, size_t first, size_t count, void *out,
                        fc_error *err);
