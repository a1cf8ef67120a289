/*
 * The headers of a file of ours as bytes: finding the attributes that hold digests, putting values into them after
 * libhdf5 has closed the file, and the digest of the headers themselves. See docs/HDF5_SCHEMA.md, "Digests".
 */
#ifndef FSDPCKPT_FORMATS_HDF5_HEADERS_H
#define FSDPCKPT_FORMATS_HDF5_HEADERS_H

#include "driver.h"
#include "fsdpckpt/error.h"

/** A dataset's digest, and where its object header is. */
typedef struct fc_h5_patch {
    uint64_t object; /**< bytes, in the file */
    uint64_t crc64;
} fc_h5_patch;

/**
 * Sets the attribute `crc64` of the objects, then the root's `header_crc64`.
 * @param blocks where the headers of the file are; everything else is data, or was never written.
 */
fc_code fc_h5_headers_seal(const char *path, const fc_h5_blocks *blocks, const fc_h5_patch *patches, size_t count,
                           fc_error *err);

/** An 8-byte value in an object header of version 2, whose checksum covers it. */
typedef struct fc_h5_field {
    uint64_t value;        /**< where it is in the file */
    uint64_t start, check; /**< the checksum at `check` (4 bytes) is of the bytes from `start` to it */
} fc_h5_field;

/** The bytes of the file at a place: valid until the next call; NULL when it has no such bytes. */
typedef struct fc_h5_view {
    const unsigned char *(*bytes)(void *context, uint64_t at, uint64_t size);
    void *context;
} fc_h5_view;

/** Finds the 8-byte attribute `name` of the object whose header is at `object`. Safe on any bytes. */
bool fc_h5_find_field(const fc_h5_view *view, uint64_t object, const char *name, fc_h5_field *out);

/** The root group's object header, from the superblock (version 2 or 3, without a user block). */
bool fc_h5_find_root(const fc_h5_view *view, uint64_t *object);

/** HDF5's checksum of metadata: Bob Jenkins' lookup3. */
uint32_t fc_h5_checksum(const unsigned char *bytes, size_t size);

#endif
