/*
 * Seals: digests of a checkpoint that has none of its own, in a JSON file beside it, as `verify --seal` writes it. The
 * checkpoint itself is never changed. A seal that is there is read with the checkpoint: its digests of tensors are
 * those of fc_checkpoint_digest where the format records none, and fc_verify compares every byte of every file.
 */
#ifndef FSDPCKPT_SEAL_H
#define FSDPCKPT_SEAL_H

#include "fsdpckpt/checkpoint.h"

#ifdef __cplusplus
extern "C" {
#endif

/** What is added to the name of the checkpoint: "ckpt" is sealed by "ckpt.fsdpckpt-seal.json" beside it. */
#define FC_SEAL_SUFFIX ".fsdpckpt-seal.json"

/** A file of the checkpoint. */
typedef struct fc_sealed_file {
    const char *name; /**< relative to the checkpoint, as fc_file.name; the format's header file, too */
    const char *path; /**< to be opened */
    uint64_t bytes, crc64;
} fc_sealed_file;

typedef struct fc_seal {
    const char *path; /**< of the seal */
    fc_sealed_file *files;
    size_t nfiles;
    uint64_t *crc64;    /**< of each of checkpoint->tensors; objects included */
    bool *has;          /**< whether it is known */
    size_t missing;     /**< tensors and objects that the seal has and the checkpoint has not */
    const char *missed; /**< the name of the first of them */
} fc_seal;

/** An empty seal for the files and tensors of `checkpoint`, to be filled. */
fc_code fc_seal_new(const fc_checkpoint *checkpoint, fc_arena *arena, fc_seal *out, fc_error *err);

/**
 * Reads the seal of a checkpoint, if there is one, into checkpoint->seal.
 * @return FC_ECORRUPT when it is there and cannot be understood.
 */
fc_code fc_seal_load(fc_checkpoint *checkpoint, fc_error *err);

/** Removes the seal of what was at `path`, after something else has been put there. It only helps: where it fails, the
 *  seal and the new checkpoint disagree, and whoever reads them says so. */
void fc_seal_forget(const char *path);

#ifdef __cplusplus
}
#endif
#endif
