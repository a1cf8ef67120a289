/*
 * Zstandard frames of bytes that are mostly 0, such as the difference of two versions. What is not 0 is known, so
 * nothing is searched: the zeros are matches at distance 1, and the rest are literals. If 2 % of the elements of a bf16
 * model changed, the frame is a third smaller than that of level 1, and takes half of the time to make and two thirds
 * to decode.
 */
#pragma once

#include "codec/changes.h"
#include "fsdpckpt/error.h"

#include <stdbool.h>

enum {
    FC_ZSTD_RUNS_HEADER = 14,                  /**< bytes of the header of a frame */
    FC_ZSTD_RUNS_MOST = FC_CHANGE_BLOCK + 2048 /**< the most that fc_zstd_runs_block needs of room */
};

/** One thread uses it at a time. */
typedef struct fc_zstd_runs fc_zstd_runs;

/** Whether this build has a libzstd that can do this. */
bool fc_zstd_runs_is_built_in(void);

/** @param out receives the encoder, which the caller frees. @return FC_EUNSUPPORTED, FC_ENOMEM. */
fc_code fc_zstd_runs_new(fc_zstd_runs **out, fc_error *err);
void fc_zstd_runs_free(fc_zstd_runs *encoder);

/** Returns the most bytes that an encoder holds. */
size_t fc_zstd_runs_memory(void);

/** Makes the header of a frame of `size` bytes, which are FC_CHANGE_BLOCK bytes for each block but the last one. */
void fc_zstd_runs_begin(uint64_t size, unsigned char out[FC_ZSTD_RUNS_HEADER]);

/**
 * Makes the next block of a frame. It depends on no other block.
 * @param changes the bytes of the block that are not 0, as fc_find_changes finds them.
 * @param last    whether it is the last block of the frame.
 * @param out     has room for FC_ZSTD_RUNS_MOST bytes. @param made receives how many of them the block has.
 */
fc_code fc_zstd_runs_block(fc_zstd_runs *encoder, const unsigned char *block, size_t size, const fc_change *changes,
                           size_t count, bool last, unsigned char *out, size_t *made, fc_error *err);
