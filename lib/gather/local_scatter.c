/*
 * reduce_scatter of ranks that are threads, beyond what lib/comm has for conversions.
 */
#include "gather/local_scatter.h"
#include "comm/local_meet.h"
#include "fsdpckpt/try.h"

static fc_code local_reduce_scatter(fc_comm *comm, const void *send, void *recv, size_t count, fc_dtype dtype,
                                    fc_reduce op, fc_stream *stream, fc_error *err) {
    (void)stream;
    local_slot mine = {.kind = LOCAL_REDUCE_SCATTER, .send = send, .count = count, .dtype = dtype, .op = op};
    FC_TRY(fc_local_enter(comm, &mine, err));
    fc_code rc = fc_local_reduce(comm->state, dtype, op, count * (size_t)comm->rank, count, recv, err);
    return fc_local_leave_with(comm, rc, err);
}

const fc_device_collectives fc_local_on_device = {.reduce_scatter = local_reduce_scatter};
