/*
 * Verifying a checkpoint: every check of its bytes that needs no other checkpoint. All defects are reported, not only
 * the first.
 */
#pragma once

#include "fsdpckpt/digest.h"
#include "fsdpckpt/read.h"
#include "fsdpckpt/seal.h"

#include <pthread.h>

FC_BEGIN_DECLS

/** One defect. Its strings are valid only during the call. */
typedef struct fc_defect {
    const char *file;    /**< fc_file.name; NULL: the checkpoint as a whole */
    const char *tensor;  /**< name of the tensor or object; NULL: none */
    bool has_offset;     /**< whether the offset is known */
    uint64_t offset;     /**< where the damaged record begins in the file, in bytes */
    const char *message; /**< one line with all of this */
} fc_defect;

/** Receives defects. */
typedef struct fc_findings {
    void (*report)(void *context, const fc_defect *defect); /**< called by one thread at a time */
    void *context;
    pthread_mutex_t lock;
    uint64_t count;
} fc_findings;

/** What was verified, and how much of it digests cover. */
typedef struct fc_verify_report {
    size_t tensors, objects, files;
    uint64_t bytes;             /**< bytes of data that were read */
    size_t digested;            /**< number of tensors and objects whose bytes a digest or CRC covers */
    size_t undigested;          /**< number of tensors and objects that were only read */
    uint64_t undigested_bytes;  /**< bytes of these */
    size_t headers_digested;    /**< number of files whose headers a digest covers */
    bool sealed;                /**< whether a seal covers every byte of every file */
    size_t unknown;             /**< number of objects that are not known to be harmless (FC_OBJECT_UNKNOWN) */
    const char *unknown_object; /**< the first of them, borrowed from the checkpoint; NULL for none */
    char unknown_reason[512];   /**< fc_object_verdict.reason of that object */
    uint64_t defects;
} fc_verify_report;

typedef struct fc_verify_options {
    fc_work_options work;
    fc_seal *seal; /**< made by fc_seal_new; receives the digests of all files and tensors. May be NULL */
} fc_verify_options;

/**
 * Verifies an open checkpoint: coverage, digests, CRCs, objects, the structure as far as the format can check it, and
 * the seal if there is one.
 * @return FC_OK even with defects; an error if it could not finish.
 */
fc_code fc_verify(const fc_checkpoint *checkpoint, const fc_verify_options *options,
                  void (*report)(void *context, const fc_defect *defect), void *context, fc_verify_report *out,
                  fc_error *err);

FC_END_DECLS
