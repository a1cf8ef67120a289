/*
 * Writes objects of other formats, whose bytes PyTorch cannot read, to torch.save and DCP files.
 */
#ifndef FSDPCKPT_FORMATS_TORCH_OBJECT_WRITE_H
#define FSDPCKPT_FORMATS_TORCH_OBJECT_WRITE_H

#ifndef FSDPCKPT_PRIVATE
#error "this header is private to fsdpckpt: include <fsdpckpt/...> instead"
#endif

#include "fsdpckpt/select.h"
#include "torch/pickle_write.h"

/**
 * Pickles an object whose bytes are not a torch.save archive: {"encoding": str, "value": its decoding, "data": bytes}.
 */
fc_code fc_torch_write_object(const fc_target *target, const fc_target_tensor *object, fc_torch_pickler *w,
                              fc_error *err);

#endif
