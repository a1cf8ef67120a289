/*
 * Chooses the dtype of each value of a target, and refuses casts that would change quantized codes or their scales.
 */
#pragma once

#include "fsdpckpt/select.h"

/**
 * Sets the dtypes of `count` values of `source`, whose other members are set.
 * @return FC_EUSAGE if a rule matches none of them; FC_EUNSUPPORTED if a cast would change codes or their scales.
 */
fc_code fc_choose_dtypes(const fc_checkpoint *source, const fc_selection *selection, fc_target_tensor *tensors,
                         size_t count, fc_error *err);
