/*
 * The plan of one rank: what `reshard --dry-run --rank R` prints.
 */
#ifndef FSDPCKPT_CLI_PLAN_RANK_H
#define FSDPCKPT_CLI_PLAN_RANK_H

#include "text.h"

#include "fsdpckpt/select.h"

/**
 * Prints every box that `rank` would hold, who stores it, and what is read for it. Each is printed as it is computed.
 * @return FC_EUSAGE when the mesh has no such rank; else what selecting, placing and coverage find.
 */
fc_code plan_rank(const fc_checkpoint *source, const fc_selection *selection, uint32_t rank, bool json, text_out *out,
                  fc_error *err);

#endif
