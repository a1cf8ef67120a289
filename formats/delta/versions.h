/*
 * A directory of versions, and what the headers of one version say. No data is read here.
 */
#pragma once

#include "fsdpckpt/arena.h"
#include "fsdpckpt/checkpoint.h"
#include "fsdpckpt/delta.h"

/** One changed tensor of a delta: a frame in one of its files. */
typedef struct fc_delta_tensor {
    const char *name;
    const char *path;      /**< of the file */
    uint64_t offset, size; /**< of the frame in the file, bytes */
    const char *checksum;  /**< of the new bytes: hexadecimal digits, as the file has them */
} fc_delta_tensor;

/** One version: a folder weight_vNNNNNN. Everything is in the arena. */
typedef struct fc_delta_version {
    int64_t number;
    const char *path;
    int64_t base; /**< FC_DELTA_NO_NUMBER: a full version */
    /* The rest is set by fc_delta_version_read, for a delta. */
    fc_delta_encoding encoding;
    fc_delta_checksum checksum;
    const fc_delta_tensor *tensors; /**< sorted by name */
    size_t ntensors;
    uint64_t stored_bytes; /**< of all frames */
    size_t window;         /**< the largest that a frame needs; set by the caller */
} fc_delta_version;

/** The versions of a directory, by number. */
typedef struct fc_delta_versions {
    const char *path;
    fc_delta_version *versions;
    size_t count;
} fc_delta_versions;

/**
 * Lists the folders weight_vNNNNNN of a directory, and reads the index of each. Other names are ignored.
 * @return FC_ECORRUPT if there are none, or if two have the same number.
 */
fc_code fc_delta_versions_list(fc_arena *arena, const char *path, fc_delta_versions *out, fc_error *err);

/** Reads the index of the version in the folder `path`. */
fc_code fc_delta_version_open(fc_arena *arena, const char *path, fc_delta_version *out, fc_error *err);

/** Reads the headers of the files of a delta, and compares them with its index. @return FC_ECORRUPT, FC_EUNSUPPORTED.
 */
fc_code fc_delta_version_read(fc_arena *arena, fc_delta_version *version, fc_error *err);

/** Finds a version by number. @return NULL if the directory does not have it. */
fc_delta_version *fc_delta_versions_find(const fc_delta_versions *versions, int64_t number);

/**
 * Finds the versions that lead to `wanted`: back over the bases to a full version, or to the version `from`.
 * @param from   the version that the deltas are applied to, which is not part of the chain; a version may be 0.
 * @param chain  receives them in the order in which they are applied, in the arena. Only the first may be full.
 * @return FC_ECORRUPT if a version is missing, or if the chain does not meet `from`.
 */
fc_code fc_delta_versions_chain(fc_arena *arena, const fc_delta_versions *versions, int64_t from, int64_t wanted,
                                fc_delta_version ***chain, size_t *count, fc_error *err);
