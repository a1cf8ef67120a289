/*
 * The header of a file to be written: which tensor lies where, and what is kept in `__metadata__`.
 */
#ifndef FSDPCKPT_FORMATS_SAFETENSORS_HEADER_OUT_H
#define FSDPCKPT_FORMATS_SAFETENSORS_HEADER_OUT_H

#ifndef FSDPCKPT_PRIVATE
#error "this header is private to fsdpckpt: include <fsdpckpt/...> instead"
#endif

#include "fsdpckpt/select.h"

#include <jansson.h>

/** What all files of a target have in common. */
typedef struct st_common {
    const fc_target *target;
    json_t *foreign; /**< members of `__metadata__` that the source brought along; borrowed */
} st_common;

/** A header. */
typedef struct st_header_out {
    char *text;       /**< malloc'ed: length, JSON, padding: the file up to its data */
    size_t size;      /**< of text */
    uint64_t data;    /**< bytes of data behind it */
    uint64_t digests; /**< offset in the file of the tensors' digests, 16 digits each; 0: there are none */
    uint64_t digest;  /**< offset of the header's own */
    uint32_t *order;  /**< malloc'ed: items of the part that are tensors, in the order of their data */
    size_t count;     /**< how many of them */
} st_header_out;

/**
 * Makes the header of the file for `part`, sets the items' offsets, and marks objects, which are in the header, as not
 * stored in the data. @param objects this file is the one that keeps the objects.
 * @param out to be given to fc_st_header_out_free, also on failure.
 */
fc_code fc_st_header_make(const st_common *common, fc_target_file *file, bool objects, st_header_out *out,
                          fc_error *err);
void fc_st_header_out_free(st_header_out *header);

/** Reads the bytes of an object of the source. @param bytes malloc'ed; NULL on failure. */
fc_code fc_st_read_object(const fc_target *target, const fc_target_tensor *object, unsigned char **bytes, size_t *size,
                          fc_error *err);

#endif
