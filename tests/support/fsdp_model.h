/*
 * A model for tests of the FSDP step: units of one parameter each behind each other within a root, whose gradient is
 * the parameter plus a number of the rank, so that it is wrong when the parameter is not there in time. All work is
 * given to the compute stream; nothing waits on the host.
 */
#ifndef TESTS_FSDP_MODEL_H
#define TESTS_FSDP_MODEL_H

#include "fsdpckpt/train/fsdp.h"

enum { MODEL_UNITS = 4, MODEL_NUMEL = 37 };

typedef struct fsdp_model {
    fc_fsdp *fsdp;
    fc_fsdp_unit *units[MODEL_UNITS]; /* 0: the root */
    fc_fsdp_handle *handles[MODEL_UNITS];
    fc_array inputs[MODEL_UNITS]; /* what the rank adds to its gradients */
    char trace[16384];            /* one word an event, as "ALL_GATHER:unit1 " or "UNSHARD<COMPUTE " for a wait */
    char warning[1024];
} fsdp_model;

/** Builds the model; `options->trace`, `warn` and `context` are set here. To be closed even when this fails. */
fc_code model_open(fsdp_model *m, fc_comm *shard, fc_comm *replicate, int rank, fc_fsdp_options options,
                   fc_fsdp_unit_options unit, fc_error *err);
void model_close(fsdp_model *m);

/** Forward of all units in order, or in the order of `order` (MODEL_UNITS - 1 numbers). */
fc_code model_forward(fsdp_model *m, const int *order, fc_error *err);
/** Backward in the reverse of the order, with the end of it. */
fc_code model_backward(fsdp_model *m, const int *order, fc_error *err);
/** The shards become shards + gradients, and the gradients are dropped. */
fc_code model_optimize(fsdp_model *m, fc_error *err);

/** Forgets the trace so far. */
void model_clear(fsdp_model *m);
/** The events of `actions` (a NULL-terminated list of names) in order, as words "ACTION:unit"; static for the thread.
 */
const char *model_events(const fsdp_model *m, const char *const *actions);

#endif
