/*
 * Regions of equal elements, which are digested without being read. A dataset that was never written takes no room in
 * its file, so a small file can have terabytes of it.
 */
#include "verify/regions.h"

#include <string.h>

/* Whether a chunk is one element, repeated. */
static bool repeats_one(const fc_tensor *tensor, const fc_extent *extent) {
    bool repeats = extent->codec == FC_CODEC_INLINE && extent->length == fc_dtype_size(tensor->dtype) && !extent->swap;
    for (int d = 0; d < tensor->ndim && repeats; d++) {
        repeats = extent->strides[d] == 0;
    }
    return repeats;
}

/* The element that all chunks of a region repeat, or NULL. */
static const unsigned char *common_element(const fc_checkpoint *checkpoint, const fc_region *r) {
    const size_t first = (size_t)(r->own.chunks - r->tensor->chunks);
    const unsigned char *element = NULL;
    for (size_t i = 0; i < r->own.nchunks; i++) {
        fc_extent extent;
        if (fc_checkpoint_extent(checkpoint, r->tensor, first + i, &extent, NULL) != FC_OK ||
            !repeats_one(r->tensor, &extent)) {
            return NULL;
        }
        if (element && memcmp(element, extent.bytes, (size_t)extent.length) != 0) {
            return NULL;
        }
        element = extent.bytes;
    }
    return element;
}

bool fc_region_constant(const fc_checkpoint *checkpoint, const fc_region *r, fc_item_digest *digest) {
    const unsigned char *element = common_element(checkpoint, r);
    const fc_box box = {r->tensor->ndim, r->dims, r->dims + r->tensor->ndim};
    if (element) {
        const fc_tile_digest sums = fc_constant_digest(r->tensor, &box, element);
        fc_item_digest_add(digest, &sums);
    }
    return element != NULL;
}
