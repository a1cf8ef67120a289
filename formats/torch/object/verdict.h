/*
 * Examines what loading a torch.save archive with PyTorch would do. The functions are fc_object_encoding.examine and
 * examine_memory of "torch.save".
 */
#pragma once

#include "fsdpckpt/format.h"

/** Examines the torch.save archive in a range of a file. */
fc_code fc_torch_verdict(int fd, const char *path, uint64_t offset, uint64_t length, fc_object_verdict *out,
                         fc_error *err);

/** Likewise examines an archive in memory, and frees the malloc'ed `bytes`. */
fc_code fc_torch_verdict_memory(unsigned char *bytes, uint64_t length, const char *path, fc_object_verdict *out,
                                fc_error *err);
