/*
 * The queue of tiles. A single mutex is enough: taking a tile costs nothing compared with copying its megabyte.
 */
#include "move/queue.h"

#include "move/resume.h"

#include "base/checked.h"
#include "fsdpckpt/order.h"
#include "fsdpckpt/try.h"
#include "io/output.h"
#include "plan/box_text.h"
#include "plan/tiles.h"
#include "read/stored_chunk.h"

#include <stdlib.h>
#include <string.h>

void fc_queue_init(fc_queue *queue, const fc_target *target, const fc_target_file *file, size_t tile_bytes,
                   size_t large_tile_bytes) {
    memset(queue, 0, sizeof *queue);
    pthread_mutex_init(&queue->lock, NULL);
    queue->target = target;
    queue->file = file;
    queue->tile_bytes = tile_bytes;
    queue->large_tile_bytes = large_tile_bytes;
    queue->end = UINT64_MAX;
}

/* Lists an item whose bytes are all written. */
static void list_complete(fc_queue *queue, fc_active_item *active) {
    active->next = queue->complete;
    queue->complete = active;
}

static void drop_active_item(fc_queue *queue, fc_active_item *active) {
    if (--active->users > 0) {
        return;
    }
    fc_item_digest_end(&active->digest, queue->target, queue->crc32);
    fc_coverage_free(active->coverage);
    if (queue->lists_complete && !active->failed) {
        list_complete(queue, active);
    } else {
        free(active);
    }
}

void fc_queue_destroy(fc_queue *queue) {
    if (queue->current) {
        queue->current->failed = true;
        drop_active_item(queue, queue->current);
    }
    while (fc_queue_take_complete(queue)) {
    }
    free(queue->order);
    pthread_mutex_destroy(&queue->lock);
}

static int compare_offsets(const void *a, const void *b) {
    const fc_target_item *x = *(fc_target_item *const *)a, *y = *(fc_target_item *const *)b;
    return FC_ORDER(x->offset, y->offset);
}

fc_code fc_queue_by_offset(fc_queue *queue, fc_error *err) {
    const fc_target_file *file = queue->file;
    queue->order = calloc(file->nitems + 1, sizeof *queue->order);
    FC_NEED(queue->order, err, file->path);
    for (size_t i = 0; i < file->nitems; i++) {
        queue->order[i] = &file->items[i];
    }
    fc_sort_items(queue->order, file->nitems, sizeof(fc_target_item *), compare_offsets);
    return FC_OK;
}

static fc_target_item *next_item(const fc_queue *queue) {
    return queue->order ? queue->order[queue->next] : &queue->file->items[queue->next];
}

static fc_box item_box(const fc_target_item *item, const fc_tensor *tensor) {
    fc_box box = {tensor->ndim, item->dims, item->dims + tensor->ndim};
    return box;
}

/* A tile moves no more than its size. So what a run that dies has moved in vain is bounded, too. */
uint64_t fc_moved_per_element(const fc_target *target, const fc_target_tensor *tensor) {
    const uint64_t read = fc_bytes_read_per_element(target->source, tensor->source);
    const uint64_t written = fc_dtype_size(tensor->dtype);
    return read > written ? read : written;
}

/* Returns the bytes per element in the wider of the source's and target's dtypes: both must fit a tile's buffer. */
static uint32_t element_size(const fc_target_tensor *target) {
    uint32_t a = fc_dtype_size(target->source->dtype), b = fc_dtype_size(target->dtype);
    return a > b ? a : b;
}

/* Returns whether an item is stored contiguously in this file and has elements. */
static bool has_bytes(const fc_queue *queue, const fc_target_item *item) {
    if (!item->owned || item->chunk) {
        return false;
    }
    fc_box box = item_box(item, queue->target->tensors[item->tensor].source);
    return fc_box_volume(&box) > 0;
}

/* Returns the data bytes of an item. An overflow gives the largest number; check_item rejects the item later. */
static uint64_t item_bytes(const fc_queue *queue, const fc_target_item *item) {
    const fc_target_tensor *target = &queue->target->tensors[item->tensor];
    fc_box box = item_box(item, target->source);
    int64_t bytes;
    return fc_mul_i64(fc_box_volume(&box), fc_dtype_size(target->dtype), &bytes) ? (uint64_t)bytes : INT64_MAX;
}

/*
 * Returns where the bound `at` of a share falls within the item of `bytes` bytes at the queue's position. It is rounded
 * down to a multiple of FC_SHARE_BYTES, so that small items stay whole and tiles begin at the disk's blocks.
 */
static uint64_t bound_within(const fc_queue *queue, uint64_t at, uint64_t bytes) {
    if (at <= queue->position) {
        return 0;
    }
    uint64_t inside = at - queue->position;
    return inside >= bytes ? bytes : inside / FC_SHARE_BYTES * FC_SHARE_BYTES;
}

void fc_queue_share(fc_queue *queue, uint32_t share, uint32_t shares) {
    uint64_t total = 0;
    for (size_t i = 0; i < queue->file->nitems; i++) {
        fc_target_item *item = &queue->file->items[i];
        if (has_bytes(queue, item)) {
            fc_item_digest none = {.item = item};
            fc_item_digest_end(&none, queue->target, queue->crc32);
            uint64_t bytes = item_bytes(queue, item);
            total = total + bytes < total ? UINT64_MAX : total + bytes;
        }
    }
    /* The product of both numbers needs 128 bits: a target file may have petabytes. */
    queue->first = (uint64_t)((unsigned __int128)total * share / shares);
    queue->end = share + 1 == shares ? UINT64_MAX : (uint64_t)((unsigned __int128)total * (share + 1) / shares);
}

/* Advances to the next item in which this process moves bytes [*first, *end). Returns false at the end. */
static bool find_next(fc_queue *queue, uint64_t *first, uint64_t *end) {
    const fc_target_file *file = queue->file;
    for (; queue->next < file->nitems && queue->position < queue->end; queue->next++) {
        const fc_target_item *item = next_item(queue);
        if (!has_bytes(queue, item)) {
            continue;
        }
        uint64_t bytes = item_bytes(queue, item);
        *first = bound_within(queue, queue->first, bytes);
        *end = bound_within(queue, queue->end, bytes);
        queue->position += bytes;
        if (*first < *end) {
            return true;
        }
    }
    return false;
}

static fc_code check_item(const fc_target_tensor *target, const fc_box *box, uint64_t offset, fc_error *err) {
    const fc_tensor *tensor = target->source;
    if (!fc_box_within(box, tensor->shape)) {
        return fc_fail(err, FC_EUSAGE, "tensor %s: the box %s is outside the tensor", target->name,
                       fc_box_to_text(box).s);
    }
    if (target->dtype != tensor->dtype &&
        (fc_dtype_get(target->dtype)->cls != FC_CLASS_FLOAT || fc_dtype_get(tensor->dtype)->cls != FC_CLASS_FLOAT)) {
        return fc_fail(err, FC_EUSAGE, "tensor %s: converting %s to %s is not supported", target->name,
                       fc_dtype_get(tensor->dtype)->torch_name, fc_dtype_get(target->dtype)->torch_name);
    }
    int64_t bytes;
    uint64_t end;
    if (!fc_mul_i64(fc_box_volume(box), element_size(target), &bytes) || !fc_add_u64(offset, (uint64_t)bytes, &end) ||
        end > INT64_MAX) {
        return fc_fail(err, FC_ECORRUPT, "tensor %s: %s elements of %s are too many for a file", target->name,
                       fc_box_to_text(box).s, fc_dtype_get(target->dtype)->torch_name);
    }
    return FC_OK;
}

/*
 * Decides how the current item is divided into tiles. If the item does not start at a block boundary (as in archives),
 * no tile of whole rows does, and each would have a head and a tail to write through the page cache. A batch is then a
 * run of a few tiles from one block boundary to another. Tensors that gain from large tiles keep those: they are rare,
 * and are not divided within rows.
 */
static void divide_item(fc_queue *queue, const fc_box *box, uint64_t first, uint64_t end) {
    const fc_target_item *item = queue->current->item;
    const fc_target_tensor *target = &queue->target->tensors[item->tensor];
    const uint64_t element = fc_moved_per_element(queue->target, target);
    uint32_t size = fc_dtype_size(target->dtype);
    size_t bytes = queue->tile_bytes;
    bool large = (uint64_t)fc_box_volume(box) > bytes / element &&
                 fc_gains_from_large_tiles(queue->target->source, target->source);
    bool aligned = item->offset % FC_OUTPUT_BLOCK == 0;
    int64_t block = aligned && FC_OUTPUT_BLOCK % size == 0 ? FC_OUTPUT_BLOCK / size : 1;
    fc_tiles_begin(&queue->tiles, box, (int64_t)((large ? queue->large_tile_bytes : bytes) / element), block);
    if (large && fc_is_computed(queue->target->source, target->source)) {
        fc_tiles_within_chunks(&queue->tiles, target->source->chunks[0].dims + target->source->ndim);
    }
    fc_tiles_only(&queue->tiles, (int64_t)(first / size), (int64_t)(end / size));
    queue->item_end = queue->tiles.total;
    bool runs = !aligned && !large && item->offset % size == 0 && FC_OUTPUT_BLOCK % size == 0;
    queue->run = runs && queue->tiles.limit >= 2 * FC_OUTPUT_BLOCK / (int64_t)size ? queue->tiles.limit : 0;
}

/*
 * Returns where the run that begins with the next tile ends: at a block boundary of the file, or at the item's end,
 * with which a last part of less than a block is merged.
 */
static int64_t end_of_run(const fc_queue *queue) {
    const fc_active_item *active = queue->current;
    uint32_t size = fc_dtype_size(active->dtype);
    int64_t next = queue->tiles.next, block = FC_OUTPUT_BLOCK / size;
    if (queue->item_end - next <= queue->run) {
        return queue->item_end;
    }
    int64_t end = next + queue->run;
    end -= (int64_t)((active->item->offset + (uint64_t)end * size) % FC_OUTPUT_BLOCK / size);
    return queue->item_end - end < block ? queue->item_end : end;
}

/* Finds the first elements from `from` on that are not finished, and divides them into tiles. @return false if there
 * are none. */
static bool divide_gap(fc_queue *queue, int64_t from) {
    const fc_target_item *item = queue->current->item;
    const uint32_t size = fc_dtype_size(queue->current->dtype);
    const fc_box box = item_box(item, queue->current->tensor);
    int64_t end = fc_box_volume(&box);
    for (size_t i = 0; i < queue->ndone && from >= 0; i++) {
        const fc_done_tiles *t = &queue->done[i];
        if (t->start > from) {
            end = t->start;
            break;
        }
        from = t->start + t->count > from ? t->start + t->count : from;
    }
    if (from >= end) {
        return false;
    }
    divide_item(queue, &box, (uint64_t)from * size, (uint64_t)end * size);
    return true;
}

/* Finds the finished tiles of an item, and adds their digests. @return whether no other is left. */
static bool take_done(fc_queue *queue, fc_target_item *item, const fc_box *box) {
    fc_item_digest digest;
    int64_t elements = 0;
    queue->ndone = 0;
    if (!queue->resume) {
        return false;
    }
    queue->done = fc_resume_done(queue->resume, (size_t)(item - queue->file->items), &queue->ndone);
    for (size_t i = 0; i < queue->ndone; i++) {
        elements += queue->done[i].count; /* these were checked */
    }
    if (elements < fc_box_volume(box)) {
        return false;
    }
    fc_item_digest_begin(&digest, item, queue->file, queue->digests);
    for (size_t i = 0; i < queue->ndone; i++) {
        fc_item_digest_add(&digest, &queue->done[i].digest);
    }
    fc_item_digest_end(&digest, queue->target, queue->crc32);
    return true;
}

/* Lists an item that an earlier run has written. */
static fc_code list_done(fc_queue *queue, const fc_target_item *item, fc_error *err) {
    if (queue->lists_complete) {
        fc_active_item *active = calloc(1, sizeof *active);
        FC_NEED(active, err, queue->file->path);
        active->item = item;
        list_complete(queue, active);
    }
    return FC_OK;
}

/* Makes the next item with bytes the current one. queue->current stays NULL at the end. */
static fc_code open_next(fc_queue *queue, fc_error *err) {
    const fc_target_file *file = queue->file;
    const fc_target_tensor *target;
    fc_target_item *item;
    uint64_t first, end;
    fc_box box;
    for (;;) {
        if (!find_next(queue, &first, &end)) {
            return FC_OK;
        }
        item = next_item(queue);
        queue->next++;
        target = &queue->target->tensors[item->tensor];
        box = item_box(item, target->source);
        FC_TRY(check_item(target, &box, item->offset, err));
        if (!take_done(queue, item, &box)) {
            break;
        }
        FC_TRY(list_done(queue, item, err));
    }
    fc_coverage *coverage;
    FC_TRY(fc_coverage_within(queue->target->source, target->source, &box, &coverage, err));
    fc_active_item *active = malloc(sizeof *active);
    if (!active) {
        fc_coverage_free(coverage);
        return fc_no_memory(err, target->name);
    }
    *active = (fc_active_item){
        .tensor = target->source, .item = item, .dtype = target->dtype, .coverage = coverage, .users = 1};
    active->moved = fc_moved_per_element(queue->target, target);
    fc_item_digest_begin(&active->digest, item, file, queue->digests);
    queue->current = active;
    for (size_t i = 0; i < queue->ndone; i++) {
        fc_item_digest_add(&active->digest, &queue->done[i].digest);
    }
    if (queue->ndone > 0) {
        (void)divide_gap(queue, 0);
    } else {
        divide_item(queue, &box, first, end);
    }
    return FC_OK;
}

/* Adds the next tile of the current item to the batch, and closes the item after its last tile. */
static void add_tile(fc_queue *queue, fc_batch *batch) {
    fc_active_item *active = queue->current;
    fc_tile tile;
    if (!fc_tiles_next(&queue->tiles, &tile)) {
        return;
    }
    uint32_t size = fc_dtype_size(active->dtype);
    batch->tiles[batch->count].active = active;
    batch->tiles[batch->count].tile = tile;
    batch->tiles[batch->count].offset = active->item->offset + (uint64_t)tile.start * size;
    batch->tiles[batch->count].size = (size_t)tile.count * size;
    batch->tiles[batch->count].digest = (fc_tile_digest){0, 0, 0};
    batch->count++;
    active->users++;
    if (queue->tiles.next >= queue->item_end && !(queue->ndone > 0 && divide_gap(queue, queue->item_end))) {
        drop_active_item(queue, active);
        queue->current = NULL;
    }
}

/* Adds one tile of the current item, or all tiles up to the end of a run. */
static void add_run(fc_queue *queue, fc_batch *batch) {
    if (queue->run == 0) {
        add_tile(queue, batch);
        return;
    }
    const int64_t item_end = queue->item_end;
    queue->tiles.total = end_of_run(queue);
    while (queue->current && queue->item_end == item_end && queue->tiles.next < queue->tiles.total &&
           batch->count < FC_BATCH_TILES) {
        add_tile(queue, batch);
    }
}

/* Returns whether the next item as a whole fits the `room` left in a batch. */
static bool next_fits(const fc_queue *queue, size_t room) {
    if (queue->next >= queue->file->nitems) {
        return false;
    }
    const fc_target_item *item = next_item(queue);
    const fc_target_tensor *target = &queue->target->tensors[item->tensor];
    fc_box box = item_box(item, target->source);
    return (uint64_t)fc_box_volume(&box) <= room / fc_moved_per_element(queue->target, target);
}

static fc_code fill_batch(fc_queue *queue, fc_batch *batch, fc_error *err) {
    size_t room = queue->tile_bytes;
    while (batch->count < FC_BATCH_TILES) {
        if (!queue->current && (batch->count == 0 || next_fits(queue, room))) {
            FC_TRY(open_next(queue, err));
        }
        if (!queue->current) {
            return FC_OK;
        }
        /* Items may have been skipped, so the opened one can exceed `room`. It then waits for the next batch. */
        const uint64_t element =
            fc_moved_per_element(queue->target, &queue->target->tensors[queue->current->item->tensor]);
        bool whole = queue->tiles.next == 0 && (uint64_t)queue->item_end <= room / element;
        if (!whole && batch->count > 0) {
            return FC_OK;
        }
        const size_t bytes = (size_t)queue->item_end * (size_t)element;
        add_run(queue, batch);
        if (!whole) {
            return FC_OK;
        }
        room -= bytes;
    }
    return FC_OK;
}

fc_code fc_queue_take(fc_queue *queue, fc_batch *batch, fc_error *err) {
    batch->count = 0;
    pthread_mutex_lock(&queue->lock);
    fc_code rc = fill_batch(queue, batch, err);
    pthread_mutex_unlock(&queue->lock);
    if (rc != FC_OK) {
        fc_queue_give_back(queue, batch, false);
    }
    return rc;
}

void fc_queue_give_back(fc_queue *queue, fc_batch *batch, bool moved) {
    pthread_mutex_lock(&queue->lock);
    for (int i = 0; i < batch->count; i++) {
        fc_active_item *active = batch->tiles[i].active;
        fc_item_digest_add(&active->digest, &batch->tiles[i].digest);
        active->failed |= !moved;
        drop_active_item(queue, active);
    }
    pthread_mutex_unlock(&queue->lock);
    batch->count = 0;
}

const fc_target_item *fc_queue_take_complete(fc_queue *queue) {
    pthread_mutex_lock(&queue->lock);
    fc_active_item *active = queue->complete;
    const fc_target_item *item = active ? active->item : NULL;
    queue->complete = active ? active->next : NULL;
    pthread_mutex_unlock(&queue->lock);
    free(active);
    return item;
}
