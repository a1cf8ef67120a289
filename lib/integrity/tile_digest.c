/*
 * Computes the digests of tiles. A tile that is moved is contiguous in its item. If it is also contiguous in the whole
 * tensor, one CRC gives both digests. Otherwise it is a nest of runs at constant distances (a block of columns: one run
 * per row), and both digests follow from the CRCs of the runs by Horner's rule. Each byte is read only once.
 */
#include "integrity/tile_digest.h"

#include "base/crc.h"
#include "codec/strided.h"

/* A walk over the runs of a tile. */
typedef struct runs {
    fc_strided in_tensor;              /* src: distances in the tensor, dst: in the tile */
    fc_crc64_factor unit;              /* a run's length */
    fc_crc64_factor axes[FC_MAX_DIMS]; /* the distances in the tensor */
    const unsigned char *bytes;        /* of the next run */
    uint64_t item;                     /* sum of all runs so far, as they follow each other in the item */
} runs;

void fc_item_digest_begin(fc_item_digest *digest, fc_target_item *item, const fc_target_file *file, uint64_t *digests) {
    bool counts = digests && item->owner == file->rank;
    *digest = (fc_item_digest){item, counts ? &digests[item->tensor] : NULL, 0, 0};
}

void fc_item_digest_add(fc_item_digest *digest, const fc_tile_digest *tile) {
    digest->sum ^= tile->item;
    digest->sum32 ^= tile->item32;
    if (digest->tensor) {
        *digest->tensor ^= tile->tensor;
    }
}

void fc_item_digest_end(const fc_item_digest *digest, const fc_target *target, bool crc32) {
    uint64_t bytes = fc_target_item_bytes(target, digest->item);
    digest->item->crc64 = fc_crc64_finish(digest->sum, bytes);
    digest->item->crc32 = crc32 ? fc_crc32_finish(digest->sum32, bytes) : 0;
}

/* Returns the sum of the runs of the axes from `axis` on. The recursion is as deep as the tensor has dimensions. */
static uint64_t sum_runs(runs *r, int axis) { /* NOLINT(misc-no-recursion) */
    if (axis == r->in_tensor.n) {
        uint64_t crc = fc_crc64_bare(r->bytes, (size_t)r->in_tensor.unit);
        r->item = fc_crc64_multiply(&r->unit, r->item) ^ crc;
        r->bytes += r->in_tensor.unit;
        return crc;
    }
    uint64_t sum = 0;
    for (int64_t i = 0; i < r->in_tensor.axes[axis].size; i++) {
        sum = fc_crc64_multiply(&r->axes[axis], sum) ^ sum_runs(r, axis + 1);
    }
    return sum;
}

/* Computes the sums of a tile as if it were the end of its item and of its tensor. */
static bool sum_tile(const fc_box *tile, const int64_t *strides, uint32_t element, const unsigned char *bytes,
                     fc_tile_digest *out) {
    runs r;
    int64_t own[FC_MAX_DIMS];
    if (!fc_row_major_strides(tile->ndim, tile->sizes, own) ||
        !fc_strided_make(&r.in_tensor, tile->ndim, tile->sizes, strides, own, element)) {
        return false;
    }
    if (r.in_tensor.n == 0) {
        out->item = out->tensor = fc_crc64_bare(bytes, (size_t)r.in_tensor.unit);
        return true;
    }
    fc_crc64_factor_init(&r.unit, (uint64_t)r.in_tensor.unit);
    for (int i = 0; i < r.in_tensor.n; i++) {
        fc_crc64_factor_init(&r.axes[i], (uint64_t)r.in_tensor.axes[i].src);
    }
    r.bytes = bytes;
    r.item = 0;
    out->tensor = sum_runs(&r, 0);
    out->item = r.item;
    return true;
}

/*
 * Returns the bytes after the last element of `tile` in the row-major order of a box that starts at `origin` (NULL: at
 * 0).
 */
static uint64_t bytes_after(const fc_box *tile, const int64_t *origin, const int64_t *sizes, uint32_t element) {
    uint64_t after = 0;
    for (int d = 0; d < tile->ndim; d++) {
        int64_t last = tile->offsets[d] + tile->sizes[d] - 1 - (origin ? origin[d] : 0);
        after = after * (uint64_t)sizes[d] + (uint64_t)(sizes[d] - 1 - last);
    }
    return after * element;
}

/*
 * Computes both sums of a tile that is not contiguous in its item: a part of a chunk of an HDF5 dataset of which other
 * chunks are not stored. Its bytes are summed twice.
 */
static bool sum_box(const fc_tensor *tensor, const fc_target_item *item, const fc_box *tile, const int64_t *strides,
                    uint32_t element, const unsigned char *bytes, fc_tile_digest *out) {
    int64_t in_item[FC_MAX_DIMS];
    fc_tile_digest again;
    if (!fc_row_major_strides(tensor->ndim, item->dims + tensor->ndim, in_item) ||
        !sum_tile(tile, strides, element, bytes, out) || !sum_tile(tile, in_item, element, bytes, &again)) {
        return false;
    }
    out->item = again.tensor;
    return true;
}

/* Whether a box is contiguous in the row-major order of a box of `sizes`. */
static bool is_contiguous(const fc_box *box, const int64_t *sizes) {
    int d = 0;
    while (d < box->ndim && box->sizes[d] == 1) {
        d++;
    }
    for (d++; d < box->ndim; d++) {
        if (box->sizes[d] != sizes[d]) {
            return false;
        }
    }
    return true;
}

fc_code fc_tile_digest_make(const fc_target_tensor *target, const fc_target_item *item, const fc_box *tile,
                            const unsigned char *bytes, bool crc32, fc_tile_digest *out, fc_error *err) {
    const fc_tensor *tensor = target->source;
    const uint32_t element = fc_dtype_size(target->dtype);
    const int64_t *sizes = item->dims + tensor->ndim;
    int64_t strides[FC_MAX_DIMS];
    *out = (fc_tile_digest){0, 0, 0};
    if (!fc_row_major_strides(tensor->ndim, tensor->shape, strides) ||
        !(is_contiguous(tile, sizes) ? sum_tile(tile, strides, element, bytes, out)
                                     : sum_box(tensor, item, tile, strides, element, bytes, out))) {
        return fc_fail(err, FC_ECORRUPT, "tensor %s: its size overflows", target->name);
    }
    uint64_t after = bytes_after(tile, item->dims, sizes, element);
    uint64_t after_in_tensor = bytes_after(tile, NULL, tensor->shape, element);
    bool same = out->item == out->tensor && after == after_in_tensor;
    out->item = fc_crc64_shift(out->item, after);
    out->tensor = same ? out->item : fc_crc64_shift(out->tensor, after_in_tensor);
    if (crc32) {
        size_t size = (size_t)fc_box_volume(tile) * element;
        out->item32 = fc_crc32_shift(fc_crc32_bare(bytes, size), after);
    }
    return FC_OK;
}

fc_code fc_box_digest_make(const fc_tensor *tensor, const fc_box *box, const unsigned char *bytes, uint64_t *out,
                           fc_error *err) {
    const uint32_t element = fc_dtype_size(tensor->dtype);
    int64_t strides[FC_MAX_DIMS];
    fc_tile_digest sums;
    if (!fc_row_major_strides(tensor->ndim, tensor->shape, strides) || !sum_tile(box, strides, element, bytes, &sums)) {
        return fc_fail(err, FC_ECORRUPT, "tensor %s: its size overflows", tensor->name);
    }
    *out = fc_crc64_shift(sums.tensor, bytes_after(box, NULL, tensor->shape, element));
    return FC_OK;
}

/* The sum of a box of elements with the CRC `crc` within a box that starts at `origin` (NULL: at 0). */
static uint64_t sum_repeated(uint64_t crc, const fc_box *box, const int64_t *origin, const int64_t *sizes,
                             uint32_t element) {
    uint64_t distance = element;
    for (int d = box->ndim - 1; d >= 0; d--) {
        crc = fc_crc64_repeat(crc, distance, (uint64_t)box->sizes[d]);
        distance *= (uint64_t)sizes[d]; /* a tensor with data has fewer than 2^63 bytes */
    }
    return fc_crc64_shift(crc, bytes_after(box, origin, sizes, element));
}

fc_tile_digest fc_repeat_digest(const fc_tensor *tensor, const fc_target_item *item, const fc_box *box,
                                const unsigned char *element) {
    const uint32_t size = fc_dtype_size(tensor->dtype);
    const uint64_t crc = fc_crc64_bare(element, size);
    fc_tile_digest out = {.tensor = sum_repeated(crc, box, NULL, tensor->shape, size)};
    if (item) {
        out.item = sum_repeated(crc, box, item->dims, item->dims + tensor->ndim, size);
    }
    return out;
}
