/*
 * What training needs of a communicator beyond comm.h. The module nccl has a copy of this file.
 */
#include "gather/gather_host.h"

#include "fsdpckpt/try.h"

fc_code fc_comm_group(fc_comm *comm, bool begin, fc_error *err) {
    return comm->group ? comm->group(comm, begin, err) : FC_OK;
}

fc_code fc_comm_wait(fc_comm *comm, fc_stream *stream, fc_error *err) {
    return comm->wait ? comm->wait(comm, stream, err) : comm->device->synchronize(comm->device, stream, err);
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
    FC_TRY_GOTO(comm->all_gather(comm, mine, memory, bytes, NULL, err), rc, out);
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
