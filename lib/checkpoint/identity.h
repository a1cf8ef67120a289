/*
 * Which files a checkpoint was opened from. Data is read through later opens by name: a file that was replaced or
 * rewritten since would give values of another checkpoint under the names of this one.
 */
#ifndef FSDPCKPT_CHECKPOINT_IDENTITY_H
#define FSDPCKPT_CHECKPOINT_IDENTITY_H

#ifndef FSDPCKPT_PRIVATE
#error "this header is private to fsdpckpt: include <fsdpckpt/...> instead"
#endif

#include "fsdpckpt/checkpoint.h"

/** Notes device, inode, size and times of each of the checkpoint's files. A missing file has none. */
fc_code fc_identities_take(fc_checkpoint *checkpoint, fc_error *err);

/** Checks that the open file `fd` is still file `index` as it was: FC_ECORRUPT. */
fc_code fc_identity_check(const fc_checkpoint *checkpoint, size_t index, int fd, fc_error *err);

/** The same for all files by name, after the last byte was read. */
fc_code fc_identities_check(const fc_checkpoint *checkpoint, fc_error *err);

#endif
