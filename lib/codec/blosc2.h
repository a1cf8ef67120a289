/*
 * Decodes Blosc 2, in memory, as its HDF5 filter writes it: a contiguous frame with one chunk, which may be an array
 * that is cut into blocks (b2nd), or a chunk without a frame. The input may be hostile.
 *
 * It is decoded here because Debian 12 has no libblosc2, and that library starts threads, allocates what a header asks
 * for and loads plugins. The codecs and shuffles are those of Blosc 1.
 */
#pragma once

#include "fsdpckpt/error.h"

#include <stddef.h>
#include <stdint.h>

enum { FC_BLOSC2_SCRATCH = 2 /**< scratch that decoding needs, as a multiple of its result */ };

/**
 * Decodes a frame or chunk that must give exactly `out_size` bytes. It never writes past them.
 * @param scratch FC_BLOSC2_SCRATCH × `out_size` bytes.
 * @return FC_ECORRUPT; FC_EUNSUPPORTED, with its name, for what no HDF5 filter writes: other codecs and filters,
 *         dictionaries, blocks of variable length, several chunks; FC_ENOMEM.
 */
fc_code fc_blosc2_decode(const unsigned char *in, size_t in_size, unsigned char *scratch, unsigned char *out,
                         size_t out_size, fc_error *err);

/** @return how many bytes a frame or chunk says that it decodes to; 0 if it is damaged. */
uint64_t fc_blosc2_size(const unsigned char *in, size_t in_size);
