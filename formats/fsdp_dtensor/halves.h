/*
 * SwiGLU's two halves, which Megatron-FSDP stores as two tensors.
 */
#pragma once

#include "fsdpckpt/target.h"

#include <jansson.h>

/**
 * Makes the rules of a recipe that divides each first matrix of a gated MLP, and its bias, into `…_w` and `…_v`.
 * @param rules receives a JSON array, which the caller frees; NULL: memory has run out.
 * @return FC_EUNSUPPORTED for experts that have one matrix together.
 */
fc_code fc_fsdp_dtensor_find_halves(const fc_target *target, fc_arena *arena, json_t **rules, fc_error *err);
