/*
 * adapter_config.json of a LoRA adapter, as PEFT writes it.
 */
#pragma once

#include "fsdpckpt/arena.h"
#include "fsdpckpt/error.h"
#include "weights/adapter_patterns.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct fc_adapter_config {
    const char *path;
    double rank, alpha;
    fc_adapter_pattern *ranks, *alphas; /**< exceptions; the first that matches decides */
    size_t nranks, nalphas;
    const char **parameters; /**< target_parameters: the ends of names such as "mlp.experts.down_proj" */
    size_t nparameters;
    bool rank_stabilized; /**< use_rslora: divide by the root of the rank */
    bool transposed;      /**< fan_in_fan_out: weights are stored as (in, out) */
} fc_adapter_config;

/**
 * Reads folder/adapter_config.json, or the file that `folder` names. `arena` owns what it returns.
 * @return FC_EUNSUPPORTED for adapters that are not LoRA, or of a kind whose weights are not base + scale × B × A.
 */
fc_code fc_adapter_config_load(const char *folder, fc_arena *arena, fc_adapter_config *out, fc_error *err);

/** A module that an adapter changes. */
typedef struct fc_adapter_module {
    const char *name;
    int64_t rank; /**< the rows of A */
    double scale; /**< receives the factor of B × A */
} fc_adapter_module;

/** Computes the factors of B × A for all modules. @return FC_EUSAGE if the configuration has another rank for one. */
fc_code fc_adapter_scales(const fc_adapter_config *config, fc_adapter_module *modules, size_t count, fc_error *err);
