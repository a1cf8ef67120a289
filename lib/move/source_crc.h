/*
 * The CRC-32s that a source records for its chunks (the records of torch's zip archives), compared with what was
 * written of its tensors. For want of one sum over the tensor this needs both sides cut into runs of its row-major
 * order: whole, or in rows (Shard(0)), as FSDP cuts. Columns are left to fsdpckpt verify.
 */
#ifndef FSDPCKPT_MOVE_SOURCE_CRC_H
#define FSDPCKPT_MOVE_SOURCE_CRC_H

#include "fsdpckpt/wanted.h"

typedef struct fc_source_crc fc_source_crc;

/** @param out NULL when the source records no CRC-32; the other functions allow that. */
fc_code fc_source_crc_new(const fc_wanted *wanted, fc_source_crc **out, fc_error *err);
void fc_source_crc_free(fc_source_crc *crc);

/** Adds the items of a part whose data has been moved, with their CRC-32s. */
void fc_source_crc_add(fc_source_crc *crc, const fc_part *part);

/** @return FC_ECORRUPT when tensor `index` of the target is not what the source's CRC-32s say. */
fc_code fc_source_crc_check(const fc_source_crc *crc, size_t index, fc_error *err);

#endif
