/*
 * Checkpoints of which every machine has a part on its own disk.
 */
#ifndef FSDPCKPT_GATHER_FILES_H
#define FSDPCKPT_GATHER_FILES_H

#include "fsdpckpt/comm.h"

#ifdef __cplusplus
extern "C" {
#endif

/**
 * Brings the files below each rank's own directory `source` together in rank 0's existing, empty directory `into`,
 * under their names. A name that several ranks have is one file, the lowest rank's; its size must be the same
 * everywhere. Rank 0's own files are linked where the file system allows it, else copied. Collective.
 * @param control host memory: lists and outcomes. @param data what the bytes go through; may be the same.
 */
fc_code fc_gather_files(fc_comm *control, fc_comm *data, const char *source, const char *into, fc_error *err);

#ifdef __cplusplus
}
#endif
#endif
