/*
 * Reading a chunk that is stored with filters: from the extent in a file to its elements in memory, by the way that the
 * memory allows.
 */
#ifndef FSDPCKPT_ENGINE_STORED_CHUNK_H
#define FSDPCKPT_ENGINE_STORED_CHUNK_H

#ifndef FSDPCKPT_PRIVATE
#error "this header is private to fsdpckpt: include <fsdpckpt/...> instead"
#endif

#include "engine/decode.h"
#include "io/input.h"

typedef enum fc_way {
    FC_WAY_NONE,   /**< its sizes make no sense */
    FC_WAY_FORMAT, /**< the format's own affair */
    FC_WAY_WINDOW, /**< in the window */
    FC_WAY_MEMORY, /**< in a workspace */
    FC_WAY_LEAN    /**< through the window, piece by piece: there is not enough memory for the other way */
} fc_way;

/** How a chunk is decoded. */
typedef struct fc_decoding {
    fc_way way;
    uint64_t extra; /**< bytes of workspace beside the result */
    bool planes;    /**< the result is what fc_strided_unshuffle takes, else it is the elements */
} fc_decoding;

/**
 * @param element bytes of one.
 * @param window  bytes of the worker's window.
 * @param limit   bytes of all decoded chunks and workspaces.
 */
fc_decoding fc_decoding_choose(const fc_extent *extent, uint32_t element, size_t window, uint64_t limit);

/** What a worker lends for reading. */
typedef struct fc_lent {
    fc_input *input; /**< the extent's file */
    unsigned char *window;
    size_t window_size;
    unsigned char *workspace; /**< fc_decoding.extra bytes */
} fc_lent;

/** Reads and decodes a chunk to `out`, extent->decoded bytes. Not for FC_WAY_NONE and FC_WAY_FORMAT. */
fc_code fc_decoding_read(const fc_decoding *decoding, const fc_extent *extent, uint32_t element, const fc_lent *lent,
                         unsigned char *out, fc_error *err);

#endif
