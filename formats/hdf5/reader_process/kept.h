/*
 * Parts of files on servers that the reader processes of one checkpoint asked for. Each box that libhdf5 decodes has a
 * process of its own, which reads the same headers first.
 */
#pragma once

#include "hdf5/reader_process/records.h"

typedef struct fc_h5_kept fc_h5_kept;

/** @return NULL: out of memory; then nothing is kept */
fc_h5_kept *fc_h5_kept_new(void);
void fc_h5_kept_free(fc_h5_kept *kept); /**< NULL is allowed */

/** Copies a part that was kept of the file `path`, whose pointer is its identity. Thread-safe, as is the next.
 * @param kept may be NULL */
bool fc_h5_kept_find(fc_h5_kept *kept, const char *path, const fc_h5_part *part, unsigned char *bytes);

/** Keeps a copy of a part. The oldest ones make room, and large ones are not kept: they are data. */
void fc_h5_kept_add(fc_h5_kept *kept, const char *path, const fc_h5_part *part, const unsigned char *bytes);
