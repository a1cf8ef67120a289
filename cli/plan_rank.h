/*
 * Prints the plan of one rank for `reshard --dry-run --rank R`.
 */
#pragma once

#include "output/text.h"

#include "fsdpckpt/select.h"

/**
 * Prints every box that `rank` would hold, the rank that stores it, and the reads that fill it. Nothing is kept in
 * memory.
 * @return FC_EUSAGE if the mesh has no such rank, or an error of selection, placement or coverage.
 */
fc_code plan_rank(const fc_checkpoint *source, const fc_selection *selection, uint32_t rank, bool json, text_out *out,
                  fc_error *err);
