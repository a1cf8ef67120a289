/*
 * Walks the chunks of a target file in the order of writing. See chunks.h.
 */
#include "move/chunks.h"

#include "fsdpckpt/order.h"
#include "fsdpckpt/try.h"
#include "plan/box_text.h"
#include "read/stored_chunk.h"

#include <stdlib.h>
#include <string.h>

static int compare_item_offsets(const void *a, const void *b) {
    const fc_target_item *x = *(const fc_target_item *const *)a, *y = *(const fc_target_item *const *)b;
    return (x->offset > y->offset) - (x->offset < y->offset);
}

fc_code fc_chunk_walk_init(fc_chunk_walk *walk, const fc_target *target, const fc_target_file *file, fc_error *err) {
    *walk = (fc_chunk_walk){.target = target, .items = calloc(file->nitems + 1, sizeof *walk->items)};
    FC_NEED(walk->items, err, file->path);
    for (size_t i = 0; i < file->nitems; i++) {
        if (file->items[i].chunk) {
            walk->items[walk->nitems++] = &file->items[i];
        }
    }
    fc_sort_items(walk->items, walk->nitems, sizeof *walk->items, compare_item_offsets);
    return FC_OK;
}

void fc_chunk_walk_free(fc_chunk_walk *walk) {
    free(walk->items);
}

void fc_chunk_walk_step(fc_chunk_walk *walk) {
    const fc_target_item *item = walk->items[walk->next];
    const int ndim = walk->target->tensors[item->tensor].source->ndim;
    const int64_t *sizes = item->dims + ndim;
    walk->number++;
    for (int d = ndim - 1; d >= 0; d--) {
        walk->start[d] += item->chunk[d];
        if (walk->start[d] < sizes[d]) {
            return;
        }
        walk->start[d] = 0;
    }
    walk->next++;
}

uint64_t fc_chunk_count(const fc_target *target, const fc_target_item *item) {
    const int ndim = target->tensors[item->tensor].source->ndim;
    uint64_t count = 1;
    for (int d = 0; d < ndim; d++) { /* at most the number of elements, which fits */
        const int64_t size = item->dims[ndim + d];
        count *= size > 0 ? (uint64_t)((size - 1) / item->chunk[d] + 1) : 1;
    }
    return count;
}

fc_code fc_chunks_init(fc_chunks *chunks, const fc_target *target, const fc_target_file *file, int longest_run,
                       fc_error *err) {
    memset(chunks, 0, sizeof *chunks);
    chunks->target = target;
    chunks->file = file;
    chunks->longest_run = longest_run < 1 ? 1 : longest_run > FC_RUN_CHUNKS ? FC_RUN_CHUNKS : longest_run;
    return fc_chunk_walk_init(&chunks->walk, target, file, err);
}

static void drop_chunked_item(fc_chunked_item *of) {
    if (of && --of->users == 0) {
        fc_item_digest_end(&of->digest, of->chunks->target, of->chunks->crc32);
        fc_coverage_free(of->coverage);
        free(of);
    }
}

void fc_chunks_destroy(fc_chunks *chunks) {
    drop_chunked_item(chunks->current);
    fc_chunk_walk_free(&chunks->walk);
}

void fc_chunks_give_back(fc_chunk_job *job) {
    if (job->of) {
        fc_item_digest_add(&job->of->digest, &job->digest);
    }
    drop_chunked_item(job->of);
    job->of = NULL;
}

/* Opens the item of the next chunk. */
static fc_code open_item(fc_chunks *chunks, fc_error *err) {
    fc_target_item *item = chunks->walk.items[chunks->walk.next];
    const fc_target_tensor *target = &chunks->target->tensors[item->tensor];
    const fc_tensor *tensor = target->source;
    fc_box box = {tensor->ndim, item->dims, item->dims + tensor->ndim};
    if (!fc_box_within(&box, tensor->shape)) {
        return fc_fail(err, FC_EUSAGE, "tensor %s: the box %s is outside the tensor", target->name,
                       fc_box_to_text(&box).s);
    }
    fc_coverage *coverage;
    FC_TRY(fc_coverage_within(chunks->target->source, tensor, &box, &coverage, err));
    fc_chunked_item *of = malloc(sizeof *of);
    if (!of) {
        fc_coverage_free(coverage);
        return fc_no_memory(err, target->name);
    }
    *of = (fc_chunked_item){.item = item, .target = target, .coverage = coverage, .chunks = chunks, .users = 1};
    fc_item_digest_begin(&of->digest, item, chunks->file, chunks->digests);
    chunks->current = of;
    chunks->run = fc_gains_from_large_tiles(chunks->target->source, tensor) ? chunks->longest_run : 1;
    return FC_OK;
}

/* Goes to the next chunk, and closes the item after its last chunk. */
static void step_chunk(fc_chunks *chunks) {
    const size_t item = chunks->walk.next;
    fc_chunk_walk_step(&chunks->walk);
    if (chunks->walk.next != item) {
        drop_chunked_item(chunks->current);
        chunks->current = NULL;
    }
}

/* Hands out the next chunk of the current item. */
static void take_one(fc_chunks *chunks, fc_chunk_job *job) {
    fc_chunked_item *of = chunks->current;
    const fc_target_item *item = of->item;
    const int ndim = of->target->source->ndim;
    const int64_t *sizes = item->dims + ndim, *start = chunks->walk.start;
    job->of = of;
    job->number = chunks->taken++;
    job->digest = (fc_tile_digest){0, 0, 0};
    of->users++;
    for (int d = 0; d < ndim; d++) {
        int64_t left = sizes[d] - start[d];
        job->start[d] = start[d];
        job->offset[d] = item->dims[d] + start[d];
        job->sizes[d] = left < item->chunk[d] ? left : item->chunk[d];
    }
    step_chunk(chunks);
}

/* Whether this process compresses the next chunk. */
static bool is_mine(const fc_chunks *chunks) {
    return chunks->shares == 0 || chunks->walk.number / chunks->band % chunks->shares == chunks->share;
}

/* Whether this process compresses one of the next `count` chunks. */
static bool is_any_mine(const fc_chunks *chunks, uint64_t count) {
    const uint64_t number = chunks->walk.number, cycle = chunks->band * chunks->shares;
    const uint64_t next = number / cycle * cycle + chunks->share * chunks->band; /* the band of this cycle */
    return is_mine(chunks) || (next > number ? next : next + cycle) - number < count;
}

/* Passes over a chunk of another process, or over an item whose chunks all are. */
static void skip_chunks(fc_chunks *chunks) {
    fc_chunk_walk *walk = &chunks->walk;
    fc_target_item *item = walk->items[walk->next];
    const uint64_t count = fc_chunk_count(chunks->target, item);
    bool begins = !chunks->current;
    for (int d = 0; d < chunks->target->tensors[item->tensor].source->ndim; d++) {
        begins = begins && walk->start[d] == 0;
    }
    if (!begins || is_any_mine(chunks, count)) {
        step_chunk(chunks);
        return;
    }
    fc_item_digest none;
    fc_item_digest_begin(&none, item, chunks->file, NULL);
    fc_item_digest_end(&none, chunks->target, chunks->crc32);
    walk->number += count;
    walk->next++;
}

fc_code fc_chunks_take(fc_chunks *chunks, fc_chunk_job *jobs, int *count, fc_error *err) {
    *count = 0;
    while (*count == 0 && chunks->walk.next < chunks->walk.nitems) {
        if (!is_mine(chunks)) {
            skip_chunks(chunks);
            continue;
        }
        if (!chunks->current) {
            FC_TRY(open_item(chunks, err));
        }
        do {
            take_one(chunks, &jobs[(*count)++]);
        } while (chunks->current && *count < chunks->run && is_mine(chunks));
    }
    return FC_OK;
}

size_t fc_chunk_bytes(const fc_target *target, const fc_target_item *item, uint32_t element) {
    size_t bytes = element;
    for (int d = 0; d < target->tensors[item->tensor].source->ndim; d++) {
        bytes *= (size_t)item->chunk[d]; /* at most FC_CHUNK_BYTES in the target's dtype, see fc_target_chunk */
    }
    return bytes;
}
