/*
 * The HDF5 filters that make bytes smaller, or keep their number: their numbers in The HDF Group's registry, and how
 * their result is undone in memory. The input may be hostile. Fletcher32 (3), which adds bytes, is lib/read/decode.c's.
 */
#pragma once

#include "fsdpckpt/checkpoint.h"

enum {
    FC_FILTER_DEFLATE = 1,
    FC_FILTER_SHUFFLE = 2,
    FC_FILTER_FLETCHER32 = 3,
    FC_FILTER_BZIP2 = 307,
    FC_FILTER_LZF = 32000,
    FC_FILTER_BLOSC = 32001,
    FC_FILTER_LZ4 = 32004,
    FC_FILTER_BITSHUFFLE = 32008,
    FC_FILTER_ZSTD = 32015,
    FC_FILTER_BLOSC2 = 32026
};

/** What the program knows of a filter. */
typedef struct fc_filter_info {
    uint16_t id;
    const char *name;      /**< for people */
    uint32_t most_smaller; /**< it makes bytes at most this many times smaller; 0: unknown, 1: not at all */
    uint8_t scratch;       /**< memory that undoing it needs besides its result, as a multiple of that */
} fc_filter_info;

/** @return NULL for a filter that the engine cannot undo in any build. */
const fc_filter_info *fc_filter_find(uint32_t id);

/** Whether the filter changes the number of bytes. Only one such filter of a pipeline can be undone: the sizes between
 *  two are recorded nowhere. */
bool fc_filter_compresses(const fc_filter *filter);

/**
 * Reads a filter and its parameters as a file has them.
 * @param element  bytes per element.
 * @return whether the engine knows the filter, and its parameters are valid and those of such elements.
 */
bool fc_filter_parse(uint32_t id, const unsigned *parameters, size_t count, uint32_t element, fc_filter *filter);

/** @return the Debian package that this build lacks to undo the filter; NULL: none. */
const char *fc_filter_lacking(const fc_filter *filter);

/**
 * Undoes one filter. Fails unless exactly `out_size` bytes result; never writes past them. `in` and `out` must not
 * overlap.
 * @param element bytes per element.
 * @param scratch as many times `out_size` bytes as the filter needs.
 * @return FC_ECORRUPT, FC_EUNSUPPORTED, FC_ENOMEM.
 */
fc_code fc_filter_undo(const fc_filter *filter, const unsigned char *in, size_t in_size, uint32_t element,
                       unsigned char *scratch, unsigned char *out, size_t out_size, fc_error *err);
