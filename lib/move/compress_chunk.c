/*
 * Makes one compressed chunk. See compress_chunk.h.
 */
#include "move/compress_chunk.h"

#include "base/pages.h"
#include "codec/codec.h"
#include "codec/shuffle.h"
#include "fsdpckpt/cast.h"
#include "fsdpckpt/try.h"
#include "read/threads.h"
#include "read/tuning.h"

#include <string.h>

fc_code fc_chunk_maker_init(fc_chunk_maker *maker, const fc_target *target, const fc_compress_sizes *sizes,
                            fc_decoded *decoded, fc_error *err) {
    const fc_compress_sizes *s = maker->sizes = sizes;
    FC_TRY(
        fc_source_new(target->source, decoded, FC_SCRATCH_BYTES, fc_files_per_worker(s->threads), &maker->source, err));
    fc_source_check_objects(maker->source);
    maker->deflater = fc_deflater_new(target->compress);
    maker->read = fc_pages_new(fc_compress_read_size(s));
    maker->cast = s->casts ? fc_pages_new(s->chunk) : NULL;
    maker->shuffled = fc_pages_new(s->chunk);
    if (!maker->deflater || !maker->read || (s->casts && !maker->cast) || !maker->shuffled) {
        return fc_fail(err, FC_ENOMEM, "out of memory for chunks of %zu bytes", s->chunk);
    }
    return FC_OK;
}

void fc_chunk_maker_free(fc_chunk_maker *maker) {
    fc_source_free(maker->source);
    fc_deflater_free(maker->deflater);
    if (maker->sizes) {
        fc_pages_free(maker->read, fc_compress_read_size(maker->sizes));
        fc_pages_free(maker->cast, maker->sizes->chunk);
        fc_pages_free(maker->shuffled, maker->sizes->chunk);
    }
}

int64_t fc_chunk_volume(const fc_chunk_job *job) {
    const fc_box box = {job->of->target->source->ndim, job->offset, job->sizes};
    return fc_box_volume(&box);
}

/* Reads the elements of a chunk in the target's dtype. A chunk at the item's edge is padded with zeros. */
static fc_code read_chunk(fc_chunk_maker *maker, fc_chunk_job *job, size_t bytes, unsigned char **out, fc_error *err) {
    const fc_target_tensor *target = job->of->target;
    const fc_box box = {target->source->ndim, job->offset, job->sizes};
    size_t count = (size_t)fc_chunk_volume(job), used = count * fc_dtype_size(target->dtype);
    *out = maker->read;
    const bool cast = target->dtype != target->source->dtype;
    fc_source_watch(maker->source, job->of->digest.tensor ? maker->recorded : NULL, cast);
    FC_TRY(fc_source_fill(maker->source, job->of->coverage, target->source, &box, maker->read, err));
    if (cast) {
        fc_cast(target->source->dtype, maker->read, target->dtype, maker->cast, count);
        *out = maker->cast;
    }
    memset(*out + used, 0, bytes - used);
    return fc_tile_digest_make(target, job->of->item, &box, *out, job->of->chunks->crc32, &job->digest, err);
}

fc_code fc_chunk_make(fc_chunk_maker *maker, fc_chunk_job *job, fc_made_chunk *out, fc_error *err) {
    const uint32_t element = fc_dtype_size(job->of->target->dtype);
    const size_t bytes = fc_chunk_bytes(job->of->chunks->target, job->of->item, element);
    unsigned char *elements = NULL;
    out->bytes = out->bytes ? out->bytes : fc_pages_new(maker->sizes->chunk);
    if (!out->bytes) {
        return fc_fail(err, FC_ENOMEM, "out of memory for a chunk of %zu bytes", bytes);
    }
    FC_TRY(read_chunk(maker, job, bytes, &elements, err));
    const unsigned char *in = elements;
    if (element > 1) {
        fc_shuffle(elements, maker->shuffled, bytes, element);
        in = maker->shuffled;
    }
    out->size = fc_deflate(maker->deflater, in, bytes, element > 1 ? bytes / element : 0, out->bytes, bytes - 1);
    out->raw = out->size == 0;
    if (out->raw) {
        memcpy(out->bytes, elements, bytes);
        out->size = bytes;
    }
    return FC_OK;
}
