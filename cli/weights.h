/*
 * --delta, --dequantize, --adapter and --quantize: replaces weights of a source by what is computed from them.
 */
#pragma once

#include "options/command.h"

#include "fsdpckpt/checkpoint.h"

/** --delta, --dequantize and --adapter, in this order: replaces `*source`, before its values are selected and renamed.
 */
fc_code weights_compute(const options *o, fc_checkpoint **source, fc_error *err);

/** --quantize: replaces `*source`, after the recipe. */
fc_code weights_quantize(const options *o, fc_checkpoint **source, fc_error *err);
