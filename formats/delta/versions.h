/*
 * A directory of versions, and what the headers of one version say. No data is read here.
 */
#pragma once

#include "fsdpckpt/arena.h"
#include "fsdpckpt/checkpoint.h"
#include "fsdpckpt/delta.h"

enum { FC_DELTA_HEAD = 18 }; /**< bytes of a frame that say what decoding it needs */

/** One changed tensor of a delta: a frame in one of its files. */
typedef struct fc_delta_tensor {
    const char *name;
    const char *path;                  /**< of the file */
    uint64_t offset, size;             /**< of the frame in the file, bytes */
    const char *checksum;              /**< of the new bytes: hexadecimal digits, as the file has them */
    unsigned char head[FC_DELTA_HEAD]; /**< the first bytes of the frame */
    size_t head_size;                  /**< 0: they were not read (heads.h) */
} fc_delta_tensor;

/** One version: a folder weight_vNNNNNN. Everything is in the arena. */
typedef struct fc_delta_version {
    int64_t number;
    const char *path;
    int64_t base; /**< FC_DELTA_NO_NUMBER: a full version */
    /* The rest is set by fc_delta_version_read, for a delta. */
    fc_delta_encoding encoding;
    fc_delta_checksum checksum;
    fc_delta_tensor *tensors; /**< sorted by name */
    size_t ntensors;
    uint64_t stored_bytes; /**< of all frames */
    size_t nfiles;
    size_t window; /**< the largest that a frame needs; set by the caller */
    bool damaged;  /**< its headers cannot be read; `base` may be unknown, and there are no tensors */
} fc_delta_version;

/** The versions of a directory, by number. */
typedef struct fc_delta_versions {
    const char *path;
    fc_delta_version *versions;
    size_t count;
} fc_delta_versions;

/** Receives what is wrong with a version. */
typedef struct fc_delta_damage {
    void (*report)(void *context, const fc_delta_version *version, const fc_error *why);
    void *context;
} fc_delta_damage;

/**
 * Lists the folders weight_vNNNNNN of a directory, and reads the index of each. Other names are ignored.
 * @param damage receives the versions whose index is damaged, which are listed as such, and those whose number another
 * one has, which are left out. NULL: they are errors.
 * @return FC_ECORRUPT if there are none.
 */
fc_code fc_delta_versions_list(fc_arena *arena, const char *path, const fc_delta_damage *damage, fc_delta_versions *out,
                               fc_error *err);

/** Whether an error is one of the system, and says nothing about a version. */
bool fc_delta_is_failure(fc_code rc);

/**
 * Keeps damage for a report.
 * @param rc of reading a version.
 * @return FC_OK if it is kept: `version` is then marked.
 */
fc_code fc_delta_keep_damage(const fc_delta_damage *damage, fc_delta_version *version, fc_code rc, fc_error *err);

/** Reads the index of the version in the folder `path`. */
fc_code fc_delta_version_open(fc_arena *arena, const char *path, fc_delta_version *out, fc_error *err);

/** Reads the headers of the files of a delta, and compares them with its index. @return FC_ECORRUPT, FC_EUNSUPPORTED.
 */
fc_code fc_delta_version_read(fc_arena *arena, fc_delta_version *version, fc_error *err);

/**
 * Goes back over the bases, to a full version or to one that is not there.
 * @param chain receives the deltas, the oldest first; room for all versions.
 * @return their number. @param end receives the full version; NULL: the base of the first delta is not there.
 */
size_t fc_delta_walk_back(const fc_delta_versions *versions, fc_delta_version *last, fc_delta_version **chain,
                          fc_delta_version **end);

/**
 * Finds the next version that lies between those of a chain, but is none of them: the versions fork there.
 * @param at where to look on; 0 at first. @return NULL: there is none.
 */
const fc_delta_version *fc_delta_next_fork(const fc_delta_versions *versions, fc_delta_version *const *chain,
                                           size_t count, size_t *at);

/**
 * Whether versions are missing before the first one of a chain. A base that is missing is that of the model, unless the
 * directory has earlier versions.
 */
bool fc_delta_is_gap(const fc_delta_versions *versions, const fc_delta_version *first);

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
