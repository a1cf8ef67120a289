/*
 * Frames that are looked at without the model: what frames.c, which finds their sizes and groups them, and
 * frames_read.c, which decodes them, share.
 */
#pragma once

#include "delta/decode.h"
#include "delta/look.h"

#include <pthread.h>

enum { FC_FRAMES_BLOCK = 64 << 10, FC_FRAMES_WORKER = 2 * FC_FRAMES_BLOCK }; /**< bytes that a worker holds */

/** A frame, with what is known of it. */
typedef struct fc_looked_frame {
    const fc_delta_version *version;
    const fc_delta_tensor *tensor;
    fc_delta_changed *seen;
    size_t root, memory; /**< memory: of its decoder */
    bool bad;
} fc_looked_frame;

/** Frames of one tensor that are decoded in lockstep. */
typedef struct fc_frames_item {
    fc_looked_frame *frames;
    size_t count;
    const fc_sync_tensor *base; /**< whose bytes pass through them; NULL: there is one frame, and zeros do */
} fc_frames_item;

typedef struct fc_frames_job {
    fc_delta_looking *looking;
    fc_looked_frame *frames;
    fc_frames_item *items;
    size_t nframes, nitems;
    size_t longest; /**< the most frames of an item */
    size_t memory;  /**< of the item that needs most */
    uint64_t budget;
    pthread_mutex_t lock; /**< guards all that follows, and reports */
    size_t next;
    fc_code code;
    fc_error error;
} fc_frames_job;

/** Reports something that is wrong with a frame. */
void fc_delta_report_frame(fc_frames_job *job, const fc_looked_frame *frame, fc_delta_fault_kind kind,
                           const fc_error *why);

/** Decodes all items with several threads. @return the first failure of the system. */
fc_code fc_frames_run(fc_frames_job *job, fc_error *err);
