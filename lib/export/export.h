/*
 * What the files of this room share.
 */
#ifndef FSDPCKPT_EXPORT_EXPORT_H
#define FSDPCKPT_EXPORT_EXPORT_H

#ifndef FSDPCKPT_PRIVATE
#error "this header is private to fsdpckpt: include <fsdpckpt/...> instead"
#endif

#include "base/name_table.h"
#include "fsdpckpt/export.h"

/** Returns a table of the tensors' names and their indexes, or NULL when out of memory. */
fc_name_table *fc_export_names(const fc_checkpoint *checkpoint, fc_arena *arena);

/** @return the index of `name`, or FC_NO_NAME. */
size_t fc_export_find(const fc_name_table *names, const char *name);

/** Returns whether a tensor of one dtype is written in another one: both are plain numbers of at least 16 bits. */
bool fc_export_casts(fc_dtype from, fc_dtype to);

/**
 * Finds a tensor of `checkpoint` with the data of `tensor`, among those that `wanted` has, too. Only the few tensors
 * with its shape are read.
 * @param out receives it, or NULL.
 */
fc_code fc_export_find_twin(const fc_checkpoint *checkpoint, const fc_tensor *tensor, const fc_name_table *wanted,
                            const fc_tensor **out, fc_error *err);

#endif
