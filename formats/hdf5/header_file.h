/*
 * Looks at the object headers of an HDF5 file as bytes, without libhdf5.
 */
#pragma once

#include "fsdpckpt/error.h"
#include "hdf5/object_header.h"
#include "hdf5/schema.h"

enum { FC_H5_VIEW = 64 << 10 };

/** An open file. The caller opens and closes it. */
typedef struct fc_h5_header_file {
    const char *path;
    int fd;
    uint64_t size;
    fc_code read;                     /**< the outcome of the last read */
    fc_error *err;                    /**< of that read; may be NULL */
    unsigned char viewed[FC_H5_VIEW]; /**< the bytes that fc_h5_header_bytes returned last */
} fc_h5_header_file;

/** fc_h5_view.bytes of an fc_h5_header_file, for up to FC_H5_VIEW bytes. */
const unsigned char *fc_h5_header_bytes(void *file, uint64_t at, uint64_t size);

/** Finds an attribute of the root group with 8 bytes, in the header of that group. */
bool fc_h5_root_field(fc_h5_header_file *file, fc_h5_attribute attribute, fc_h5_field *field);

/** Finds the value of such an attribute. */
bool fc_h5_root_number(fc_h5_header_file *file, fc_h5_attribute attribute, uint64_t *value);
