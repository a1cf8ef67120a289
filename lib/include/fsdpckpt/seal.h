/*
 * Seals: the digests of a checkpoint in a JSON file next to it (docs/schemas/seal.json). The checkpoint itself is never
 * changed. A seal is read when its checkpoint is opened. fc_checkpoint_digest returns its digests of tensors if the
 * format records none, and fc_verify compares every byte of every file with it.
 */
#pragma once

#include "fsdpckpt/checkpoint.h"

FC_BEGIN_DECLS

/** The seal of "ckpt" is the file "ckpt.fsdpckpt-seal.json" next to it. */
#define FC_SEAL_SUFFIX ".fsdpckpt-seal.json"

/** The digest of one file of the checkpoint. */
typedef struct fc_sealed_file {
    const char *name; /**< path relative to the checkpoint; the header file of the format is included */
    const char *path; /**< path that can be opened */
    uint64_t bytes;   /**< size of the file */
    uint64_t crc64;   /**< digest of the whole file */
} fc_sealed_file;

typedef struct fc_seal {
    const char *path; /**< path of the seal */
    fc_sealed_file *files;
    size_t nfiles;
    uint64_t *crc64;    /**< digest of each of checkpoint->tensors, including objects */
    bool *has;          /**< whether the digest of each of them is known */
    size_t missing;     /**< number of tensors and objects in the seal that the checkpoint does not have */
    const char *missed; /**< name of the first of them */
} fc_seal;

/** Makes an empty seal with room for the files and tensors of `checkpoint`. */
fc_code fc_seal_new(const fc_checkpoint *checkpoint, fc_arena *arena, fc_seal *out, fc_error *err);

/** Removes the seal of a checkpoint at `path` that was replaced. A failure is ignored: the seal then does not fit the
 * new checkpoint, which is an error when that is opened. */
void fc_seal_forget(const char *path);

FC_END_DECLS
