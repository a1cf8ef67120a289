/*
 * Gathers a checkpoint whose files are spread over the disks of several machines.
 */
#pragma once

#include "fsdpckpt/comm.h"

FC_BEGIN_DECLS

/**
 * Copies the files below each rank's directory `source` to the existing, empty directory `into` of rank 0, under their
 * names. If several ranks have a file of the same name, the one of the lowest rank is taken; its size must be the same
 * on all of them. Rank 0's own files are linked if the file system allows it, else copied. Collective.
 * @param comm its device uses host memory.
 */
fc_code fc_gather_files(fc_comm *comm, const char *source, const char *into, fc_error *err);

FC_END_DECLS
