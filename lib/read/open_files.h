/*
 * Opens many files by several threads and hands them over one by one, in order. So a checkpoint of thousands of files
 * opens faster, and its manifest, its messages and the first error are those of one thread.
 */
#pragma once

#include "fsdpckpt/error.h"

#include <stddef.h>

/** How the files are opened. A slot is the caller's record of one file. Only a few exist at a time. */
typedef struct fc_file_opener {
    size_t count;     /**< number of files */
    size_t slot_size; /**< size of a slot in bytes */
    void *context;    /**< passed to `open` and `take` */
    /** Reads file `index` into a zeroed slot, in any thread. It must change nothing else. It may leave one descriptor
     *  open. */
    fc_code (*open)(void *context, size_t index, void *slot, fc_error *err);
    /** Takes what `open` has read. The calling thread calls it for file 0, 1, 2, …, up to the first error. */
    fc_code (*take)(void *context, size_t index, void *slot, fc_error *err);
    /** Releases a slot for which `open` was called, whatever its result. */
    void (*close)(void *slot);
} fc_file_opener;

/** @return the first error, in the order of the files. */
fc_code fc_open_files(const fc_file_opener *how, fc_error *err);
