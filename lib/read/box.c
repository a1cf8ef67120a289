/*
 * Reads one box without threads: into memory (for inspect and diff), or tile by tile in row-major order (for extract).
 * It uses the engine's source. A tensor that is read as a whole is compared with its recorded digests.
 */
#include "read/box.h"

#include "base/crc.h"
#include "fsdpckpt/cast.h"
#include "fsdpckpt/try.h"
#include "plan/tiles.h"
#include "read/chunk_lists.h"
#include "read/source.h"
#include "read/tuning.h"

#include <stdlib.h>
#include <string.h>

/* A box to read. All of it goes to `whole`; if that is NULL, each tile goes through `tile` to `visit`. */
typedef struct box_reader {
    fc_chunk_lists *lists; /* may be NULL */
    fc_source *source;
    fc_coverage *coverage;
    fc_source_crc *crc; /* collects the CRCs of what is read; may be NULL */
    const fc_tensor *tensor;
    fc_dtype dtype;
    unsigned char *whole;
    unsigned char *raw;  /* FC_TILE_BYTES in the source's dtype, for a cast */
    unsigned char *tile; /* one tile, when `whole` is NULL */
    fc_read_visit *visit;
    void *context;
} box_reader;

static fc_code read_tile(const box_reader *r, const fc_tile *tile, fc_error *err) {
    fc_box box = {r->tensor->ndim, tile->offsets, tile->sizes};
    uint32_t size = fc_dtype_size(r->dtype);
    unsigned char *to = r->whole ? r->whole + (size_t)tile->start * size : r->tile;
    FC_TRY(fc_source_fill(r->source, r->coverage, r->tensor, &box, r->raw ? r->raw : to, err));
    if (r->raw) {
        fc_cast(r->tensor->dtype, r->raw, r->dtype, to, (size_t)tile->count);
    }
    return r->visit ? r->visit(r->context, to, (size_t)tile->count * size, err) : FC_OK;
}

static fc_code read_tiles(const box_reader *r, const fc_box *box, fc_error *err) {
    fc_tiles tiles;
    fc_tile tile;
    fc_tiles_begin(&tiles, box, FC_TILE_BYTES / fc_dtype_size(r->tensor->dtype), 1);
    while (fc_tiles_next(&tiles, &tile)) {
        FC_TRY(read_tile(r, &tile, err));
    }
    return FC_OK;
}

/* Fills the rest of `r`, reads the box, and frees what it allocated. */
static fc_code read_box(const fc_checkpoint *checkpoint, box_reader *r, const fc_box *box, fc_error *err) {
    const fc_tensor *tensor = r->tensor;
    fc_decoded *decoded = NULL;
    bool cast = r->dtype != tensor->dtype;
    if (cast && (fc_dtype_get(r->dtype)->cls != FC_CLASS_FLOAT || fc_dtype_get(tensor->dtype)->cls != FC_CLASS_FLOAT)) {
        return fc_fail(err, FC_EUSAGE, "tensor %s: reading %s as %s is not supported", tensor->name,
                       fc_dtype_get(tensor->dtype)->torch_name, fc_dtype_get(r->dtype)->torch_name);
    }
    fc_code rc;
    FC_TRY_GOTO(fc_chunk_lists_find(r->lists, checkpoint, tensor, box, &r->coverage, err), rc, out);
    if (fc_box_volume(box) == 0) {
        goto out;
    }
    r->raw = cast ? malloc(FC_TILE_BYTES) : NULL;
    r->tile = r->whole ? NULL : malloc((size_t)FC_TILE_BYTES / fc_dtype_size(tensor->dtype) * fc_dtype_size(r->dtype));
    decoded = fc_decoded_new(FC_DEFAULT_MEMORY);
    if (!decoded || (cast && !r->raw) || (!r->whole && !r->tile)) {
        rc = fc_no_memory(err, checkpoint->path);
        goto out;
    }
    FC_TRY_GOTO(fc_source_new(checkpoint, decoded, FC_SCRATCH_BYTES, FC_OPEN_FILES, &r->source, err), rc, out);
    fc_source_check_objects(r->source);
    fc_source_watch(r->source, r->crc, true);
    rc = read_tiles(r, box, err);
out:
    fc_source_free(r->source);
    fc_decoded_free(decoded);
    fc_coverage_free(r->coverage);
    free(r->raw);
    free(r->tile);
    return rc;
}

/* A tensor that is read as a whole is compared with its recorded digest. */
static fc_code read_checked(const fc_checkpoint *checkpoint, box_reader *r, const fc_box *box, fc_error *err) {
    const fc_tensor *tensor = r->tensor;
    if (tensor->ndim > 0 && memcmp(box->sizes, tensor->shape, (size_t)tensor->ndim * sizeof *box->sizes) != 0) {
        return read_box(checkpoint, r, box, err);
    }
    fc_code rc;
    FC_TRY_GOTO(fc_source_crc_new(checkpoint, tensor, 1, &r->crc, err), rc, out);
    FC_TRY_GOTO(read_box(checkpoint, r, box, err), rc, out);
    rc = fc_source_crc_check(r->crc, NULL, fc_read_crc64, err);
out:
    fc_source_crc_free(r->crc);
    return rc;
}

fc_code fc_read_box(const fc_checkpoint *checkpoint, const fc_tensor *tensor, const fc_box *box, fc_dtype dtype,
                    void *buf, fc_error *err) {
    box_reader r = {.tensor = tensor, .dtype = dtype, .whole = buf};
    return read_checked(checkpoint, &r, box, err);
}

fc_code fc_read_box_listed(const fc_checkpoint *checkpoint, fc_chunk_lists *lists, const fc_box_request *request,
                           fc_error *err) {
    box_reader r = {.lists = lists, .tensor = request->tensor, .dtype = request->tensor->dtype, .whole = request->buf};
    return read_checked(checkpoint, &r, &request->box, err);
}

fc_code fc_read_object(const fc_checkpoint *checkpoint, const fc_tensor *object, unsigned char **bytes, fc_error *err) {
    static const int64_t start[1] = {0};
    const fc_box all = {1, start, object->shape};
    const uint64_t size = (uint64_t)object->shape[0];
    *bytes = size < SIZE_MAX ? malloc((size_t)size + 1) : NULL; /* malloc(0) may return NULL */
    FC_NEED(*bytes, err, checkpoint->path);
    fc_code rc = fc_read_box(checkpoint, object, &all, FC_OPAQUE, *bytes, err);
    if (rc != FC_OK) {
        free(*bytes);
        *bytes = NULL;
    }
    return rc;
}

fc_code fc_read_box_crc(const fc_checkpoint *checkpoint, const fc_tensor *tensor, const fc_box *box, fc_dtype dtype,
                        void *buf, fc_source_crc *crc, fc_error *err) {
    box_reader r = {.tensor = tensor, .dtype = dtype, .whole = buf, .crc = crc};
    return read_box(checkpoint, &r, box, err);
}

fc_code fc_read_stream(const fc_checkpoint *checkpoint, const fc_tensor *tensor, const fc_box *box, fc_dtype dtype,
                       fc_read_visit *visit, void *context, fc_error *err) {
    box_reader r = {.tensor = tensor, .dtype = dtype, .visit = visit, .context = context};
    return read_checked(checkpoint, &r, box, err);
}

static fc_code add_crc64(void *context, const void *bytes, size_t size, fc_error *err) {
    uint64_t *crc64 = context;
    (void)err;
    *crc64 = fc_crc64(*crc64, bytes, size);
    return FC_OK;
}

fc_code fc_read_crc64(const fc_checkpoint *checkpoint, const fc_tensor *tensor, const fc_box *box, uint64_t *crc64,
                      fc_error *err) {
    box_reader r = {.tensor = tensor, .dtype = tensor->dtype, .visit = add_crc64, .context = crc64};
    *crc64 = 0;
    return read_box(checkpoint, &r, box, err);
}

static fc_code pass_over(void *context, const void *bytes, size_t size, fc_error *err) {
    (void)context, (void)bytes, (void)size, (void)err;
    return FC_OK;
}

fc_code fc_compare_tensor(const fc_checkpoint *checkpoint, const fc_tensor *tensor, fc_error *err) {
    static const int64_t origin[FC_MAX_DIMS];
    const fc_box whole = {tensor->ndim, origin, tensor->shape};
    return fc_read_stream(checkpoint, tensor, &whole, tensor->dtype, pass_over, NULL, err);
}
