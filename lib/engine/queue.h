/*
 * The queue of tiles: what the workers of one part share. From the items of a part to batches of tiles, each handed out
 * once, together with the proof that the source covers what they need.
 */
#ifndef FSDPCKPT_ENGINE_QUEUE_H
#define FSDPCKPT_ENGINE_QUEUE_H

#ifndef FSDPCKPT_PRIVATE
#error "this header is private to fsdpckpt: include <fsdpckpt/...> instead"
#endif

#include "engine/tile_digest.h"
#include "engine/tuning.h"
#include "fsdpckpt/format.h"
#include "fsdpckpt/plan.h"

#include <pthread.h>

/** An item whose tiles are being moved. Freed when the last of them is given back. */
typedef struct fc_active {
    const fc_tensor *tensor;
    const fc_target_item *item;
    fc_dtype dtype; /**< of the target */
    fc_coverage *coverage;
    fc_item_digest digest;
    unsigned users;
} fc_active;

/** Consecutive tiles: one, the few of a run from block to block, or several whole small items. */
typedef struct fc_batch {
    struct {
        fc_active *active;
        fc_tile tile;
        uint64_t offset;       /**< bytes, in the target file */
        size_t size;           /**< bytes there */
        fc_tile_digest digest; /**< out: what was moved */
    } tiles[FC_BATCH_TILES];
    int count;
} fc_batch;

typedef struct fc_queue {
    pthread_mutex_t lock;
    const fc_target *target;
    const fc_target_file *file;
    size_t tile_bytes;       /**< of a tile in the larger of both types */
    size_t large_tile_bytes; /**< the same for tensors that gain from it */
    bool crc32;              /**< see fc_move_options */
    uint64_t *digests;       /**< see fc_move_options; may be NULL */
    uint64_t first, end;     /**< bytes of the part's contiguous items behind each other: what this process moves */
    uint64_t position;       /**< of item `next` among them */
    size_t next;             /**< item */
    fc_active *current;      /**< whose tiles are not all handed out; NULL between items */
    fc_tiles tiles;          /**< of current */
    int64_t item_end;        /**< elements of current up to the end of what is moved of it */
    int64_t run;             /**< elements of a batch of current that goes from block to block; 0: a tile each */
} fc_queue;

void fc_queue_init(fc_queue *queue, const fc_target *target, const fc_target_file *file, size_t tile_bytes,
                   size_t large_tile_bytes);

/** Leaves out all but part `share` of `shares`, by bytes; sets the CRCs of items of which nothing is moved here. */
void fc_queue_share(fc_queue *queue, uint32_t share, uint32_t shares);

/** Frees what is left, also after an error; no worker may hold a batch any more. */
void fc_queue_destroy(fc_queue *queue);

/** The next batch; batch->count is 0 when there is nothing left. */
fc_code fc_queue_take(fc_queue *queue, fc_batch *batch, fc_error *err);

/** Gives a batch back, moved or not, and adds up its digests. */
void fc_queue_give_back(fc_queue *queue, fc_batch *batch);

/** Whether the tensor's chunks must be decoded whole, or are not row-major. */
bool fc_gains_from_large_tiles(const fc_checkpoint *source, const fc_tensor *tensor);

#endif
