/*
 * zlib streams in memory, by ISA-L where it is built in and by zlib otherwise: the deflate filter of HDF5 without its
 * pipeline. Any inflater reads what is deflated here.
 */
#ifndef FSDPCKPT_CODEC_CODEC_H
#define FSDPCKPT_CODEC_CODEC_H

#ifndef FSDPCKPT_PRIVATE
#error "this header is private to fsdpckpt: include <fsdpckpt/...> instead"
#endif

#include "fsdpckpt/error.h"

#include <stddef.h>

/** What a thread needs to deflate chunk after chunk. */
typedef struct fc_deflater fc_deflater;

/** @param level 1 … 9. @return NULL when out of memory. */
fc_deflater *fc_deflater_new(int level);
void fc_deflater_free(fc_deflater *deflater);

/** Bytes that a deflater takes, about. */
size_t fc_deflater_size(void);

/**
 * Deflates `size` bytes (at most 1 GiB) into a zlib stream.
 * @param plane bytes of a byte plane when the bytes are shuffled: planes are alike within, not among each other.
 *              0: not shuffled.
 * @return bytes of the stream, 0 when it does not fit into `room`.
 */
size_t fc_deflate(fc_deflater *deflater, const unsigned char *in, size_t size, size_t plane, unsigned char *out,
                  size_t room);

/**
 * Inflates a zlib stream that holds exactly `out_size` bytes. The output buffer is the bound: a bomb stops at its end.
 * Bytes behind the stream are not looked at.
 */
fc_code fc_inflate(const unsigned char *in, size_t in_size, unsigned char *out, size_t out_size, fc_error *err);

#endif
