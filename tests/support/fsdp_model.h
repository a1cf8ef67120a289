/*
 * A model for tests of the FSDP step: a root with a sequence of units of one parameter each. The gradient is the
 * parameter plus a number of the rank, so it is wrong if the parameter is not unsharded in time. All work is on the
 * compute stream; the host never waits.
 */
#pragma once

#include "fsdpckpt/train/fsdp.h"

enum { MODEL_UNITS = 4, MODEL_NUMEL = 37 };

typedef struct fsdp_model {
    fc_fsdp *fsdp;
    fc_fsdp_unit *units[MODEL_UNITS]; /* the first is the root */
    fc_fsdp_handle *handles[MODEL_UNITS];
    fc_array inputs[MODEL_UNITS]; /* the numbers that this rank adds to its gradients */
    char trace[16384];            /* one word per event: "ALL_GATHER:unit1 ", or "UNSHARD<COMPUTE " for a wait */
    char warning[1024];
} fsdp_model;

/** Builds the model, and sets options.trace, warn and context. Close it even after a failure. */
fc_code model_open(fsdp_model *m, fc_comm *shard, fc_comm *replicate, int rank, fc_fsdp_options options,
                   fc_fsdp_unit_options unit, fc_error *err);
/** The same with options for each of the MODEL_UNITS units. */
fc_code model_open_each(fsdp_model *m, fc_comm *shard, fc_comm *replicate, int rank, fc_fsdp_options options,
                        const fc_fsdp_unit_options *units, fc_error *err);
void model_close(fsdp_model *m);

/** Runs the forward of all units in order, or as given by `order` (MODEL_UNITS - 1 indices). */
fc_code model_forward(fsdp_model *m, const int *order, fc_error *err);
/** Runs the backward in reverse order, including its end. */
fc_code model_backward(fsdp_model *m, const int *order, fc_error *err);
/** Adds the gradients to the shards and drops the gradients. */
fc_code model_optimize(fsdp_model *m, fc_error *err);

/** Clears the trace. */
void model_clear(fsdp_model *m);
/** Returns the events of `actions` (a NULL-terminated list of names) as words "ACTION:unit", in a buffer of the thread.
 */
const char *model_events(const fsdp_model *m, const char *const *actions);
