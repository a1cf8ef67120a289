/*
 * Objects that another format keeps, whose bytes mean nothing to torch.
 */
#ifndef FSDPCKPT_FORMATS_TORCH_OBJECT_WRITE_H
#define FSDPCKPT_FORMATS_TORCH_OBJECT_WRITE_H

#include "fsdpckpt/wanted.h"
#include "torch/pickle_write.h"

/** Pickles an object whose bytes are no torch.save archive: {"encoding": str, "value": its decoding, "data": bytes}. */
fc_code fc_torch_write_object(const fc_wanted *wanted, const fc_wanted_tensor *object, fc_torch_pickler *w,
                              fc_error *err);

#endif
