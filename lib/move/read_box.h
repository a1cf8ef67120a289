/*
 * Reading boxes that are pieces of something: who reads them adds up what was read, and compares it when all is.
 */
#ifndef FSDPCKPT_MOVE_READ_BOX_H
#define FSDPCKPT_MOVE_READ_BOX_H

#include "fsdpckpt/move.h"
#include "move/source_crc.h"

/** As fc_read_box, adding what is read to `crc`; NULL: to nothing. */
fc_code fc_read_piece(const fc_checkpoint *checkpoint, const fc_tensor *tensor, const fc_box *box, fc_dtype dtype,
                      void *buf, fc_source_crc *crc, fc_error *err);

#endif
