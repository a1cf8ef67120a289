/*
 * Computes digests while bytes are moved: what a tile, still in the processor's cache, adds to the digests of its item
 * and of its tensor. The digests are sums of bare CRCs (base/crc.h), so the order of the tiles does not matter.
 */
#pragma once

#include "fsdpckpt/select.h"

/** What one tile adds. All zero: nothing. */
typedef struct fc_tile_digest {
    uint64_t item, tensor;
    uint32_t item32; /**< CRC-32 of the item */
} fc_tile_digest;

/** The sums of a target item. Guarded by its owner's lock. */
typedef struct fc_item_digest {
    fc_target_item *item;
    uint64_t *tensor; /**< sum of the whole tensor; NULL when this item is a replica and does not count */
    uint64_t sum;
    uint32_t sum32;
} fc_item_digest;

/** Starts an item with empty sums. @param digests one sum per target tensor (fc_move_options.digests), or NULL. */
void fc_item_digest_begin(fc_item_digest *digest, fc_target_item *item, const fc_target_file *file, uint64_t *digests);

void fc_item_digest_add(fc_item_digest *digest, const fc_tile_digest *tile);

/** Sets the item's CRCs once all its tiles are added. */
void fc_item_digest_end(const fc_item_digest *digest, const fc_target *target, bool crc32);

/**
 * Computes the digests of a tile.
 * @param tile a box of the tensor and of the item. If `crc32`, it must be contiguous in the row-major order of the
 * item.
 * @param bytes its elements in the target's dtype.
 */
fc_code fc_tile_digest_make(const fc_target_tensor *target, const fc_target_item *item, const fc_box *tile,
                            const unsigned char *bytes, bool crc32, fc_tile_digest *out, fc_error *err);

/**
 * Computes what a box of `tensor` adds to the sum of the whole tensor. `bytes` are its elements in the tensor's own
 * dtype, in row-major order.
 */
fc_code fc_box_digest_make(const fc_tensor *tensor, const fc_box *box, const unsigned char *bytes, uint64_t *out,
                           fc_error *err);

/**
 * The digests of a box of equal elements, which are not written out, in time that does not depend on their number.
 * @param item may be NULL: only the sum of the tensor is computed
 * @param element fc_dtype_size(tensor->dtype) bytes
 */
fc_tile_digest fc_repeat_digest(const fc_tensor *tensor, const fc_target_item *item, const fc_box *box,
                                const unsigned char *element);
