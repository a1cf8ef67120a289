/*
 * Decodes the byte formats of the LZ77 family, in memory: LZF, the block of LZ4, and BloscLZ. They differ only in how
 * they write literals and matches. The input may be hostile.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>

/** Decodes a block. @return whether it is whole and gives exactly `out_size` bytes. It never writes past them. */
typedef bool (*fc_lz_fn)(const unsigned char *in, size_t in_size, unsigned char *out, size_t out_size);

bool fc_lzf_decode(const unsigned char *in, size_t in_size, unsigned char *out, size_t out_size);
bool fc_lz4_decode(const unsigned char *in, size_t in_size, unsigned char *out, size_t out_size);
bool fc_blosclz_decode(const unsigned char *in, size_t in_size, unsigned char *out, size_t out_size);
