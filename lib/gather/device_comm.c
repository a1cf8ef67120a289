/*
 * What training needs of a communicator beyond comm.h. The module nccl has a copy of this file.
 */
#include "gather/gather_host.h"

#include "fsdpckpt/try.h"

static const fc_device_collectives host = {0}; /* everything is that of fc_comm */

static const fc_device_collectives *on_device(const fc_comm *comm) {
    return comm->on_device ? comm->on_device : &host;
}

fc_code fc_all_gather(fc_comm *comm, const void *send, void *recv, size_t bytes, fc_stream *stream, fc_error *err) {
    const fc_device_collectives *on = on_device(comm);
    return on->all_gather ? on->all_gather(comm, send, recv, bytes, stream, err)
                          : comm->all_gather(comm, send, recv, bytes, err);
}

fc_code fc_all_gather_v(fc_comm *comm, const void *send, void *recv, const size_t *counts, const size_t *displs,
                        fc_stream *stream, fc_error *err) {
    const fc_device_collectives *on = on_device(comm);
    return on->all_gather_v ? on->all_gather_v(comm, send, recv, counts, displs, stream, err)
                            : comm->all_gather_v(comm, send, recv, counts, displs, err);
}

fc_code fc_all_reduce(fc_comm *comm, void *data, size_t count, fc_dtype dtype, fc_reduce op, fc_stream *stream,
                      fc_error *err) {
    const fc_device_collectives *on = on_device(comm);
    return on->all_reduce ? on->all_reduce(comm, data, count, dtype, op, stream, err)
                          : comm->all_reduce(comm, data, count, dtype, op, err);
}

fc_code fc_broadcast(fc_comm *comm, void *data, size_t bytes, int root, fc_stream *stream, fc_error *err) {
    const fc_device_collectives *on = on_device(comm);
    return on->broadcast ? on->broadcast(comm, data, bytes, root, stream, err)
                         : comm->broadcast(comm, data, bytes, root, err);
}

fc_code fc_reduce_scatter(fc_comm *comm, const void *send, void *recv, size_t count, fc_dtype dtype, fc_reduce op,
                          fc_stream *stream, fc_error *err) {
    const fc_device_collectives *on = on_device(comm);
    return on->reduce_scatter
               ? on->reduce_scatter(comm, send, recv, count, dtype, op, stream, err)
               : fc_fail(err, FC_EUSAGE, "%s: reduce_scatter needs a communicator with a device", comm->backend);
}

fc_code fc_comm_group(fc_comm *comm, bool begin, fc_error *err) {
    const fc_device_collectives *on = on_device(comm);
    return on->group ? on->group(comm, begin, err) : FC_OK;
}

fc_code fc_comm_wait(fc_comm *comm, fc_stream *stream, fc_error *err) {
    const fc_device_collectives *on = on_device(comm);
    return on->wait ? on->wait(comm, stream, err) : comm->device->synchronize(comm->device, stream, err);
}

fc_code fc_comm_gather_host(fc_comm *comm, const void *send, void *recv, size_t bytes, fc_error *err) {
    fc_device *device = comm->device;
    void *memory = NULL;
    size_t all = bytes * (size_t)comm->size;
    char *mine;
    fc_code rc;
    FC_TRY_GOTO(device->alloc(device, all, &memory, err), rc, out);
    mine = (char *)memory + bytes * (size_t)comm->rank;
    FC_TRY_GOTO(device->copy(device, mine, send, bytes, NULL, err), rc, out);
    FC_TRY_GOTO(fc_all_gather(comm, mine, memory, bytes, NULL, err), rc, out);
    FC_TRY_GOTO(fc_comm_wait(comm, NULL, err), rc, out);
    FC_TRY_GOTO(device->copy(device, recv, memory, all, NULL, err), rc, out);
    rc = fc_comm_wait(comm, NULL, err);
out:
    if (rc != FC_OK && !comm->broken) {
        fc_comm_abort(comm);
    }
    device->release(device, memory);
    return rc;
}
