/*
 * One rank of an MPI job that tests the backend `mpi`. Prints the failure and exits with 1 if a case fails.
 *   comm_mpi              runs the cases of comm_cases.h
 *   comm_mpi cancel       the last rank never joins a barrier, and fc_comm.cancel ends the wait of the others
 */
#include "comm_cases.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

static fc_code run_cases(fc_comm *comm, fc_error *err) {
    for (const comm_case *c = comm_cases; c->name; c++) {
        fc_code rc = fc_comm_agree(comm, c->run(comm, NULL, err), err);
        if (rc != FC_OK) {
            return fc_context(err, rc, "%s", c->name);
        }
    }
    return FC_OK;
}

/* The communicators are broken afterwards, so nothing may wait for another rank. The last rank never ends on its own:
   mpirun ends it when another rank has ended without MPI_Finalize. */
static fc_code run_cancel(fc_comm *comm, fc_error *err) {
    static atomic_bool stop;
    fc_code rc = comm->barrier(comm, err);
    if (rc != FC_OK) {
        return rc;
    }
    while (comm->rank == comm->size - 1) {
        pause();
    }
    atomic_store(&stop, true);
    comm->cancel = &stop;
    rc = comm->barrier(comm, err);
    return rc == FC_EINTERRUPTED && comm->broken ? FC_OK : fc_fail(err, FC_EFOUND, "the flag did not end the barrier");
}

int main(int argc, char **argv) {
    fc_error err = {FC_OK, ""};
    fc_device *device;
    fc_comm *comm;
    fc_code rc = fc_device_cpu(&device, &err);
    if (rc != FC_OK) {
        fprintf(stderr, "%s\n", err.message);
        return 1;
    }
    rc = fc_device_mpi(device, &comm, &err);
    if (rc == FC_OK) {
        bool cancel = argc > 1 && strcmp(argv[1], "cancel") == 0;
        int rank = comm->rank, size = comm->size;
        rc = cancel ? run_cancel(comm, &err) : run_cases(comm, &err);
        comm->free(comm);
        if (rc == FC_OK && !cancel && fc_device_mpi(device, &comm, NULL) != FC_EUSAGE) {
            rc = fc_fail(&err, FC_EFOUND, "MPI was started twice");
        }
        if (rc == FC_OK) {
            printf("rank %d of %d: good\n", rank, size);
        }
    }
    if (rc != FC_OK) {
        fprintf(stderr, "%s\n", err.message);
    }
    device->destroy(device);
    return rc != FC_OK;
}
