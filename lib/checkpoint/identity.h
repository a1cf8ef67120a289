/*
 * Records which files a checkpoint was opened from. Data is read later, through names. If a file was replaced or
 * rewritten in the meantime, this would give values of another checkpoint under the names of this one.
 */
#ifndef FSDPCKPT_CHECKPOINT_IDENTITY_H
#define FSDPCKPT_CHECKPOINT_IDENTITY_H

#ifndef FSDPCKPT_PRIVATE
#error "this header is private to fsdpckpt: include <fsdpckpt/...> instead"
#endif

#include "fsdpckpt/checkpoint.h"

/** Records device, inode, size and times of each file of the checkpoint. A missing file has none. */
fc_code fc_identities_take(fc_checkpoint *checkpoint, fc_error *err);

/** Makes the files of `checkpoint`, with their identities, those of all `sources`, one source after the other. */
fc_code fc_identities_join(fc_checkpoint *checkpoint, fc_checkpoint *const *sources, size_t count, fc_error *err);

/** Checks that the open file `fd` is still file `index`, unchanged. @return FC_ECORRUPT if not. */
fc_code fc_identity_check(const fc_checkpoint *checkpoint, size_t index, int fd, fc_error *err);

/** Does the same for all files by name. Call it after the last byte was read. */
fc_code fc_identities_check(const fc_checkpoint *checkpoint, fc_error *err);

#endif
