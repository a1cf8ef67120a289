/*
 * A worker's view of the source: fills boxes of a tensor with native row-major bytes, from whichever chunks, files and
 * codecs they lie in. One worker each; only the cache of decoded chunks is shared.
 */
#ifndef FSDPCKPT_ENGINE_SOURCE_H
#define FSDPCKPT_ENGINE_SOURCE_H

#ifndef FSDPCKPT_PRIVATE
#error "this header is private to fsdpckpt: include <fsdpckpt/...> instead"
#endif

#include "engine/decode.h"
#include "engine/source_crc.h"
#include "fsdpckpt/plan.h"

typedef struct fc_source fc_source;

/**
 * @param decoded shared by all workers of a job; outlives the source.
 * @param scratch bytes of the window for strided reads, at least FC_LEAST_TILE_BYTES; the same for all sources that
 * share `decoded`, as it decides in which form chunks are kept there.
 * @param files   descriptors to keep open at most, at least 1.
 */
fc_code fc_source_new(const fc_checkpoint *checkpoint, fc_decoded *decoded, size_t scratch, int files, fc_source **out,
                      fc_error *err);
void fc_source_free(fc_source *source);

/** Bytes that a source holds beside its window. */
size_t fc_source_overhead(void);

/** Of what is filled from now on, adds the CRC-32s of the stored bytes to `crc`, see source_crc.h; NULL: of nothing.
   With `elements` also the CRC-64s of the elements, where the source records those: who has them anyhow needs it not.
 */
void fc_source_watch(fc_source *source, fc_source_crc *crc, bool elements);

/** From now on, has the format check each object before its bytes are read: they will be copied. */
void fc_source_check_objects(fc_source *source);

/** Reads `size` bytes of file `file` (an index into fc_checkpoint.files) as they are stored. */
fc_code fc_source_bytes(fc_source *source, uint32_t file, uint64_t offset, unsigned char *out, size_t size,
                        fc_error *err);

/**
 * Fills `out` with the elements of `box` in row-major order, in the tensor's own type and this machine's byte order.
 * `box` lies within what `coverage` covers. Each element is written exactly once, else FC_ECORRUPT.
 */
fc_code fc_source_fill(fc_source *source, const fc_coverage *coverage, const fc_tensor *tensor, const fc_box *box,
                       unsigned char *out, fc_error *err);

#endif
