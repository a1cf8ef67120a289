/*
 * What a flat tensor has of a parameter, as a tensor whose chunks are boxes of the flat one's shards.
 */
#ifndef FSDPCKPT_FLAT_FLAT_BOXES_H
#define FSDPCKPT_FLAT_FLAT_BOXES_H

#ifndef FSDPCKPT_PRIVATE
#error "this header is private to fsdpckpt: include <fsdpckpt/...> instead"
#endif

#include "fsdpckpt/checkpoint.h"
#include "fsdpckpt/flat_param.h"

/** Where the first element of a chunk lies: in a chunk of the flat tensor, `at` elements from its start. */
typedef struct fc_flat_place {
    size_t chunk;
    int64_t at;
} fc_flat_place;

/** What a value was made of: fc_tensor.detail. */
typedef struct fc_flat_origin {
    const fc_tensor *tensor;     /**< the source's */
    const fc_flat_place *places; /**< one a chunk; NULL: it is the source's as it is */
} fc_flat_origin;

/** The numbers of a flat tensor's chunks by their offsets; malloc'ed. NULL: out of memory. */
size_t *fc_flat_order_chunks(const fc_tensor *flat);

/**
 * Makes the tensor of what a flat one has of a parameter: its shape, its boxes, and their origin. It gets no name.
 * @param flat  one dimension; borrowed, as long as `out` is used.
 * @param order of fc_flat_order_chunks.
 * @return FC_ENOMEM.
 */
fc_code fc_flat_boxes(const fc_tensor *flat, const size_t *order, const fc_flat_param *p, fc_arena *arena,
                      fc_tensor *out, fc_error *err);

#endif
