/*
 * Merges adapters whose values are open already: those of a folder, or of the checkpoint itself.
 */
#ifndef FSDPCKPT_WEIGHTS_ADAPTERS_H
#define FSDPCKPT_WEIGHTS_ADAPTERS_H

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

#endif
