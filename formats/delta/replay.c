/*
 * Reads a journal, and brings the model to its version. See journal.h.
 *
 * The whole journal is read and compared with its digest before the first byte of the model is written, so what follows
 * checks only that a journal, which could be someone else's, writes to no other files.
 */
#include "base/checked.h"
#include "base/little.h"
#include "delta/checksum.h"
#include "delta/journal.h"
#include "delta/record.h"
#include "fsdpckpt/try.h"
#include "io/directory.h"
#include "io/file.h"
#include "io/sync.h"
#include "read/threads.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
    LEAST_PER_THREAD = 1 << 20, /* bytes of the journal */
    BATCH = 256 << 10,          /* bytes of the journal that are read at once */
    LENGTH = 20                 /* where a header has the length of what follows */
};

typedef struct record {
    journal_kind kind;
    uint32_t file, size, length;
    uint64_t offset;
    const unsigned char *bytes; /* in the batch; `length` of them */
} record;

typedef struct replay {
    const char *model;
    char path[PATH_MAX]; /* of the journal */
    int fd;
    uint64_t size, at;   /* bytes of the journal, and where the records after the batch begin */
    size_t filled, used; /* bytes of the batch that are whole records, and those of the records that were taken */
    int *files;          /* malloc'ed: the files of the model, in the order of their numbers */
    size_t nfiles;
    int64_t version;
    /* Behind the batch and the place of the model is room that put_change copies, too. */
    unsigned char batch[BATCH + JOURNAL_SHORT], block[FC_JOURNAL_BLOCK + JOURNAL_SHORT];
} replay;

static fc_code join(char out[PATH_MAX], const char *model, const char *folder, const char *name, fc_error *err) {
    const int n = snprintf(out, PATH_MAX, "%s/%s%s%s", model, folder, *folder ? "/" : "", name);
    return n < PATH_MAX ? FC_OK : fc_fail(err, FC_EUSAGE, "%s: the path is too long", model);
}

/* ---- reading ---- */

/* Reads a batch of whole records before `end`. It is empty if what comes next is no record. */
static fc_code read_batch(replay *r, uint64_t end, fc_error *err) {
    const size_t some = end - r->at < BATCH ? (size_t)(end - r->at) : BATCH;
    _Static_assert(BATCH >= JOURNAL_HEADER + JOURNAL_MOST, "a batch has at least one record");
    r->filled = r->used = 0;
    FC_TRY(fc_pread_full(r->fd, r->batch, some, r->at, r->path, err));
    while (some - r->filled >= JOURNAL_HEADER) {
        const size_t length = (size_t)fc_load_little(r->batch + r->filled + LENGTH, 4);
        if (length > JOURNAL_MOST || length > some - r->filled - JOURNAL_HEADER) {
            break;
        }
        r->filled += JOURNAL_HEADER + length;
    }
    r->at += r->filled;
    return FC_OK;
}

/* Takes the next record of the batch. @return false if there is none. */
static bool take_record(replay *r, record *out) {
    const unsigned char *header = r->batch + r->used;
    if (r->used == r->filled) {
        return false;
    }
    *out = (record){.kind = (journal_kind)fc_load_little(header, 4),
                    .file = (uint32_t)fc_load_little(header + 4, 4),
                    .offset = fc_load_little(header + 8, 8),
                    .size = (uint32_t)fc_load_little(header + 16, 4),
                    .length = (uint32_t)fc_load_little(header + LENGTH, 4),
                    .bytes = header + JOURNAL_HEADER};
    r->used += JOURNAL_HEADER + out->length;
    return true;
}

/* Computes the digest of the first `size` bytes. */
static fc_code digest_journal(replay *r, uint64_t size, unsigned char out[16], fc_error *err) {
    XXH3_state_t *state = XXH3_createState();
    XXH128_canonical_t digest;
    fc_code rc = state ? FC_OK : fc_no_memory(err, r->path);
    if (state) {
        XXH3_128bits_reset(state);
    }
    for (uint64_t at = 0; rc == FC_OK && at < size;) {
        const size_t some = size - at < FC_JOURNAL_BLOCK ? (size_t)(size - at) : FC_JOURNAL_BLOCK;
        rc = fc_pread_full(r->fd, r->block, some, at, r->path, err);
        if (rc == FC_OK) {
            XXH3_128bits_update(state, r->block, some);
        }
        at += some;
    }
    if (rc == FC_OK) {
        XXH128_canonicalFromHash(&digest, XXH3_128bits_digest(state));
        memcpy(out, digest.digest, sizeof digest.digest);
    }
    XXH3_freeState(state);
    return rc;
}

/* Finds out whether the journal is complete. */
static fc_code check_complete(replay *r, bool *complete, fc_error *err) {
    enum { LAST = JOURNAL_HEADER + JOURNAL_LAST, DIGEST = 16 };
    unsigned char digest[DIGEST], magic[JOURNAL_MAGIC_BYTES];
    record last;
    *complete = false;
    if (r->size < JOURNAL_MAGIC_BYTES + LAST) {
        return FC_OK;
    }
    FC_TRY(fc_pread_full(r->fd, magic, sizeof magic, 0, r->path, err));
    r->at = r->size - LAST;
    FC_TRY(read_batch(r, r->size, err));
    if (memcmp(magic, JOURNAL_MAGIC, sizeof magic) != 0 || !take_record(r, &last) || last.kind != JOURNAL_END ||
        last.offset != r->size - LAST || last.length != JOURNAL_LAST) {
        return FC_OK;
    }
    FC_TRY(digest_journal(r, r->size - LAST, digest, err));
    *complete = memcmp(digest, last.bytes, DIGEST) == 0;
    r->version = (int64_t)fc_load_little(last.bytes + DIGEST, 8);
    return FC_OK;
}

/* @param there is set to whether there is a journal, which is then open. */
static fc_code replay_open(replay *r, bool *there, bool *complete, fc_error *err) {
    *there = *complete = false;
    FC_TRY(join(r->path, r->model, "", SYNC_JOURNAL, err));
    fc_error missing = {FC_OK};
    if (!fc_path_exists(r->path, NULL, &missing)) {
        return missing.code == FC_OK ? FC_OK : fc_fail(err, missing.code, "%s", missing.message);
    }
    *there = true;
    FC_TRY(fc_open_input(r->path, &r->fd, &r->size, err));
    return check_complete(r, complete, err);
}

static void replay_close(replay *r) {
    for (size_t i = 0; i < r->nfiles; i++) {
        close(r->files[i]);
    }
    if (r->fd >= 0) {
        close(r->fd);
    }
    free(r->files);
    free(r);
}

static replay *replay_new(const char *model) {
    replay *r = calloc(1, sizeof *r);
    if (r) {
        r->model = model;
        r->fd = -1;
    }
    return r;
}

fc_code fc_journal_look(const char *model, int64_t *version, fc_error *err) {
    replay *r = replay_new(model);
    bool there, complete;
    FC_NEED(r, err, model);
    const fc_code rc = replay_open(r, &there, &complete, err);
    *version = rc == FC_OK && complete ? r->version : -1;
    replay_close(r);
    return rc;
}

/* ---- replaying ---- */

static fc_code journal_fail(const replay *r, const char *what, fc_error *err) {
    return fc_fail(err, FC_ECORRUPT, "%s: %s: the journal is not of fsdpckpt; remove it if the model is whole", r->path,
                   what);
}

/* Takes the name of a file in the model itself. */
static fc_code take_name(const replay *r, const record *e, char name[NAME_MAX + 1], fc_error *err) {
    if (e->length == 0 || e->length > NAME_MAX || e->bytes[0] == '.' || memchr(e->bytes, '/', e->length) ||
        memchr(e->bytes, '\0', e->length)) {
        return journal_fail(r, "a name leads out of the model", err);
    }
    memcpy(name, e->bytes, e->length);
    name[e->length] = '\0';
    return FC_OK;
}

static fc_code replay_file(replay *r, const record *e, fc_error *err) {
    char name[NAME_MAX + 1], path[PATH_MAX];
    int *more = realloc(r->files, (r->nfiles + 1) * sizeof *more);
    FC_NEED(more, err, r->path);
    r->files = more;
    FC_TRY(take_name(r, e, name, err));
    FC_TRY(join(path, r->model, "", name, err));
    const int fd = open(path, O_RDWR | O_CLOEXEC | O_NOFOLLOW);
    if (fd < 0) {
        return fc_fail_errno(err, errno, "%s: the file cannot be opened", path);
    }
    r->files[r->nfiles++] = fd;
    return FC_OK;
}

/* Reads a number of put_varint. @return false if it does not end in time. */
static bool take_varint(const unsigned char *bytes, size_t size, size_t *at, size_t *out) {
    *out = 0;
    for (int shift = 0; *at < size && shift < 28; shift += 7) {
        const unsigned char byte = bytes[(*at)++];
        *out |= (size_t)(byte & 127) << shift;
        if (byte < 128) {
            return true;
        }
    }
    return false;
}

/* Copies a change. Most are short, so there is no branch for each length. */
static inline void put_change(unsigned char *out, const unsigned char *bytes, size_t length) {
    uint64_t old, made;
    if (length >= sizeof made) {
        memcpy(out, bytes, length);
        return;
    }
    const uint64_t mask = (UINT64_C(1) << (8 * length)) - 1; /* little endian, as everywhere here */
    memcpy(&old, out, sizeof old);
    memcpy(&made, bytes, sizeof made);
    old ^= (old ^ made) & mask;
    memcpy(out, &old, sizeof old);
}

/* Stores the new bytes in the block. @param first, end receive the range of them in it. */
static bool patch(replay *r, const record *e, size_t *first, size_t *end) {
    size_t at = 0, place = 0;
    *first = e->size;
    *end = 0;
    while (at < e->length) {
        size_t gap, length;
        if (!take_varint(e->bytes, e->length, &at, &gap) || !take_varint(e->bytes, e->length, &at, &length) ||
            !fc_range_within(place, gap, e->size) || !fc_range_within(place + gap, length, e->size) ||
            !fc_range_within(at, length, e->length)) {
            return false;
        }
        place += gap;
        put_change(r->block + place, e->bytes + at, length);
        *first = *end == 0 ? place : *first;
        place += length;
        at += length;
        *end = place;
    }
    return true;
}

/* Lets the disk begin with a part of the file that is complete, as a rule, while the next one is made. The places of a
   tensor come in order. */
static void begin_writing(int fd, uint64_t offset, uint64_t size) {
    const uint64_t part = UINT64_C(4) << 20, last = (offset + size) / part;
    if (offset / part != last) {
        (void)sync_file_range(fd, (off64_t)((last - 1) * part), (off64_t)part, SYNC_FILE_RANGE_WRITE);
    }
}

static fc_code replay_changes(replay *r, const record *e, fc_error *err) {
    size_t first, end;
    if (e->file >= r->nfiles || e->size > FC_JOURNAL_BLOCK) {
        return journal_fail(r, "a record is damaged", err);
    }
    FC_TRY(fc_pread_full(r->files[e->file], r->block, e->size, e->offset, r->model, err));
    if (!patch(r, e, &first, &end)) {
        return journal_fail(r, "a record is damaged", err);
    }
    FC_TRY(end > first
               ? fc_pwrite_full(r->files[e->file], r->block + first, end - first, e->offset + first, r->model, err)
               : FC_OK);
    begin_writing(r->files[e->file], e->offset, e->size);
    return FC_OK;
}

/* An earlier replay may have done this already. */
static fc_code replay_names(replay *r, const record *e, fc_error *err) {
    char name[NAME_MAX + 1], from[PATH_MAX], to[PATH_MAX];
    FC_TRY(take_name(r, e, name, err));
    FC_TRY(join(from, r->model, SYNC_STAGED, name, err));
    FC_TRY(join(to, r->model, "", name, err));
    const int done = e->kind == JOURNAL_REPLACES ? rename(from, to) : unlinkat(AT_FDCWD, to, 0);
    return done == 0 || errno == ENOENT ? FC_OK
                                        : fc_fail_errno(err, errno, "%s: the file cannot be %s", to,
                                                        e->kind == JOURNAL_REPLACES ? "replaced" : "removed");
}

static fc_code replay_record(replay *r, const record *e, fc_error *err) {
    switch (e->kind) {
    case JOURNAL_CHANGES:
        return replay_changes(r, e, err);
    case JOURNAL_REPLACES:
    case JOURNAL_REMOVES:
        return replay_names(r, e, err);
    default:
        return journal_fail(r, "a record is of an unknown kind", err);
    }
}

static fc_code write_state(const replay *r, fc_error *err) {
    char path[PATH_MAX], made[PATH_MAX], text[64], folder[PATH_MAX];
    FC_TRY(join(path, r->model, "", SYNC_STATE, err));
    FC_TRY(join(made, r->model, "", SYNC_STATE ".new", err));
    FC_TRY(join(folder, r->model, "", SYNC_FOLDER, err));
    const int size = snprintf(text, sizeof text, "{\"version\": \"%06" PRId64 "\"}", r->version);
    int fd = open(made, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0666);
    if (fd < 0) {
        return fc_fail_errno(err, errno, "%s: the file cannot be created", made);
    }
    fc_code rc = fc_pwrite_full(fd, text, (size_t)size, 0, made, err);
    if (rc == FC_OK && fsync(fd) != 0) {
        rc = fc_fail_errno(err, errno, "%s: fsync", made);
    }
    FC_TRY(fc_close_written(fd, rc, made, err));
    if (rename(made, path) != 0) {
        return fc_fail_errno(err, errno, "%s: the file cannot be replaced", path);
    }
    return fc_sync_path(AT_FDCWD, folder, folder, err);
}

static fc_code remove_journal(const replay *r, fc_error *err) {
    char folder[PATH_MAX];
    FC_TRY(join(folder, r->model, "", SYNC_FOLDER, err));
    if (unlinkat(AT_FDCWD, r->path, 0) != 0) {
        return fc_fail_errno(err, errno, "%s: the file cannot be removed", r->path);
    }
    return fc_sync_path(AT_FDCWD, folder, folder, err);
}

/* Everything of the model must be on the disk before the state says so. */
static fc_code sync_model(const replay *r, fc_progress *progress, fc_error *err) {
    fc_progress_begin(progress, FC_PHASE_SYNCING, FC_COUNTED_FILES, r->nfiles + 1);
    for (size_t i = 0; i < r->nfiles; i++) {
        if (fsync(r->files[i]) != 0) {
            return fc_fail_errno(err, errno, "%s: fsync", r->model);
        }
        (void)fc_progress_count(progress, 1, NULL);
    }
    return fc_sync_path(AT_FDCWD, r->model, r->model, err);
}

/* The records that the workers share. */
typedef struct replay_job {
    replay *replay; /* where the next record is; each worker has a copy for what it reads */
    uint64_t end;
    fc_progress *progress;
    pthread_mutex_t lock; /* guards replay->at and what follows */
    fc_code code;
    fc_error error;
} replay_job;

/* Takes the next batch. @return false at the end, or after an error of any worker. */
static bool take_batch(replay_job *job, replay *w, fc_code *rc, fc_error *err) {
    pthread_mutex_lock(&job->lock);
    const bool more = job->code == FC_OK && job->replay->at < job->end;
    if (more) {
        w->at = job->replay->at;
        *rc = read_batch(w, job->end, err);
        if (*rc == FC_OK && w->filled == 0) {
            *rc = journal_fail(w, "a record is damaged", err);
        }
        (void)fc_progress_count(job->progress, w->filled, NULL); /* it must end, whatever the user wants */
        job->replay->at = w->at;
    }
    pthread_mutex_unlock(&job->lock);
    return more && *rc == FC_OK;
}

static void *replay_records(void *context) {
    replay_job *job = context;
    replay *w = malloc(sizeof *w);
    record e;
    fc_error err = {FC_OK};
    fc_code rc = w ? FC_OK : fc_no_memory(&err, job->replay->path);
    if (w) {
        pthread_mutex_lock(&job->lock); /* another worker may have begun */
        *w = *job->replay;
        pthread_mutex_unlock(&job->lock);
    }
    while (rc == FC_OK && take_batch(job, w, &rc, &err)) {
        while (rc == FC_OK && take_record(w, &e)) {
            rc = replay_record(w, &e, &err);
        }
    }
    free(w);
    if (rc != FC_OK) {
        pthread_mutex_lock(&job->lock);
        if (job->code == FC_OK) {
            job->code = rc;
            job->error = err;
        }
        pthread_mutex_unlock(&job->lock);
    }
    return NULL;
}

/* The files come first. Opens them. */
static fc_code replay_files(replay *r, uint64_t end, fc_error *err) {
    record e;
    r->at = JOURNAL_MAGIC_BYTES;
    while (r->at < end) {
        FC_TRY(read_batch(r, end, err));
        if (r->filled == 0) {
            return journal_fail(r, "a record is damaged", err);
        }
        while (take_record(r, &e)) {
            if (e.kind != JOURNAL_FILE) {
                r->at -= r->filled - r->used + JOURNAL_HEADER + e.length;
                return FC_OK;
            }
            FC_TRY(replay_file(r, &e, err));
        }
    }
    return FC_OK;
}

static fc_code replay_all(replay *r, fc_progress *progress, fc_error *err) {
    replay_job job = {.replay = r, .end = r->size - JOURNAL_HEADER - JOURNAL_LAST, .progress = progress};
    FC_TRY(replay_files(r, job.end, err));
    fc_progress_begin(progress, FC_PHASE_COPYING, FC_COUNTED_BYTES, job.end);
    pthread_mutex_init(&job.lock, NULL);
    fc_threads_run(fc_useful_threads(fc_processors(), job.end, LEAST_PER_THREAD), replay_records, &job);
    pthread_mutex_destroy(&job.lock);
    if (job.code != FC_OK && err) {
        *err = job.error;
    }
    FC_TRY(job.code);
    FC_TRY(sync_model(r, progress, err));
    return write_state(r, err);
}

fc_code fc_journal_replay(const char *model, int64_t *version, fc_progress *progress, fc_error *err) {
    replay *r = replay_new(model);
    bool there, complete;
    fc_code rc;
    *version = -1;
    FC_NEED(r, err, model);
    FC_TRY_GOTO(replay_open(r, &there, &complete, err), rc, out);
    if (complete) {
        rc = replay_all(r, progress, err);
        if (rc != FC_OK) {
            rc = fc_context(err, rc, "%s: the new version is in %s, and the next run goes on", model, SYNC_JOURNAL);
            goto out;
        }
        *version = r->version;
    }
    rc = there ? remove_journal(r, err) : FC_OK;
out:
    replay_close(r);
    return rc;
}
