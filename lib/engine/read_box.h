/*
 * Reading boxes that are pieces of something: who reads them adds up what was read, and compares it when all is.
 */
#ifndef FSDPCKPT_ENGINE_READ_BOX_H
#define FSDPCKPT_ENGINE_READ_BOX_H

#ifndef FSDPCKPT_PRIVATE
#error "this header is private to fsdpckpt: include <fsdpckpt/...> instead"
#endif

#include "engine/source_crc.h"
#include "fsdpckpt/move.h"

/** As fc_read_box, adding what is read to `crc`; NULL: to nothing. */
fc_code fc_read_piece(const fc_checkpoint *checkpoint, const fc_tensor *tensor, const fc_box *box, fc_dtype dtype,
                      void *buf, fc_source_crc *crc, fc_error *err);

#endif
