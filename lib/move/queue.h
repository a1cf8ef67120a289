/*
 * The queue of tiles that the workers of one target file share. It hands out each tile once, with the proof that the
 * source covers it.
 */
#pragma once

#include "fsdpckpt/format.h"
#include "fsdpckpt/plan.h"
#include "integrity/tile_digest.h"
#include "plan/tiles.h"
#include "read/tuning.h"

#include <pthread.h>

/** A target item whose tiles are being moved. The last user frees it, or lists it as complete. */
typedef struct fc_active_item {
    const fc_tensor *tensor;
    const fc_target_item *item;
    fc_dtype dtype; /**< of the target */
    fc_coverage *coverage;
    fc_item_digest digest;
    uint64_t moved; /**< fc_moved_per_element */
    unsigned users;
    bool failed;                 /**< a tile of it was not moved */
    struct fc_active_item *next; /**< the next complete item */
} fc_active_item;

/**
 * Consecutive tiles of a target file: one large tile, a few tiles that end at a block boundary, or several small items.
 */
typedef struct fc_batch {
    struct {
        fc_active_item *active;
        fc_tile tile;
        uint64_t offset;       /**< bytes, in the target file */
        size_t size;           /**< bytes, in the target file */
        fc_tile_digest digest; /**< out: digests of the moved elements */
    } tiles[FC_BATCH_TILES];
    int count;
} fc_batch;

struct fc_done_tiles; /* tile_journal.h */
struct fc_resume;     /* resume.h */

typedef struct fc_queue {
    pthread_mutex_t lock;
    const fc_target *target;
    const fc_target_file *file;
    size_t tile_bytes;                /**< bytes per tile that are read or written, whichever are more */
    size_t large_tile_bytes;          /**< the same, for tensors that gain from large tiles */
    bool crc32;                       /**< see fc_move_options */
    uint64_t *digests;                /**< see fc_move_options; may be NULL */
    uint64_t first, end;              /**< bytes of the contiguous items, without gaps, that this process moves */
    uint64_t position;                /**< of item `next`, counted the same way */
    size_t next;                      /**< index of the next item */
    fc_target_item **order;           /**< the items in the order in which they are handed out; NULL: as in the file */
    fc_active_item *current;          /**< the item that still has tiles to hand out; NULL between items */
    fc_tiles tiles;                   /**< of current */
    int64_t item_end;                 /**< where this process stops within current, in elements */
    struct fc_resume *resume;         /**< knows tiles that are finished; may be NULL */
    const struct fc_done_tiles *done; /**< those of current, in order */
    size_t ndone;
    int64_t run;              /**< elements per batch of current that ends at a block boundary; 0: one tile per batch */
    bool lists_complete;      /**< whether items are listed when they are complete */
    fc_active_item *complete; /**< items whose bytes are all written, and whose digests are set */
} fc_queue;

void fc_queue_init(fc_queue *queue, const fc_target *target, const fc_target_file *file, size_t tile_bytes,
                   size_t large_tile_bytes);

/** Returns the bytes that are moved for an element: those that are read, unless more are written. */
uint64_t fc_moved_per_element(const fc_target *target, const fc_target_tensor *tensor);

/** Hands out the items in the order of their offsets. Cannot be combined with fc_queue_share or `resume`. */
fc_code fc_queue_by_offset(fc_queue *queue, fc_error *err);

/**
 * Restricts the queue to share number `share` of `shares`, divided by bytes. Resets the CRCs of all items to those of
 * no data, so that the shares' CRCs add up.
 */
void fc_queue_share(fc_queue *queue, uint32_t share, uint32_t shares);

/** Frees everything that is left, also after an error. No worker may hold a batch. */
void fc_queue_destroy(fc_queue *queue);

/** Takes the next batch. Sets batch->count to 0 when no tile is left. */
fc_code fc_queue_take(fc_queue *queue, fc_batch *batch, fc_error *err);

/** Returns a batch and adds its digests. Call it for every batch taken, also after a failure.
 *  @param moved whether all its tiles are written. */
void fc_queue_give_back(fc_queue *queue, fc_batch *batch, bool moved);

/** Takes an item off the list of complete ones. @return NULL if there is none. */
const fc_target_item *fc_queue_take_complete(fc_queue *queue);
