/*
 * Compresses the chunks of a target file. Workers read, cast, shuffle and deflate in parallel.
 *
 * The file must not depend on the number of threads, and a chunk's offset follows from the sizes of the chunks before
 * it. So each compressed chunk goes into the slot of its number. The worker that fills the next slot in turn assigns
 * offsets to it and to all ready slots after it, which takes microseconds. Any worker then writes chunks that have
 * offsets. A worker waits only when every slot holds a chunk that comes after one still being compressed.
 *
 * A worker that would begin a part of a file in a bucket may have to wait until others are sent. The worker with the
 * first of the chunks that are being written never waits for a chunk. A worker frees its slot before it sends a part.
 *
 * If several ranks compress the file, the slots hold this rank's chunks of two rounds (rounds.h). The calling thread,
 * which alone may talk to other ranks, exchanges a round when all its chunks are ready.
 */
#include "fsdpckpt/move.h"

#include "base/pages.h"
#include "fsdpckpt/try.h"
#include "io/output.h"
#include "io/path.h"
#include "io/staged_objects.h"
#include "move/chunks.h"
#include "move/compress_chunk.h"
#include "move/file.h"
#include "move/rounds.h"
#include "read/threads.h"
#include "read/tuning.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { RESERVE_BYTES = 64 << 20 };

typedef enum slot_state {
    SLOT_FREE,   /* or being filled by the worker that has the job of its number */
    SLOT_READY,  /* compressed */
    SLOT_PLACED, /* has its offset in the file */
    SLOT_WRITING
} slot_state;

typedef struct slot {
    slot_state state;
    fc_chunk_job job;
    fc_made_chunk made;
    uint64_t offset, gap; /* `gap` bytes before it are left out of a file in a bucket */
} slot;

typedef struct compressor {
    const fc_target *target;
    const fc_target_file *file;
    fc_writer *writer;
    fc_progress *progress;          /* may be NULL */
    struct fc_source_crc *recorded; /* see fc_move_options; may be NULL */
    bool cached;                    /* see fc_work_options */
    fc_compress_sizes sizes;
    fc_decoded *decoded;
    pthread_mutex_t lock; /* guards all fields below, and the writer */
    pthread_cond_t freed; /* signals that a slot became free, or that all workers stop */
    fc_chunks chunks;
    slot *slots;
    fc_rounds rounds; /* of several ranks; its `comm` is NULL for one process */
    pthread_t leader; /* the thread that exchanges rounds */
    uint64_t turn;    /* number of the next chunk to get an offset */
    uint64_t first;   /* all chunks before this one are written */
    uint64_t stored;
    struct fc_staged_file *staged; /* the file is made in a bucket, which gets its parts; else NULL */
    uint64_t end;                  /* of what has its place in that file */
    int ahead;                     /* descriptor for reserving space, or -1 */
    uint64_t reserved;             /* where the reserved space ends, in bytes */
    bool stop;
    fc_code code;
    fc_error error;
} compressor;

typedef struct worker {
    compressor *compressor;
    fc_chunk_maker maker;
    fc_output output;
} worker;

/* Records the first error and stops all workers. Called with the lock held. */
static void fail_compression(compressor *p, fc_code code, const fc_error *err) {
    if (p->code == FC_OK) {
        p->code = code;
        p->error = *err;
    }
    p->stop = true;
    pthread_cond_broadcast(&p->freed);
    if (p->staged) { /* after this error is recorded, because those that stop waiting fail, too */
        fc_staged_stop(p->staged);
    }
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

/* Whether all chunks of this rank in the round are compressed. */
static bool is_round_ready(compressor *p) {
    if (p->rounds.done == p->rounds.count) {
        return false;
    }
    const uint64_t own = fc_rounds_own(&p->rounds);
    for (uint64_t i = 0; i < own; i++) {
        const slot *s = slot_of(p, p->turn + i);
        if (s->state != SLOT_READY || s->job.number != p->turn + i) {
            return false;
        }
    }
    return true;
}

static bool is_leader(const compressor *p) {
    return p->rounds.comm && pthread_equal(pthread_self(), p->leader);
}

/* Exchanges a round, or this rank's error if it has one: then no round is left. Called by the leader with the lock
 * held; releases it meanwhile. */
static void exchange_round(compressor *p) {
    const uint64_t own = p->stop ? 0 : fc_rounds_own(&p->rounds), first = fc_rounds_first(&p->rounds);
    fc_error err = p->error;
    for (uint64_t i = 0; i < own; i++) {
        const slot *s = slot_of(p, p->turn + i);
        p->rounds.sizes[first + i] = fc_round_size(s->made.size, s->made.raw);
    }
    const fc_code mine = p->code;
    pthread_mutex_unlock(&p->lock);
    fc_code rc = fc_rounds_exchange(&p->rounds, mine, p->writer, &err);
    pthread_mutex_lock(&p->lock);
    if (rc != FC_OK) {
        p->rounds.done = p->rounds.count;
        fail_compression(p, rc, &err);
        return;
    }
    for (uint64_t i = 0; i < own; i++, p->turn++) {
        slot_of(p, p->turn)->offset = p->rounds.offsets[first + i];
        slot_of(p, p->turn)->state = SLOT_PLACED;
    }
    reserve_ahead(p, p->rounds.end);
    pthread_cond_broadcast(&p->freed);
}

/* Assigns offsets to the chunks that are ready, in their order. Called with the lock held. */
static fc_code assign_offsets(compressor *p, fc_error *err) {
    if (p->rounds.comm) {
        pthread_cond_broadcast(&p->freed); /* the leader may wait for this chunk */
        return FC_OK;
    }
    for (;;) {
        slot *s = slot_of(p, p->turn);
        if (s->state != SLOT_READY || s->job.number != p->turn) {
            return FC_OK;
        }
        FC_TRY_CONTEXT(p->writer->format->writer.place(p->writer, s->job.of->item, s->job.start, s->made.raw,
                                                       s->made.size, &s->offset, err),
                       err, "tensor %s", s->job.of->target->name);
        s->gap = s->offset - p->end;
        p->end = s->offset + s->made.size;
        s->state = SLOT_PLACED;
        p->turn++;
        reserve_ahead(p, s->offset + s->made.size);
    }
}

static void count_progress(compressor *p, const fc_chunk_job *job) {
    if (p->progress) {
        uint64_t bytes = (uint64_t)fc_chunk_volume(job) * fc_dtype_size(job->of->target->dtype);
        atomic_fetch_add_explicit(&p->progress->done, bytes, memory_order_relaxed);
    }
}

static fc_code write_slot(worker *w, const slot *s, fc_error *err) {
    const fc_output *output = &w->output;
    if (!output->staged) {
        return fc_output_write(&w->output, s->made.bytes, s->made.size, s->offset, err);
    }
    FC_TRY(fc_staged_skip(output->staged, s->offset - s->gap, s->gap, err));
    return fc_staged_write(output->staged, output->fd, s->made.bytes, s->made.size, s->offset, err);
}

/* Sends what is complete of a file in a bucket, without a slot, because that takes long. Called with the lock held;
 * releases it meanwhile. */
static fc_code send_parts(compressor *p, fc_error *err) {
    if (!p->staged) {
        return FC_OK;
    }
    pthread_mutex_unlock(&p->lock);
    const fc_code rc = fc_staged_send(p->staged, err);
    pthread_mutex_lock(&p->lock);
    return rc;
}

/* Writes one chunk that has its offset, if there is one: the first one, so that no worker waits for a part whose bytes
 * nobody writes. Called with the lock held; releases it during the write. */
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
    *rc = write_slot(w, s, err);
    pthread_mutex_lock(&p->lock);
    p->stored += s->made.size;
    count_progress(p, &s->job);
    fc_chunks_give_back(&s->job);
    s->state = SLOT_FREE;
    while (p->first < p->turn && slot_of(p, p->first)->state == SLOT_FREE) {
        p->first++;
    }
    pthread_cond_broadcast(&p->freed);
    *rc = *rc == FC_OK ? send_parts(p, err) : *rc;
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
        if (is_leader(p) && is_round_ready(p)) {
            exchange_round(p);
        } else if (!write_one(w, &rc, err)) {
            pthread_cond_wait(&p->freed, &p->lock);
        } else if (rc != FC_OK) {
            fail_compression(p, rc, err);
        }
    }
    slot *s = p->stop ? NULL : slot_of(p, number);
    pthread_mutex_unlock(&p->lock);
    return s;
}

/* Publishes a compressed chunk and writes chunks that have offsets. */
static fc_code hand_over(worker *w, fc_chunk_job *job, slot *s, fc_error *err) {
    compressor *p = w->compressor;
    pthread_mutex_lock(&p->lock);
    s->job = *job;
    s->state = SLOT_READY;
    job->of = NULL;
    fc_code rc = assign_offsets(p, err);
    if (is_leader(p) && is_round_ready(p)) {
        exchange_round(p);
    }
    while (rc == FC_OK && !p->stop && write_one(w, &rc, err)) {
    }
    pthread_mutex_unlock(&p->lock);
    return rc;
}

/* Does one job, unless all workers stop. */
static fc_code do_job(worker *w, fc_chunk_job *job, bool *stopped, fc_error *err) {
    FC_TRY(fc_progress_count(w->compressor->progress, 0, err));
    slot *s = take_slot(w, job->number, err);
    *stopped = !s;
    if (!s) {
        return FC_OK;
    }
    FC_TRY(fc_chunk_make(&w->maker, job, &s->made, err));
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

/* Exchanges the rounds that are left, and writes what gets a place. After an error on this rank, the others must still
 * learn of it. */
static fc_code end_rounds(worker *w, fc_code rc, fc_error *err) {
    compressor *p = w->compressor;
    pthread_mutex_lock(&p->lock);
    for (bool idle = false; !idle;) {
        if (rc != FC_OK) {
            fail_compression(p, rc, err);
        }
        const bool left = p->rounds.done < p->rounds.count;
        if (left && is_leader(p) && (p->stop || is_round_ready(p))) {
            exchange_round(p);
        } else if (p->stop || write_one(w, &rc, err)) {
            idle = p->stop && !(left && is_leader(p));
        } else if (left) {
            pthread_cond_wait(&p->freed, &p->lock);
        } else {
            idle = true;
        }
    }
    pthread_mutex_unlock(&p->lock);
    return rc;
}

static fc_code compress_chunks(worker *w, fc_error *err) {
    const compressor *p = w->compressor;
    FC_TRY(fc_chunk_maker_init(&w->maker, p->target, &p->sizes, p->decoded, err));
    FC_TRY(fc_output_open(&w->output, p->file->path, p->cached, err));
    return do_jobs(w, err);
}

/* A worker thread. Its error goes to the compressor. */
static void *run_compressor(void *context) {
    compressor *p = context;
    worker w = {.compressor = p, .maker.recorded = p->recorded, .output = {.fd = -1, .direct = -1}};
    fc_error err;
    fc_code rc = compress_chunks(&w, &err);
    if (p->rounds.comm) {
        rc = end_rounds(&w, rc, &err);
    }
    rc = fc_output_close(&w.output, rc, &err);
    if (rc != FC_OK) {
        pthread_mutex_lock(&p->lock);
        fail_compression(p, rc, &err);
        pthread_mutex_unlock(&p->lock);
    }
    fc_chunk_maker_free(&w.maker);
    return NULL;
}

static void compressor_free(compressor *p) {
    for (int i = 0; p->slots && i < p->sizes.slots; i++) {
        if (p->slots[i].state != SLOT_FREE) {
            fc_chunks_give_back(&p->slots[i].job);
        }
        fc_pages_free(p->slots[i].made.bytes, p->sizes.chunk);
    }
    free(p->slots);
    fc_rounds_free(&p->rounds);
    fc_chunks_destroy(&p->chunks);
    fc_decoded_free(p->decoded);
}

/* Finds the file in a bucket, and where its chunks begin. */
static fc_code find_parts(compressor *p, fc_error *err) {
    struct stat st;
    p->staged = fc_staged_find(p->file->path);
    if (p->staged && fc_stat(p->file->path, &st) != 0) {
        return fc_fail_errno(err, errno, "%s: cannot be examined", p->file->path);
    }
    p->end = p->staged ? (uint64_t)st.st_size : 0;
    return FC_OK;
}

static fc_code prepare_compression(compressor *p, const fc_move_options *options, fc_error *err) {
    FC_TRY(fc_compress_divide(fc_memory_beside_parts(p->file->path, &options->work), fc_staged_held(p->staged),
                              options->work.threads, &p->sizes, err));
    FC_TRY(fc_chunks_init(&p->chunks, p->target, p->file, p->sizes.run, err));
    p->chunks.crc32 = options->crc32;
    p->chunks.digests = options->digests;
    p->decoded = fc_decoded_new(p->sizes.decoded);
    p->slots = calloc((size_t)p->sizes.slots, sizeof *p->slots);
    return p->decoded && p->slots ? FC_OK : fc_no_memory(err, p->file->path);
}

/* Shares the chunks among the ranks: two rounds fit into the slots, so that one is compressed while the other is
 * written. */
static fc_code share_chunks(compressor *p, fc_comm *comm, fc_code mine, fc_error *err) {
    const int most = p->sizes.slots / 2;
    FC_TRY(fc_rounds_init(&p->rounds, comm, mine, p->target, p->file, most > 0 ? (uint64_t)most : 1, err));
    if (comm) {
        p->chunks.share = (uint64_t)comm->rank;
        p->chunks.shares = (uint64_t)comm->size;
        p->chunks.band = p->rounds.band;
    }
    p->leader = pthread_self();
    p->ahead = !p->staged && (!comm || comm->rank == 0) ? open(p->file->path, O_WRONLY | O_CLOEXEC) : -1;
    return FC_OK;
}

static void run_compression(compressor *p) {
    pthread_mutex_init(&p->lock, NULL);
    pthread_cond_init(&p->freed, NULL);
    fc_threads_run(p->sizes.threads, run_compressor, p);
    pthread_cond_destroy(&p->freed);
    pthread_mutex_destroy(&p->lock);
    if (p->ahead >= 0) {
        close(p->ahead);
    }
}

fc_code fc_compress_file(const fc_target *target, const fc_target_file *file, fc_writer *writer, fc_comm *comm,
                         const fc_move_options *options, uint64_t *stored, fc_error *err) {
    compressor p = {.target = target,
                    .file = file,
                    .writer = writer,
                    .progress = options->work.progress,
                    .recorded = options->recorded,
                    .cached = options->work.cached};
    *stored = 0;
    fc_compress_survey(target, file, &p.sizes);
    if (p.sizes.chunks == 0) {
        return FC_OK;
    }
    fc_code rc;
    FC_TRY_GOTO(find_parts(&p, err), rc, out);
    FC_TRY_GOTO(share_chunks(&p, comm, prepare_compression(&p, options, err), err), rc, out);
    run_compression(&p);
    *stored = comm ? p.rounds.stored : p.stored;
    rc = p.code;
    if (rc != FC_OK && err) {
        *err = p.error;
    }
out:
    compressor_free(&p);
    return rc;
}
