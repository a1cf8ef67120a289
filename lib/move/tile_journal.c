/*
 * Reads and writes the journal of finished tiles: see tile_journal.h. A record is its kind and the length of its
 * content, the content, and a CRC-64, which goes on from that of the record before it: so no record is taken for one
 * that was written at another time or in another journal. All numbers are little-endian and have 8 bytes.
 */
#include "move/tile_journal.h"

#include "base/checked.h"
#include "base/crc.h"
#include "base/grow.h"
#include "base/little.h"
#include "fsdpckpt/try.h"
#include "io/file.h"
#include "io/path.h"
#include "net/remote.h"
#include "net/upload.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
    NUMBER = 8,
    HEAD = 2 * NUMBER, /* kind and length */
    FILE_NUMBERS = 4,
    TILE_NUMBERS = 8,
    SUM_NUMBERS = 6,
    MOST_FETCHED = 1 << 30 /* bytes of a journal in a bucket */
};

typedef enum record_kind { RECORD_IDENTITY = 1, RECORD_FILE, RECORD_TILES } record_kind;

/* The content of a record that is being read. */
typedef struct content {
    const unsigned char *at;
    uint64_t left; /* bytes */
} content;

static uint64_t take(content *c) {
    uint64_t value = c->left >= NUMBER ? fc_load_little(c->at, NUMBER) : 0;
    c->at += c->left >= NUMBER ? NUMBER : 0;
    c->left -= c->left >= NUMBER ? NUMBER : 0;
    return value;
}

static bool put(fc_notes *notes, uint64_t value) {
    unsigned char bytes[NUMBER];
    fc_store_little(bytes, value, NUMBER);
    return fc_notes_add(notes, bytes, sizeof bytes);
}

/* ---- reading ---- */

static fc_code read_identity(fc_tile_journal *j, const content *c, fc_error *err) {
    j->identity = malloc((size_t)c->left + 1);
    FC_NEED(j->identity, err, j->path);
    memcpy(j->identity, c->at, (size_t)c->left);
    j->identity[c->left] = '\0';
    j->identity_size = (size_t)c->left;
    return FC_OK;
}

static void forget_tiles(fc_tile_journal *j, uint64_t file) {
    size_t kept = 0;
    for (size_t i = 0; i < j->ntiles; i++) {
        if (j->tiles[i].file != file) {
            j->tiles[kept++] = j->tiles[i];
        }
    }
    j->ntiles = kept;
}

/* @return whether the content is good; sets *rc if memory runs out. */
static bool read_file(fc_tile_journal *j, content *c, fc_code *rc, fc_error *err) {
    const size_t numbers = (size_t)FILE_NUMBERS * NUMBER;
    if (c->left < numbers || memchr(c->at + numbers, 0, (size_t)c->left - numbers)) {
        return false;
    }
    const uint64_t number = take(c);
    if (number > j->nfiles) { /* files come one after the other */
        return false;
    }
    if (!fc_grow(&j->files, &j->most_files, (size_t)number + 1, sizeof *j->files)) {
        *rc = fc_no_memory(err, j->path);
        return true;
    }
    if (number < j->nfiles) {
        forget_tiles(j, number);
        free(j->files[number].upload);
    } else {
        j->nfiles++;
    }
    fc_written_file *file = &j->files[number];
    file->inode = take(c);
    file->size = take(c);
    file->layout = take(c);
    file->upload = c->left > 0 ? strndup((const char *)c->at, (size_t)c->left) : NULL;
    *rc = file->upload || c->left == 0 ? FC_OK : fc_no_memory(err, j->path);
    return true;
}

static fc_done_tiles take_tiles(content *c) {
    fc_done_tiles t;
    t.file = take(c);
    t.item = take(c);
    t.start = (int64_t)take(c);
    t.count = (int64_t)take(c);
    t.bytes = take(c);
    t.digest.item = take(c);
    t.digest.tensor = take(c);
    t.digest.item32 = (uint32_t)take(c);
    t.offset = 0;
    return t;
}

static fc_done_sum take_sum(content *c) {
    fc_done_sum s;
    s.source = take(c);
    s.index = take(c);
    s.sum.bytes = take(c);
    s.sum.sum = take(c);
    s.sum.recorded = take(c);
    s.sum.layout = take(c);
    return s;
}

static bool read_tiles(fc_tile_journal *j, content *c, fc_code *rc, fc_error *err) {
    const bool counted = c->left >= 2 * NUMBER;
    const uint64_t ntiles = take(c), nsums = take(c);
    const size_t first = j->ntiles;
    uint64_t tiles, sums, all;
    if (!counted || !fc_mul_u64(ntiles, TILE_NUMBERS * NUMBER, &tiles) ||
        !fc_mul_u64(nsums, SUM_NUMBERS * NUMBER, &sums) || !fc_add_u64(tiles, sums, &all) || all != c->left) {
        return false;
    }
    if (!fc_grow(&j->tiles, &j->most_tiles, j->ntiles + (size_t)ntiles, sizeof *j->tiles) ||
        !fc_grow(&j->sums, &j->most_sums, j->nsums + (size_t)nsums, sizeof *j->sums)) {
        *rc = fc_no_memory(err, j->path);
        return true;
    }
    for (uint64_t i = 0; i < ntiles; i++) {
        const fc_done_tiles t = take_tiles(c);
        if (t.file >= j->nfiles || t.start < 0 || t.count <= 0 || t.count > INT64_MAX - t.start) {
            return false;
        }
        j->tiles[first + i] = t;
    }
    j->ntiles += (size_t)ntiles;
    for (uint64_t i = 0; i < nsums; i++) {
        j->sums[j->nsums++] = take_sum(c);
    }
    return true;
}

/* @return whether it is a record that can follow those before it. */
static bool read_content(fc_tile_journal *j, uint64_t kind, content *c, fc_code *rc, fc_error *err) {
    if (kind == RECORD_IDENTITY && !j->identity) {
        *rc = read_identity(j, c, err);
        return true;
    }
    return j->identity &&
           ((kind == RECORD_FILE && read_file(j, c, rc, err)) || (kind == RECORD_TILES && read_tiles(j, c, rc, err)));
}

/* Reads the record at j->end. @param whole whether there is one. */
static fc_code read_record(fc_tile_journal *j, uint64_t size, bool *whole, fc_error *err) {
    unsigned char head[HEAD];
    *whole = false;
    if (size - j->end < HEAD + NUMBER) {
        return FC_OK;
    }
    FC_TRY(fc_pread_full(j->fd, head, HEAD, j->end, j->path, err));
    const uint64_t kind = fc_load_little(head, NUMBER), length = fc_load_little(head + NUMBER, NUMBER);
    if (length > size - j->end - HEAD - NUMBER) {
        return FC_OK;
    }
    unsigned char *bytes = malloc((size_t)length + NUMBER);
    FC_NEED(bytes, err, j->path);
    content c = {bytes, length};
    fc_code rc;
    FC_TRY_GOTO(fc_pread_full(j->fd, bytes, (size_t)length + NUMBER, j->end + HEAD, j->path, err), rc, out);
    const uint64_t crc = fc_crc64(fc_crc64(j->crc, head, HEAD), bytes, (size_t)length);
    *whole = crc == fc_load_little(bytes + length, NUMBER) && read_content(j, kind, &c, &rc, err);
    if (*whole) {
        j->end += HEAD + length + NUMBER;
        j->crc = crc;
    }
out:
    free(bytes);
    return rc;
}

/* Copies a journal in a bucket, if it is there. */
static fc_code fetch(const char *path, int to, fc_error *err) {
    char *text = NULL;
    size_t size = 0;
    struct stat st;
    bool found = false;
    FC_TRY(fc_stat_path(path, &st, &found, err));
    if (!found) {
        return FC_OK;
    }
    FC_TRY(fc_read_whole(path, "a journal", MOST_FETCHED, &text, &size, err));
    const fc_code rc = fc_pwrite_full(to, text, size, 0, path, err);
    free(text);
    return rc;
}

fc_code fc_tile_journal_open(const char *path, fc_tile_journal *journal, fc_error *err) {
    struct stat st;
    *journal = (fc_tile_journal){.fd = -1, .path = strdup(path), .remote = fc_is_remote(path)};
    FC_NEED(journal->path, err, path);
    journal->fd = journal->remote ? memfd_create("fsdpckpt-journal", MFD_CLOEXEC)
                                  : open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0600);
    FC_TRY(journal->remote && journal->fd >= 0 ? fetch(path, journal->fd, err) : FC_OK);
    if (journal->fd < 0 || fstat(journal->fd, &st) != 0 || !S_ISREG(st.st_mode)) {
        return fc_fail_errno(err, journal->fd < 0 ? errno : EINVAL, "%s: cannot be opened", path);
    }
    for (bool whole = true; whole;) {
        FC_TRY(read_record(journal, (uint64_t)st.st_size, &whole, err));
    }
    journal->torn = (uint64_t)st.st_size > journal->end;
    return FC_OK;
}

void fc_tile_journal_free(fc_tile_journal *journal) {
    if (journal->fd >= 0) {
        close(journal->fd);
    }
    free(journal->path);
    free(journal->identity);
    for (size_t i = 0; i < journal->nfiles; i++) {
        free(journal->files[i].upload);
    }
    free(journal->files);
    free(journal->tiles);
    free(journal->sums);
    *journal = (fc_tile_journal){.fd = -1};
}

/* ---- writing ---- */

/* Removes what is not a whole record, durably: a part of it could follow the next record as if it belonged there. */
static fc_code cut(fc_tile_journal *j, fc_error *err) {
    if (ftruncate(j->fd, (off_t)j->end) != 0 || fsync(j->fd) != 0) {
        return fc_fail_errno(err, errno, "%s: cannot be cut", j->path);
    }
    j->torn = false;
    return FC_OK;
}

/* Appends a record. `notes` has room for its head, and the content. */
static fc_code append(fc_tile_journal *j, record_kind kind, fc_notes *notes, fc_error *err) {
    FC_TRY(j->torn ? cut(j, err) : FC_OK);
    fc_store_little(notes->data, kind, NUMBER);
    fc_store_little(notes->data + NUMBER, notes->size - HEAD, NUMBER);
    const uint64_t crc = fc_crc64(j->crc, notes->data, notes->size);
    FC_NEED(put(notes, crc), err, j->path);
    j->torn = true; /* until all of it is there */
    FC_TRY(fc_pwrite_full(j->fd, notes->data, notes->size, j->end, j->path, err));
    j->torn = false;
    j->end += notes->size;
    j->crc = crc;
    return FC_OK;
}

static bool put_head(fc_notes *notes) {
    static const unsigned char room[HEAD];
    return fc_notes_add(notes, room, sizeof room);
}

fc_code fc_tile_journal_sync(const fc_tile_journal *journal, fc_error *err) {
    if (journal->remote) {
        return fc_upload_journal(journal->path, journal->fd, journal->end, err);
    }
    return fdatasync(journal->fd) == 0 ? FC_OK : fc_fail_errno(err, errno, "%s: fdatasync", journal->path);
}

fc_code fc_tile_journal_begin(fc_tile_journal *journal, const char *identity, size_t size, fc_error *err) {
    fc_notes notes = {NULL, 0, 0};
    journal->end = journal->crc = 0;
    FC_TRY(cut(journal, err));
    while (journal->nfiles > 0) {
        free(journal->files[--journal->nfiles].upload);
    }
    journal->ntiles = journal->nsums = 0;
    fc_code rc = put_head(&notes) && fc_notes_add(&notes, identity, size)
                     ? append(journal, RECORD_IDENTITY, &notes, err)
                     : fc_no_memory(err, journal->path);
    free(notes.data);
    return rc == FC_OK && !journal->remote ? fc_tile_journal_sync(journal, err) : rc;
}

fc_code fc_tile_journal_file(fc_tile_journal *journal, uint64_t number, const fc_written_file *file, fc_error *err) {
    fc_notes notes = {NULL, 0, 0};
    bool good = put_head(&notes) && put(&notes, number) && put(&notes, file->inode) && put(&notes, file->size) &&
                put(&notes, file->layout) &&
                (!file->upload || fc_notes_add(&notes, file->upload, strlen(file->upload)));
    fc_code rc = good ? append(journal, RECORD_FILE, &notes, err) : fc_no_memory(err, journal->path);
    free(notes.data);
    return rc;
}

static bool put_tiles(fc_notes *n, const fc_done_tiles *t) {
    return put(n, t->file) && put(n, t->item) && put(n, (uint64_t)t->start) && put(n, (uint64_t)t->count) &&
           put(n, t->bytes) && put(n, t->digest.item) && put(n, t->digest.tensor) && put(n, t->digest.item32);
}

static bool put_sum(fc_notes *n, const fc_done_sum *s) {
    return put(n, s->source) && put(n, s->index) && put(n, s->sum.bytes) && put(n, s->sum.sum) &&
           put(n, s->sum.recorded) && put(n, s->sum.layout);
}

fc_code fc_tile_journal_add(fc_tile_journal *journal, const fc_done_tiles *tiles, size_t ntiles,
                            const fc_done_sum *sums, size_t nsums, fc_error *err) {
    fc_notes notes = {NULL, 0, 0};
    bool good = put_head(&notes) && put(&notes, ntiles) && put(&notes, nsums);
    for (size_t i = 0; i < ntiles && good; i++) {
        good = put_tiles(&notes, &tiles[i]);
    }
    for (size_t i = 0; i < nsums && good; i++) {
        good = put_sum(&notes, &sums[i]);
    }
    fc_code rc = good ? append(journal, RECORD_TILES, &notes, err) : fc_no_memory(err, journal->path);
    free(notes.data);
    return rc;
}
