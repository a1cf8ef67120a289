/*
 * Decoding of stored chunks: HDF5's deflate, shuffle and fletcher32, and a shared cache of decoded chunks that bounds
 * their memory. From the bytes of an extent to elements in memory.
 */
#ifndef FSDPCKPT_MOVE_DECODE_H
#define FSDPCKPT_MOVE_DECODE_H

#include "fsdpckpt/checkpoint.h"

/**
 * Bytes of workspace that decoding a FILTERED extent takes beside its result: what is stored, and what lies between two
 * filters. @return false when the numbers make no sense.
 */
bool fc_decode_workspace(const fc_extent *extent, uint64_t *bytes);

/**
 * Undoes a filter pipeline.
 * @param workspace fc_decode_workspace bytes; the first extent->length of them are the chunk as read from the file.
 * @param element   bytes an element, for shuffle.
 * @param out       extent->decoded bytes.
 * A result of any other size than extent->decoded is FC_ECORRUPT, found without using more memory.
 */
fc_code fc_decode_filters(const fc_extent *extent, unsigned char *workspace, uint32_t element, unsigned char *out,
                          fc_error *err);

/** HDF5's checksum of `size` bytes. */
uint32_t fc_fletcher32(const unsigned char *bytes, size_t size);

/** Decoded chunks, shared by the workers. */
typedef struct fc_decoded fc_decoded;

/** Decodes a chunk into `out`, extent->decoded bytes. `workspace`: as many bytes as `extra` of fc_decoded_acquire. */
typedef fc_code (*fc_decode_fn)(void *context, const fc_tensor *tensor, size_t chunk, const fc_extent *extent,
                                unsigned char *workspace, unsigned char *out, fc_error *err);

/** @param limit bytes of memory for all chunks and their decoding. @return NULL when out of memory. */
fc_decoded *fc_decoded_new(uint64_t limit);
void fc_decoded_free(fc_decoded *cache);

/** The limit it was made with. */
uint64_t fc_decoded_limit(const fc_decoded *cache);

/**
 * The decoded bytes of a chunk, from the cache or by `decode`. Waits while the memory is held by other workers, so a
 * worker holds at most one chunk at a time; it gives it back with fc_decoded_release.
 * @param extra bytes of workspace that `decode` needs; 0 for none.
 * @return FC_EUNSUPPORTED for a chunk that can never fit the limit.
 */
fc_code fc_decoded_acquire(fc_decoded *cache, const fc_tensor *tensor, size_t chunk, const fc_extent *extent,
                           uint64_t extra, fc_decode_fn decode, void *context, const unsigned char **bytes,
                           fc_error *err);

/** @param taken bytes of the chunk that were used: one that was used up makes room first. */
void fc_decoded_release(fc_decoded *cache, const fc_tensor *tensor, size_t chunk, uint64_t taken);

#endif
