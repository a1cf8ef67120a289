/*
 * Digests: CRC-64 of the row-major bytes of a tensor or of a box of it, the same in any format and layout, combined
 * from pieces while they are moved.
 *
 * CRC-64/XZ (ECMA-182 reflected; init and xorout all ones; check value of "123456789": 995DC9BBDF1939FA) over the
 * elements in row-major order, native little endian.
 */
#ifndef FSDPCKPT_DIGEST_H
#define FSDPCKPT_DIGEST_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/** Continues `crc` (0 to start) over `size` bytes, in the manner of zlib's crc32(). */
uint64_t fc_crc64(uint64_t crc, const void *bytes, size_t size);

/** The CRC-64 of two runs of bytes behind each other, from theirs and the length of the second. */
uint64_t fc_crc64_combine(uint64_t first, uint64_t second, uint64_t second_size);

/**
 * CRC-64 of `size` bytes from the sum that threads and ranks add up: the XOR of the CRCs of their pieces without the
 * inversions (init and xorout 0), each as if zeros were in the place of all other bytes. See fc_move_options.digests.
 */
uint64_t fc_crc64_finish(uint64_t sum, uint64_t size);

/** CRC-32 as in zip and gzip, for the records of zip files. */
uint32_t fc_crc32(uint32_t crc, const void *bytes, size_t size);

/** The CRC-32 of two runs of bytes behind each other. */
uint32_t fc_crc32_combine(uint32_t first, uint32_t second, uint64_t second_size);

/** What a recorded digest covers. */
typedef enum fc_digest_kind {
    FC_DIGEST_NONE,  /**< none is recorded */
    FC_DIGEST_CRC64, /**< CRC-64 of the row-major bytes of the tensor, or of the chunk's box */
    FC_DIGEST_CRC32, /**< CRC-32 of `length` stored bytes from `offset` of the chunk's file on (a zip record) */
    FC_DIGEST_GROUP  /**< CRC-64 of a box that several chunks make up, e.g. those of a compressed HDF5 dataset */
} fc_digest_kind;

typedef struct fc_digest {
    fc_digest_kind kind;
    uint64_t value;
    uint64_t offset, length; /**< CRC32 only */
    size_t first, count;     /**< GROUP only: the chunks */
    const int64_t *offsets;  /**< GROUP only: of the box in the tensor; NULL: all 0 */
    const int64_t *sizes;    /**< GROUP only */
} fc_digest;

#ifdef __cplusplus
}
#endif
#endif
