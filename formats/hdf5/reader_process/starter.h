/*
 * A process that starts reader processes for this one. fork copies the locks of threads that are not copied with it,
 * and a child that then allocates may wait for one for ever (libasan's; glibc takes care of its own). So what threads
 * will want to read through libhdf5 is started by a copy of this process from before there were any: it knows the
 * checkpoint as it was opened, waits for requests, and does nothing else.
 */
#ifndef FSDPCKPT_FORMATS_HDF5_READER_PROCESS_STARTER_H
#define FSDPCKPT_FORMATS_HDF5_READER_PROCESS_STARTER_H

#ifndef FSDPCKPT_PRIVATE
#error "this header is private to fsdpckpt: include <fsdpckpt/...> instead"
#endif

#include "hdf5/reader_process/child.h"

#include <pthread.h>

/** What is asked of it. The pointer is into memory that was there when it was started. */
typedef struct fc_h5_request {
    const void *what;
    uint64_t bytes;
    int number;
} fc_h5_request;

/** In a reader process to be: makes its job, or leaves it as it is for want of memory. `input` is the descriptor that
 *  came with the request. What the job points to stays until the process ends. */
typedef void fc_h5_make_job(void *context, const fc_h5_request *request, int input, fc_h5_job *job);

typedef struct fc_h5_starter {
    pid_t pid; /**< 0: not started */
    int fd;
    pthread_mutex_t lock; /**< one request at a time */
} fc_h5_starter;

fc_code fc_h5_starter_start(fc_h5_starter *starter, fc_h5_make_job *make_job, void *context, fc_error *err);

/** Ends it; reader processes that it has started go on. One that was not started is allowed. */
void fc_h5_starter_stop(fc_h5_starter *starter);

/** As fc_h5_child_start, with the job that is made of `request`; `like` says how long to wait for it. Thread-safe. */
fc_code fc_h5_child_start_by(fc_h5_starter *starter, fc_h5_child *child, const fc_h5_request *request, int input,
                             const fc_h5_job *like, fc_error *err);

#endif
