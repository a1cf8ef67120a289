/*
 * Finds and loads the shared object of a module, which runs in this process: libraries that most commands do not need
 * are linked only by modules.
 */
#pragma once

#include "fsdpckpt/error.h"

#include <stdbool.h>

/** Which module a caller wants. */
typedef struct fc_module_file {
    const char *name;    /**< for messages: "mpi" */
    const char *stem;    /**< of the file libfsdpckpt-<stem>.so: "comm-mpi" */
    bool is_built;       /**< whether this build contains it */
    const char *library; /**< what a build needs to contain it */
    const char *instead; /**< what a user can do without it, such as "download the files first"; NULL: nothing */
    const char *symbol;  /**< of the table that it exports */
    /** Returns whether a table belongs to this build. */
    bool (*fits)(const struct fc_module_file *file, const void *table);
    const void *context; /**< for `fits` */
} fc_module_file;

/** Finds and loads a module, once for a process. @return FC_EUNSUPPORTED with the reason why there is none. */
fc_code fc_module_file_load(const fc_module_file *file, const void **table, fc_error *err);

/** Refuses a module that has the name of another. */
fc_code fc_module_file_refuse(const fc_module_file *file, fc_error *err);
