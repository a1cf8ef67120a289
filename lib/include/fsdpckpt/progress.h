/*
 * Progress of a job, and the flag that stops it. The job counts; any thread may read the counters, without locks and at
 * no measurable cost. One fc_progress may be used for several calls: opening, then converting.
 */
#pragma once

#include "fsdpckpt/atomic.h"
#include "fsdpckpt/error.h"

#include <stdbool.h>
#include <stdint.h>

FC_BEGIN_DECLS

/** What a job is doing. A conversion is OPENING, PLANNING, COPYING, CHECKING and SYNCING, in this order. */
typedef enum fc_phase {
    FC_PHASE_NONE,      /**< nothing yet */
    FC_PHASE_GATHERING, /**< gathering the files of several machines */
    FC_PHASE_OPENING,   /**< reading the headers of a source */
    FC_PHASE_PLANNING,  /**< proving that the chunks cover every element once; nothing is written */
    FC_PHASE_COPYING,   /**< reading, converting and writing data */
    FC_PHASE_READING,   /**< reading data for the caller, as fc_read_stream does */
    FC_PHASE_COMPARING, /**< reading the data of two checkpoints */
    FC_PHASE_VERIFYING, /**< reading data and computing its digests */
    FC_PHASE_CHECKING,  /**< comparing what was read with the recorded digests */
    FC_PHASE_SYNCING,   /**< waiting until files are on the disk */
    FC_PHASE_COUNT
} fc_phase;

/** What fc_progress.done and fc_progress.total count. */
typedef enum fc_counted { FC_COUNTED_BYTES, FC_COUNTED_FILES, FC_COUNTED_TENSORS, FC_COUNTED_COUNT } fc_counted;

/** Shared by the caller, its signal handler and the workers. Initialize it with zeros. */
typedef struct fc_progress {
    atomic_uint_fast64_t done;  /**< what the phase has done, in `unit` */
    atomic_uint_fast64_t total; /**< what the phase has to do, in `unit`; 0: unknown */
    atomic_uint phase;          /**< fc_phase */
    atomic_uint unit;           /**< fc_counted */
    atomic_uint changes;        /**< odd while a phase begins: see fc_progress_look */
    atomic_bool cancel;         /**< set it to stop: the job returns FC_EINTERRUPTED and leaves nothing behind, but for
                                 fc_convert_options.resumable */
    /** Called at the start of each phase, by the thread that runs the job. May be NULL. */
    void (*began)(void *context, const struct fc_progress *progress);
    void *context; /**< passed to `began` */
} fc_progress;

/** A consistent copy. */
typedef struct fc_progress_state {
    fc_phase phase;
    fc_counted unit;
    uint64_t done, total; /**< total is 0 if unknown */
    unsigned number;      /**< how many phases have begun */
} fc_progress_state;

/** Copies the current counters. Any thread may call it. */
fc_progress_state fc_progress_look(const fc_progress *progress);

/** Names for people and programs, such as "copying" and "bytes". They never change. */
const char *fc_phase_name(fc_phase phase);
const char *fc_counted_name(fc_counted unit);

/**
 * Begins a phase with `total` things to do (0: unknown). If this phase has already begun, in the same unit, `total` is
 * added to its total, because a checkpoint may consist of others. Only the thread that runs the job calls it.
 * @param progress may be NULL, here and below.
 */
void fc_progress_begin(fc_progress *progress, fc_phase phase, fc_counted unit, uint64_t total);

/** Counts `n` more as done; with 0, only asks whether the job must stop. Any thread may call it. @return
 * FC_EINTERRUPTED if the job must stop. */
fc_code fc_progress_count(fc_progress *progress, uint64_t n, fc_error *err);

/**
 * From now on, what this thread and the workers that it starts wait for on servers is given up, with FC_EINTERRUPTED,
 * when `progress` is cancelled. A request that makes or deletes an object is waited for. NULL: they wait to the end.
 * @return the one before.
 */
const fc_progress *fc_progress_watch(const fc_progress *progress);

/** The one that the calling thread watches; NULL: none. */
const fc_progress *fc_progress_watched(void);

FC_END_DECLS
