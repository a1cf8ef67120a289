/*
 * The lists of chunks of tensors that are read in many small boxes: see fc_chunk_lists in move.h.
 */
#pragma once

#include "fsdpckpt/plan.h"
#include "fsdpckpt/read.h"

/** Like fc_coverage_within. @param lists NULL: every call searches through all chunks. */
fc_code fc_chunk_lists_find(fc_chunk_lists *lists, const fc_checkpoint *checkpoint, const fc_tensor *tensor,
                            const fc_box *region, fc_coverage **out, fc_error *err);
