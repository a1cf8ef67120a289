/*
 * What every communicator must do, whatever its backend: called by every rank, FC_OK or what was wrong. Run by threads
 * (tests/unit) and by processes (tests/mpi). The expected bytes follow from the definition of each collective alone.
 */
#ifndef TESTS_COMM_CASES_H
#define TESTS_COMM_CASES_H

#include "fsdpckpt/comm.h"

fc_code case_all_gather(fc_comm *comm, void *context, fc_error *err);
fc_code case_all_gather_v(fc_comm *comm, void *context, fc_error *err);
/** Every operation on every type of elements, in place and not. */
fc_code case_reduce_scatter(fc_comm *comm, void *context, fc_error *err);
fc_code case_all_reduce(fc_comm *comm, void *context, fc_error *err);
/** float16 and bfloat16 are rounded once. */
fc_code case_rounding(fc_comm *comm, void *context, fc_error *err);
fc_code case_broadcast(fc_comm *comm, void *context, fc_error *err);
fc_code case_split(fc_comm *comm, void *context, fc_error *err);
/** The lines of a 2D mesh of comm->size / 2 × 2 ranks, and of a 3D one where 8 divides. */
fc_code case_split_mesh(fc_comm *comm, void *context, fc_error *err);
/** Outcomes of which some are failures. */
fc_code case_agree(fc_comm *comm, void *context, fc_error *err);
/** Calls that are refused on all ranks alike, after which the communicator still works. */
fc_code case_refusals(fc_comm *comm, void *context, fc_error *err);

typedef struct comm_case {
    const char *name;
    fc_code (*run)(fc_comm *comm, void *context, fc_error *err);
} comm_case;

/** All of them; ends with name NULL. */
extern const comm_case comm_cases[];

#endif
