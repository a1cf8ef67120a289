/*
 * In the reader process: asks for the headers of a file on a server before libhdf5 reads them one by one.
 */
#pragma once

#include "hdf5/reader_process/vfd.h"

/**
 * Asks for what the old form of groups (superblock 0 or 1, h5py's default) refers to, level by level: the nodes of
 * groups, the headers of objects and the indexes of chunks. Each level is one question. What is not of this form is
 * left alone.
 */
void fc_h5_look_ahead(const fc_h5_source *source);
