/*
 * Sealing a file of ours: putting digests into its attributes after libhdf5 has closed it, and the digest of the
 * headers themselves. See docs/HDF5_SCHEMA.md, "Digests".
 */
#ifndef FSDPCKPT_FORMATS_HDF5_WRITER_HEADERS_H
#define FSDPCKPT_FORMATS_HDF5_WRITER_HEADERS_H

#ifndef FSDPCKPT_PRIVATE
#error "this header is private to fsdpckpt: include <fsdpckpt/...> instead"
#endif

#include "fsdpckpt/error.h"
#include "hdf5/writer/driver.h"

/** A dataset's digest, and where its object header is. */
typedef struct fc_h5_patch {
    uint64_t object; /**< bytes, in the file */
    uint64_t crc64;
} fc_h5_patch;

/**
 * Sets the attribute `crc64` of the objects, then the root's `header_crc64`.
 * @param blocks where the headers of the file are; everything else is data, or was never written.
 */
fc_code fc_h5_headers_finish(const char *path, const fc_h5_blocks *blocks, const fc_h5_patch *patches, size_t count,
                             fc_error *err);

#endif
