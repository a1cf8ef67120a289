/*
 * A model for tests of state dicts, with uneven shapes, a shared parameter, a transposed one, bf16 and states of an
 * optimizer. Every element is a number that follows from its tensor and its place, so each rank can check its own.
 */
#pragma once

#include "fsdpckpt/train/state_dict.h"

enum { STATE_UNITS = 4, STATE_HANDLES = 5, STATE_OPTIM = 2 * STATE_HANDLES, STATE_VALUES = 3 };

typedef struct state_model {
    fc_comm *shard;
    fc_device *cpu; /* of states whose shards are offloaded: the device of offloaded shards goes with the instance */
    const fc_device_mesh *tp;
    fc_fsdp *fsdp;
    fc_fsdp_unit *units[STATE_UNITS]; /* the first is the root */
    fc_comm *shards[STATE_UNITS];     /* the ranks that shard each */
    fc_fsdp_handle *handles[STATE_HANDLES];
    fc_fsdp_buffer *buffer; /* float32, and float64 while it is used */
    fc_array states[STATE_OPTIM], values[STATE_VALUES];
    fc_fsdp_optim_state optim[STATE_OPTIM];
    fc_fsdp_value named[STATE_VALUES];
    fc_fsdp_state state;
    int steps; /* added to each element so far */
} state_model;

typedef struct state_model_options {
    fc_fsdp_options fsdp;
    fc_fsdp_unit_options unit;
    fc_comm *replicate;       /* or NULL */
    bool mixed;               /* layers.0 is sharded over all ranks, and layers.1 over the replicas of the others */
    fc_comm *all;             /* for `mixed` */
    const fc_device_mesh *tp; /* the mesh of tensor parallelism, or NULL */
    bool one_handle;          /* the unit with two flat parameters has only the first, as LOCAL_STATE_DICT needs */
} state_model_options;

/** Builds the model on the device of `shard`. Close it even after a failure. */
fc_code state_model_open(state_model *m, fc_comm *shard, const state_model_options *options, fc_error *err);
void state_model_close(state_model *m);

/** Runs a step on the compute stream that adds 1 to every parameter and state. The host does not wait for it. */
fc_code state_model_step(state_model *m, fc_error *err);

/** Sets parameters, states and values to 0. */
fc_code state_model_clear(state_model *m, fc_error *err);

/** Compares the shards of this rank with what they must be after `steps` steps. @return FC_ECORRUPT. */
fc_code state_model_check(const state_model *m, int steps, fc_error *err);
