/*
 * The writer of fsdp_dtensor: adapt.c gives the values of any source the names that Megatron-FSDP looks for, halves.c
 * finds what it stores as two tensors, and fsdp_dtensor.c has the table. DCP's own writer writes the files.
 */
#pragma once

#include "fsdpckpt/format.h"

/** Implements fc_format_target.adapt. */
fc_code fc_fsdp_dtensor_adapt(const fc_checkpoint *source, const struct fc_selection *selection, size_t *left_out,
                              fc_checkpoint **out, fc_error *err);

/** Whether the checkpoint is what fc_fsdp_dtensor_adapt made. */
bool fc_fsdp_dtensor_is_adapted(const fc_checkpoint *source);
