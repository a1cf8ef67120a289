/*
 * Decodes Blosc 1, in memory: a header, and blocks that are shuffled and compressed on their own. The input may be
 * hostile. The chunks of Blosc 2 have another header: see blosc2.h.
 */
#pragma once

#include "fsdpckpt/error.h"

#include <stddef.h>

/**
 * Decodes a buffer that must give exactly `out_size` bytes. It never writes past them.
 * @param scratch `out_size` bytes, for a block before its shuffle is undone.
 * @return FC_ECORRUPT; FC_EUNSUPPORTED if its blocks are compressed with Snappy, or with Zstandard and this build has
 *         none; FC_ENOMEM.
 */
fc_code fc_blosc_decode(const unsigned char *in, size_t in_size, unsigned char *scratch, unsigned char *out,
                        size_t out_size, fc_error *err);

/**
 * Decodes one stream of a block. A stream of the length of what it gives is stored as it is.
 * @param compressor the number of the method, as the flags of a header have it.
 */
fc_code fc_blosc_decode_stream(int compressor, const unsigned char *in, size_t in_size, unsigned char *out,
                               size_t out_size, fc_error *err);
