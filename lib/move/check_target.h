/*
 * Compares a target that is written, but has not got its name yet, with its source: an independent check of the plan
 * and of the writer.
 */
#pragma once

#include "fsdpckpt/format.h"
#include "fsdpckpt/move.h"
#include "fsdpckpt/select.h"

/** A target to compare. */
typedef struct fc_written_target {
    const fc_target *target;
    const fc_format *format;
    const fc_selection *selection; /**< how the names of the target follow from those of the source */
    const char *path;              /**< where it is staged */
    const uint64_t *digests;       /**< one CRC-64 for each of target->tensors: of what was moved under its name */
    const bool *unmoved;           /**< one for each: the writer stored it in its own way, so it has no digest */
    bool sampled;                  /**< whether elements are read; false if other ranks have the data of the source */
    const fc_work_options *work;   /**< its threads and progress are used */
} fc_written_target;

/**
 * Opens the target with its format's reader, finds every value by its name, and compares dtypes, shapes, digests, and
 * some elements of each tensor, which are read from both sides. docs/INTEGRITY.md says what this finds.
 * @return FC_EIO if the target does not hold what the source holds.
 */
fc_code fc_check_target(const fc_written_target *written, fc_error *err);
