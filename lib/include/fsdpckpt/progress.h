/*
 * Progress of a job, and the flag that stops it. The job counts, whoever wants to know looks: without locks, and at no
 * cost that can be measured. One fc_progress may go through several calls: opening, then converting.
 */
#ifndef FSDPCKPT_PROGRESS_H
#define FSDPCKPT_PROGRESS_H

#include "fsdpckpt/error.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/** What a job is doing. A conversion is OPENING, PLANNING, COPYING, CHECKING and SYNCING, in this order. */
typedef enum fc_phase {
    FC_PHASE_NONE,      /**< nothing yet */
    FC_PHASE_GATHERING, /**< bringing files of several machines together */
    FC_PHASE_OPENING,   /**< reading headers of a source */
    FC_PHASE_PLANNING,  /**< proving that every element is there once; nothing is written */
    FC_PHASE_COPYING,   /**< reading, converting and writing data */
    FC_PHASE_READING,   /**< reading data for the caller, as fc_read_stream does */
    FC_PHASE_COMPARING, /**< reading the data of two checkpoints */
    FC_PHASE_VERIFYING, /**< reading data and computing its digests */
    FC_PHASE_CHECKING,  /**< comparing what was read with the digests that are recorded */
    FC_PHASE_SYNCING,   /**< waiting until files are on the disk */
    FC_PHASE_COUNT
} fc_phase;

/** What fc_progress.done and fc_progress.total count. */
typedef enum fc_counted { FC_COUNTED_BYTES, FC_COUNTED_FILES, FC_COUNTED_TENSORS, FC_COUNTED_COUNT } fc_counted;

/** Shared by the caller, its signal handler and the workers. Zeros are a valid start. */
typedef struct fc_progress {
    atomic_uint_fast64_t done;  /**< of the phase */
    atomic_uint_fast64_t total; /**< of the phase; 0: not known */
    atomic_uint phase;          /**< fc_phase */
    atomic_uint unit;           /**< fc_counted */
    atomic_uint changes;        /**< odd while a phase begins: see fc_progress_look */
    atomic_bool cancel;         /**< set it to stop: the job returns FC_EINTERRUPTED and leaves nothing behind */
    /** Called at the start of each phase, by the thread that runs the job. NULL: not wanted. */
    void (*began)(void *context, const struct fc_progress *progress);
    void *context; /**< of `began` */
} fc_progress;

/** A consistent copy. */
typedef struct fc_progress_state {
    fc_phase phase;
    fc_counted unit;
    uint64_t done, total; /**< total 0: not known */
    unsigned number;      /**< another one for each phase that began */
} fc_progress_state;

/** Copies what `progress` says now. From any thread. */
fc_progress_state fc_progress_look(const fc_progress *progress);

/** "copying", "bytes": for people and programs; they do not change. */
const char *fc_phase_name(fc_phase phase);
const char *fc_counted_name(fc_counted unit);

/**
 * For what does the work: a phase begins, with `total` things to do (0: not known). Where this phase is under way
 * already, in the same unit, `total` is added to it: a checkpoint may consist of others. One thread calls it.
 * @param progress may be NULL, here and below.
 */
void fc_progress_begin(fc_progress *progress, fc_phase phase, fc_counted unit, uint64_t total);

/** Counts `n` more as done. From any thread. @return FC_EINTERRUPTED if the job is to stop. */
fc_code fc_progress_count(fc_progress *progress, uint64_t n, fc_error *err);

#ifdef __cplusplus
}
#endif
#endif
