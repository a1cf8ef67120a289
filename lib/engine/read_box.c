/*
 * Reading one box, without threads: into memory (what inspect and diff use), or piece by piece in row-major order (what
 * extract uses). The same source as the engine's, and what is read whole is compared with what is recorded of it.
 */
#include "engine/read_box.h"

#include "base/try.h"
#include "engine/source.h"
#include "engine/tuning.h"
#include "fsdpckpt/cast.h"

#include <stdlib.h>
#include <string.h>

/* A box being read. `whole` is where all of it goes; else each tile goes through `tile` to `visit`. */
typedef struct reading {
    fc_source *source;
    fc_coverage *coverage;
    fc_source_crc *crc; /* to which it is added; NULL: to nothing */
    const fc_tensor *tensor;
    fc_dtype dtype;
    unsigned char *whole;
    unsigned char *raw;  /* FC_TILE_BYTES as they are stored, for a cast */
    unsigned char *tile; /* room for a tile's elements, without `whole` */
    fc_read_visit *visit;
    void *context;
} reading;

static fc_code read_tile(const reading *r, const fc_tile *tile, fc_error *err) {
    fc_box part = {r->tensor->ndim, tile->offsets, tile->sizes};
    uint32_t size = fc_dtype_size(r->dtype);
    unsigned char *to = r->whole ? r->whole + (size_t)tile->start * size : r->tile;
    fc_code rc = fc_source_fill(r->source, r->coverage, r->tensor, &part, r->raw ? r->raw : to, err);
    if (rc == FC_OK && r->raw) {
        fc_cast(r->tensor->dtype, r->raw, r->dtype, to, (size_t)tile->count);
    }
    return rc == FC_OK && r->visit ? r->visit(r->context, to, (size_t)tile->count * size, err) : rc;
}

static fc_code read_tiles(const reading *r, const fc_box *box, fc_error *err) {
    fc_tiles tiles;
    fc_tile tile;
    fc_tiles_begin(&tiles, box, FC_TILE_BYTES / fc_dtype_size(r->tensor->dtype), 1);
    while (fc_tiles_next(&tiles, &tile)) {
        FC_TRY(read_tile(r, &tile, err));
    }
    return FC_OK;
}

/* Fills the rest of `r`, reads, and frees what it filled. */
static fc_code read_box(const fc_checkpoint *checkpoint, reading *r, const fc_box *box, fc_error *err) {
    const fc_tensor *tensor = r->tensor;
    fc_decoded *decoded = NULL;
    bool cast = r->dtype != tensor->dtype;
    if (cast && (fc_dtype_get(r->dtype)->cls != FC_CLASS_FLOAT || fc_dtype_get(tensor->dtype)->cls != FC_CLASS_FLOAT)) {
        return fc_fail(err, FC_EUSAGE, "tensor %s: %s cannot be read as %s", tensor->name,
                       fc_dtype_get(tensor->dtype)->torch_name, fc_dtype_get(r->dtype)->torch_name);
    }
    fc_code rc = fc_coverage_within(checkpoint, tensor, box, &r->coverage, err);
    if (rc != FC_OK || fc_box_volume(box) == 0) {
        goto out;
    }
    r->raw = cast ? malloc(FC_TILE_BYTES) : NULL;
    r->tile = r->whole ? NULL : malloc((size_t)FC_TILE_BYTES / fc_dtype_size(tensor->dtype) * fc_dtype_size(r->dtype));
    decoded = fc_decoded_new(FC_DEFAULT_MEMORY);
    if (!decoded || (cast && !r->raw) || (!r->whole && !r->tile)) {
        rc = fc_no_memory(err, checkpoint->path);
        goto out;
    }
    rc = fc_source_new(checkpoint, decoded, FC_SCRATCH_BYTES, FC_OPEN_FILES, &r->source, err);
    if (rc == FC_OK) {
        fc_source_check_objects(r->source);
        fc_source_watch(r->source, r->crc, true);
        rc = read_tiles(r, box, err);
    }
out:
    fc_source_free(r->source);
    fc_decoded_free(decoded);
    fc_coverage_free(r->coverage);
    free(r->raw);
    free(r->tile);
    return rc;
}

/* A tensor that is read whole is compared with what is recorded of it. */
static fc_code read_checked(const fc_checkpoint *checkpoint, reading *r, const fc_box *box, fc_error *err) {
    const fc_tensor *tensor = r->tensor;
    if (tensor->ndim > 0 && memcmp(box->sizes, tensor->shape, (size_t)tensor->ndim * sizeof *box->sizes) != 0) {
        return read_box(checkpoint, r, box, err);
    }
    fc_code rc;
    FC_TRY_GOTO(fc_source_crc_new(checkpoint, tensor, 1, &r->crc, err), rc, out);
    FC_TRY_GOTO(read_box(checkpoint, r, box, err), rc, out);
    rc = fc_source_crc_check(r->crc, NULL, err);
out:
    fc_source_crc_free(r->crc);
    return rc;
}

fc_code fc_read_box(const fc_checkpoint *checkpoint, const fc_tensor *tensor, const fc_box *box, fc_dtype dtype,
                    void *buf, fc_error *err) {
    reading r = {.tensor = tensor, .dtype = dtype, .whole = buf};
    return read_checked(checkpoint, &r, box, err);
}

fc_code fc_read_piece(const fc_checkpoint *checkpoint, const fc_tensor *tensor, const fc_box *box, fc_dtype dtype,
                      void *buf, fc_source_crc *crc, fc_error *err) {
    reading r = {.tensor = tensor, .dtype = dtype, .whole = buf, .crc = crc};
    return read_box(checkpoint, &r, box, err);
}

fc_code fc_read_stream(const fc_checkpoint *checkpoint, const fc_tensor *tensor, const fc_box *box, fc_dtype dtype,
                       fc_read_visit *visit, void *context, fc_error *err) {
    reading r = {.tensor = tensor, .dtype = dtype, .visit = visit, .context = context};
    return read_checked(checkpoint, &r, box, err);
}
