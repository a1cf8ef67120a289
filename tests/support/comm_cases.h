/*
 * Test cases for the communicators of all backends, as threads (tests/unit) and as processes (tests/mpi). Every rank
 * calls a case, which returns FC_OK or the failure. The expected bytes follow from the definition of each collective.
 */
#pragma once

#include "fsdpckpt/gather/device_comm.h"

fc_code case_all_gather(fc_comm *comm, void *context, fc_error *err);
fc_code case_all_gather_v(fc_comm *comm, void *context, fc_error *err);
/** Every operation on every dtype, in place and not. */
fc_code case_reduce_scatter(fc_comm *comm, void *context, fc_error *err);
fc_code case_all_reduce(fc_comm *comm, void *context, fc_error *err);
/** float16 and bfloat16 are rounded once. */
fc_code case_rounding(fc_comm *comm, void *context, fc_error *err);
fc_code case_broadcast(fc_comm *comm, void *context, fc_error *err);
fc_code case_split(fc_comm *comm, void *context, fc_error *err);
/** Splits along the dimensions of 1D, 2D and 3D meshes. */
fc_code case_split_mesh(fc_comm *comm, void *context, fc_error *err);
/** Agreement when some ranks have failed. */
fc_code case_agree(fc_comm *comm, void *context, fc_error *err);
/** Invalid calls, which all ranks refuse. The communicator works afterwards. */
fc_code case_refusals(fc_comm *comm, void *context, fc_error *err);

typedef struct comm_case {
    const char *name;
    fc_code (*run)(fc_comm *comm, void *context, fc_error *err);
} comm_case;

/** All cases. The last entry has the name NULL. */
extern const comm_case comm_cases[];
