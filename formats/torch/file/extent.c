/*
 * The extent and the digest of a chunk, as found and checked when the file was opened.
 */
#include "torch/file/file.h"

#include <string.h>

fc_code fc_torch_extent(const fc_checkpoint *checkpoint, const fc_tensor *tensor, size_t index, fc_extent *out,
                        fc_error *err) {
    const fc_chunk *chunk = &tensor->chunks[index];
    const torch_extent *extent = chunk->data;
    (void)checkpoint;
    (void)err;
    memset(out, 0, sizeof *out);
    out->file = chunk->place.file;
    out->offset = chunk->place.offset;
    out->length = chunk->place.length;
    const torch_object *object = tensor->object ? tensor->detail : NULL;
    if (object && object->encoding) {
        *out = (fc_extent){.codec = FC_CODEC_INLINE, .bytes = object->pickle, .length = object->size};
        out->decoded = object->size;
        out->strides[0] = 1;
        return FC_OK;
    }
    if (object) {
        out->codec = FC_CODEC_FORMAT;
        out->decoded = (uint64_t)tensor->shape[0];
        out->strides[0] = 1;
        return FC_OK;
    }
    out->offset = extent->record.offset; /* also of a copy of a number, which has no place of its own */
    out->length = extent->record.stored;
    out->codec = extent->record.method == FC_ZIP_STORED ? FC_CODEC_RAW : FC_CODEC_FORMAT;
    out->decoded = extent->record.size;
    out->crc32 = extent->record.method == FC_ZIP_STORED ? extent->record.crc
                                                        : 0; /* otherwise the CRC is compared while it is inflated */
    out->first = extent->first;
    out->negate = extent->negate;
    out->conjugate = extent->conjugate;
    out->swap = extent->swap;
    for (int i = 0; i < tensor->ndim; i++) {
        out->strides[i] = extent->strides[i];
    }
    return FC_OK;
}

fc_code fc_torch_digest(const fc_checkpoint *checkpoint, const fc_tensor *tensor, size_t index, fc_digest *out,
                        fc_error *err) {
    (void)checkpoint;
    (void)err;
    if (tensor->object || index == FC_WHOLE_TENSOR) {
        return FC_OK;
    }
    const torch_extent *extent = tensor->chunks[index].data;
    if (extent->record.crc != 0 && extent->record.method == FC_ZIP_STORED) {
        *out = (fc_digest){.kind = FC_DIGEST_CRC32,
                           .value = extent->record.crc,
                           .offset = extent->record.offset,
                           .length = extent->record.stored};
    }
    return FC_OK;
}
