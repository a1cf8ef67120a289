/*
 * Writes objects to torch.save and DCP files: those of other formats, whose bytes PyTorch cannot read, and torch.save
 * archives.
 */
#pragma once

#include "fsdpckpt/select.h"
#include "torch/pickle/write.h"
#include "torch/zip/write.h"

/** The encoding of objects that are torch.save archives. */
#define FC_TORCH_OBJECT "torch.save"

/** A storage of a tensor within an object, which becomes a record of the archive. */
typedef struct fc_torch_inner {
    unsigned char *bytes;
    uint64_t size;
} fc_torch_inner;

/** Storages in the order of their keys. Starts with zeros; owned by the caller. */
typedef struct fc_torch_inners {
    fc_torch_inner *items;
    size_t count, capacity;
} fc_torch_inners;

/**
 * Pickles an object whose bytes are not a torch.save archive: {"encoding": str, "value": its decoding, "data": bytes}.
 */
fc_code fc_torch_write_object(const fc_target *target, const fc_target_tensor *object, fc_torch_pickler *w,
                              fc_error *err);

/**
 * Pickles the decoded value of an object whose bytes are a torch.save archive.
 * @param first_storage the key of the first storage in it. @param inners its storages are appended.
 * @param readable receives false, and `err` the reason, if the value cannot be decoded: the archive is too large, or a
 * program of TorchScript. Objects whose loading runs code get here only if the user trusts them.
 */
fc_code fc_torch_copy_object(const fc_target *target, const fc_tensor *object, uint64_t first_storage,
                             fc_torch_pickler *w, fc_torch_inners *inners, bool *readable, fc_error *err);

/** Adds the storages to an archive, which borrows their bytes. */
fc_code fc_torch_inners_add(const fc_torch_inners *inners, fc_torch_zip *zip, fc_error *err);

/** Frees the content of `inners`. */
void fc_torch_inners_free(fc_torch_inners *inners);
