/*
 * Moves the contiguous items of one target file. The worker threads share only the queue of tiles, the cache of decoded
 * chunks and the first error.
 */
#include "fsdpckpt/move.h"

#include "base/checked.h"
#include "base/pages.h"
#include "fsdpckpt/cast.h"
#include "fsdpckpt/order.h"
#include "fsdpckpt/try.h"
#include "io/output.h"
#include "io/staged_objects.h"
#include "move/chunks.h"
#include "move/file.h"
#include "move/queue.h"
#include "move/resume.h"
#include "net/shared.h"
#include "plan/tiles.h"
#include "read/budget.h"
#include "read/source.h"
#include "read/threads.h"
#include "read/tuning.h"

#include <stdlib.h>

typedef struct engine {
    const fc_target *target;
    const fc_target_file *file;
    fc_writer *writer;     /* see fc_move_options; may be NULL */
    fc_progress *progress; /* may be NULL */
    fc_budget budget;
    struct fc_source_crc *recorded; /* see fc_move_options; may be NULL */
    bool casts;                     /* some item changes its dtype, so workers need a second buffer */
    bool cached;                    /* see fc_work_options */
    bool remote;                    /* files of the source are on servers */
    fc_queue queue;
    fc_decoded *decoded;
    atomic_bool stop;
    pthread_mutex_t lock; /* guards the fields below */
    fc_code code;
    fc_error error;
} engine;

/* Records the first error and stops all workers. */
static void fail_move(engine *e, fc_code code, const fc_error *err) {
    pthread_mutex_lock(&e->lock);
    if (e->code == FC_OK) {
        e->code = code;
        e->error = *err;
    }
    pthread_mutex_unlock(&e->lock);
    atomic_store(&e->stop, true);
}

/* One worker's state. Its buffers grow to the larger tile size only when a tensor needs it. */
typedef struct worker {
    engine *engine;
    fc_source *source;
    fc_output output;
    unsigned char *buffer,
        *cast; /* tiles in the target's dtype; the current tile in the source's dtype if that differs */
    size_t buffer_size, cast_size;
} worker;

static fc_code grow_buffer(const worker *w, unsigned char **buffer, size_t *size, size_t target, fc_error *err) {
    if (*size < target) {
        fc_shared_free(*buffer, *size);
        *size = 0;
        *buffer = w->engine->remote ? fc_shared_new(target) : fc_pages_new(target);
        if (!*buffer) {
            return fc_fail(err, FC_ENOMEM, "out of memory for a buffer of %zu bytes", target);
        }
        *size = target;
    }
    return FC_OK;
}

/* Tiles that are adjacent in the file and share one write. */
typedef struct run {
    int end;         /* index after its last tile in the batch */
    size_t at, size; /* bytes, in the buffer */
} run;

/*
 * Returns the run that begins with tile `first`. Its place in the buffer, `at` or later, has the same distance to a
 * block boundary as in the file, so direct I/O can write it without a copy.
 */
static run next_run(const fc_batch *batch, int first, size_t at) {
    uint64_t offset = batch->tiles[first].offset;
    run r = {first, at + (size_t)((offset - at) % FC_OUTPUT_BLOCK), 0};
    do {
        r.size += batch->tiles[r.end++].size;
    } while (r.end < batch->count && batch->tiles[r.end].offset == offset + r.size);
    return r;
}

/* Makes the worker's buffers large enough for a batch. */
static fc_code make_room(worker *w, const fc_batch *batch, fc_error *err) {
    size_t total = 0, largest_cast = 0;
    for (int i = 0; i < batch->count;) {
        run r = next_run(batch, i, total);
        total = r.at + r.size;
        i = r.end;
    }
    for (int i = 0; i < batch->count; i++) {
        const fc_active_item *active = batch->tiles[i].active;
        if (active->dtype != active->tensor->dtype) {
            size_t size = (size_t)batch->tiles[i].tile.count * fc_dtype_size(active->tensor->dtype);
            largest_cast = size > largest_cast ? size : largest_cast;
        }
    }
    FC_TRY(grow_buffer(w, &w->buffer, &w->buffer_size, total, err));
    return grow_buffer(w, &w->cast, &w->cast_size, largest_cast, err);
}

/* Reads a tile as it will be in the target, and digests it while it is in the cache. */
static fc_code read_tile(worker *w, const fc_active_item *active, const fc_tile *tile, unsigned char *to,
                         fc_tile_digest *digest, fc_error *err) {
    fc_box box = {active->tensor->ndim, tile->offsets, tile->sizes};
    bool cast = active->dtype != active->tensor->dtype;
    fc_source_watch(w->source, active->digest.tensor ? w->engine->recorded : NULL, cast);
    FC_TRY(fc_source_fill(w->source, active->coverage, active->tensor, &box, cast ? w->cast : to, err));
    if (cast) {
        fc_cast(active->tensor->dtype, w->cast, active->dtype, to, (size_t)tile->count);
    }
    return fc_tile_digest_make(&w->engine->target->tensors[active->item->tensor], active->item, &box, to,
                               w->engine->queue.crc32, digest, err);
}

static fc_code move_batch(worker *w, fc_batch *batch, fc_error *err) {
    FC_TRY(make_room(w, batch, err));
    size_t at = 0;
    for (int i = 0; i < batch->count;) {
        run r = next_run(batch, i, at);
        uint64_t offset = batch->tiles[i].offset;
        for (at = r.at; i < r.end; at += batch->tiles[i++].size) {
            FC_TRY(read_tile(w, batch->tiles[i].active, &batch->tiles[i].tile, w->buffer + at, &batch->tiles[i].digest,
                             err));
        }
        FC_TRY(fc_output_write(&w->output, w->buffer + r.at, r.size, offset, err));
        if (w->engine->progress) {
            atomic_fetch_add_explicit(&w->engine->progress->done, r.size, memory_order_relaxed);
        }
    }
    return FC_OK;
}

/* Takes a batch. Servers begin to send it. */
static fc_code take_batch(worker *w, fc_batch *batch, fc_error *err) {
    FC_TRY(fc_queue_take(&w->engine->queue, batch, err));
    for (int i = 0; i < batch->count && w->engine->remote; i++) {
        const fc_active_item *active = batch->tiles[i].active;
        const fc_tile *tile = &batch->tiles[i].tile;
        const fc_box box = {active->tensor->ndim, tile->offsets, tile->sizes};
        fc_source_expect(w->source, active->coverage, active->tensor, &box);
    }
    fc_source_announce(w->source);
    return FC_OK;
}

/* Whether a worker takes its next batch before it moves the one that it has. Taking one may wait for a tile record,
   which waits until all workers have moved theirs. In a bucket, these may wait for room in memory, which comes only
   when the first one has moved its own. */
static bool takes_ahead(const worker *w) {
    return w->engine->remote && !(w->engine->queue.resume && w->output.staged);
}

/* Moves one batch, or takes the first one if `now` is empty. Files on servers are asked for the next one before. */
static fc_code take_and_move(worker *w, fc_batch *now, fc_batch *next, fc_error *err) {
    if (now->count == 0) {
        FC_TRY(take_batch(w, now, err));
    }
    if (now->count > 0 && takes_ahead(w)) {
        FC_TRY(take_batch(w, next, err));
    }
    return now->count > 0 ? move_batch(w, now, err) : FC_OK;
}

/* Lets the writer write the headers of the items that are complete. Other workers may do the same meanwhile. */
static fc_code finish_items(const worker *w, fc_error *err) {
    engine *e = w->engine;
    const fc_target_item *item;
    while (e->writer && (item = fc_queue_take_complete(&e->queue))) {
        FC_TRY(e->writer->format->writer.finish_item(e->writer, item, w->output.fd, err));
    }
    return FC_OK;
}

/* Moves one batch. `*done`: there was none. @param next receives the one that follows, if that is taken ahead */
static fc_code move_next(worker *w, fc_batch *batch, fc_batch *next, bool *done, fc_error *err) {
    engine *e = w->engine;
    FC_TRY(fc_progress_count(e->progress, 0, err));
    if (e->queue.resume) {
        fc_resume_enter(e->queue.resume);
    }
    fc_code rc = take_and_move(w, batch, next, err);
    *done = batch->count == 0;
    if (e->queue.resume) {
        const fc_code left = fc_resume_leave(e->queue.resume, batch, rc == FC_OK, rc == FC_OK ? err : NULL);
        rc = rc == FC_OK ? left : rc;
    }
    fc_queue_give_back(&e->queue, batch, rc == FC_OK);
    return rc == FC_OK ? finish_items(w, err) : rc;
}

static fc_code move_batches(worker *w, fc_error *err) {
    engine *e = w->engine;
    fc_batch *now = calloc(1, sizeof *now), *next = calloc(1, sizeof *next);
    fc_code rc = now && next ? FC_OK : fc_no_memory(err, e->file->path);
    for (bool done = false; rc == FC_OK && !done && !atomic_load_explicit(&e->stop, memory_order_relaxed);) {
        rc = move_next(w, now, next, &done, err);
        fc_batch *moved = now;
        now = next;
        next = moved;
    }
    if (now && next) { /* what is taken and not moved */
        fc_queue_give_back(&e->queue, now, false);
        fc_queue_give_back(&e->queue, next, false);
    }
    free(now);
    free(next);
    return rc;
}

static fc_code move_tiles(worker *w, fc_error *err) {
    const engine *e = w->engine;
    FC_TRY(fc_source_new(e->target->source, e->decoded, e->budget.window, e->budget.files, &w->source, err));
    fc_source_check_objects(w->source);
    FC_TRY(fc_output_open(&w->output, e->file->path, e->cached, err));
    return move_batches(w, err);
}

/* A worker thread. Its error goes to the engine. */
static void *run_mover(void *context) {
    engine *e = context;
    worker w = {.engine = e, .output = {.fd = -1, .direct = -1}};
    fc_error err;
    fc_code rc = move_tiles(&w, &err);
    rc = fc_output_close(&w.output, rc, &err);
    if (rc != FC_OK) {
        fail_move(e, rc, &err);
    }
    if (rc != FC_OK && w.output.staged) { /* after this error is recorded: those that stop waiting have one, too */
        fc_staged_stop(w.output.staged);
    }
    fc_source_free(w.source);
    fc_shared_free(w.buffer, w.buffer_size);
    fc_shared_free(w.cast, w.cast_size);
    return NULL;
}

/* Counts the elements that the engine moves into the file. They decide how many threads are worth starting. */
static uint64_t owned_bytes(const fc_target *target, const fc_target_file *file, bool *casts) {
    uint64_t total = 0;
    *casts = false;
    for (size_t i = 0; i < file->nitems; i++) {
        const fc_target_item *item = &file->items[i];
        if (!item->owned || item->chunk) {
            continue;
        }
        const fc_target_tensor *tensor = &target->tensors[item->tensor];
        fc_box box = {tensor->source->ndim, item->dims, item->dims + tensor->source->ndim};
        if (__builtin_add_overflow(total, (uint64_t)fc_box_volume(&box), &total)) {
            total = UINT64_MAX;
        }
        *casts |= tensor->dtype != tensor->source->dtype;
    }
    return total;
}

static int compare_data(const void *a, const void *b) {
    const fc_staged_data *x = a, *y = b;
    return FC_ORDER(x->offset, y->offset);
}

static int choose_move_threads(const fc_move_options *options, uint64_t bytes, bool remote) {
    const int shares = options && options->shares > 1 ? (int)options->shares : 1;
    const int wanted = fc_wanted_threads(options ? options->work.threads : 0, remote, shares);
    return fc_useful_threads(wanted, bytes / (uint64_t)shares, FC_TILE_BYTES / 4);
}

uint64_t fc_memory_beside_parts(const char *path, const fc_work_options *work) {
    const uint64_t memory = fc_memory_of(work), held = fc_staged_held(fc_staged_find(path));
    return memory - (held < memory / 2 ? held : memory / 2);
}

/* Adds what the compressed chunks of an item take at most: compression never makes them larger. An overflow gives the
 * largest number, which is refused. */
static void add_chunks(const fc_target *target, const fc_target_item *item, uint64_t *bytes) {
    const uint32_t element = fc_dtype_size(target->tensors[item->tensor].dtype);
    const uint64_t each = fc_chunk_bytes(target, item, element) + FC_PLACE_ALIGN;
    uint64_t all = 0;
    if (!fc_mul_u64(fc_chunk_count(target, item), each, &all) || !fc_add_u64(*bytes, all, bytes)) {
        *bytes = UINT64_MAX;
    }
}

/* Divides a file that is made in a bucket into parts. */
static fc_code divide_file(const fc_target *target, const fc_target_file *file, const fc_work_options *work,
                           fc_error *err) {
    size_t count = 0;
    uint64_t grows = 0;
    if (!fc_is_staged(file->path)) {
        return FC_OK;
    }
    fc_staged_data *data = calloc(file->nitems + 1, sizeof *data);
    FC_NEED(data, err, file->path);
    for (size_t i = 0; i < file->nitems; i++) {
        const fc_target_item *item = &file->items[i];
        const uint64_t size = item->owned && !item->chunk ? fc_target_item_bytes(target, item) : 0;
        if (item->chunk) {
            add_chunks(target, item, &grows);
        } else if (size > 0) {
            data[count++] = (fc_staged_data){item->offset, size};
        }
    }
    fc_sort_items(data, count, sizeof *data, compare_data);
    fc_code rc = fc_staged_divide(file->path, data, count, grows, fc_memory_of(work) / 2, err);
    free(data);
    return rc;
}

/* Runs the workers on an engine whose budget and cache are made. */
static fc_code run_workers(engine *e, const fc_move_options *options, fc_error *err) {
    atomic_init(&e->stop, false);
    pthread_mutex_init(&e->lock, NULL);
    fc_queue_init(&e->queue, e->target, e->file, e->budget.tile, e->budget.large_tile);
    e->queue.crc32 = options && options->crc32;
    e->queue.digests = options ? options->digests : NULL;
    e->queue.resume = options ? options->resume : NULL;
    e->queue.lists_complete = e->writer != NULL;
    if (options && options->shares > 1) {
        fc_queue_share(&e->queue, options->share, options->shares);
    }
    if (fc_is_staged(e->file->path)) {
        e->code = fc_queue_by_offset(&e->queue, &e->error);
    }
    if (e->code == FC_OK) {
        fc_threads_run(e->budget.threads, run_mover, e);
    }
    fc_queue_destroy(&e->queue);
    pthread_mutex_destroy(&e->lock);
    if (e->code != FC_OK && err) {
        *err = e->error;
    }
    return e->code;
}

static void limit_tile(size_t *tile, size_t most, size_t least) {
    most = most < least ? least : most;
    *tile = *tile < most ? *tile : most;
}

fc_code fc_move_file(const fc_target *target, const fc_target_file *file, const fc_move_options *options,
                     fc_error *err) {
    engine e = {.target = target, .file = file, .progress = options ? options->work.progress : NULL};
    e.recorded = options ? options->recorded : NULL;
    e.writer = options ? options->writer : NULL;
    e.cached = options && options->work.cached;
    fc_work_options work = options ? options->work : (fc_work_options){.threads = 0};
    uint64_t bytes = owned_bytes(target, file, &e.casts);
    FC_TRY(divide_file(target, file, &work, err));
    const bool sent = fc_staged_find(file->path) != NULL;
    work.memory = fc_memory_beside_parts(file->path, &work);
    work.memory = sent && work.memory < FC_LEAST_MEMORY ? FC_LEAST_MEMORY : work.memory;
    e.remote = fc_reads_from_servers(target->source);
    const fc_worker_needs needs = {
        .sources = 1, .tiles = e.casts ? 2 : 1, .extra = 2 * sizeof(fc_batch), .remote = e.remote};
    const int threads = choose_move_threads(options, bytes, e.remote || sent);
    FC_TRY(fc_budget_divide(&work, threads, &needs, &e.budget, err));
    if (options && options->resume) {
        const size_t most = fc_resume_tile_bytes(options->resume, e.budget.threads);
        const size_t least = e.remote || sent ? FC_LEAST_REMOTE_BYTES : FC_LEAST_TILE_BYTES;
        limit_tile(&e.budget.tile, most, least);
        limit_tile(&e.budget.large_tile, most, least);
    }
    if (!options || options->share == 0) { /* the first of the processes that write this file together */
        FC_TRY(fc_output_allocate(file->path, err));
    }
    e.decoded = fc_decoded_new(e.budget.decoded);
    FC_NEED(e.decoded, err, file->path);
    fc_code rc = run_workers(&e, options, err);
    fc_decoded_free(e.decoded);
    return rc;
}
