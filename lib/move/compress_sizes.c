/*
 * Divides the memory of a compression. See compress_sizes.h.
 */
#include "move/compress_sizes.h"

#include "codec/codec.h"
#include "io/staged_objects.h"
#include "move/chunks.h"
#include "read/source.h"
#include "read/stored_chunk.h"
#include "read/threads.h"
#include "read/tuning.h"

#include <inttypes.h>

enum { MOST_SURVEYED = 64 };

void fc_compress_survey(const fc_target *target, const fc_target_file *file, fc_compress_sizes *s) {
    int looked_at = 0;
    for (size_t i = 0; i < file->nitems; i++) {
        const fc_target_item *item = &file->items[i];
        if (!item->chunk) {
            continue;
        }
        const fc_target_tensor *tensor = &target->tensors[item->tensor];
        size_t chunk = fc_chunk_bytes(target, item, fc_dtype_size(tensor->dtype));
        size_t source = fc_chunk_bytes(target, item, fc_dtype_size(tensor->source->dtype));
        s->chunk = chunk > s->chunk ? chunk : s->chunk;
        s->source = source > s->source ? source : s->source;
        s->casts |= tensor->dtype != tensor->source->dtype;
        s->chunks += fc_target_item_bytes(target, item) / chunk + 1;
        /* A checkpoint's tensors are usually stored alike, and each look may read from the disk. */
        if (!s->decodes && looked_at++ < MOST_SURVEYED) {
            s->decodes = fc_gains_from_large_tiles(target->source, tensor->source);
        }
    }
}

/* Decoding keeps processors busy rather than disks, and every further worker takes memory from the decoded chunks. */
static int default_threads(const fc_compress_sizes *s, uint64_t parts) {
    const uint64_t senders = parts / FC_STAGED_PART;
    return (s->decodes ? fc_processors() + 1 : fc_default_threads()) +
           (senders < FC_MOST_THREADS ? (int)senders : FC_MOST_THREADS);
}

fc_code fc_compress_divide(uint64_t memory, uint64_t parts, int threads, fc_compress_sizes *s, fc_error *err) {
    const int wanted = threads > 0 ? threads : default_threads(s, parts),
              workers = wanted < FC_MOST_THREADS ? wanted : FC_MOST_THREADS;
    const uint64_t each = fc_source_overhead() + FC_SCRATCH_BYTES + fc_deflater_size() + fc_compress_read_size(s) +
                          (s->casts ? s->chunk : 0) + s->chunk;
    const uint64_t of = s->decodes ? 5 : 4, share = s->decodes ? 2 : 3, mine = memory / of * share;
    const uint64_t least = each + 2 * s->chunk;
    if (least > mine) {
        const uint64_t needed = (least + share - 1) / share * of;
        fc_code rc =
            fc_fail(err, FC_EUSAGE, "compression needs %" PRIu64 " bytes of memory, but only %" PRIu64 " are allowed",
                    parts > 0 ? 2 * needed : needed, parts > 0 ? 2 * memory : memory);
        return fc_advise(err, rc, FC_HINT_MEMORY, NULL);
    }
    uint64_t fit = (mine - s->chunk) / (each + s->chunk);
    s->threads = (uint64_t)workers < fit ? workers : (int)fit;
    if ((uint64_t)s->threads > s->chunks) {
        s->threads = (int)s->chunks;
    }
    uint64_t slots = (mine - (uint64_t)s->threads * each) / s->chunk;
    uint64_t most = FC_RUN_CHUNKS * ((uint64_t)s->threads + 1);
    s->slots = (int)(slots < most ? slots : most);
    s->run = s->slots / (s->threads + 1);
    s->decoded = memory - (uint64_t)s->threads * each - (uint64_t)s->slots * s->chunk;
    return FC_OK;
}
