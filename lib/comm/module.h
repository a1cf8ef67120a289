/*
 * The interface between the library and its modules. A module is a shared object with one backend, loaded on demand, so
 * that one binary also runs without MPI, CUDA and NCCL. It contains hidden copies of the pure functions that it needs
 * from the library, and exports one table.
 */
#ifndef FSDPCKPT_COMM_MODULE_H
#define FSDPCKPT_COMM_MODULE_H

#include "fsdpckpt/comm.h"

/** The version of this interface. Every change of fc_comm, fc_device or fc_module increments it. */
enum { FC_MODULE_ABI = 1 };

/** The symbol that every module exports: a `const fc_module`. */
#define FC_MODULE_SYMBOL fc_module_table
#define FC_MODULE_SYMBOL_NAME "fc_module_table"

/** The table of a module. Functions of other modules are NULL. */
typedef struct fc_module {
    int abi;                       /**< FC_MODULE_ABI */
    size_t comm_size, device_size; /**< size of fc_comm and fc_device in the module, in bytes */
    const char *version;           /**< FSDPCKPT_VERSION */
    fc_code (*mpi)(fc_device *device, fc_comm **out, fc_error *err);
    fc_code (*cuda)(int index, fc_device **out, fc_error *err);
    fc_code (*nccl)(fc_comm *bootstrap, fc_device *device, fc_comm **out, fc_error *err);
    fc_code (*nccl_file)(const char *path, int rank, int size, int seconds, fc_device *device, fc_comm **out,
                         fc_error *err);
} fc_module;

#define FC_MODULE_HEAD                                                                                                 \
    .abi = FC_MODULE_ABI, .comm_size = sizeof(fc_comm), .device_size = sizeof(fc_device), .version = FSDPCKPT_VERSION

/** Exports the table, the only visible symbol of a module. */
#define FC_MODULE_EXPORT __attribute__((visibility("default")))

#endif
