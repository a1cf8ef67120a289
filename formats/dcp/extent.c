/*
 * Finds the bytes of a chunk: opens the chunk's torch.save archive and checks that its tensor is the one that
 * `.metadata` describes. Chunks in safetensors were checked when their headers were read. The bytes of an object are
 * its whole archive, which is not opened.
 */
#include "dcp/extent.h"
#include "dcp/builder.h"
#include "dcp/files.h"
#include "dcp/packed.h"

#include "fsdpckpt/try.h"
#include "fsdpckpt/verify.h"
#include "torch/file/file.h"
#include "verify/report.h"

#include <inttypes.h>
#include <string.h>

static bool same_sizes(const fc_tensor *tensor, const fc_chunk *chunk, const fc_torch_tensor *t) {
    return fc_same_sizes(t->ndim, t->sizes, tensor->ndim, chunk->dims + tensor->ndim);
}

/* Finds the record of the item's tensor, and checks it against `.metadata`. */
static fc_code find_storage(const fc_tensor *tensor, const fc_chunk *chunk, const fc_torch_item *item,
                            fc_torch_tensor *t, const fc_zip_entry **storage, fc_error *err) {
    const char *path = item->zip.path;
    FC_TRY_CONTEXT(fc_torch_tensor_decode(item->pickle, item->pickle->root, t, err), err, "%s: offset %" PRIu64, path,
                   chunk->place.offset);
    if (t->dtype != tensor->dtype) {
        return fc_fail(err, FC_ECORRUPT, "%s: offset %" PRIu64 ": the item has the dtype %s, but .metadata says %s",
                       path, chunk->place.offset, fc_dtype_get(t->dtype)->torch_name,
                       fc_dtype_get(tensor->dtype)->torch_name);
    }
    if (!same_sizes(tensor, chunk, t)) {
        return fc_fail(err, FC_ECORRUPT, "%s: offset %" PRIu64 ": the item's sizes differ from those in .metadata",
                       path, chunk->place.offset);
    }
    return fc_torch_item_storage(item, t, storage, err);
}

/* The extent of a compressed item: its decoded bytes, from the first one to the last one of the tensor. */
static void describe_packed(const fc_chunk *chunk, const fc_torch_tensor *t, const fc_zip_entry *storage,
                            fc_extent *out) {
    const uint64_t before = storage->data - chunk->place.offset;
    out->codec = FC_CODEC_FORMAT;
    out->offset = chunk->place.offset;
    out->length = chunk->place.length;
    out->decoded = before + storage->size;
    out->first = before + t->first;
    out->crc32 = 0; /* fc_dcp_read compares it */
}

static void describe_extent(const fc_torch_item *item, const fc_chunk *chunk, const fc_torch_tensor *t,
                            const fc_zip_entry *storage, fc_extent *out) {
    out->offset = storage->data;
    out->length = storage->size;
    out->decoded = storage->size;
    out->first = t->first;
    out->negate = t->negate;
    out->conjugate = t->conjugate;
    out->swap = item->big_endian && fc_dtype_get(t->dtype)->swap_size > 1;
    out->crc32 = storage->crc; /* 0 if torch was told not to compute it */
    memcpy(out->strides, t->strides, sizeof out->strides);
    if (fc_dcp_is_packed(chunk)) {
        describe_packed(chunk, t, storage, out);
    }
}

/* What the caller wants to know about a chunk's archive. NULL members are not wanted. */
typedef struct sought {
    fc_extent *extent;
    fc_digest *digest;
    struct fc_findings *findings; /* receives defects of its other records */
} sought;

static fc_code check_others(const fc_checkpoint *checkpoint, const fc_tensor *tensor, const fc_chunk *chunk,
                            fc_torch_item *item, struct fc_findings *findings, fc_error *err) {
    const fc_defect place = {.file = checkpoint->files[chunk->place.file].name,
                             .tensor = tensor->name,
                             .has_offset = true,
                             .offset = chunk->place.offset};
    bool covered;
    if (item->pickle->risk == FC_RISK_RUNS) {
        char name[256];
        fc_report_defect(findings, &place,
                         "%s: offset %" PRIu64 ": tensor %.256s: loading it calls %s: it may be hostile",
                         checkpoint->files[chunk->place.file].path, chunk->place.offset, tensor->name,
                         fc_pickle_risky_name(item->pickle, name, sizeof name));
    }
    return fc_torch_check_records(item, false, &place, findings, &covered, err);
}

/* Finds the tensor of a chunk in its open archive, and fills in the members of `out` that are not NULL. */
static fc_code look_into_item(const fc_checkpoint *checkpoint, const fc_tensor *tensor, const fc_chunk *chunk,
                              fc_torch_item *item, const sought *out, fc_error *err) {
    fc_torch_tensor t = {0};
    const fc_zip_entry *storage = NULL;
    if (out->findings) {
        FC_TRY(check_others(checkpoint, tensor, chunk, item, out->findings, err));
    }
    FC_TRY(find_storage(tensor, chunk, item, &t, &storage, err));
    if (out->extent) {
        describe_extent(item, chunk, &t, storage, out->extent);
    }
    if (out->digest && storage->crc != 0 && !fc_dcp_is_packed(chunk)) {
        *out->digest = (fc_digest){
            .kind = FC_DIGEST_CRC32, .value = storage->crc, .offset = storage->data, .length = storage->stored};
    }
    return FC_OK;
}

/* Opens the archive of a chunk and finds its tensor. */
static fc_code look_into_archive(const fc_checkpoint *checkpoint, const fc_tensor *tensor, const fc_chunk *chunk,
                                 const sought *out, fc_error *err) {
    fc_torch_item item;
    int fd;
    FC_TRY(fc_dcp_acquire(checkpoint, chunk->place.file, &fd, err));
    fc_code rc;
    if (fc_dcp_is_packed(chunk)) {
        FC_TRY_GOTO(fc_dcp_open_packed(fd, checkpoint->files[chunk->place.file].path, chunk, &item, err), rc, out);
    } else {
        unsigned char *bytes =
            fc_dcp_read_ahead(checkpoint, chunk->place.file, chunk->place.offset, chunk->place.length);
        FC_TRY_GOTO(fc_torch_item_open_read(fd, checkpoint->files[chunk->place.file].path, chunk->place.offset,
                                            chunk->place.length, bytes, &item, err),
                    rc, out);
    }
    rc = look_into_item(checkpoint, tensor, chunk, &item, out, err);
    fc_torch_item_close(&item);
out:
    fc_dcp_release(checkpoint, chunk->place.file);
    return rc;
}

/* Finds the tensor of a chunk. A chunk in safetensors has no recorded digest. */
static fc_code look_into(const fc_checkpoint *checkpoint, const fc_tensor *tensor, const fc_chunk *chunk,
                         const sought *out, fc_error *err) {
    if (!fc_dcp_in_safetensors(tensor, chunk)) {
        return look_into_archive(checkpoint, tensor, chunk, out, err);
    }
    return out->extent ? fc_dcp_safetensors_extent(checkpoint, tensor, chunk, out->extent, err) : FC_OK;
}

/* Turns the extent of a run of elements into that of a box of it. */
static void take_box(const fc_tensor *tensor, size_t index, const fc_dcp_listed *listed, fc_extent *extent) {
    const int64_t stride = extent->strides[listed->tensor->ndim - 1];
    extent->first += (uint64_t)(listed->at * stride) * fc_dtype_size(tensor->dtype);
    fc_row_major_strides(tensor->ndim, tensor->chunks[index].dims + tensor->ndim, extent->strides);
    for (int d = 0; d < tensor->ndim; d++) {
        extent->strides[d] *= stride;
    }
}

fc_code fc_dcp_verify_chunk(const fc_checkpoint *checkpoint, const fc_tensor *tensor, size_t index, fc_extent *extent,
                            fc_digest *digest, struct fc_findings *findings, fc_error *err) {
    const fc_chunk *chunk = &tensor->chunks[index];
    if (digest) {
        *digest = (fc_digest){.kind = FC_DIGEST_NONE};
    }
    if (fc_dcp_is_opened(tensor, index)) {
        FC_TRY(digest ? fc_torch_digest(checkpoint, tensor, index, digest, err) : FC_OK);
        return fc_torch_extent(checkpoint, tensor, index, extent, err);
    }
    memset(extent, 0, sizeof *extent);
    extent->codec = FC_CODEC_RAW;
    extent->file = chunk->place.file;
    if (tensor->object) {
        extent->codec = fc_dcp_is_packed(chunk) ? FC_CODEC_FORMAT : FC_CODEC_RAW;
        extent->offset = chunk->place.offset;
        extent->length = chunk->place.length;
        extent->decoded = (uint64_t)tensor->shape[0];
        extent->strides[0] = 1;
        return FC_OK;
    }
    const fc_dcp_listed listed = fc_dcp_find_listed(tensor, index);
    const sought all = {extent, digest, listed.is_first ? findings : NULL};
    fc_error why;
    fc_code rc = look_into(checkpoint, listed.tensor, &listed.chunk, &all, &why);
    if (rc != FC_OK) {
        rc = fc_fail(err, rc, "tensor %.256s: %s", tensor->name, why.message);
        return rc == FC_EUNSUPPORTED ? fc_advise(err, rc, FC_HINT_EXCLUDE, tensor->name) : rc;
    }
    if (listed.tensor != tensor) {
        take_box(tensor, index, &listed, extent);
    }
    return FC_OK;
}

fc_code fc_dcp_extent(const fc_checkpoint *checkpoint, const fc_tensor *tensor, size_t index, fc_extent *out,
                      fc_error *err) {
    return fc_dcp_verify_chunk(checkpoint, tensor, index, out, NULL, NULL, err);
}

fc_code fc_dcp_digest(const fc_checkpoint *checkpoint, const fc_tensor *tensor, size_t index, fc_digest *out,
                      fc_error *err) {
    if (tensor->object || index == FC_WHOLE_TENSOR) {
        return FC_OK;
    }
    if (fc_dcp_is_opened(tensor, index)) {
        return fc_torch_digest(checkpoint, tensor, index, out, err);
    }
    const sought only = {.digest = out};
    const fc_dcp_listed listed = fc_dcp_find_listed(tensor, index);
    if (fc_dcp_is_packed(&listed.chunk)) {
        return FC_OK;
    }
    fc_code rc = look_into(checkpoint, listed.tensor, &listed.chunk, &only, err);
    return rc == FC_OK ? rc : fc_context(err, rc, "tensor %.256s", tensor->name);
}

static fc_code packed_json(int fd, const char *path, const fc_chunk *chunk, fc_arena *arena, const char **json,
                           fc_error *err) {
    unsigned char *bytes;
    uint64_t size;
    FC_TRY(fc_dcp_unpack(fd, path, chunk, &bytes, &size, err));
    return fc_torch_json_memory(bytes, size, path, arena, json, err);
}

fc_code fc_dcp_object_json(const fc_checkpoint *checkpoint, const fc_tensor *object, fc_arena *arena, const char **json,
                           fc_error *err) {
    if (fc_dcp_is_opened(object, 0)) {
        return fc_torch_object_json(checkpoint, object, arena, json, err);
    }
    if (object->nchunks == 0) {
        return fc_fail(err, FC_ECORRUPT, "%s: object %.256s has no bytes", checkpoint->path, object->name);
    }
    const fc_chunk *chunk = &object->chunks[0];
    int fd;
    FC_TRY_CONTEXT(fc_dcp_acquire(checkpoint, chunk->place.file, &fd, err), err, "object %.256s", object->name);
    const char *path = checkpoint->files[chunk->place.file].path;
    fc_code rc = fc_dcp_is_packed(chunk)
                     ? packed_json(fd, path, chunk, arena, json, err)
                     : fc_torch_json_range(fd, path, chunk->place.offset, chunk->place.length, arena, json, err);
    fc_dcp_release(checkpoint, chunk->place.file);
    FC_TRY_CONTEXT(rc, err, "object %.256s", object->name);
    return FC_OK;
}
