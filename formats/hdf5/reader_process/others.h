/*
 * A list of the other files that a file's data is in: those of links, virtual datasets and external storage. Runs only
 * in the child. The parent protects these files from being replaced, and notices when they change.
 */
#pragma once

#include "base/name_table.h"
#include "hdf5/reader_process/records.h"

typedef struct fc_h5_names {
    fc_arena *arena; /**< NULL until there is a name; owns the rest */
    const char **names;
    size_t count, capacity;
    fc_name_table *table; /**< finds duplicates */
} fc_h5_names;

/** Sends the names as records. */
void fc_h5_send_others(fc_h5_sink *out, const fc_h5_names *others);

/** Frees the names. */
void fc_h5_free_others(fc_h5_names *others);
