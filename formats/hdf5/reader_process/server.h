/*
 * A reader process that reads the headers of one file after another: a command has one for all files that it opens,
 * because starting it takes as long as reading 200 datasets. It receives the descriptor of each file over a socket, and
 * has no others.
 *
 * A file never suffers from those before it: whatever goes wrong in a process that has read others, the file is read
 * again in a new one, so the limits and the errors are those of the file alone.
 */
#pragma once

#include "hdf5/reader_process/records.h"
#include "hdf5/reader_process/vfd.h"

#include <limits.h>
#include <sys/stat.h>

/** A file that the caller has opened. */
typedef struct fc_h5_given {
    const char *path;
    int fd;
    uint64_t size, file_size; /**< of the HDF5 file, and of the file that it is in */
    bool follow_external;
    fc_h5_span span; /**< `size` is its length, unless that is 0 */
} fc_h5_given;

/** A request, in one message with the descriptor: the attributes of the file, and its path with the final NUL. */
typedef struct fc_h5_file_request {
    struct stat st;
    uint64_t lent; /**< fc_h5_input.lent */
    fc_h5_span span;
    char path[PATH_MAX];
} fc_h5_file_request;

typedef struct fc_h5_server fc_h5_server;

/** Starts no process yet. @param plugins a folder, borrowed; may be NULL. @return NULL: out of memory. */
fc_h5_server *fc_h5_server_new(const char *plugins);

/** @return the folder of plugins; NULL: none. `server` may be NULL. */
const char *fc_h5_server_plugins(const fc_h5_server *server);

/** Ends the process. In a process that was forked from the one that started it, only frees memory and descriptors. */
void fc_h5_server_free(fc_h5_server *server);

/**
 * Reads the headers of a file, in a process that is started if there is none. One thread at a time; the process ends
 * with the thread that started it.
 * @param available receives false, with FC_OK, if the system does not allow such a process, so that the file must be
 *                  read by fc_h5_scan_files.
 */
fc_code fc_h5_server_read(fc_h5_server *server, const fc_h5_given *given, fc_arena *arena, fc_h5_file *file,
                          bool *available, fc_error *err);
