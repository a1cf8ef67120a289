/*
 * Compresses the chunks of a target file. Workers read, cast, shuffle and deflate in parallel.
 *
 * The file must not depend on the number of threads, and a chunk's offset follows from the sizes of the chunks before
 * it. So each compressed chunk goes into the slot of its number. The worker that fills the next slot in turn assigns
 * offsets to it and to all ready slots after it, which takes microseconds. Any worker then writes chunks that have
 * offsets. A worker waits only when every slot holds a chunk that comes after one still being compressed.
 */
#include "fsdpckpt/move.h"

#include "base/pages.h"
#include "base/try.h"
#include "codec/codec.h"
#include "codec/shuffle.h"
#include "engine/chunks.h"
#include "engine/queue.h"
#include "engine/source.h"
#include "engine/threads.h"
#include "engine/tuning.h"
#include "fsdpckpt/cast.h"
#include "io/output.h"

#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    MOST_SURVEYED = 64,
    RESERVE_BYTES = 64 << 20,
};

typedef enum slot_state {
    SLOT_FREE,   /* or being filled by the worker that has the job of its number */
    SLOT_READY,  /* compressed */
    SLOT_PLACED, /* has its offset in the file */
    SLOT_WRITING
} slot_state;

typedef struct slot {
    slot_state state;
    bool raw;
    fc_chunk_job job;
    unsigned char *bytes; /* sizes.chunk bytes, allocated at first use */
    size_t size;
    uint64_t offset;
} slot;

/* The largest chunk, and how the memory is divided. */
typedef struct sizes {
    size_t chunk;    /* bytes, in the target's dtype */
    size_t source;   /* bytes, in the source's dtype */
    bool casts;      /* some item changes its dtype */
    bool decodes;    /* some item's source is itself compressed */
    uint64_t chunks; /* at least this many */
    int threads;
    int slots;
    int run;          /* chunks that a worker takes at once, at most */
    uint64_t decoded; /* bytes for decoded chunks of the source */
} sizes;

typedef struct compressor {
    const fc_target *target;
    const fc_target_file *file;
    fc_writer *writer;
    fc_progress *progress;          /* may be NULL */
    struct fc_source_crc *recorded; /* see fc_move_options; may be NULL */
    sizes sizes;
    fc_decoded *decoded;
    pthread_mutex_t lock; /* guards all fields below, and the writer */
    pthread_cond_t freed; /* signals that a slot became free, or that all workers stop */
    fc_chunks chunks;
    slot *slots;
    uint64_t turn;  /* number of the next chunk to get an offset */
    uint64_t first; /* all chunks before this one are written */
    uint64_t stored;
    int ahead;         /* descriptor for reserving space, or -1 */
    uint64_t reserved; /* where the reserved space ends, in bytes */
    bool stop;
    fc_code code;
    fc_error error;
} compressor;

/* One worker's buffers. */
typedef struct worker {
    compressor *compressor;
    fc_source *source;
    fc_deflater *deflater;
    fc_output output;
    unsigned char *read, *cast, *shuffled;
} worker;

/* Records the first error and stops all workers. Called with the lock held. */
static void fail(compressor *p, fc_code code, const fc_error *err) {
    if (p->code == FC_OK) {
        p->code = code;
        p->error = *err;
    }
    p->stop = true;
    pthread_cond_broadcast(&p->freed);
}

static slot *slot_of(compressor *p, uint64_t number) {
    return &p->slots[number % (uint64_t)p->sizes.slots];
}

/*
 * Reserves space in the file before it is written, because writes that extend a file are serialized. This is only an
 * optimization: if it fails, even for lack of space, the write reports that. The writer truncates the excess at the
 * end.
 */
static void reserve_ahead(compressor *p, uint64_t end) {
    if (p->ahead >= 0 && end > p->reserved && end < INT64_MAX - RESERVE_BYTES) {
        uint64_t from = p->reserved ? p->reserved : end;
        p->reserved = end + RESERVE_BYTES;
        if (fallocate(p->ahead, 0, (off_t)from, (off_t)(p->reserved - from)) != 0) {
            p->reserved = INT64_MAX;
        }
    }
}

/* Assigns offsets to the chunks that are ready, in their order. Called with the lock held. */
static fc_code assign_offsets(compressor *p, fc_error *err) {
    for (;;) {
        slot *s = slot_of(p, p->turn);
        if (s->state != SLOT_READY || s->job.number != p->turn) {
            return FC_OK;
        }
        FC_TRY_CONTEXT(
            p->writer->format->writer.place(p->writer, s->job.of->item, s->job.start, s->raw, s->size, &s->offset, err),
            err, "tensor %s", s->job.of->target->name);
        s->state = SLOT_PLACED;
        p->turn++;
        reserve_ahead(p, s->offset + s->size);
    }
}

static int64_t volume_of(const fc_chunk_job *job) {
    const fc_box box = {job->of->target->source->ndim, job->offset, job->sizes};
    return fc_box_volume(&box);
}

static void count_progress(compressor *p, const fc_chunk_job *job) {
    if (p->progress) {
        uint64_t bytes = (uint64_t)volume_of(job) * fc_dtype_size(job->of->target->dtype);
        atomic_fetch_add_explicit(&p->progress->done, bytes, memory_order_relaxed);
    }
}

/* Writes one chunk that has its offset, if there is one. Called with the lock held; releases it during the write. */
static bool write_one(worker *w, fc_code *rc, fc_error *err) {
    compressor *p = w->compressor;
    slot *s = NULL;
    for (uint64_t n = p->first; n < p->turn && !s; n++) {
        s = slot_of(p, n)->state == SLOT_PLACED ? slot_of(p, n) : NULL;
    }
    if (!s) {
        return false;
    }
    s->state = SLOT_WRITING;
    pthread_mutex_unlock(&p->lock);
    *rc = fc_output_write(&w->output, s->bytes, s->size, s->offset, err);
    pthread_mutex_lock(&p->lock);
    p->stored += s->size;
    count_progress(p, &s->job);
    fc_chunks_give_back(&s->job);
    s->state = SLOT_FREE;
    while (p->first < p->turn && slot_of(p, p->first)->state == SLOT_FREE) {
        p->first++;
    }
    pthread_cond_broadcast(&p->freed);
    return true;
}

/*
 * Returns the slot of a job once its previous chunk is written, and helps to write until then. Returns NULL when all
 * workers stop, also after an error of its own.
 */
static slot *take_slot(worker *w, uint64_t number, fc_error *err) {
    compressor *p = w->compressor;
    fc_code rc = FC_OK;
    pthread_mutex_lock(&p->lock);
    while (!p->stop && number >= p->first + (uint64_t)p->sizes.slots) {
        if (!write_one(w, &rc, err)) {
            pthread_cond_wait(&p->freed, &p->lock);
        } else if (rc != FC_OK) {
            fail(p, rc, err);
        }
    }
    slot *s = p->stop ? NULL : slot_of(p, number);
    pthread_mutex_unlock(&p->lock);
    return s;
}

/* Reads the elements of a chunk in the target's dtype. A chunk at the item's edge is padded with zeros. */
static fc_code read_chunk(worker *w, fc_chunk_job *job, size_t bytes, unsigned char **out, fc_error *err) {
    const fc_target_tensor *target = job->of->target;
    const fc_box box = {target->source->ndim, job->offset, job->sizes};
    size_t count = (size_t)volume_of(job), used = count * fc_dtype_size(target->dtype);
    *out = w->read;
    const bool cast = target->dtype != target->source->dtype;
    fc_source_watch(w->source, job->of->digest.tensor ? w->compressor->recorded : NULL, cast);
    FC_TRY(fc_source_fill(w->source, job->of->coverage, target->source, &box, w->read, err));
    if (cast) {
        fc_cast(target->source->dtype, w->read, target->dtype, w->cast, count);
        *out = w->cast;
    }
    memset(*out + used, 0, bytes - used);
    return fc_tile_digest_make(target, job->of->item, &box, *out, w->compressor->chunks.crc32, &job->digest, err);
}

static fc_code compress_chunk(worker *w, fc_chunk_job *job, slot *s, fc_error *err) {
    const uint32_t element = fc_dtype_size(job->of->target->dtype);
    const size_t bytes = fc_chunk_bytes(w->compressor->target, job->of->item, element);
    unsigned char *elements = NULL;
    s->bytes = s->bytes ? s->bytes : fc_pages_new(w->compressor->sizes.chunk);
    if (!s->bytes) {
        return fc_fail(err, FC_ENOMEM, "out of memory for a chunk of %zu bytes", bytes);
    }
    FC_TRY(read_chunk(w, job, bytes, &elements, err));
    const unsigned char *in = elements;
    if (element > 1) {
        fc_shuffle(elements, w->shuffled, bytes, element);
        in = w->shuffled;
    }
    s->size = fc_deflate(w->deflater, in, bytes, element > 1 ? bytes / element : 0, s->bytes, bytes - 1);
    s->raw = s->size == 0;
    if (s->raw) {
        memcpy(s->bytes, elements, bytes);
        s->size = bytes;
    }
    return FC_OK;
}

/* Publishes a compressed chunk and writes chunks that have offsets. */
static fc_code hand_over(worker *w, fc_chunk_job *job, slot *s, fc_error *err) {
    compressor *p = w->compressor;
    pthread_mutex_lock(&p->lock);
    s->job = *job;
    s->state = SLOT_READY;
    job->of = NULL;
    fc_code rc = assign_offsets(p, err);
    while (rc == FC_OK && !p->stop && write_one(w, &rc, err)) {
    }
    pthread_mutex_unlock(&p->lock);
    return rc;
}

static bool cancelled(const compressor *p) {
    return p->progress && atomic_load_explicit(&p->progress->cancel, memory_order_relaxed);
}

/* Does one job, unless all workers stop. */
static fc_code do_job(worker *w, fc_chunk_job *job, bool *stopped, fc_error *err) {
    if (cancelled(w->compressor)) {
        return fc_fail(err, FC_EINTERRUPTED, "interrupted");
    }
    slot *s = take_slot(w, job->number, err);
    *stopped = !s;
    if (!s) {
        return FC_OK;
    }
    FC_TRY(compress_chunk(w, job, s, err));
    return hand_over(w, job, s, err);
}

/* Takes the next run of jobs. `*count` is 0 at the end. */
static fc_code take_jobs(compressor *p, fc_chunk_job *jobs, int *count, fc_error *err) {
    *count = 0;
    pthread_mutex_lock(&p->lock);
    fc_code rc = p->stop ? FC_OK : fc_chunks_take(&p->chunks, jobs, count, err);
    pthread_mutex_unlock(&p->lock);
    return rc;
}

static void give_back_jobs(compressor *p, fc_chunk_job *jobs, int count) {
    pthread_mutex_lock(&p->lock);
    for (int i = 0; i < count; i++) {
        fc_chunks_give_back(&jobs[i]);
    }
    pthread_mutex_unlock(&p->lock);
}

/* Takes runs of jobs until none is left. */
static fc_code do_jobs(worker *w, fc_error *err) {
    fc_chunk_job jobs[FC_RUN_CHUNKS];
    fc_code rc = FC_OK;
    for (bool stopped = false;;) {
        int count;
        FC_TRY(take_jobs(w->compressor, jobs, &count, err));
        for (int i = 0; i < count && rc == FC_OK && !stopped; i++) {
            rc = do_job(w, &jobs[i], &stopped, err);
        }
        give_back_jobs(w->compressor, jobs, count);
        FC_TRY(rc);
        if (count == 0 || stopped) {
            return FC_OK;
        }
    }
}

/* The buffer holds a chunk before the cast, or the result when nothing is cast. */
static size_t read_size(const sizes *s) {
    return s->source > s->chunk ? s->source : s->chunk;
}

static fc_code worker_init(worker *w, fc_error *err) {
    const compressor *p = w->compressor;
    const sizes *s = &p->sizes;
    FC_TRY(fc_source_new(p->target->source, p->decoded, FC_SCRATCH_BYTES, fc_files_per_worker(s->threads), &w->source,
                         err));
    fc_source_check_objects(w->source);
    FC_TRY(fc_output_open(&w->output, p->file->path, err));
    w->deflater = fc_deflater_new(p->target->compress);
    w->read = fc_pages_new(read_size(s));
    w->cast = s->casts ? fc_pages_new(s->chunk) : NULL;
    w->shuffled = fc_pages_new(s->chunk);
    if (!w->deflater || !w->read || (s->casts && !w->cast) || !w->shuffled) {
        return fc_fail(err, FC_ENOMEM, "out of memory for chunks of %zu bytes", s->chunk);
    }
    return FC_OK;
}

static fc_code do_work(worker *w, fc_error *err) {
    FC_TRY(worker_init(w, err));
    return do_jobs(w, err);
}

/* A worker thread. Its error goes to the compressor. */
static void *work(void *context) {
    compressor *p = context;
    worker w = {.compressor = p, .output = {.fd = -1, .direct = -1}};
    fc_error err;
    fc_code rc = do_work(&w, &err);
    rc = fc_output_close(&w.output, rc, &err);
    if (rc != FC_OK) {
        pthread_mutex_lock(&p->lock);
        fail(p, rc, &err);
        pthread_mutex_unlock(&p->lock);
    }
    fc_source_free(w.source);
    fc_deflater_free(w.deflater);
    fc_pages_free(w.read, read_size(&p->sizes));
    fc_pages_free(w.cast, p->sizes.chunk);
    fc_pages_free(w.shuffled, p->sizes.chunk);
    return NULL;
}

/* Finds the largest chunk of the file, and whether anything must be cast or decoded. */
static void survey(const fc_target *target, const fc_target_file *file, sizes *s) {
    int looked_at = 0;
    for (size_t i = 0; i < file->nitems; i++) {
        const fc_target_item *item = &file->items[i];
        if (!item->chunk) {
            continue;
        }
        const fc_target_tensor *tensor = &target->tensors[item->tensor];
        size_t chunk = fc_chunk_bytes(target, item, fc_dtype_size(tensor->dtype));
        size_t source = fc_chunk_bytes(target, item, fc_dtype_size(tensor->source->dtype));
        s->chunk = chunk > s->chunk ? chunk : s->chunk;
        s->source = source > s->source ? source : s->source;
        s->casts |= tensor->dtype != tensor->source->dtype;
        s->chunks += fc_target_item_bytes(target, item) / chunk + 1;
        /* A checkpoint's tensors are usually stored alike, and each look may read from the disk. */
        if (!s->decodes && looked_at++ < MOST_SURVEYED) {
            s->decodes = fc_gains_from_large_tiles(target->source, tensor->source);
        }
    }
}

/* Divides `memory`: workers' buffers, slots, and at least a quarter for decoded chunks. */
static fc_code divide_memory(uint64_t memory, int threads, sizes *s, fc_error *err) {
    const uint64_t each = fc_source_overhead() + FC_SCRATCH_BYTES + fc_deflater_size() + read_size(s) +
                          (s->casts ? s->chunk : 0) + s->chunk;
    const uint64_t mine = s->decodes ? memory / 5 * 2 : memory / 4 * 3;
    const uint64_t least = each + 2 * s->chunk;
    if (least > mine) {
        fc_code rc =
            fc_fail(err, FC_EUSAGE, "compression needs %" PRIu64 " bytes of memory, but only %" PRIu64 " are allowed",
                    least * (s->decodes ? 5 : 4) / (s->decodes ? 2 : 3) + 1, memory);
        return fc_advise(err, rc, FC_HINT_MEMORY, NULL);
    }
    uint64_t fit = (mine - s->chunk) / (each + s->chunk);
    s->threads = (uint64_t)threads < fit ? threads : (int)fit;
    if ((uint64_t)s->threads > s->chunks) {
        s->threads = (int)s->chunks;
    }
    uint64_t slots = (mine - (uint64_t)s->threads * each) / s->chunk;
    uint64_t most = FC_RUN_CHUNKS * ((uint64_t)s->threads + 1);
    s->slots = (int)(slots < most ? slots : most);
    s->run = s->slots / (s->threads + 1);
    s->decoded = memory - (uint64_t)s->threads * each - (uint64_t)s->slots * s->chunk;
    return FC_OK;
}

/* Decoding keeps processors busy rather than disks, and every further worker takes memory from the decoded chunks. */
static int default_threads(const sizes *s) {
    return s->decodes ? fc_processors() + 1 : fc_default_threads();
}

static void compressor_free(compressor *p) {
    for (int i = 0; p->slots && i < p->sizes.slots; i++) {
        if (p->slots[i].state != SLOT_FREE) {
            fc_chunks_give_back(&p->slots[i].job);
        }
        fc_pages_free(p->slots[i].bytes, p->sizes.chunk);
    }
    free(p->slots);
    fc_chunks_destroy(&p->chunks);
    fc_decoded_free(p->decoded);
}

fc_code fc_compress_file(const fc_target *target, const fc_target_file *file, fc_writer *writer,
                         const fc_move_options *options, uint64_t *stored, fc_error *err) {
    uint64_t memory = options && options->memory ? options->memory : FC_DEFAULT_MEMORY;
    compressor p = {.target = target, .file = file, .writer = writer, .progress = options ? options->progress : NULL};
    p.recorded = options ? options->recorded : NULL;
    *stored = 0;
    survey(target, file, &p.sizes);
    if (p.sizes.chunks == 0) {
        return FC_OK;
    }
    int threads = options && options->threads > 0 ? options->threads : default_threads(&p.sizes);
    FC_TRY(divide_memory(memory, threads < FC_MOST_THREADS ? threads : FC_MOST_THREADS, &p.sizes, err));
    FC_TRY(fc_chunks_init(&p.chunks, target, file, p.sizes.run, err));
    p.chunks.crc32 = options && options->crc32;
    p.chunks.digests = options ? options->digests : NULL;
    p.decoded = fc_decoded_new(p.sizes.decoded);
    p.slots = calloc((size_t)p.sizes.slots, sizeof *p.slots);
    if (!p.decoded || !p.slots) {
        compressor_free(&p);
        return fc_no_memory(err, file->path);
    }
    p.ahead = open(file->path, O_WRONLY | O_CLOEXEC);
    pthread_mutex_init(&p.lock, NULL);
    pthread_cond_init(&p.freed, NULL);
    fc_threads_run(p.sizes.threads, work, &p);
    pthread_cond_destroy(&p.freed);
    pthread_mutex_destroy(&p.lock);
    if (p.ahead >= 0) {
        close(p.ahead);
    }
    compressor_free(&p);
    *stored = p.stored;
    if (p.code != FC_OK && err) {
        *err = p.error;
    }
    return p.code;
}
