/*
 * One worker's access to the source: fills boxes of a tensor with row-major elements in native byte order, wherever and
 * however their chunks are stored. Workers share only the cache of decoded chunks.
 */
#pragma once

#include "fsdpckpt/plan.h"
#include "integrity/source_crc.h"
#include "read/decode.h"

typedef struct fc_source fc_source;

/**
 * Creates a source for one worker.
 * @param decoded shared by all workers of a job; outlives the source.
 * @param scratch bytes of the window for strided reads, at least FC_LEAST_TILE_BYTES. All sources that share `decoded`
 *                must pass the same number: it decides in which form chunks are cached.
 * @param files descriptors to keep open, at least 1.
 */
fc_code fc_source_new(const fc_checkpoint *checkpoint, fc_decoded *decoded, size_t scratch, int files, fc_source **out,
                      fc_error *err);
void fc_source_free(fc_source *source);

/** Returns the bytes that a source holds in addition to its window. */
size_t fc_source_overhead(void);

/**
 * Adds the CRC-32s of the stored bytes of all further reads to `crc` (see source_crc.h); NULL turns this off.
 * `elements` also adds the CRC-64s of the elements where the source records them. Callers that already compute those
 * can pass false.
 */
void fc_source_watch(fc_source *source, fc_source_crc *crc, bool elements);

/** Makes all reads go through the page cache. Without it, reads of much that is not cached go past it. */
void fc_source_use_cache(fc_source *source);

/** Makes the format check each object before its bytes are read. Use it when objects are copied verbatim. */
void fc_source_check_objects(fc_source *source);

/** Reads `size` stored bytes of file `file` (an index into fc_checkpoint.files). */
fc_code fc_source_bytes(fc_source *source, uint32_t file, uint64_t offset, unsigned char *out, size_t size,
                        fc_error *err);

/**
 * Fills `out` with the elements of `box` in row-major order, in the tensor's dtype and native byte order. `box` must be
 * within what `coverage` covers. Fails with FC_ECORRUPT unless the chunks supply each element exactly once.
 */
fc_code fc_source_fill(fc_source *source, const fc_coverage *coverage, const fc_tensor *tensor, const fc_box *box,
                       unsigned char *out, fc_error *err);

/** The same for a box whose elements are all equal: reads the first, and counts it for all of them in the CRC-64. */
fc_code fc_source_fill_one(fc_source *source, const fc_coverage *coverage, const fc_tensor *tensor, const fc_box *box,
                           unsigned char *out, fc_error *err);

/**
 * Says that this box will soon be filled, after those that were named before. Once fc_source_announce is called,
 * servers are asked for its bytes. It is only for speed: nothing fails, and files on this machine are not touched.
 */
void fc_source_expect(fc_source *source, const fc_coverage *coverage, const fc_tensor *tensor, const fc_box *box);
void fc_source_announce(fc_source *source);
