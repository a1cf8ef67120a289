/*
 * What the modules for GPUs export, beyond comm/module.h.
 */
#pragma once

#include "fsdpckpt/gather/device_comm.h"

#include "comm/module.h"

/** The functions of a module. Those of other modules are NULL. */
struct fc_device_module {
    const fc_device_collectives *on_mpi; /**< fc_comm.on_device */
    fc_code (*cuda)(int index, fc_device **out, fc_error *err);
    fc_code (*nccl)(fc_comm *bootstrap, fc_device *device, fc_comm **out, fc_error *err);
    fc_code (*nccl_file)(const char *path, int rank, int size, int seconds, fc_device *device, fc_comm **out,
                         fc_error *err);
};
