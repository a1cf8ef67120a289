/*
 * Coverage for readers of many small regions; see fsdpckpt/plan.h.
 */
#pragma once

#include "fsdpckpt/plan.h"

/**
 * Lists the chunks of a tensor without a proof that they cover it. Many small regions are then found with
 * fc_coverage_part, each without a search through all chunks.
 */
fc_code fc_coverage_list(const fc_checkpoint *checkpoint, const fc_tensor *tensor, fc_coverage **out, fc_error *err);

/** Like fc_coverage_within for the tensor of `list`, from fc_coverage_list; the result does not refer to it. */
fc_code fc_coverage_part(const fc_coverage *list, const fc_box *region, fc_coverage **out, fc_error *err);

/** Returns the number of chunks that cover the region. Of replicas, one counts. */
size_t fc_coverage_count(const fc_coverage *coverage);

/** Returns the index, in the tensor's chunks, of the chunk at a position in ascending order of offsets. */
size_t fc_coverage_chunk(const fc_coverage *coverage, size_t position);
