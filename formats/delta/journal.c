/*
 * Writes a journal. See journal.h.
 */
#include "delta/journal.h"

#include "base/little.h"
#include "codec/changes.h"
#include "delta/checksum.h"
#include "delta/record.h"
#include "fsdpckpt/try.h"
#include "io/file.h"
#include "io/sync.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SPOOL = 256 << 10 };

struct fc_journal {
    XXH3_state_t digest; /* of everything so far */
    char *path;          /* malloc'ed */
    char *folder;        /* malloc'ed */
    int fd;
    bool committed;
    uint32_t files;
    uint64_t end, changed; /* bytes in the file; bytes that differ */
    pthread_mutex_t lock;  /* guards what follows, and the above while there are threads */
    size_t filled;
    unsigned char spool[SPOOL];
};

static fc_code journal_flush(fc_journal *j, fc_error *err) {
    FC_TRY(fc_pwrite_full(j->fd, j->spool, j->filled, j->end, j->path, err));
    j->end += j->filled;
    j->filled = 0;
    return FC_OK;
}

static fc_code journal_put(fc_journal *j, const void *bytes, size_t size, fc_error *err) {
    if (sizeof j->spool - j->filled < size) {
        FC_TRY(journal_flush(j, err));
    }
    XXH3_128bits_update(&j->digest, bytes, size);
    memcpy(j->spool + j->filled, bytes, size);
    j->filled += size;
    return FC_OK;
}

/* @param offset, size of the place, if it is one. @param length of `bytes`, which fit into the spool. */
static fc_code put_record(fc_journal *j, journal_kind kind, uint32_t file, uint64_t offset, uint32_t size,
                          const void *bytes, size_t length, fc_error *err) {
    unsigned char header[JOURNAL_HEADER];
    fc_store_little(header, kind, 4);
    fc_store_little(header + 4, file, 4);
    fc_store_little(header + 8, offset, 8);
    fc_store_little(header + 16, size, 4);
    fc_store_little(header + 20, length, 4);
    FC_TRY(journal_put(j, header, sizeof header, err));
    return journal_put(j, bytes, length, err);
}

fc_code fc_journal_new(const char *model, fc_journal **out, fc_error *err) {
    fc_journal *j = *out = aligned_alloc(_Alignof(fc_journal), sizeof *j);
    FC_NEED(j, err, model);
    memset(j, 0, sizeof *j);
    j->fd = -1;
    pthread_mutex_init(&j->lock, NULL);
    XXH3_128bits_reset(&j->digest);
    if (asprintf(&j->path, "%s/" SYNC_JOURNAL, model) < 0) {
        j->path = NULL;
        return fc_no_memory(err, model);
    }
    if (asprintf(&j->folder, "%s/" SYNC_FOLDER, model) < 0) {
        j->folder = NULL;
        return fc_no_memory(err, model);
    }
    j->fd = open(j->path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (j->fd < 0) {
        return fc_fail_errno(err, errno, "%s: the file cannot be created", j->path);
    }
    return journal_put(j, JOURNAL_MAGIC, JOURNAL_MAGIC_BYTES, err);
}

void fc_journal_free(fc_journal *j) {
    if (!j) {
        return;
    }
    if (j->fd >= 0) {
        close(j->fd);
        if (!j->committed) {
            unlink(j->path);
        }
    }
    pthread_mutex_destroy(&j->lock);
    free(j->path);
    free(j->folder);
    free(j);
}

fc_code fc_journal_file(fc_journal *j, const char *name, uint32_t *number, fc_error *err) {
    *number = j->files++;
    return put_record(j, JOURNAL_FILE, *number, 0, 0, name, strlen(name), err);
}

fc_code fc_journal_replaces(fc_journal *j, const char *name, fc_error *err) {
    return put_record(j, JOURNAL_REPLACES, 0, 0, 0, name, strlen(name), err);
}

fc_code fc_journal_removes(fc_journal *j, const char *name, fc_error *err) {
    return put_record(j, JOURNAL_REMOVES, 0, 0, 0, name, strlen(name), err);
}

uint64_t fc_journal_changed(const fc_journal *j) {
    return j->changed;
}

bool fc_journal_is_committed(const fc_journal *j) {
    return j && j->committed;
}

/* ---- changes ---- */

/* Appends a number, 7 bits to a byte, the lowest first. */
static size_t put_varint(unsigned char *out, size_t value) {
    size_t n = 0;
    for (; value >= 128; value >>= 7) {
        out[n++] = (unsigned char)(value | 128);
    }
    out[n++] = (unsigned char)value;
    return n;
}

/* Stores the changes of a place of `size` bytes. @return how many bytes they take. */
static size_t store_changes(const fc_change *changes, size_t count, const unsigned char *made, size_t size,
                            unsigned char *out) {
    size_t stored = 0, last = 0;
    for (size_t i = 0; i < count; i++) {
        const size_t at = changes[i].begin, length = changes[i].end - at;
        stored += put_varint(out + stored, at - last);
        stored += put_varint(out + stored, length);
        if (length <= JOURNAL_SHORT && at + JOURNAL_SHORT <= size) {
            memcpy(out + stored, made + at, JOURNAL_SHORT); /* most have a few bytes; what is too much is overwritten */
        } else {
            memcpy(out + stored, made + at, length);
        }
        stored += length;
        last = changes[i].end;
    }
    return stored;
}

fc_code fc_journal_changes(fc_journal *j, uint32_t file, uint64_t offset, const unsigned char *old,
                           const unsigned char *made, size_t size, fc_error *err) {
    unsigned char stored[JOURNAL_MOST + JOURNAL_SHORT];
    fc_change changes[FC_MOST_CHANGES];
    size_t changed;
    const size_t count = fc_find_changes(old, made, size, changes, &changed);
    if (count == 0) {
        return FC_OK;
    }
    const size_t length = store_changes(changes, count, made, size, stored);
    pthread_mutex_lock(&j->lock);
    j->changed += changed;
    const fc_code rc = put_record(j, JOURNAL_CHANGES, file, offset, (uint32_t)size, stored, length, err);
    pthread_mutex_unlock(&j->lock);
    return rc;
}

/* ---- the end ---- */

static fc_code sync_journal(const fc_journal *j, fc_error *err) {
    return fsync(j->fd) == 0 ? FC_OK : fc_fail_errno(err, errno, "%s: fsync", j->path);
}

fc_code fc_journal_commit(fc_journal *j, int64_t version, fc_error *err) {
    unsigned char last[JOURNAL_LAST];
    XXH128_canonical_t digest;
    FC_TRY(journal_flush(j, err));
    FC_TRY(sync_journal(j, err));
    FC_TRY(fc_sync_path(AT_FDCWD, j->folder, j->folder, err));
    XXH128_canonicalFromHash(&digest, XXH3_128bits_digest(&j->digest));
    memcpy(last, digest.digest, sizeof digest.digest);
    fc_store_little(last + sizeof digest.digest, (uint64_t)version, 8);
    FC_TRY(put_record(j, JOURNAL_END, 0, j->end, 0, last, sizeof last, err));
    FC_TRY(journal_flush(j, err));
    FC_TRY(sync_journal(j, err));
    j->committed = true;
    return FC_OK;
}
