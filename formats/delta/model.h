/*
 * A model on a local disk that deltas are applied to in place: a folder with safetensors files, and `.weight_sync/`
 * with its version and the lock that SGLang takes, too.
 */
#pragma once

#include "fsdpckpt/arena.h"
#include "fsdpckpt/delta.h"

/** A file of the model. */
typedef struct fc_sync_file {
    const char *name; /**< in the folder */
    const char *path;
    uint64_t data;    /**< where the data begin */
    size_t ntensors;  /**< of the file */
    bool has_digests; /**< its header has digests of its tensors, which change with them */
    bool changes;     /**< set by the caller */
    uint32_t number;  /**< in the journal; set by the caller */
    int fd;           /**< set by the caller */
} fc_sync_file;

/** A tensor of the model. */
typedef struct fc_sync_tensor {
    const char *name;
    fc_sync_file *file;
    uint64_t offset, size; /**< of its bytes in the file */
    uint32_t element;      /**< bytes of an element; 0: elements are no whole bytes */
    bool changes;          /**< set by the caller */
    size_t place;          /**< in the order of the file's data */
} fc_sync_tensor;

/** The headers of a model. Everything is in the arena. */
typedef struct fc_sync_model {
    const char *path;
    fc_sync_file *files;
    size_t nfiles;
    fc_sync_tensor *tensors; /**< sorted by name */
    size_t ntensors;
} fc_sync_model;

/** Reads the headers of the files that the index names, or without an index of all safetensors files. */
fc_code fc_sync_model_read(fc_arena *arena, const char *path, fc_sync_model *out, fc_error *err);

/** Finds a tensor by name. @return NULL if there is none. */
fc_sync_tensor *fc_sync_model_find(const fc_sync_model *model, const char *name);

/** Refuses a file that must not be changed in place: a link, one with another name, one that is read-only. */
fc_code fc_sync_file_check(const fc_sync_file *file, fc_error *err);

/** Reads the version of a model. @param base the version of one without a state; FC_DELTA_NO_NUMBER: 0. */
fc_code fc_sync_version(const char *model, int64_t base, int64_t *version, fc_error *err);

/**
 * Reads the version that the state of a model says. @param path the folder of the model, or a file in it.
 * @param version FC_DELTA_NO_NUMBER: it has no state.
 * @return FC_EUSAGE if a run of apply did not complete a version, so that the files may have bytes of two.
 */
fc_code fc_sync_known_version(const char *path, int64_t *version, fc_error *err);

/**
 * Takes the lock of a model, and waits for whoever has it. Makes `.weight_sync` if the model does not have it.
 * @param fd receives the descriptor, which holds the lock until the caller closes it; -1 on failure.
 */
fc_code fc_sync_lock(const char *model, const fc_delta_apply_options *options, int *fd, fc_error *err);

/**
 * Makes the header of a file with other digests of its tensors.
 * @param crcs   by place; only those whose `known` is set change.
 * @param text   receives the header as it is, `*made` as it becomes: `data` bytes each, from malloc.
 */
fc_code fc_sync_digests(const fc_sync_file *file, const uint64_t *crcs, const bool *known, unsigned char **text,
                        unsigned char **made, fc_error *err);
