/*
 * zlib streams in memory, compressed by ISA-L where it is built in and by zlib otherwise. This is HDF5's deflate filter
 * without its pipeline. Any inflater can read the output.
 */
#pragma once

#include "fsdpckpt/error.h"

#include <stddef.h>

/** The state that a thread needs to deflate chunk after chunk. */
typedef struct fc_deflater fc_deflater;

/** @param level 1 … 9. @return NULL when out of memory; release it with fc_deflater_free. */
fc_deflater *fc_deflater_new(int level);
void fc_deflater_free(fc_deflater *deflater);

/** @return roughly the bytes of memory that a deflater needs. */
size_t fc_deflater_size(void);

/**
 * Deflates `size` bytes (at most 1 GiB) into a zlib stream.
 * @param plane the size of a byte plane when the bytes are shuffled, because each plane compresses best on its own; 0
 *              when they are not shuffled.
 * @param room the size of `out` in bytes.
 * @return the size of the stream in bytes, or 0 when it does not fit into `room`.
 */
size_t fc_deflate(fc_deflater *deflater, const unsigned char *in, size_t size, size_t plane, unsigned char *out,
                  size_t room);

/**
 * Inflates a zlib stream that must decode to exactly `out_size` bytes. It never writes past `out`, so a decompression
 * bomb fails there. Bytes after the end of the stream are ignored.
 * @return FC_ECORRUPT when the stream is damaged or has another size, FC_ENOMEM.
 */
fc_code fc_inflate(const unsigned char *in, size_t in_size, unsigned char *out, size_t out_size, fc_error *err);
