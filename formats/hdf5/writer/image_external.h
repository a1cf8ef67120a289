/*
 * Datasets of an image over the bytes of other files.
 */
#ifndef FSDPCKPT_FORMATS_HDF5_WRITER_IMAGE_EXTERNAL_H
#define FSDPCKPT_FORMATS_HDF5_WRITER_IMAGE_EXTERNAL_H

#ifndef FSDPCKPT_PRIVATE
#error "this header is private to fsdpckpt: include <fsdpckpt/...> instead"
#endif

#include "hdf5/writer/image.h"

/** Bytes of another file. At most FC_H5_SEGMENT of them: libhdf5 reads a segment with one read(), which above 2 GiB
 *  gives less than was asked for, and takes the rest for zeros. */
typedef struct fc_h5_segment {
    const char *file;
    uint64_t offset, length;
} fc_h5_segment;

enum { FC_H5_SEGMENT = 1 << 30, FC_H5_SEGMENTS = 2729 /**< more do not fit into an object header */ };

/** Adds the names of the files, not while an object header is open. @return what fc_h5_image_external takes. */
size_t fc_h5_image_add_names(fc_h5_image *image, const fc_h5_segment *segments, size_t count);

/** Fill value, list of files and layout of a dataset over `count` segments, in their order: at most FC_H5_SEGMENTS. */
void fc_h5_image_external(fc_h5_image *image, size_t names, const fc_h5_segment *segments, size_t count);

#endif
