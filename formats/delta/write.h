/*
 * Writes the files of a delta from the frames of its tensors.
 */
#pragma once

#include "delta/encode.h"

/** One changed tensor. */
typedef struct fc_delta_member {
    const char *name;
    const fc_delta_found *found;
} fc_delta_member;

/** A delta that is complete except for its files. */
typedef struct fc_delta_content {
    int64_t number, base;
    fc_delta_encoding encoding; /**< each member has a frame of it */
    fc_delta_checksum checksum;
    const fc_delta_member *members; /**< sorted by name */
    size_t count;
} fc_delta_content;

/** Writes the data file `file` of `files`, counted from 1, which has all members. */
fc_code fc_delta_write_data(const char *folder, const fc_delta_content *content, unsigned file, unsigned files,
                            fc_error *err);

/** What makes the content of a delta, and how it is published. */
typedef struct fc_delta_publication {
    const char *path;
    bool force;         /**< replace an existing version */
    unsigned forbidden; /**< fc_commit_options.forbidden */
    uint64_t memory;    /**< for a target in a bucket: fc_delta_sender_new */
    fc_reporter reporter;
    fc_progress *progress;
    void *context;
    /** Makes the content, with the files of encoders in the directory `scratch`, or with `sender`: one is NULL. */
    fc_code (*make)(void *context, const char *scratch, fc_delta_sender *sender, fc_delta_content *content,
                    fc_error *err);
    /** Frees the encoders, also after a failure. */
    void (*release)(void *context);
} fc_delta_publication;

/** Returns the memory that the workers get of `memory`, if the target is `path`: in a bucket, the sender needs some. */
uint64_t fc_delta_workers_memory(const char *path, uint64_t memory);

/** Writes the files of a delta, which appear under their name when they are complete. */
fc_code fc_delta_publish(const fc_delta_publication *publication, fc_error *err);
