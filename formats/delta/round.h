/*
 * Applies several deltas to a model at once: each tensor is read once, passes through the frames of all of them, and
 * its new bytes go to the journal, or into files that are no model yet.
 */
#pragma once

#include "delta/journal.h"
#include "delta/model.h"
#include "delta/versions.h"

typedef struct fc_delta_round {
    fc_sync_model *model;
    fc_delta_version *const *versions; /**< deltas, in order, whose headers were read */
    size_t count;
    fc_journal *journal; /**< NULL: the files are changed at once */
    fc_work_options work;
} fc_delta_round;

/** Returns the most bytes that a worker of a round of these versions holds. Their windows are set. */
size_t fc_delta_round_memory(fc_delta_version *const *versions, size_t count);

/**
 * Compares the tensors of a delta with those of the model, without reading frames, and sets their `changes`.
 * @param window receives the largest window that its frames need.
 */
fc_code fc_delta_fits(fc_sync_model *model, const fc_delta_version *version, size_t *window, fc_error *err);

/** Applies the round.  */
fc_code fc_delta_apply_round(const fc_delta_round *round, fc_error *err);
