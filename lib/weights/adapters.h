/*
 * Merges adapters whose values are open already: those of a folder, or of the checkpoint itself.
 */
#pragma once

#include "fsdpckpt/weights.h"
#include "weights/adapter_config.h"

typedef struct fc_opened_adapter {
    fc_adapter_config config;
    fc_checkpoint *values; /**< named as PEFT saves them */
    double weight;         /**< multiplies what it adds */
} fc_opened_adapter;

/**
 * As fc_merge_adapters. After success the values belong to the new checkpoint; after a failure, and the array always,
 * they remain the caller's.
 */
fc_code fc_merge_opened(fc_checkpoint *source, const fc_opened_adapter *adapters, size_t count, fc_checkpoint **out,
                        size_t *merged, fc_error *err);

/** Returns whether a name is one of those that PEFT's LoRA gives to the values of a model: base layers, factors. */
bool fc_is_adapter_name(const char *name);

/**
 * Merges the LoRA adapter that the weights of a training run have inside ("q_proj.base_layer.weight",
 * "q_proj.lora_A.default.weight"), and removes what PEFT adds to names.
 * @param source its names are those of the module; objects have no place in it.
 * @param config adapter_config.json, or its folder.
 * @param merged receives the number of weights that were changed.
 * @return FC_EUSAGE if there are several adapters, or the configuration is another one's; FC_EUNSUPPORTED for kinds of
 *         adapters that are not LoRA.
 */
fc_code fc_merge_own_adapter(fc_checkpoint *source, const char *config, fc_checkpoint **out, size_t *merged,
                             fc_error *err);
