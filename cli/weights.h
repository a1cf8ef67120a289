/*
 * --dequantize: replaces weights of a source by what is computed from them.
 */
#ifndef FSDPCKPT_CLI_WEIGHTS_H
#define FSDPCKPT_CLI_WEIGHTS_H

#include "command.h"

#include "fsdpckpt/checkpoint.h"

/** Replaces `*source`, before its values are selected and renamed. */
fc_code weights_compute(const options *o, fc_checkpoint **source, fc_error *err);

#endif
