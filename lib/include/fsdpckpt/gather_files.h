/*
 * Gathers a checkpoint whose files are spread over the disks of several machines.
 */
#ifndef FSDPCKPT_GATHER_FILES_H
#define FSDPCKPT_GATHER_FILES_H

#include "fsdpckpt/comm.h"

#ifdef __cplusplus
extern "C" {
#endif

/**
 * Copies the files below each rank's directory `source` to the existing, empty directory `into` of rank 0, under their
 * names. If several ranks have a file of the same name, the one of the lowest rank is taken; its size must be the same
 * on all of them. Rank 0's own files are linked if the file system allows it, else copied. Collective.
 * @param control carries lists and outcomes; its device uses host memory.
 * @param data    carries the bytes of the files; may be the same.
 */
fc_code fc_gather_files(fc_comm *control, fc_comm *data, const char *source, const char *into, fc_error *err);

#ifdef __cplusplus
}
#endif
#endif
