/*
 * Reads and decodes a chunk that is stored with filters, in the way that the available memory allows.
 */
#pragma once

#include "io/input.h"
#include "read/decode.h"

typedef enum fc_decode_way {
    FC_WAY_NONE,   /**< its sizes are invalid */
    FC_WAY_FORMAT, /**< the format decodes it */
    FC_WAY_WINDOW, /**< the stored bytes fit the window */
    FC_WAY_MEMORY, /**< the stored bytes need a workspace */
    FC_WAY_LEAN    /**< through the window bit by bit: a workspace would not fit the memory limit */
} fc_decode_way;

/** How to decode a chunk. */
typedef struct fc_decode_plan {
    fc_decode_way way;
    uint64_t extra; /**< bytes of workspace in addition to the result */
    bool planes;    /**< the result is byte planes for fc_strided_unshuffle; otherwise it is the elements */
} fc_decode_plan;

/**
 * Chooses how to decode a chunk.
 * @param element bytes per element.
 * @param window bytes of the worker's window.
 * @param limit bytes for all decoded chunks and workspaces.
 */
fc_decode_plan fc_decode_plan_choose(const fc_extent *extent, uint32_t element, size_t window, uint64_t limit);

/** A worker's buffers and file, borrowed for one chunk. */
typedef struct fc_decode_buffers {
    fc_input *input; /**< the extent's file */
    unsigned char *window;
    size_t window_size;
    unsigned char *workspace; /**< as many bytes as `extra` of fc_decoded_try */
} fc_decode_buffers;

/** Reads and decodes a chunk to `out` (extent->decoded bytes). Not for FC_WAY_NONE and FC_WAY_FORMAT. */
fc_code fc_decode_plan_read(const fc_decode_plan *plan, const fc_extent *extent, uint32_t element,
                            const fc_decode_buffers *buffers, unsigned char *out, fc_error *err);

/** Returns whether the tensor's chunks are computed: blocks of one size, and fewer at the edges. */
bool fc_is_computed(const fc_checkpoint *source, const fc_tensor *tensor);

/** Returns about how many bytes are read for each element of the tensor, at least its size. */
uint64_t fc_bytes_read_per_element(const fc_checkpoint *source, const fc_tensor *tensor);

/** Returns whether the tensor's chunks must be decoded as a whole or are not stored in row-major order. */
bool fc_gains_from_large_tiles(const fc_checkpoint *source, const fc_tensor *tensor);
