/*
 * The interface between the library and its modules. A module is a shared object with one backend, loaded on demand, so
 * that one binary also runs without MPI, CUDA and NCCL. It contains hidden copies of the pure functions that it needs
 * from the library, and exports one table.
 */
#pragma once

#include "fsdpckpt/comm.h"

/** The version of this interface. Every change of fc_comm, fc_device or fc_module increments it. */
enum { FC_MODULE_ABI = 3 };

/** The symbol that every module exports: a `const fc_module`. */
#define FC_MODULE_SYMBOL fc_module_table
#define FC_MODULE_SYMBOL_NAME "fc_module_table"

/** The table of a module. What other modules have is NULL. */
typedef struct fc_module {
    int abi;             /**< FC_MODULE_ABI */
    size_t comm_size;    /**< size of fc_comm in the module, in bytes */
    size_t device_size;  /**< that of fc_device; 0 in a module without devices */
    const char *version; /**< FSDPCKPT_VERSION */
    fc_code (*mpi)(fc_comm **out, fc_error *err);
    const struct fc_device_module *devices; /**< gather/module.h */
} fc_module;

#define FC_MODULE_HEAD .abi = FC_MODULE_ABI, .comm_size = sizeof(fc_comm), .version = FSDPCKPT_VERSION

/** Exports the table, the only visible symbol of a module. */
#define FC_MODULE_EXPORT __attribute__((visibility("default")))

/** Which module a caller wants. */
typedef struct fc_module_kind {
    const char *name;    /**< "mpi" */
    bool is_built;       /**< whether this build contains it */
    const char *library; /**< what a build needs to contain it */
    size_t device_size;  /**< fc_module.device_size */
} fc_module_kind;

/** Finds and loads a module. @return FC_EUNSUPPORTED with the reason why there is none. */
fc_code fc_module_load(const fc_module_kind *kind, const fc_module **out, fc_error *err);

/** Refuses a module that has the name of another. */
fc_code fc_module_refuse(const fc_module_kind *kind, fc_error *err);
