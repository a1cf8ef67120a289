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

/** Writes the data file, if there are members, and the index to the empty directory `path`. */
fc_code fc_delta_write_files(const char *path, const fc_delta_content *content, fc_error *err);

/** fc_commit_options.is_own_file: a delta can replace another version in a directory of its name. */
fc_code fc_delta_is_own_file(const char *path, const char *name, bool *own, fc_error *err);
