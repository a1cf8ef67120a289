/*
 * Digests while the bytes are moved: what a tile, still in the cache, adds to the digests of its item and of its
 * tensor. Sums of bare CRCs (core/crc.h), so tiles come in any order.
 */
#ifndef FSDPCKPT_ENGINE_TILE_DIGEST_H
#define FSDPCKPT_ENGINE_TILE_DIGEST_H

#ifndef FSDPCKPT_PRIVATE
#error "this header is private to fsdpckpt: include <fsdpckpt/...> instead"
#endif

#include "fsdpckpt/select.h"

/** What one tile adds. All 0: nothing. */
typedef struct fc_tile_digest {
    uint64_t item, tensor;
    uint32_t item32; /**< CRC-32 */
} fc_tile_digest;

/** The sums of an item. Guarded by the lock of whoever owns it. */
typedef struct fc_item_digest {
    fc_target_item *item;
    uint64_t *tensor; /**< sum of the whole tensor; NULL: this item does not count for it */
    uint64_t sum;
    uint32_t sum32;
} fc_item_digest;

/** @param digests sums of wanted->tensors, see fc_move_options.digests; or NULL. */
void fc_item_digest_begin(fc_item_digest *digest, fc_target_item *item, const fc_target_file *file, uint64_t *digests);

void fc_item_digest_add(fc_item_digest *digest, const fc_tile_digest *tile);

/** Sets the item's CRCs, when all its tiles are added. */
void fc_item_digest_end(const fc_item_digest *digest, const fc_target *target, bool crc32);

/**
 * The digests of a tile.
 * @param tile  a box of the tensor that is contiguous in the row-major order of the item: its offsets and sizes count.
 * @param bytes its elements in the target's type.
 */
fc_code fc_tile_digest_make(const fc_target_tensor *target, const fc_target_item *item, const fc_box *tile,
                            const unsigned char *bytes, bool crc32, fc_tile_digest *out, fc_error *err);

/** What a box of `tensor`, whose elements of its own type lie at `bytes` in row-major order, adds to the sum of all. */
fc_code fc_box_digest_make(const fc_tensor *tensor, const fc_box *box, const unsigned char *bytes, uint64_t *out,
                           fc_error *err);

#endif
