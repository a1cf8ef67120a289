/*
 * Fuzzes the reader of the journal of a conversion that can be resumed. The input is a list of records: a kind, the
 * length in two bytes, and the content. They get their lengths and CRCs, unless the first byte is odd: then the input
 * is the journal. Whatever was read can go on: a record that is appended to it is read with it.
 */
#include "base/crc.h"
#include "base/grow.h"
#include "base/little.h"
#include "fuzz.h"
#include "move/tile_journal.h"

#include <fcntl.h>

static void write_journal(const char *path, const void *data, size_t size) {
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (fd < 0 || write(fd, data, size) != (ssize_t)size) {
        abort();
    }
    close(fd);
}

static void add_record(fc_notes *out, unsigned char kind, const uint8_t *content, size_t size, uint64_t *crc) {
    unsigned char head[16], tail[8];
    fc_store_little(head, kind, 8);
    fc_store_little(head + 8, size, 8);
    *crc = fc_crc64(fc_crc64(*crc, head, sizeof head), content, size);
    fc_store_little(tail, *crc, 8);
    if (!fc_notes_add(out, head, sizeof head) || !fc_notes_add(out, content, size) ||
        !fc_notes_add(out, tail, sizeof tail)) {
        abort();
    }
}

/* What the reader guarantees, and resume.c relies on. */
static void check(const fc_tile_journal *j, size_t size) {
    if (j->end > size || (!j->identity && (j->end || j->nfiles || j->ntiles || j->nsums)) ||
        (j->identity && j->identity[j->identity_size] != '\0')) {
        abort();
    }
    for (size_t i = 0; i < j->ntiles; i++) {
        const fc_done_tiles *t = &j->tiles[i];
        if (t->file >= j->nfiles || t->start < 0 || t->count <= 0 || t->start > INT64_MAX - t->count) {
            abort();
        }
    }
}

static void go_on(fc_tile_journal *j, const char *path) {
    const fc_written_file file = {.inode = 1, .size = 2, .layout = 3};
    const size_t files = j->nfiles, tiles = j->ntiles;
    fc_tile_journal again;
    fc_error err;
    if (fc_tile_journal_file(j, files, &file, &err) != FC_OK || fc_tile_journal_open(path, &again, &err) != FC_OK ||
        again.nfiles != files + 1 || again.ntiles != tiles) {
        abort();
    }
    fc_tile_journal_free(&again);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static char path[64];
    fc_notes records = {NULL, 0, 0};
    uint64_t crc = 0;
    fc_tile_journal j;
    fc_error err;
    if (!*path) {
        fuzz_place(path, "fuzz-journal-XXXXXX");
        close(mkstemp(path));
        fuzz_remove_at_end(path);
    }
    if (size > 0 && data[0] % 2) {
        write_journal(path, data + 1, --size);
    } else {
        for (size_t at = 1; at + 3 <= size;) {
            const size_t wanted = fc_load_little(data + at + 1, 2), rest = size - at - 3;
            const size_t length = wanted < rest ? wanted : rest;
            add_record(&records, data[at], data + at + 3, length, &crc);
            at += 3 + length;
        }
        size = records.size;
        write_journal(path, records.data, size);
    }
    if (fc_tile_journal_open(path, &j, &err) != FC_OK) {
        abort();
    }
    check(&j, size);
    if (j.identity) {
        go_on(&j, path);
    }
    fc_tile_journal_free(&j);
    free(records.data);
    return 0;
}
