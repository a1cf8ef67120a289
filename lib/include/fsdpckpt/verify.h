/*
 * Verifying a checkpoint: everything that can be known about its bytes without another checkpoint to compare with.
 * All defects are reported, not only the first.
 */
#ifndef FSDPCKPT_VERIFY_H
#define FSDPCKPT_VERIFY_H

#include "fsdpckpt/digest.h"
#include "fsdpckpt/move.h"
#include "fsdpckpt/seal.h"

#include <pthread.h>

#ifdef __cplusplus
extern "C" {
#endif

/** One thing that is wrong. Everything is borrowed for the call. */
typedef struct fc_defect {
    const char *file;    /**< fc_file.name; NULL: the checkpoint as a whole */
    const char *tensor;  /**< or object; NULL: none */
    bool has_offset;     /**< whether the place is known */
    uint64_t offset;     /**< bytes, in the file */
    const char *message; /**< one line that says all of it */
} fc_defect;

/** Where defects go. */
typedef struct fc_findings {
    void (*report)(void *context, const fc_defect *defect); /**< called by one thread at a time */
    void *context;
    pthread_mutex_t lock;
    uint64_t count;
} fc_findings;

/** Reports a defect. Thread-safe. `place` holds all but the message. */
void fc_report_defect(fc_findings *findings, const fc_defect *place, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));

/** What was looked at, and what of it digests covered. */
typedef struct fc_verify_report {
    size_t tensors, objects, files;
    uint64_t bytes;             /**< of data read */
    size_t digested;            /**< tensors and objects whose bytes a CRC covers */
    size_t undigested;          /**< those that were only read */
    uint64_t undigested_bytes;  /**< of them */
    size_t headers_digested;    /**< files whose headers a digest covers */
    bool sealed;                /**< a seal was there: every byte of every file is covered */
    size_t unknown;             /**< objects that are not known to be harmless (FC_OBJECT_UNKNOWN) */
    const char *unknown_object; /**< the first of them, borrowed from the checkpoint; NULL: none */
    char unknown_reason[512];   /**< fc_object_verdict.reason of that one */
    uint64_t defects;
} fc_verify_report;

/**
 * Counts an object of which the format itself has compared every byte with a CRC: what fc_verify reads counts it as
 * only read, unless the checkpoint records a digest of it (a seal does).
 */
void fc_verify_covered(const fc_checkpoint *checkpoint, const fc_tensor *object, fc_verify_report *report);

typedef struct fc_verify_options {
    fc_move_options move; /**< threads, memory, progress */
    fc_seal *seal;        /**< from fc_seal_new: receives the digests of what is there; NULL: none are wanted */
} fc_verify_options;

/**
 * Verifies an open checkpoint: coverage, digests, CRCs, objects, what the format knows of its structure, and the seal
 * where there is one.
 * @return FC_OK also when there are defects; else what kept it from going on.
 */
fc_code fc_verify(const fc_checkpoint *checkpoint, const fc_verify_options *options,
                  void (*report)(void *context, const fc_defect *defect), void *context, fc_verify_report *out,
                  fc_error *err);

#ifdef __cplusplus
}
#endif
#endif
