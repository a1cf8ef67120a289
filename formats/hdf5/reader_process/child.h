/*
 * The child process in which libhdf5 meets foreign bytes: forked, limited, confined, and believed in nothing.
 *
 * libhdf5 is not designed for malicious files. The parent opens the files, the child inherits their descriptors and
 * can do nothing but read them, compute, and write to one pipe. Knows nothing about HDF5 itself.
 */
#ifndef FSDPCKPT_FORMATS_HDF5_READER_PROCESS_CHILD_H
#define FSDPCKPT_FORMATS_HDF5_READER_PROCESS_CHILD_H

#ifndef FSDPCKPT_PRIVATE
#error "this header is private to fsdpckpt: include <fsdpckpt/...> instead"
#endif

#include "fsdpckpt/error.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

/** Shared memory, written by the child: what it is doing now, so that its death can be told in terms of the file. */
typedef struct fc_h5_shared {
    atomic_uint_fast64_t beats; /**< counts steps: a child that computes without writing is not taken for a hung one */
    atomic_uint_fast32_t missing; /**< set of fc_h5_missing */
    char where[4024];             /**< "dataset /a/b"; not trusted to end in NUL */
} fc_h5_shared;

/** What the system does not give the child. */
typedef enum fc_h5_missing {
    FC_H5_NO_SECCOMP = 1, /**< no filter: its limits and the parent's checks remain */
    FC_H5_NO_PROC = 2     /**< no /proc: a higher limit of memory, since the memory in use is unknown */
} fc_h5_missing;

/** What the child does. Both functions run in the child only; the value of `run` becomes its exit status. */
typedef struct fc_h5_job {
    void (*prepare)(void *context); /**< before confinement: initialise libraries */
    int (*run)(void *context, int out, fc_h5_shared *shared);
    void *context;
    const int *keep; /**< descriptors the child may read */
    size_t nkeep;
    uint64_t memory;   /**< bytes of address space above what the parent uses; 0: 1 GiB */
    int timeout_ms;    /**< without a byte or a beat; 0: 60 s */
    int spin_ms;       /**< processor time without a byte or a beat; 0: only timeout_ms counts */
    bool may_open;     /**< may open further files for reading (--follow-external) */
    bool not_confined; /**< tests only: no seccomp, so that a child can misbehave in ways it would forbid */
} fc_h5_job;

typedef struct fc_h5_child {
    pid_t pid;
    int fd;
    int timeout_ms;
    int spin_ms;
    bool hung;
    int64_t worked_ms; /**< its processor time at the last byte or beat */
    uint64_t beats;
    fc_h5_shared *shared;
} fc_h5_child;

/** Starts the child. On success fc_h5_child_finish must follow, whatever happens in between. */
fc_code fc_h5_child_start(fc_h5_child *child, const fc_h5_job *job, fc_error *err);

/**
 * Reads up to `size` bytes of what the child writes. @return the number of bytes; 0 at the end, on an error, or when
 * the child hangs: fc_h5_child_finish tells which.
 */
size_t fc_h5_child_read(fc_h5_child *child, void *buf, size_t size);

/**
 * Ends the child (kills it if it still runs) and reaps it.
 * @param path for the message.
 * @return FC_OK when it ended by itself with status 0, else FC_ECORRUPT that says how it died and where.
 */
fc_code fc_h5_child_finish(fc_h5_child *child, const char *path, fc_error *err);

/** Kills and reaps a child that is not needed any more. */
void fc_h5_child_abandon(fc_h5_child *child);

/* ---- the parts of starting, also for starter.c ---- */

/** The parent's side: all of `child` but its process. @param out, shared the ends for the process; the caller closes
 *  them. */
fc_code fc_h5_child_prepare(fc_h5_child *child, const fc_h5_job *job, int *out, int *shared, fc_error *err);
void fc_h5_child_unprepare(fc_h5_child *child);

/** In the new process: does the job, and ends.
 * @param parent when this process ends, or the thread of it that forked, so does the new one; 0: it finds out when it
 *  writes, as another thread may have made what has started it. */
void fc_h5_child_become(const fc_h5_job *job, int out, int shared, pid_t parent) __attribute__((noreturn));

/** Closes all descriptors but those to keep and `out`; 0, 1 and 2 are /dev/null. */
bool fc_h5_child_close_others(const fc_h5_job *job, int out);

#endif
