/*
 * The files of all ranks, and which rank sends which file.
 */
#pragma once

#include "fsdpckpt/arena.h"
#include "fsdpckpt/comm.h"

/** A file that `rank` sends. */
typedef struct fc_sent_file {
    const char *name; /**< path below the source directory; checked, so it cannot lead outside */
    uint64_t size;    /**< in bytes */
    int rank;
} fc_sent_file;

/**
 * Lists the files below each rank's directory `source`, in the order of the ranks. A name that several ranks have is
 * listed once, for the lowest rank. Collective: all ranks get the same list.
 * @param arena owns the list.
 * @return FC_EUSAGE if `source` is not a directory, or if two files of the same name differ in size.
 */
fc_code fc_list_files(fc_comm *comm, const char *source, fc_arena *arena, fc_sent_file **out, size_t *count,
                      fc_error *err);
