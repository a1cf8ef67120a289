/*
 * Notes which tiles are finished: see resume.h. A worker that has finished its batch adds its tiles to the pending
 * ones. From time to time it then keeps the others from taking another batch until all have finished theirs. At that
 * moment the sums of the sources are those of the pending tiles. It takes a copy of both, lets the others go on, syncs
 * the files, and appends the record.
 */
#include "move/resume.h"

#include "base/checked.h"
#include "base/grow.h"
#include "fsdpckpt/order.h"
#include "fsdpckpt/try.h"
#include "io/report.h"
#include "io/staged_objects.h"
#include "io/staging.h"
#include "io/sync.h"
#include "move/queue.h"
#include "move/resume_file.h"
#include "move/resume_identity.h"
#include "move/resume_sums.h"
#include "net/remote.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum {
    RECORDS = 32,         /* at least so many per conversion, so that a dead run loses at most 3 % */
    REMOTE_RECORDS = 128, /* in a bucket, where some wait for the rest of a part */
    SECONDS = 2,          /* between two records */
    NEAR = 16             /* pending tiles that a new one is joined with, if it follows one of them */
};
static const uint64_t least_record = 64 << 10, most_record = 1 << 30; /* bytes between two records */

/* Finished tiles that no record has yet. */
typedef struct pending {
    fc_done_tiles *tiles;
    size_t count, capacity;
    fc_noted_sums sums;
    uint64_t bytes;  /* that were moved for them */
    bool ends_chunk; /* the last one of a chunk, which is then not read again */
} pending;

struct fc_resume {
    const fc_target *target;
    fc_tile_journal journal;
    char *folder;
    int tiles;               /* descriptor of the directory of the staged files; -1 in a bucket */
    fc_staged_file **staged; /* in a bucket: the staged files, by number; NULL: it is not divided into parts yet */
    size_t most_staged;
    fc_resume_sums sums;               /* of the sources */
    uint64_t record_bytes, held_bytes; /* between two records; in the tiles of all workers */
    fc_progress *progress;
    const fc_target_file *file;   /* the one that is being moved, */
    uint64_t number, next_number; /* its number, and that of the next one */
    const fc_done_tiles *done;    /* its finished tiles, in order */
    size_t ndone;
    pthread_mutex_t lock; /* guards what follows */
    pthread_cond_t changed;
    unsigned active;         /* workers that have a batch */
    bool paused, recording;  /* no worker takes a batch; one writes a record */
    bool failed, named, any; /* a batch failed; files have new names; there are tile records */
    pending pending;
    pending *waiting; /* the tiles of records that are to be written when all of them are safe */
    size_t nwaiting, most_waiting;
    time_t recorded_at;
};

static time_t clock_now(void) {
    struct timespec now = {0, 0};
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec;
}

/* ---- opening ---- */

static int compare_tiles(const void *a, const void *b) {
    const fc_done_tiles *x = a, *y = b;
    FC_ORDER_BY(x->file, y->file);
    FC_ORDER_BY(x->item, y->item);
    return FC_ORDER(x->start, y->start);
}

static void report_done(const fc_resume *r, const fc_resume_options *o) {
    uint64_t bytes = 0;
    for (size_t i = 0; i < r->journal.ntiles; i++) {
        bytes += r->journal.tiles[i].bytes;
    }
    if (bytes > 0) {
        const double part = bytes < o->bytes ? (double)bytes / (double)o->bytes : 1; /* a damaged journal has more */
        fc_report(&o->convert->reporter, "%s: goes on with a conversion of which %d %% is written", o->path,
                  (int)(100 * part));
    }
}

/* A journal without tiles is worth nothing, so it may be of another conversion. */
static fc_code open_journal(fc_resume *r, const fc_resume_options *o, fc_error *err) {
    fc_notes identity = {NULL, 0, 0};
    char *path = NULL, *tiles = NULL;
    fc_code rc = FC_OK;
    const bool remote = fc_is_remote(r->folder); /* it is the journal itself */
    if (asprintf(&path, remote ? "%s" : "%s/" FC_STAGED_JOURNAL, r->folder) < 0) {
        path = NULL;
    }
    if (asprintf(&tiles, "%s/" FC_STAGED_TILES, r->folder) < 0) {
        tiles = NULL;
    }
    FC_TRY_GOTO(path && tiles ? FC_OK : fc_no_memory(err, r->folder), rc, out);
    r->tiles = remote ? -1 : open(tiles, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
    FC_TRY_GOTO(remote || r->tiles >= 0 ? FC_OK : fc_fail_errno(err, errno, "%s: cannot be opened", tiles), rc, out);
    FC_TRY_GOTO(fc_tile_journal_open(path, &r->journal, err), rc, out);
    FC_TRY_GOTO(fc_resume_identify(r->target, o->path, o->convert, &identity, err), rc, out);
    fc_tile_journal *j = &r->journal;
    r->any = j->ntiles > 0;
    if (r->any) {
        FC_TRY_GOTO(fc_resume_compare(j->identity, j->identity_size, &identity, r->folder, err), rc, out);
        FC_TRY_GOTO(fc_resume_sums_load(&r->sums, j, r->folder, err), rc, out);
        fc_sort_items(j->tiles, j->ntiles, sizeof *j->tiles, compare_tiles);
        report_done(r, o);
    } else {
        FC_TRY_GOTO(fc_tile_journal_begin(j, (const char *)identity.data, identity.size, err), rc, out);
        rc = remote ? FC_OK : fc_sync_path(AT_FDCWD, r->folder, r->folder, err);
    }
out:
    free(identity.data);
    free(path);
    free(tiles);
    return rc;
}

/* Returns the bytes that the conversion moves. What is computed can read more than it writes. */
static uint64_t count_moved(const fc_target *target) {
    uint64_t all = 0;
    for (size_t i = 0; i < target->ntensors; i++) {
        const fc_tensor *t = target->tensors[i].source;
        const fc_box whole = {t->ndim, NULL, t->shape};
        uint64_t bytes = 0;
        if (!fc_mul_u64((uint64_t)fc_box_volume(&whole), fc_moved_per_element(target, &target->tensors[i]), &bytes) ||
            !fc_add_u64(all, bytes, &all)) {
            return UINT64_MAX;
        }
    }
    return all;
}

static uint64_t clamp_record(uint64_t bytes) {
    return bytes < least_record ? least_record : bytes > most_record ? most_record : bytes;
}

fc_code fc_resume_open(const fc_target *target, const fc_resume_options *options, fc_resume **out, fc_error *err) {
    fc_resume *r = calloc(1, sizeof *r);
    *out = NULL;
    FC_NEED(r, err, options->path);
    const uint64_t moved = count_moved(target);
    r->target = target;
    r->tiles = r->journal.fd = -1;
    r->progress = options->convert->work.progress;
    r->record_bytes = clamp_record(moved / (fc_is_remote(options->folder) ? REMOTE_RECORDS : RECORDS));
    r->held_bytes = clamp_record(moved / (2 * RECORDS));
    r->recorded_at = clock_now();
    pthread_mutex_init(&r->lock, NULL);
    pthread_cond_init(&r->changed, NULL);
    r->folder = strdup(options->folder);
    fc_code rc = r->folder ? fc_resume_sums_find(&r->sums, target->source, options->recorded, err)
                           : fc_no_memory(err, options->path);
    rc = rc == FC_OK ? open_journal(r, options, err) : rc;
    if (rc != FC_OK) {
        fc_resume_free(r);
        return rc;
    }
    *out = r;
    return FC_OK;
}

static void free_pending(const pending *p) {
    free(p->tiles);
    free(p->sums.list);
}

void fc_resume_free(fc_resume *resume) {
    if (!resume) {
        return;
    }
    fc_resume_sums_free(&resume->sums);
    free(resume->staged);
    free_pending(&resume->pending);
    for (size_t i = 0; i < resume->nwaiting; i++) {
        free_pending(&resume->waiting[i]);
    }
    free(resume->waiting);
    fc_tile_journal_free(&resume->journal);
    if (resume->tiles >= 0) {
        close(resume->tiles);
    }
    free(resume->folder);
    pthread_cond_destroy(&resume->changed);
    pthread_mutex_destroy(&resume->lock);
    free(resume);
}

size_t fc_resume_tile_bytes(const fc_resume *resume, int threads) {
    return (size_t)(resume->held_bytes / (uint64_t)threads);
}

bool fc_resume_has_tiles(const fc_resume *resume) {
    return resume->any;
}

/* ---- files ---- */

/* Whether the tiles of the file are within its items, in order, without an overlap. */
static bool are_sound(const fc_resume *r, const fc_target_file *file, const fc_done_tiles *tiles, size_t count) {
    for (size_t i = 0; i < count; i++) {
        const fc_done_tiles *t = &tiles[i];
        const fc_target_item *item = t->item < file->nitems ? &file->items[t->item] : NULL;
        if (!item || !item->owned || item->chunk || t->start < 0 || t->count <= 0) {
            return false;
        }
        const fc_target_tensor *tensor = &r->target->tensors[item->tensor];
        const uint32_t size = fc_dtype_size(tensor->dtype);
        const int64_t elements = (int64_t)(fc_target_item_bytes(r->target, item) / size);
        const bool after =
            i == 0 || tiles[i - 1].item != t->item || tiles[i - 1].start + tiles[i - 1].count <= t->start;
        if (!after || t->start > elements || t->count > elements - t->start || t->bytes != (uint64_t)t->count * size) {
            return false;
        }
    }
    return true;
}

/* Finds the tiles of the file. */
static void find_tiles(fc_resume *r, const fc_target_file *file) {
    const fc_tile_journal *j = &r->journal;
    size_t first = 0, end = 0;
    FC_BISECT(first, j->ntiles, middle, j->tiles[middle].file < r->number);
    FC_BISECT(end, j->ntiles, middle, j->tiles[middle].file <= r->number);
    if (!are_sound(r, file, j->tiles + first, end - first)) {
        return;
    }
    r->done = j->tiles + first;
    r->ndone = end - first;
}

static void count_tiles(const fc_resume *r) {
    for (size_t i = 0; i < r->ndone && r->progress; i++) {
        atomic_fetch_add(&r->progress->done, r->done[i].bytes);
    }
}

/* Durable before the old file is gone: its inode could become that of the new one. */
static fc_code begin_file(fc_resume *r, const fc_target_file *file, const fc_written_file *made, bool was_known,
                          fc_error *err) {
    FC_TRY(fc_tile_journal_file(&r->journal, r->number, made, err));
    FC_TRY(was_known ? fc_tile_journal_sync(&r->journal, err) : FC_OK);
    return fc_staged_name(file, r->tiles, r->number, err);
}

/* Counts the tiles of a file that is made in a bucket as done if its upload goes on. */
static fc_code take_upload(fc_resume *r, const fc_written_file *then, fc_error *err) {
    fc_written_file made;
    bool taken = false;
    find_tiles(r, r->file);
    FC_NEED(fc_grow(&r->staged, &r->most_staged, (size_t)r->next_number, sizeof(fc_staged_file *)), err, r->folder);
    r->staged[r->number] = NULL;
    FC_TRY(fc_staged_take_upload(r->target, r->file, then, r->done, r->ndone, &made, &taken, err));
    r->ndone = taken ? r->ndone : 0;
    count_tiles(r);
    return taken ? FC_OK : fc_tile_journal_file(&r->journal, r->number, &made, err);
}

fc_code fc_resume_file(fc_resume *resume, const fc_target_file *file, fc_error *err) {
    fc_resume *r = resume;
    fc_written_file made;
    bool taken = false;
    r->file = file;
    r->number = r->next_number++;
    r->ndone = 0;
    const fc_written_file *then = r->number < r->journal.nfiles ? &r->journal.files[r->number] : NULL;
    if (r->journal.remote) {
        return take_upload(r, then, err);
    }
    FC_TRY(fc_staged_take(r->target, file, r->tiles, r->number, then, &made, &taken, err));
    if (taken) {
        find_tiles(r, file);
        count_tiles(r);
        return FC_OK;
    }
    r->named = true;
    return begin_file(r, file, &made, then != NULL, err);
}

const fc_done_tiles *fc_resume_done(const fc_resume *resume, size_t item, size_t *count) {
    size_t first = 0, end = 0;
    FC_BISECT(first, resume->ndone, middle, resume->done[middle].item < item);
    FC_BISECT(end, resume->ndone, middle, resume->done[middle].item <= item);
    *count = end - first;
    return resume->ndone ? resume->done + first : NULL;
}

/* ---- records ---- */

static bool joins(fc_done_tiles *a, const fc_done_tiles *b) {
    if (a->file != b->file || a->item != b->item || a->start + a->count != b->start) {
        return false;
    }
    a->count += b->count;
    a->bytes += b->bytes;
    a->digest.item ^= b->digest.item;
    a->digest.tensor ^= b->digest.tensor;
    a->digest.item32 ^= b->digest.item32;
    return true;
}

static fc_code note_tile(fc_resume *r, const fc_done_tiles *tile, fc_error *err) {
    pending *p = &r->pending;
    for (size_t i = p->count; i > 0 && p->count - i < NEAR; i--) {
        if (joins(&p->tiles[i - 1], tile)) {
            return FC_OK;
        }
    }
    FC_NEED(fc_grow(&p->tiles, &p->capacity, p->count + 1, sizeof *p->tiles), err, r->folder);
    p->tiles[p->count++] = *tile;
    return FC_OK;
}

static fc_code note_batch(fc_resume *r, const fc_batch *batch, fc_error *err) {
    if (r->journal.remote && !r->staged[r->number]) {
        r->staged[r->number] = fc_staged_find(r->file->path);
    }
    for (int i = 0; i < batch->count; i++) {
        const fc_target_item *item = batch->tiles[i].active->item;
        const fc_done_tiles tile = {r->number,
                                    (uint64_t)(item - r->file->items),
                                    batch->tiles[i].tile.start,
                                    batch->tiles[i].tile.count,
                                    batch->tiles[i].size,
                                    batch->tiles[i].digest,
                                    batch->tiles[i].offset};
        r->pending.bytes += (uint64_t)tile.count * batch->tiles[i].active->moved;
        r->pending.ends_chunk |= batch->tiles[i].tile.ends_chunk;
        FC_TRY(note_tile(r, &tile, err));
    }
    return FC_OK;
}

/* Whether tiles are safe: the server has them, or the disk will after a sync. */
static bool are_safe(const fc_resume *r, const pending *p) {
    bool safe = true;
    for (size_t i = 0; i < p->count && safe && r->journal.remote; i++) {
        fc_staged_file *file = r->staged[p->tiles[i].file];
        safe = file && fc_staged_has_sent(file, p->tiles[i].offset, p->tiles[i].bytes);
    }
    return safe;
}

static fc_code sync_files(const fc_resume *r, const pending *p, bool named, fc_error *err) {
    uint64_t last = UINT64_MAX;
    for (size_t i = 0; i < p->count && r->tiles >= 0; i++) { /* files come one after the other */
        if (p->tiles[i].file != last) {
            char name[FC_STAGED_NAME];
            last = p->tiles[i].file;
            fc_staged_name_of(last, name);
            FC_TRY(fc_sync_path(r->tiles, name, r->folder, err));
        }
    }
    return named && r->tiles >= 0 ? fc_sync_path(r->tiles, ".", r->folder, err) : FC_OK;
}

/* Syncs the files, then appends and syncs the records whose tiles are safe. */
static fc_code write_records(fc_resume *r, bool named, fc_error *err) {
    size_t kept = 0;
    bool any = false;
    fc_code rc = FC_OK;
    for (size_t i = 0; i < r->nwaiting; i++) {
        pending *p = &r->waiting[i];
        if (rc != FC_OK || !are_safe(r, p)) {
            r->waiting[kept++] = *p;
            continue;
        }
        rc = sync_files(r, p, named, err);
        rc = rc == FC_OK ? fc_tile_journal_add(&r->journal, p->tiles, p->count, p->sums.list, p->sums.count, err) : rc;
        free_pending(p);
        any = true;
    }
    r->nwaiting = kept;
    rc = rc == FC_OK && any ? fc_tile_journal_sync(&r->journal, err) : rc;
    r->any |= any && rc == FC_OK;
    return rc;
}

static bool is_due(const fc_resume *r) {
    return !r->recording && !r->failed && r->pending.bytes > 0 &&
           (r->pending.bytes >= r->record_bytes || r->pending.ends_chunk || clock_now() - r->recorded_at >= SECONDS);
}

/* Records the pending tiles. Called with the lock, which is free while the disk is written to. */
static fc_code record(fc_resume *r, fc_error *err) {
    bool named;
    r->recording = r->paused = true;
    while (r->active > 0) {
        pthread_cond_wait(&r->changed, &r->lock);
    }
    fc_code rc = r->failed ? FC_OK : fc_resume_sums_note(&r->sums, &r->pending.sums, err);
    rc = rc == FC_OK && !fc_grow(&r->waiting, &r->most_waiting, r->nwaiting + 1, sizeof *r->waiting)
             ? fc_no_memory(err, r->folder)
             : rc;
    const bool writes = rc == FC_OK && !r->failed;
    r->paused = false;
    pthread_cond_broadcast(&r->changed);
    if (writes) {
        r->waiting[r->nwaiting++] = r->pending;
        named = r->named;
        r->pending = (pending){0};
        r->named = false;
        pthread_mutex_unlock(&r->lock);
        rc = write_records(r, named, err);
        pthread_mutex_lock(&r->lock);
    }
    r->recorded_at = clock_now();
    r->recording = false;
    r->failed |= rc != FC_OK;
    return rc;
}

void fc_resume_enter(fc_resume *resume) {
    pthread_mutex_lock(&resume->lock);
    while (resume->paused) {
        pthread_cond_wait(&resume->changed, &resume->lock);
    }
    resume->active++;
    pthread_mutex_unlock(&resume->lock);
}

fc_code fc_resume_leave(fc_resume *resume, const fc_batch *batch, bool moved, fc_error *err) {
    fc_code rc = FC_OK;
    pthread_mutex_lock(&resume->lock);
    rc = moved ? note_batch(resume, batch, err) : FC_OK;
    resume->failed |= !moved || rc != FC_OK;
    resume->active--;
    if (resume->active == 0) {
        pthread_cond_broadcast(&resume->changed);
    }
    rc = rc == FC_OK && is_due(resume) ? record(resume, err) : rc;
    pthread_mutex_unlock(&resume->lock);
    return rc;
}

void fc_resume_flush(fc_resume *resume) {
    fc_error ignored;
    pthread_mutex_lock(&resume->lock);
    if (!resume->failed && resume->pending.bytes > 0) {
        (void)record(resume, &ignored);
    } else if (resume->nwaiting > 0) { /* they may be safe by now */
        (void)write_records(resume, false, &ignored);
    }
    pthread_mutex_unlock(&resume->lock);
}
