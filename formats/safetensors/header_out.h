/*
 * The header of a target file: the offset of each tensor, and `__metadata__`.
 */
#pragma once

#include "fsdpckpt/select.h"

#include <jansson.h>

/** State shared by all files of a target. */
typedef struct fc_st_common {
    const fc_target *target;
    json_t *foreign; /**< Members of `__metadata__` that come from the source; owned by the writer. */
} fc_st_common;

/** A complete header. */
typedef struct fc_st_header_out {
    char *text;       /**< malloc'ed: length, JSON and padding, which is the file up to its data */
    size_t size;      /**< Bytes of text. */
    uint64_t data;    /**< Bytes of data that follow. */
    uint64_t digests; /**< Offset in the file of the tensors' digests, 16 digits each; 0 if there are none. */
    uint64_t digest;  /**< Offset in the file of the header's own digest. */
    uint32_t *order;  /**< malloc'ed: indexes of the target items that are tensors, in the order of their data */
    size_t count;     /**< Number of entries of order. */
} fc_st_header_out;

/**
 * Builds the header of `file` and sets the offsets of its items. Objects are stored in the header, so their items are
 * marked as not owned.
 * @param objects stores the objects in this file.
 * @param out the caller frees it with fc_st_header_out_free, also on failure.
 */
fc_code fc_st_header_make(const fc_st_common *common, fc_target_file *file, bool objects, fc_st_header_out *out,
                          fc_error *err);
void fc_st_header_out_free(fc_st_header_out *header);

/** Reads the bytes of an object of the source. @param bytes malloc'ed, owned by the caller; NULL on failure. */
fc_code fc_st_read_object(const fc_target *target, const fc_target_tensor *object, unsigned char **bytes, size_t *size,
                          fc_error *err);
