/*
 * Reads many boxes into memory with several threads, which take one tile after the other: a training program loads its
 * shard of every tensor in this way.
 */
#include "fsdpckpt/read.h"

#include "base/crc.h"
#include "fsdpckpt/try.h"
#include "plan/coverage.h"
#include "plan/tiles.h"
#include "read/budget.h"
#include "read/chunk_lists.h"
#include "read/source.h"
#include "read/threads.h"
#include "read/tuning.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum { LEAST_BYTES = FC_TILE_BYTES / 4 }; /* that are worth a thread */

/* A box that is being read. The last user finishes it. */
typedef struct active {
    const fc_box_request *request;
    fc_coverage *coverage;
    int64_t volume;
    uint64_t sum; /* of the tiles that were read, as in fc_crc64_finish */
    unsigned users;
} active;

typedef struct reading {
    const fc_checkpoint *checkpoint;
    const fc_box_request *requests;
    size_t count;
    fc_chunk_lists *lists;
    fc_progress *progress; /* may be NULL */
    fc_decoded *decoded;
    int files;            /* open files per worker */
    bool cached;          /* as in fc_work_options */
    pthread_mutex_t lock; /* guards everything below */
    size_t next;
    active *current; /* the box that still has tiles to hand out */
    fc_tiles tiles;  /* of current */
    fc_code code;
    fc_error error;
} reading;

static void free_active(active *a) {
    if (a) {
        fc_coverage_free(a->coverage);
        free(a);
    }
}

/* Whether the box is chunk `index` of its tensor. */
static bool is_chunk(const fc_box_request *r, size_t index) {
    const size_t bytes = (size_t)r->tensor->ndim * sizeof(int64_t);
    const int64_t *dims = r->tensor->chunks[index].dims;
    return bytes == 0 ||
           (memcmp(dims, r->box.offsets, bytes) == 0 && memcmp(dims + r->tensor->ndim, r->box.sizes, bytes) == 0);
}

static bool is_whole(const fc_box_request *r) {
    const size_t bytes = (size_t)r->tensor->ndim * sizeof(int64_t);
    return bytes == 0 || memcmp(r->tensor->shape, r->box.sizes, bytes) == 0;
}

/* Finds the recorded digest of the box. */
static fc_code find_recorded_digest(const reading *r, const active *a, fc_digest *out, fc_error *err) {
    const fc_box_request *request = a->request;
    *out = (fc_digest){.kind = FC_DIGEST_NONE};
    if (is_whole(request)) {
        return fc_checkpoint_digest(r->checkpoint, request->tensor, FC_WHOLE_TENSOR, out, err);
    }
    for (size_t i = 0; i < fc_coverage_count(a->coverage); i++) {
        const size_t chunk = fc_coverage_chunk(a->coverage, i);
        if (is_chunk(request, chunk)) {
            return fc_checkpoint_digest(r->checkpoint, request->tensor, chunk, out, err);
        }
    }
    return FC_OK;
}

static fc_code compare_box_digest(const reading *r, const active *a, fc_error *err) {
    const fc_tensor *t = a->request->tensor;
    const uint64_t found = fc_crc64_finish(a->sum, (uint64_t)a->volume * fc_dtype_size(t->dtype));
    fc_digest digest;
    FC_TRY(find_recorded_digest(r, a, &digest, err));
    if (digest.kind != FC_DIGEST_CRC64 || digest.value == found) {
        return FC_OK;
    }
    return fc_fail(err, FC_ECORRUPT, "%s: tensor %s: its bytes do not match their recorded CRC-64; save it again",
                   r->checkpoint->path, t->name);
}

/* Begins the next box that has elements. Called with the lock. *out stays NULL if none is left. */
static fc_code begin_next_box(reading *r, active **out, fc_error *err) {
    while (r->next < r->count && fc_box_volume(&r->requests[r->next].box) == 0) {
        r->next++;
    }
    if (r->next == r->count) {
        return FC_OK;
    }
    active *a = calloc(1, sizeof *a);
    FC_NEED(a, err, r->checkpoint->path);
    a->request = &r->requests[r->next++];
    a->volume = fc_box_volume(&a->request->box);
    fc_code rc = fc_chunk_lists_find(r->lists, r->checkpoint, a->request->tensor, &a->request->box, &a->coverage, err);
    if (rc != FC_OK) {
        free_active(a);
        return fc_context(err, rc, "%s", r->checkpoint->path);
    }
    a->users = 1; /* r->current */
    fc_tiles_begin(&r->tiles, &a->request->box, FC_TILE_BYTES / fc_dtype_size(a->request->tensor->dtype), 1);
    *out = a;
    return FC_OK;
}

/* Gives up a use. Called with the lock. The last user compares the digest and frees the box. */
static fc_code give_back_box(const reading *r, active *a, fc_error *err) {
    if (--a->users > 0) {
        return FC_OK;
    }
    fc_code rc = r->code == FC_OK ? compare_box_digest(r, a, err) : FC_OK;
    free_active(a);
    return rc;
}

/* Takes a tile. Called with the lock. *out stays NULL if none is left. */
static fc_code take_box_tile(reading *r, active **out, fc_tile *tile, fc_error *err) {
    for (;;) {
        if (!r->current) {
            FC_TRY(begin_next_box(r, &r->current, err));
        }
        if (!r->current) {
            return FC_OK;
        }
        if (fc_tiles_next(&r->tiles, tile)) {
            r->current->users++;
            *out = r->current;
            return FC_OK;
        }
        active *finished = r->current;
        r->current = NULL;
        FC_TRY(give_back_box(r, finished, err));
    }
}

static fc_code read_box_tile(const reading *r, fc_source *source, const active *a, const fc_tile *tile, uint64_t *sum,
                             fc_error *err) {
    const fc_tensor *t = a->request->tensor;
    const uint32_t element = fc_dtype_size(t->dtype);
    const fc_box box = {t->ndim, tile->offsets, tile->sizes};
    const size_t size = (size_t)tile->count * element;
    unsigned char *to = (unsigned char *)a->request->buf + (size_t)tile->start * element;
    FC_TRY(fc_progress_count(r->progress, 0, err));
    FC_TRY(fc_source_fill(source, a->coverage, t, &box, to, err));
    *sum = fc_crc64_shift(fc_crc64_bare(to, size), (uint64_t)(a->volume - tile->start - tile->count) * element);
    if (r->progress) {
        atomic_fetch_add_explicit(&r->progress->done, size, memory_order_relaxed);
    }
    return FC_OK;
}

/* Records the first error, after which no worker takes a tile. Called with the lock. */
static void keep_read_error(reading *r, fc_code rc, const fc_error *err) {
    if (rc != FC_OK && r->code == FC_OK) {
        r->code = rc;
        r->error = *err;
    }
}

static void read_box_tiles(reading *r, fc_source *source, fc_error *err) {
    fc_tile tile;
    pthread_mutex_lock(&r->lock);
    while (r->code == FC_OK) {
        active *a = NULL;
        uint64_t sum = 0;
        keep_read_error(r, take_box_tile(r, &a, &tile, err), err);
        if (!a) {
            break;
        }
        pthread_mutex_unlock(&r->lock);
        fc_code rc = read_box_tile(r, source, a, &tile, &sum, err);
        pthread_mutex_lock(&r->lock);
        keep_read_error(r, rc, err);
        a->sum ^= sum;
        keep_read_error(r, give_back_box(r, a, err), err);
    }
    pthread_mutex_unlock(&r->lock);
}

static void *run_reader(void *context) {
    reading *r = context;
    fc_source *source = NULL;
    fc_error err;
    fc_code rc = fc_source_new(r->checkpoint, r->decoded, FC_SCRATCH_BYTES, r->files, &source, &err);
    if (rc == FC_OK) {
        if (r->cached) {
            fc_source_use_cache(source);
        }
        read_box_tiles(r, source, &err);
    } else {
        pthread_mutex_lock(&r->lock);
        keep_read_error(r, rc, &err);
        pthread_mutex_unlock(&r->lock);
    }
    fc_source_free(source);
    return NULL;
}

/* Less than a few tiles does not justify a thread. From a server, a small box takes as long as they do. */
static int choose_read_threads(const fc_checkpoint *checkpoint, const fc_box_request *requests, size_t count,
                               const fc_work_options *options) {
    const bool remote = fc_reads_from_servers(checkpoint);
    uint64_t bytes = 0;
    for (size_t i = 0; i < count && bytes < FC_MOST_THREADS * (uint64_t)FC_TILE_BYTES; i++) {
        const uint64_t own = (uint64_t)fc_box_volume(&requests[i].box) * fc_dtype_size(requests[i].tensor->dtype);
        bytes += remote && own < LEAST_BYTES ? LEAST_BYTES : own;
    }
    const int processes = options ? options->processes : 1;
    const int wanted = fc_wanted_threads(options ? options->threads : 0, remote, processes);
    return fc_useful_threads(wanted ? wanted : fc_shared_threads(processes), bytes, LEAST_BYTES);
}

fc_code fc_read_boxes(const fc_checkpoint *checkpoint, fc_chunk_lists *lists, const fc_box_request *requests,
                      size_t count, const fc_work_options *options, fc_error *err) {
    const int threads = choose_read_threads(checkpoint, requests, count, options);
    reading r = {.checkpoint = checkpoint,
                 .requests = requests,
                 .count = count,
                 .progress = options ? options->progress : NULL,
                 .cached = options && options->cached,
                 .decoded = fc_decoded_new(FC_DEFAULT_MEMORY),
                 .files = fc_files_per_worker(threads)};
    fc_chunk_lists *own = lists ? NULL : fc_chunk_lists_new(checkpoint);
    r.lists = lists ? lists : own;
    if (!r.decoded || !r.lists) {
        fc_decoded_free(r.decoded);
        fc_chunk_lists_free(own);
        return fc_no_memory(err, checkpoint->path);
    }
    pthread_mutex_init(&r.lock, NULL);
    fc_threads_run(threads, run_reader, &r);
    pthread_mutex_destroy(&r.lock);
    free_active(r.current);
    fc_decoded_free(r.decoded);
    fc_chunk_lists_free(own);
    if (r.code != FC_OK && err) {
        *err = r.error;
    }
    return r.code;
}
