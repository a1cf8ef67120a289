/*
 * Walks the chunks of a target file in the order of writing. See chunks.h.
 */
#include "engine/chunks.h"

#include "base/try.h"
#include "engine/queue.h"
#include "plan/box_text.h"

#include <stdlib.h>
#include <string.h>

static int by_offset(const void *a, const void *b) {
    const fc_target_item *x = *(const fc_target_item *const *)a, *y = *(const fc_target_item *const *)b;
    return (x->offset > y->offset) - (x->offset < y->offset);
}

fc_code fc_chunks_init(fc_chunks *chunks, const fc_target *target, const fc_target_file *file, int longest_run,
                       fc_error *err) {
    memset(chunks, 0, sizeof *chunks);
    chunks->target = target;
    chunks->file = file;
    chunks->longest_run = longest_run < 1 ? 1 : longest_run > FC_RUN_CHUNKS ? FC_RUN_CHUNKS : longest_run;
    chunks->items = calloc(file->nitems + 1, sizeof *chunks->items);
    if (!chunks->items) {
        return fc_no_memory(err, file->path);
    }
    for (size_t i = 0; i < file->nitems; i++) {
        if (file->items[i].chunk) {
            chunks->items[chunks->nitems++] = &file->items[i];
        }
    }
    qsort(chunks->items, chunks->nitems, sizeof *chunks->items, by_offset);
    return FC_OK;
}

static void drop(fc_chunked_item *of) {
    if (of && --of->users == 0) {
        fc_item_digest_end(&of->digest, of->chunks->target, of->chunks->crc32);
        fc_coverage_free(of->coverage);
        free(of);
    }
}

void fc_chunks_destroy(fc_chunks *chunks) {
    drop(chunks->current);
    free(chunks->items);
}

void fc_chunks_give_back(fc_chunk_job *job) {
    if (job->of) {
        fc_item_digest_add(&job->of->digest, &job->digest);
    }
    drop(job->of);
    job->of = NULL;
}

static fc_code open_next(fc_chunks *chunks, fc_error *err) {
    fc_target_item *item = chunks->items[chunks->next++];
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
        return fc_fail(err, FC_ENOMEM, "tensor %s: out of memory", target->name);
    }
    *of = (fc_chunked_item){.item = item, .target = target, .coverage = coverage, .chunks = chunks, .users = 1};
    fc_item_digest_begin(&of->digest, item, chunks->file, chunks->digests);
    chunks->current = of;
    chunks->run = fc_gains_from_large_tiles(chunks->target->source, tensor) ? chunks->longest_run : 1;
    memset(chunks->start, 0, sizeof chunks->start);
    return FC_OK;
}

/* Hands out the next chunk of the current item, and closes the item after its last chunk. */
static void take_one(fc_chunks *chunks, fc_chunk_job *job) {
    fc_chunked_item *of = chunks->current;
    const fc_target_item *item = of->item;
    const int ndim = of->target->source->ndim;
    const int64_t *sizes = item->dims + ndim;
    job->of = of;
    job->number = chunks->number++;
    job->digest = (fc_tile_digest){0, 0, 0};
    of->users++;
    for (int d = 0; d < ndim; d++) {
        int64_t left = sizes[d] - chunks->start[d];
        job->start[d] = chunks->start[d];
        job->offset[d] = item->dims[d] + chunks->start[d];
        job->sizes[d] = left < item->chunk[d] ? left : item->chunk[d];
    }
    int d = ndim - 1;
    for (; d >= 0; d--) {
        chunks->start[d] += item->chunk[d];
        if (chunks->start[d] < sizes[d]) {
            break;
        }
        chunks->start[d] = 0;
    }
    if (d < 0) {
        drop(of);
        chunks->current = NULL;
    }
}

fc_code fc_chunks_take(fc_chunks *chunks, fc_chunk_job *jobs, int *count, fc_error *err) {
    *count = 0;
    if (!chunks->current) {
        if (chunks->next == chunks->nitems) {
            return FC_OK;
        }
        FC_TRY(open_next(chunks, err));
    }
    do {
        take_one(chunks, &jobs[(*count)++]);
    } while (chunks->current && *count < chunks->run);
    return FC_OK;
}

size_t fc_chunk_bytes(const fc_target *target, const fc_target_item *item, uint32_t element) {
    size_t bytes = element;
    for (int d = 0; d < target->tensors[item->tensor].source->ndim; d++) {
        bytes *= (size_t)item->chunk[d]; /* at most FC_CHUNK_BYTES in the target's dtype, see fc_target_chunk */
    }
    return bytes;
}
