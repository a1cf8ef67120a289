/*
 * Sends the frames of a delta to a bucket while they are made. They go to the data file in the order of their tensors.
 * The worker that has the first tensor that is not finished sends its frame piece by piece. Frames of later tensors
 * wait in memory, and if there are too many, their workers wait, too. So the bytes are those of a delta on the disk.
 */
#pragma once

#include "fsdpckpt/error.h"

#include <stddef.h>
#include <stdint.h>

typedef struct fc_delta_sender fc_delta_sender;

/**
 * @param path   the data file, in a target in a bucket
 * @param memory the bytes that are held at once: parts, frames that wait, and what fc_delta_sender_hold adds
 */
fc_code fc_delta_sender_new(const char *path, uint64_t memory, fc_delta_sender **out, fc_error *err);

/** Says how many tensors there are. Each index is then given to a worker, in ascending order, and ended. */
fc_code fc_delta_sender_begin(fc_delta_sender *sender, size_t count, fc_error *err);

/** Adds bytes to the frame of tensor `index`. */
fc_code fc_delta_sender_put(fc_delta_sender *sender, size_t index, const unsigned char *bytes, size_t size,
                            fc_error *err);

/**
 * Tensor `index`, called `name`, needs `size` more bytes of memory until it ends. Waits for them.
 * @return FC_EUSAGE if this tensor alone needs too many
 */
fc_code fc_delta_sender_hold(fc_delta_sender *sender, size_t index, const char *name, size_t size, fc_error *err);

/** Ends tensor `index`, whether it has a frame or not. */
fc_code fc_delta_sender_end(fc_delta_sender *sender, size_t index, fc_error *err);

/** A worker has failed and will not end its tensor: others stop waiting for it. NULL is allowed. */
void fc_delta_sender_stop(fc_delta_sender *sender);

/** Ends the data file, which has at least one frame. */
fc_code fc_delta_sender_finish(fc_delta_sender *sender, const char *header, size_t size, fc_error *err);

/** NULL is allowed. */
void fc_delta_sender_free(fc_delta_sender *sender);
