/*
 * Finds what the target_parameters of an adapter are about, such as the fused experts of a layer.
 */
#pragma once

#include "base/name_table.h"
#include "fsdpckpt/checkpoint.h"
#include "weights/adapter_config.h"

/** The target_parameters of one adapter. */
typedef struct fc_adapter_targets {
    fc_name_table *names; /**< NULL: there are none */
    const bool *lengths;  /**< whether a target has this length */
    size_t longest;
} fc_adapter_targets;

/** Lists the targets of `config`, whose names are borrowed. @return false: out of memory. */
bool fc_adapter_targets_list(const fc_adapter_config *config, fc_arena *arena, fc_adapter_targets *out);

/** @return whether `name` is a target, or ends in one after a dot. */
bool fc_adapter_targets_have(const fc_adapter_targets *targets, const char *name);

/** The parameters of each module of a checkpoint. */
typedef struct fc_module_parameters {
    fc_name_table *first; /**< by the name of the module: its first tensor */
    size_t *next;         /**< per tensor: the next one of its module, or FC_NO_NAME */
} fc_module_parameters;

/** Lists the parameters of the modules of `source`, which is borrowed. @return false: out of memory. */
bool fc_module_parameters_list(const fc_checkpoint *source, fc_arena *arena, fc_module_parameters *out);

/**
 * Finds the prefix of the source's names: what is before `module` in the one place where it has a target.
 * @param len receives the length of the prefix, which is the beginning of the tensor's name.
 * @return the tensor; NULL if there is none, or if several prefixes fit.
 */
const fc_tensor *fc_adapter_targets_prefix(const fc_adapter_targets *targets, const fc_checkpoint *source,
                                           const char *module, size_t *len);
