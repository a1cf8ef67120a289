/*
 * Reads the seal next to a checkpoint.
 */
#pragma once

#include "fsdpckpt/seal.h"

/**
 * Reads the seal of a checkpoint, if there is one, into checkpoint->seal.
 * @return FC_ECORRUPT if it exists and cannot be read, or does not fit the checkpoint.
 */
fc_code fc_seal_load(fc_checkpoint *checkpoint, fc_error *err);
