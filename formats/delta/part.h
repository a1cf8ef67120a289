/*
 * A part of a delta: the tensors that one process compares, and the frames of those that changed. A delta that one
 * process writes has one part.
 */
#pragma once

#include "delta/write.h"
#include "read/tuning.h"

#include <pthread.h>

struct fc_delta_part {
    fc_arena *arena;
    fc_delta_options options; /**< without text of the caller */
    fc_delta_how how;
    fc_delta_report report;
    struct fc_commit *scratch; /**< has the files of the encoders; NULL: how.directory is another's */
    fc_delta_member *members;  /**< report.changed, in any order */
    size_t capacity;
    pthread_mutex_t lock; /**< guards what follows */
    fc_delta_encoder *encoders[FC_MOST_THREADS];
    int nencoders, taken; /**< how many there are, and how many of these the workers have now */
};

/** Gives a worker an encoder. */
fc_code fc_delta_take_encoder(fc_delta_part *part, fc_delta_encoder **out, fc_error *err);
