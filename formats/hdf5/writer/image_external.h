/*
 * Datasets whose bytes are in other files (HDF5's external storage).
 */
#pragma once

#include "hdf5/writer/image.h"

/** Up to FC_H5_SEGMENT bytes of another file. libhdf5 reads a segment with one read() and takes missing bytes for
 *  zeros, but one read() returns at most 2 GiB. */
typedef struct fc_h5_segment {
    const char *file;
    uint64_t offset, length;
} fc_h5_segment;

enum { FC_H5_SEGMENT = 1 << 30, FC_H5_SEGMENTS = 2729 /**< more do not fit into an object header */ };

/** Adds the names of the files. No object header may be open. @return `names` for fc_h5_image_external. */
size_t fc_h5_image_add_names(fc_h5_image *image, const fc_h5_segment *segments, size_t count);

/** Adds the fill value, list of files and layout of a dataset of up to FC_H5_SEGMENTS segments, in their order. */
void fc_h5_image_external(fc_h5_image *image, size_t names, const fc_h5_segment *segments, size_t count);
