/*
 * A process that starts reader processes for this one. fork copies locks that other threads hold, but not the threads,
 * so a child that allocates may wait for such a lock forever (libasan's; glibc handles its own). So readers are started
 * by a copy of this process that was made before there were threads. It knows the checkpoint as it was opened, waits
 * for requests, and does nothing else.
 */
#pragma once

#include "hdf5/reader_process/child.h"

#include <pthread.h>

/** A request. The pointer is into memory that existed when the starter was made. */
typedef struct fc_h5_request {
    const void *what;
    uint64_t bytes;
    uint64_t lent; /**< fc_h5_input.lent */
    int number;
} fc_h5_request;

/**
 * Makes the job of a future reader process, in that process; leaves it unchanged when out of memory. `input` is the
 * descriptor that came with the request. Whatever the job points to lives until the process ends.
 */
typedef void fc_h5_make_job(void *context, const fc_h5_request *request, int input, fc_h5_job *job);

typedef struct fc_h5_starter {
    pid_t pid;   /**< 0: not started */
    pid_t owner; /**< the process that started it, and alone may use it */
    int fd;
    pthread_mutex_t lock; /**< one request at a time */
} fc_h5_starter;

fc_code fc_h5_starter_start(fc_h5_starter *starter, fc_h5_make_job *make_job, void *context, fc_error *err);

/**
 * Stops the starter, but not the readers that it has started. A starter that was not started is allowed. In a process
 * that was forked from the owner, it only closes the descriptor.
 */
void fc_h5_starter_stop(fc_h5_starter *starter);

/** Like fc_h5_child_start, with the job made from `request` and the time limits of `like`. Thread-safe. */
fc_code fc_h5_child_start_by(fc_h5_starter *starter, fc_h5_child *child, const fc_h5_request *request, int input,
                             const fc_h5_job *like, fc_error *err);
