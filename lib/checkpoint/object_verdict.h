/*
 * How the library examines pickles, which only formats/torch can read.
 */
#ifndef FSDPCKPT_CHECKPOINT_OBJECT_VERDICT_H
#define FSDPCKPT_CHECKPOINT_OBJECT_VERDICT_H

#ifndef FSDPCKPT_PRIVATE
#error "this header is private to fsdpckpt: include <fsdpckpt/...> instead"
#endif

#include "fsdpckpt/checkpoint.h"

/** Examines the torch.save archive in a range of a file. Defined in formats/torch/verdict.c. */
fc_code fc_torch_verdict(int fd, const char *path, uint64_t offset, uint64_t length, fc_object_verdict *out,
                         fc_error *err);

/** Likewise an archive in memory; takes over the malloc'ed `bytes`. */
fc_code fc_torch_verdict_memory(unsigned char *bytes, uint64_t length, const char *path, fc_object_verdict *out,
                                fc_error *err);

#endif
