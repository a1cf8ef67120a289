/*
 * Digests: the CRC-64 of the row-major bytes of a tensor, or of a box of it. It does not depend on format or layout,
 * and is combined from the CRCs of parts while these are moved.
 *
 * The CRC is CRC-64/XZ (ECMA-182 reflected; init and xorout all ones; the check value of "123456789" is
 * 995DC9BBDF1939FA) over the elements in row-major order, little-endian.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "fsdpckpt/decls.h"

FC_BEGIN_DECLS

/** What a recorded digest covers. */
typedef enum fc_digest_kind {
    FC_DIGEST_NONE,  /**< none is recorded */
    FC_DIGEST_CRC64, /**< CRC-64 of the row-major bytes of the tensor, or of the chunk's box */
    FC_DIGEST_CRC32, /**< CRC-32 of the `length` stored bytes at `offset` of the chunk's file (a zip record) */
    FC_DIGEST_GROUP  /**< CRC-64 of a box of several chunks, e.g. those of a compressed HDF5 dataset */
} fc_digest_kind;

typedef struct fc_digest {
    fc_digest_kind kind;
    uint64_t value;
    uint64_t offset, length; /**< CRC32 only: the bytes in the file */
    size_t first, count;     /**< GROUP only: index of the first chunk, and number of chunks */
    const int64_t *offsets;  /**< GROUP only: where the box begins in the tensor; NULL: all 0 */
    const int64_t *sizes;    /**< GROUP only: the sizes of the box, in elements */
} fc_digest;

FC_END_DECLS
