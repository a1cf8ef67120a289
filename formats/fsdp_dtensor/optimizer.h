/*
 * The optimizer of Megatron-FSDP: states and the values of groups under the name of each parameter.
 */
#pragma once

#include "torch_dist/adapting.h"

typedef struct fc_fsdp_dtensor_optimizer {
    fc_name_table *parameters; /**< the model's, by the names before SwiGLU's matrices were divided */
    fc_name_table *masters;    /**< parameters that have a weight in fp32: their indexes in `weights` */
    const fc_tensor **weights;
    int64_t step; /**< -1: there is no optimizer */
} fc_fsdp_dtensor_optimizer;

/** The length of the name that a parameter had before SwiGLU's matrices were divided; 0: it is no parameter. */
size_t fc_fsdp_dtensor_parameter(const fc_name_table *parameters, const char *name);

/**
 * Adds the optimizer of `target`, if it has one.
 * @param o       `parameters` is set; the rest is in `scratch`, and is set here.
 * @param taken   one per value of `target`: set for those that belong to the optimizer.
 */
fc_code fc_fsdp_dtensor_add_optimizer(fc_dist_adapting *a, const fc_target *target, fc_fsdp_dtensor_optimizer *o,
                                      bool *taken, fc_arena *scratch);
