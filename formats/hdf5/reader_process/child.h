/*
 * The child process in which libhdf5 reads foreign files: forked, limited, confined and not trusted.
 *
 * libhdf5 is not designed for malicious files. The parent opens the files, and the child inherits their descriptors. It
 * can only read them, compute, and write to one pipe. This file does not depend on HDF5.
 */
#pragma once

#include "fsdpckpt/error.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

/**
 * Shared memory, written by the child: what it is doing, so that an error can name the part of the file at which it
 * died.
 */
typedef struct fc_h5_shared {
    atomic_uint_fast64_t beats;   /**< counts steps, so that a child that computes without writing does not look hung */
    atomic_uint_fast32_t missing; /**< set of fc_h5_missing */
    char where[4024];             /**< "dataset /a/b"; may lack the final NUL */
} fc_h5_shared;

/** The protection that the system does not provide for the child. */
typedef enum fc_h5_missing {
    FC_H5_NO_SECCOMP = 1, /**< no filter: its limits and the parent's checks remain */
    FC_H5_NO_PROC = 2     /**< no /proc: a higher limit of memory, since the memory in use is unknown */
} fc_h5_missing;

/** What the child does. Both functions run in the child only; the value of `run` becomes its exit status. */
typedef struct fc_h5_job {
    void (*prepare)(void *context); /**< runs before the confinement; initialises libraries */
    int (*run)(void *context, int out, fc_h5_shared *shared);
    void *context;
    const int *keep; /**< descriptors the child may read */
    size_t nkeep;
    uint64_t memory;   /**< bytes of address space in addition to the parent's; 0: 1 GiB */
    int timeout_ms;    /**< limit of time without data or a heartbeat; 0: 60 s */
    int spin_ms;       /**< limit of processor time without either; 0: only timeout_ms counts */
    bool may_open;     /**< may open other files for reading (fc_open_options.follow_external) */
    bool receives;     /**< may receive one descriptor at a time on the socket keep[0] */
    bool not_confined; /**< for tests: no seccomp, so that a child can misbehave */
} fc_h5_job;

/** In the child: ends it because there is no memory, which fc_h5_child_finish tells apart from a corrupt file. */
_Noreturn void fc_h5_child_no_memory(void);

/** In the child: allocates zeroed memory, or ends it with fc_h5_child_no_memory. */
void *fc_h5_child_calloc(size_t count, size_t size);

typedef struct fc_h5_child {
    pid_t pid;
    int fd;
    int timeout_ms;
    int spin_ms;
    bool hung;
    int64_t worked_ms; /**< its processor time at the last data or heartbeat */
    uint64_t beats;
    fc_h5_shared *shared;
} fc_h5_child;

/** Starts the child. After success, fc_h5_child_finish must be called in any case. */
fc_code fc_h5_child_start(fc_h5_child *child, const fc_h5_job *job, fc_error *err);

/**
 * Reads up to `size` bytes of the child's output. @return the number of bytes; 0 at the end, after an error, or if the
 * child hangs; fc_h5_child_finish returns which.
 */
size_t fc_h5_child_read(fc_h5_child *child, void *buf, size_t size);

/**
 * Ends the child (kills it if it still runs) and reaps it.
 * @param path for the message.
 * @return FC_OK if it exited with status 0, otherwise FC_ECORRUPT with how and where it died, or FC_ENOMEM.
 */
fc_code fc_h5_child_finish(fc_h5_child *child, const char *path, fc_error *err);

/** Kills and reaps a child that is no longer needed. */
void fc_h5_child_abandon(fc_h5_child *child);

/** @return the processor time that the child has used, in ms; 0 if unknown. */
int64_t fc_h5_child_processor_ms(const fc_h5_child *child);

/* ---- the steps of starting, also used by starter.c ---- */

/** Makes all of `child` except its process. @param out, shared receive the descriptors for the process; the caller
 *  closes them. */
fc_code fc_h5_child_prepare(fc_h5_child *child, const fc_h5_job *job, int *out, int *shared, fc_error *err);
void fc_h5_child_unprepare(fc_h5_child *child);

/** Runs the job in the new process, and exits.
 * @param parent if this process, or its thread that forked, ends, the new process does, too. 0: the new process notices
 *               only when it writes, because another thread may have created its starter. */
void fc_h5_child_become(const fc_h5_job *job, int out, int shared, pid_t parent) __attribute__((noreturn));

/** Closes all descriptors except those to keep and `out`, and opens /dev/null as 0, 1 and 2. */
bool fc_h5_child_close_others(const fc_h5_job *job, int out);
