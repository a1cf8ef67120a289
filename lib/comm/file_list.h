/*
 * The files of every rank, known to all: who sends which.
 */
#ifndef FSDPCKPT_COMM_FILE_LIST_H
#define FSDPCKPT_COMM_FILE_LIST_H

#ifndef FSDPCKPT_PRIVATE
#error "this header is private to fsdpckpt: include <fsdpckpt/...> instead"
#endif

#include "fsdpckpt/arena.h"
#include "fsdpckpt/comm.h"

/** One file, to be sent by `rank`. */
typedef struct fc_sent_file {
    const char *name; /**< relative to the source; checked: nothing outside of it */
    uint64_t size;
    int rank;
} fc_sent_file;

/**
 * Lists the files below each rank's directory `source`, each name once, by rank. Collective; everybody gets the same.
 * @param arena of what is made.
 */
fc_code fc_list_files(fc_comm *comm, const char *source, fc_arena *arena, fc_sent_file **out, size_t *count,
                      fc_error *err);

#endif
