/*
 * Backends that are shared objects of their own, opened when they are asked for: so one binary runs where there is no
 * MPI, no CUDA and no NCCL. A module brings its own copies of the few pure functions it needs from the library and
 * gives one table.
 */
#ifndef FSDPCKPT_COMM_MODULE_H
#define FSDPCKPT_COMM_MODULE_H

#ifndef FSDPCKPT_PRIVATE
#error "this header is private to fsdpckpt: include <fsdpckpt/...> instead"
#endif

#include "fsdpckpt/comm.h"

/** What the library and its modules must have in common; changed with every change of fc_comm, fc_device or this. */
enum { FC_MODULE_ABI = 1 };

/** The symbol of every module: a `const fc_module`. */
#define FC_MODULE_SYMBOL fc_module_table
#define FC_MODULE_SYMBOL_NAME "fc_module_table"

/** Functions that a module does not have are NULL. */
typedef struct fc_module {
    int abi;
    size_t comm_size, device_size; /**< of the structs, as the module was compiled */
    const char *version;           /**< FSDPCKPT_VERSION */
    fc_code (*mpi)(fc_device *device, fc_comm **out, fc_error *err);
    fc_code (*cuda)(int index, fc_device **out, fc_error *err);
    fc_code (*nccl)(fc_comm *bootstrap, fc_device *device, fc_comm **out, fc_error *err);
    fc_code (*nccl_file)(const char *path, int rank, int size, int seconds, fc_device *device, fc_comm **out,
                         fc_error *err);
} fc_module;

#define FC_MODULE_HEAD                                                                                                 \
    .abi = FC_MODULE_ABI, .comm_size = sizeof(fc_comm), .device_size = sizeof(fc_device), .version = FSDPCKPT_VERSION

/** Only the table of a module is seen from outside. */
#define FC_MODULE_EXPORT __attribute__((visibility("default")))

#endif
