/*
 * Makes one compressed chunk: reads its elements, casts, shuffles and deflates them. Each worker of a compression has a
 * maker.
 */
#pragma once

#include "move/chunks.h"
#include "move/compress_sizes.h"
#include "read/source.h"

/** One worker's source and buffers. All zero is allowed for fc_chunk_maker_free. */
typedef struct fc_chunk_maker {
    fc_source *source;
    struct fc_deflater *deflater;
    const fc_compress_sizes *sizes;
    struct fc_source_crc *recorded; /**< see fc_move_options; may be NULL */
    unsigned char *read, *cast, *shuffled;
} fc_chunk_maker;

/** A compressed chunk, or elements that cannot be compressed, unchanged (`raw`). */
typedef struct fc_made_chunk {
    unsigned char *bytes; /**< fc_compress_sizes.chunk bytes, allocated at first use; freed by the owner */
    size_t size;
    bool raw;
} fc_made_chunk;

fc_code fc_chunk_maker_init(fc_chunk_maker *maker, const fc_target *target, const fc_compress_sizes *sizes,
                            fc_decoded *decoded, fc_error *err);
void fc_chunk_maker_free(fc_chunk_maker *maker);

/** Makes the chunk of a job, and its digest. */
fc_code fc_chunk_make(fc_chunk_maker *maker, fc_chunk_job *job, fc_made_chunk *out, fc_error *err);

/** Returns the number of elements of a chunk, without padding. */
int64_t fc_chunk_volume(const fc_chunk_job *job);
