/*
 * Reads a chunk that is larger than the memory for decoding: see streamed.h. The format keeps the decoder between two
 * parts, so a walk in the order of the bytes decodes the chunk once.
 */
#include "read/streamed.h"

#include "base/checked.h"
#include "fsdpckpt/format.h"
#include "fsdpckpt/try.h"

/* Whether the elements of the chunk fill the bytes from the first to the last: then no walk goes back. */
static bool is_dense(const fc_tensor *tensor, size_t chunk, const fc_extent *extent) {
    const fc_box box = fc_chunk_box(tensor, &tensor->chunks[chunk]);
    int64_t last = 0, step;
    bool good = true;
    for (int d = 0; d < tensor->ndim && good; d++) {
        good = (box.sizes[d] == 1 || extent->strides[d] > 0) &&
               fc_mul_i64(box.sizes[d] - 1, extent->strides[d], &step) && fc_add_i64(last, step, &last);
    }
    return good && last + 1 == fc_box_volume(&box);
}

bool fc_can_stream(const fc_checkpoint *checkpoint, const fc_tensor *tensor, size_t chunk, const fc_extent *extent,
                   uint64_t limit) {
    enum { SPARE = 64 << 10 }; /* pages and the entry of the cache */
    return extent->codec == FC_CODEC_FORMAT && checkpoint->format->reader.read_part && !tensor->object &&
           (limit < SPARE || extent->decoded > limit - SPARE) && is_dense(tensor, chunk, extent);
}

fc_code fc_copy_streamed(const fc_checkpoint *checkpoint, const fc_tensor *tensor, size_t chunk, uint64_t start,
                         const fc_strided *copy, unsigned char *out, fc_error *err) {
    int64_t index[FC_MAX_DIMS] = {0}, src = 0, dst = 0;
    int i;
    do {
        FC_TRY(checkpoint->format->reader.read_part(checkpoint, tensor, chunk, start + (uint64_t)src, out + dst,
                                                    (size_t)copy->unit, err));
        for (i = copy->n - 1; i >= 0; i--) {
            src += copy->axes[i].src;
            dst += copy->axes[i].dst;
            if (++index[i] < copy->axes[i].size) {
                break;
            }
            src -= index[i] * copy->axes[i].src;
            dst -= index[i] * copy->axes[i].dst;
            index[i] = 0;
        }
    } while (i >= 0);
    return FC_OK;
}
