/*
 * Decoding of stored chunks: HDF5's deflate, shuffle and fletcher32, and a shared cache of decoded chunks that bounds
 * their memory. From the bytes of an extent to elements in memory.
 */
#ifndef FSDPCKPT_ENGINE_DECODE_H
#define FSDPCKPT_ENGINE_DECODE_H

#ifndef FSDPCKPT_PRIVATE
#error "this header is private to fsdpckpt: include <fsdpckpt/...> instead"
#endif

#include "fsdpckpt/checkpoint.h"

/**
 * Bytes of workspace that decoding a FILTERED extent takes beside its result: what is stored, and what lies between two
 * filters. @return false when the numbers make no sense.
 */
bool fc_decode_workspace(const fc_extent *extent, uint64_t *bytes);

/**
 * Whether all that was done to the elements, of `element` bytes, was to shuffle and to deflate them: then inflating the
 * stored bytes gives planes, and fc_strided_unshuffle takes elements from them; that saves a pass over the chunk.
 */
bool fc_decode_gives_planes(const fc_extent *extent, uint32_t element);

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

/** Says that a chunk will be taken: once decoded it stays until fc_decoded_release. */
fc_code fc_decoded_claim(fc_decoded *cache, const fc_tensor *tensor, size_t chunk, fc_error *err);

/**
 * The decoded bytes of a chunk that the caller has claimed, from the cache or by `decode`.
 * @param extra bytes of workspace that `decode` needs; 0 for none.
 * @param bytes out: valid until the release. NULL when another worker is decoding this chunk, or chunks that others
 *              have claimed take the memory for it: take those that are to be had first; when there are none,
 *              fc_decoded_wait. Who waits while a chunk that it has claimed is ready may wait for ever.
 * @return FC_EUNSUPPORTED for a chunk that can never fit the limit.
 */
fc_code fc_decoded_try(fc_decoded *cache, const fc_tensor *tensor, size_t chunk, const fc_extent *extent,
                       uint64_t extra, fc_decode_fn decode, void *context, const unsigned char **bytes, fc_error *err);

/** How often chunks have become ready or room was made. */
uint64_t fc_decoded_changes(fc_decoded *cache);

/** Waits until that is another number than `seen`, which was asked for before the chunks were tried. */
void fc_decoded_wait(fc_decoded *cache, uint64_t seen);

/** Gives a claim back. @param taken bytes of the chunk that were used: one that was used up makes room first. */
void fc_decoded_release(fc_decoded *cache, const fc_tensor *tensor, size_t chunk, uint64_t taken);

#endif
