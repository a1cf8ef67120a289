/*
 * The structs of the emulated NCCL: communicators.c makes and ends communicators, collectives.c runs collectives.
 */
#pragma once

#include "emulate.h"

#include "comm/arith.h"

#include <nccl.h>

enum { MOST_RANKS = 16, MOST_ITEMS = 512, PATIENCE = 2 /* questions after which a lazy call takes place */ };

typedef enum item_kind { ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE, BROADCAST, SEND, RECEIVE } item_kind;

/* One call, or one of a group. */
typedef struct item {
    item_kind kind;
    const void *send;
    void *recv;
    size_t count;
    fc_dtype dtype;
    fc_reduce op;
    int peer; /* or the root */
} item;

/* The calls of one rank that run together. */
typedef struct batch {
    struct batch *next;
    struct ncclComm *comm;
    cudaStream_t stream;
    unsigned long number; /* in the order of the communicator */
    bool launched, at_head;
    int count;
    item items[MOST_ITEMS];
} batch;

/* The ranks of a communicator. */
typedef struct world {
    struct world *next;
    char id[sizeof(ncclUniqueId)];
    int size, joined, left;
    struct ncclComm *ranks[MOST_RANKS];
    unsigned long done; /* batches that have run */
} world;

/* What a rank asked of ncclCommSplit. */
typedef struct split {
    int color, key;
    struct ncclComm *made; /* in no world until all ranks have asked */
} split;

struct ncclComm {
    world *world; /* NULL: a split that not all ranks have asked for */
    int rank;
    bool nonblocking, aborted, finalized;
    int users; /* the caller, batches, and communicators that were split from it */
    unsigned long issued, finished;
    batch *first, **last; /* those that have not run */
    int questions;        /* since the last lazy call */
    bool lazy;            /* a call has not taken place yet */
    unsigned long splits; /* calls of ncclCommSplit */
    bool splitting;
    split asked; /* by the last of them */
    struct ncclComm *parent;
    int gpu;
    struct ncclComm *next_aborted; /* in the open group */
};

/* All of these need the machine to be locked. */
void emulated_let_go(struct ncclComm *comm);
/* Ends the program if a call of the communicator is still in progress. */
void emulated_check_idle(struct ncclComm *comm, const char *name);
/* Puts the calls on their stream; removes them when they are done. */
void emulated_launch(batch *b);
void emulated_drop_batch(void *batch);
/* Waits until an aborted communicator has ended, and gives it up. */
void emulated_end_abort(struct ncclComm *comm);
/* Ends the program if memory is still registered with a communicator that is destroyed; forgets it on an abort. */
void emulated_end_registrations(const struct ncclComm *comm);
/* Leaves the abort to the end of the group. @return false if no group is open. Needs no lock. */
bool emulated_abort_in_group(struct ncclComm *comm);
/* Counts an all-gather if its result is in registered memory. */
void emulated_count_gather(const struct ncclComm *comm, const void *recv);
