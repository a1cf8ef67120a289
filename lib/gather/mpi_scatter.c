/*
 * reduce_scatter of the backend `mpi`, beyond what lib/comm has for conversions. A part of the module mpi.
 */
#include "comm/mpi_state.h"
#include "fsdpckpt/try.h"
#include "gather/module.h"

#include <stdlib.h>

static fc_code mpi_reduce_scatter(fc_comm *comm, const void *send, void *recv, size_t count, fc_dtype dtype,
                                  fc_reduce op, fc_stream *stream, fc_error *err) {
    (void)stream;
    fc_mpi_segments of;
    FC_TRY(fc_mpi_check_reduction(comm, dtype, op, err));
    if (!fc_mpi_segments_new(&of, comm->size)) {
        return fc_mpi_break_for_memory(comm, err);
    }
    for (int r = 0; r < comm->size; r++) {
        of.first[r] = count * (size_t)r;
        of.count[r] = count;
    }
    of.most = count;
    fc_code rc = fc_mpi_reduce_segments(comm, send, &of, recv, dtype, op, err);
    free(of.first);
    return rc;
}

static const fc_device_collectives collectives = {.reduce_scatter = mpi_reduce_scatter};
const struct fc_device_module fc_mpi_devices = {.on_mpi = &collectives};
