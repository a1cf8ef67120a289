/*
 * Collectives of host memory, for backends whose buffers are in the memory of a GPU.
 */
#pragma once

#include "fsdpckpt/gather/device_comm.h"

/** fc_comm.all_gather of a backend with buffers in the memory of a GPU: by a copy in device memory. */
fc_code fc_comm_gather_host(fc_comm *comm, const void *send, void *recv, size_t bytes, fc_error *err);
