/*
 * Reading one box into memory: what inspect, extract and diff use. The same source as the engine's, without threads.
 */
#include "fsdpckpt/move.h"

#include "move/source.h"
#include "move/tuning.h"

#include <stdlib.h>

/* Fills `buf` with the box; without a cast the tiles are read straight to their place. */
static fc_code read_tiles(fc_source *source, const fc_coverage *coverage, const fc_tensor *tensor, const fc_box *box,
                          fc_dtype dtype, unsigned char *buf, unsigned char *tile_buf, fc_error *err) {
    uint32_t size = fc_dtype_size(tensor->dtype), target_size = fc_dtype_size(dtype);
    fc_tiles tiles;
    fc_tiles_begin(&tiles, box, FC_TILE_BYTES / size, 1);
    fc_tile tile;
    while (fc_tiles_next(&tiles, &tile)) {
        fc_box part = {box->ndim, tile.offsets, tile.sizes};
        unsigned char *to = buf + (size_t)tile.start * target_size;
        fc_code rc = fc_source_fill(source, coverage, tensor, &part, tile_buf ? tile_buf : to, err);
        if (rc != FC_OK) {
            return rc;
        }
        if (tile_buf) {
            fc_cast(tensor->dtype, tile_buf, dtype, to, (size_t)tile.count);
        }
    }
    return FC_OK;
}

fc_code fc_read_box(const fc_checkpoint *checkpoint, const fc_tensor *tensor, const fc_box *box, fc_dtype dtype,
                    void *buf, fc_error *err) {
    fc_source *source = NULL;
    fc_decoded *decoded = NULL;
    fc_coverage *coverage = NULL;
    unsigned char *tile = NULL;
    bool cast = dtype != tensor->dtype;
    if (cast && (fc_dtype_get(dtype)->cls != FC_CLASS_FLOAT || fc_dtype_get(tensor->dtype)->cls != FC_CLASS_FLOAT)) {
        return fc_fail(err, FC_EUSAGE, "tensor %s: %s cannot be read as %s", tensor->name,
                       fc_dtype_get(tensor->dtype)->torch_name, fc_dtype_get(dtype)->torch_name);
    }
    fc_code rc = fc_coverage_within(checkpoint, tensor, box, &coverage, err);
    if (rc != FC_OK || fc_box_volume(box) == 0) {
        goto out;
    }
    tile = cast ? malloc(FC_TILE_BYTES) : NULL;
    decoded = fc_decoded_new(FC_DEFAULT_MEMORY);
    if (!decoded || (cast && !tile)) {
        rc = fc_fail(err, FC_ENOMEM, "%s: out of memory", checkpoint->path);
        goto out;
    }
    rc = fc_source_new(checkpoint, decoded, FC_SCRATCH_BYTES, FC_OPEN_FILES, &source, err);
    if (rc == FC_OK) {
        rc = read_tiles(source, coverage, tensor, box, dtype, buf, tile, err);
    }
out:
    fc_source_free(source);
    fc_decoded_free(decoded);
    fc_coverage_free(coverage);
    free(tile);
    return rc;
}
