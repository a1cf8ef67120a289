/*
 * Decodes stored chunks (HDF5's filters), and caches decoded chunks for all workers within a memory limit.
 */
#pragma once

#include "fsdpckpt/checkpoint.h"

/**
 * Computes the bytes of workspace that decoding a FILTERED extent needs in addition to its result: the stored bytes and
 * the results of the filters in between.
 * @return false when the extent's sizes are invalid.
 */
bool fc_decode_workspace(const fc_extent *extent, uint64_t *bytes);

/**
 * Returns whether the filters are exactly shuffle and a compression. Undoing the latter then yields byte planes, and
 * fc_strided_unshuffle takes the elements from them, which saves a pass over the chunk. `element` is the bytes per
 * element.
 */
bool fc_decode_gives_planes(const fc_extent *extent, uint32_t element);

/**
 * Undoes a filter pipeline. Fails with FC_ECORRUPT when the result does not have extent->decoded bytes.
 * @param workspace fc_decode_workspace bytes; the first extent->length of them hold the stored chunk.
 * @param element bytes per element, for shuffle.
 * @param out extent->decoded bytes.
 */
fc_code fc_decode_filters(const fc_extent *extent, unsigned char *workspace, uint32_t element, unsigned char *out,
                          fc_error *err);

/** Returns HDF5's Fletcher-32 checksum of `size` bytes. */
uint32_t fc_fletcher32(const unsigned char *bytes, size_t size);

/** A cache of decoded chunks that all workers share. */
typedef struct fc_decoded fc_decoded;

/** Decodes a chunk into `out` (extent->decoded bytes). `workspace` has as many bytes as `extra` of fc_decoded_try. */
typedef fc_code (*fc_decode_fn)(void *context, const fc_tensor *tensor, size_t chunk, const fc_extent *extent,
                                unsigned char *workspace, unsigned char *out, fc_error *err);

/**
 * @param limit bytes of memory for all chunks and workspaces.
 * @return NULL when out of memory.
 */
fc_decoded *fc_decoded_new(uint64_t limit);
void fc_decoded_free(fc_decoded *cache);

/** Returns the limit passed to fc_decoded_new. */
uint64_t fc_decoded_limit(const fc_decoded *cache);

/** Announces that the caller will use a chunk. Once decoded, it stays in memory until fc_decoded_release. */
fc_code fc_decoded_claim(fc_decoded *cache, const fc_tensor *tensor, size_t chunk, fc_error *err);

/**
 * Finds the decoded bytes of a chunk that the caller has claimed, or decodes it with `decode`.
 *
 * `*bytes` is NULL when another worker is decoding this chunk, or when chunks claimed by others leave no memory for it.
 * Try your other claims first, and call fc_decoded_wait only when none of them is available: a worker that waits while
 * one of its claims is ready can wait forever.
 * @param extra bytes of workspace that `decode` needs, or 0.
 * @param bytes out: valid until fc_decoded_release.
 * @return FC_EUNSUPPORTED for a chunk that exceeds the limit on its own.
 */
fc_code fc_decoded_try(fc_decoded *cache, const fc_tensor *tensor, size_t chunk, const fc_extent *extent,
                       uint64_t extra, fc_decode_fn decode, void *context, const unsigned char **bytes, fc_error *err);

/** Returns a counter that grows whenever a chunk becomes ready or memory becomes free. */
uint64_t fc_decoded_changes(fc_decoded *cache);

/** Waits until fc_decoded_changes differs from `seen`. Read `seen` before you try the chunks. */
void fc_decoded_wait(fc_decoded *cache, uint64_t seen);

/** Releases a claim. @param taken bytes of the chunk that the caller has used; a fully used chunk is evicted first. */
void fc_decoded_release(fc_decoded *cache, const fc_tensor *tensor, size_t chunk, uint64_t taken);
