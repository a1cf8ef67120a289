/*
 * lib/move/tile_journal.c: what is written is read; whatever the bytes are, no more is read than was written, and a
 * tile that is read is one of a file that is known.
 */
#include "move/tile_journal.h"

#include "base/crc.h"
#include "base/little.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

enum { MOST = 4096, RECORDS = 6 };

static char folder[] = "/tmp/fsdpckpt-journal-XXXXXX", path[64];
static unsigned char bytes[MOST];
static size_t ends[RECORDS + 1]; /* of the records */

static size_t load(void) {
    FILE *f = fopen(path, "rb");
    assert_non_null(f);
    const size_t size = fread(bytes, 1, sizeof bytes, f);
    fclose(f);
    return size;
}

static void store(const unsigned char *data, size_t size) {
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(data, 1, size, f), size);
    fclose(f);
}

static fc_done_tiles tiles_of(uint64_t file, int64_t start) {
    return (fc_done_tiles){.file = file, .item = 3, .start = start, .count = 4, .bytes = 8, .digest = {1, 2, 3}};
}

static void add(fc_tile_journal *j, uint64_t file, int64_t start) {
    fc_error err;
    const fc_done_tiles tiles = tiles_of(file, start);
    const fc_done_sum sum = {.source = 1, .index = 2, .sum = {3, 4, 5, 1}};
    assert_int_equal(fc_tile_journal_add(j, &tiles, 1, &sum, 1, &err), FC_OK);
    assert_int_equal(fc_tile_journal_sync(j, &err), FC_OK);
}

static void add_file(fc_tile_journal *j, uint64_t number, uint64_t inode) {
    fc_error err;
    const fc_written_file file = {.inode = inode, .size = 100, .layout = 7};
    assert_int_equal(fc_tile_journal_file(j, number, &file, &err), FC_OK);
}

static fc_tile_journal reopen(void) {
    fc_tile_journal j;
    fc_error err;
    assert_int_equal(fc_tile_journal_open(path, &j, &err), FC_OK);
    return j;
}

/* Writes a journal: identity, file 0, its tiles, file 1, its tiles, more tiles of file 0. */
static size_t make(void) {
    fc_error err;
    unlink(path);
    fc_tile_journal j = reopen();
    assert_null(j.identity);
    assert_int_equal(fc_tile_journal_begin(&j, "vone\0ntwo", 10, &err), FC_OK);
    for (size_t i = 1; i <= RECORDS; i++) {
        ends[i] = (size_t)j.end;
        if (i == 1 || i == 3) {
            add_file(&j, i / 2, 40 + i);
        } else if (i < RECORDS) {
            add(&j, i == 4, (int64_t)(10 * i));
        }
    }
    fc_tile_journal_free(&j);
    return load();
}

/* The journal has exactly the first records. */
static void check_records(const fc_tile_journal *j, size_t count) {
    const size_t tiles = (count > 2) + (count > 4) + (count > 5);
    assert_int_equal(j->end, ends[count]);
    assert_int_equal(j->identity != NULL, count > 0);
    assert_int_equal(j->nfiles, (count > 1) + (count > 3));
    assert_int_equal(j->ntiles, tiles);
    assert_int_equal(j->nsums, tiles);
    if (count > 0) {
        assert_int_equal(j->identity_size, 10);
        assert_memory_equal(j->identity, "vone\0ntwo", 10);
    }
    if (count > 4) {
        const fc_done_tiles expected = tiles_of(1, 40);
        assert_int_equal(j->files[1].inode, 43);
        assert_int_equal(j->tiles[1].file, expected.file);
        assert_int_equal(j->tiles[1].start, expected.start);
        assert_int_equal(j->tiles[1].count, expected.count);
        assert_int_equal(j->tiles[1].digest.item32, expected.digest.item32);
        assert_int_equal(j->sums[1].sum.recorded, 5);
    }
}

static void check_prefix(size_t count) {
    fc_tile_journal j = reopen();
    check_records(&j, count);
    fc_tile_journal_free(&j);
}

static size_t records_within(size_t size) {
    size_t count = 0;
    while (count < RECORDS && ends[count + 1] <= size) {
        count++;
    }
    return count;
}

static void torn_journal_has_its_whole_records(void **state) {
    (void)state;
    const size_t size = make();
    assert_int_equal(size, ends[RECORDS]);
    for (size_t length = 0; length <= size; length++) {
        store(bytes, length);
        check_prefix(records_within(length));
    }
}

static void changed_byte_ends_the_journal(void **state) {
    (void)state;
    const size_t size = make();
    for (size_t at = 0; at < size; at++) {
        bytes[at] ^= 1 << at % 8;
        store(bytes, size);
        check_prefix(records_within(at));
        bytes[at] ^= 1 << at % 8;
    }
}

/* Records that a power failure has left after a lost one belong to the lost one. */
static void lost_record_takes_those_after_it_along(void **state) {
    (void)state;
    const size_t size = make();
    memset(bytes + ends[3], 0, ends[4] - ends[3]);
    store(bytes, size);
    fc_tile_journal j = reopen();
    check_records(&j, 3);
    add_file(&j, 1, 43); /* the same again: its CRC is that of the lost one */
    fc_tile_journal_free(&j);
    j = reopen();
    assert_int_equal(j.nfiles, 2);
    assert_int_equal(j.ntiles, 1);
    fc_tile_journal_free(&j);
}

/* Records of another journal, or the same again, are not taken for the next ones. */
static void record_in_another_place_ends_the_journal(void **state) {
    (void)state;
    const size_t size = make();
    memcpy(bytes + size, bytes + ends[4], ends[6] - ends[4]);
    store(bytes, size + ends[6] - ends[4]);
    check_prefix(6);
    memmove(bytes + ends[2], bytes + ends[4], size - ends[4]);
    store(bytes, size - (ends[4] - ends[2]));
    check_prefix(2);
}

static void new_file_forgets_its_tiles(void **state) {
    (void)state;
    make();
    fc_tile_journal j = reopen();
    add_file(&j, 0, 99);
    fc_tile_journal_free(&j);
    j = reopen();
    assert_int_equal(j.ntiles, 1);
    assert_int_equal(j.tiles[0].file, 1);
    assert_int_equal(j.files[0].inode, 99);
    assert_int_equal(j.nsums, 3); /* what was read was read */
    fc_tile_journal_free(&j);
}

/* Appends a record with a good CRC. */
static void append(size_t at, uint64_t kind, const uint64_t *numbers, size_t count) {
    uint64_t before = fc_load_little(bytes + at - 8, 8);
    fc_store_little(bytes + at, kind, 8);
    fc_store_little(bytes + at + 8, 8 * count, 8);
    for (size_t i = 0; i < count; i++) {
        fc_store_little(bytes + at + 16 + 8 * i, numbers[i], 8);
    }
    fc_store_little(bytes + at + 16 + 8 * count, fc_crc64(before, bytes + at, 16 + 8 * count), 8);
    store(bytes, at + 24 + 8 * count);
}

static void senseless_records_end_the_journal(void **state) {
    (void)state;
    enum { IDENTITY = 1, FILES, TILES };
    const uint64_t negative = UINT64_MAX, huge = UINT64_MAX / 8;
    const struct {
        uint64_t kind;
        size_t count;
        uint64_t numbers[12];
    } records[] = {
        {IDENTITY, 1, {0}},
        {0, 0, {0}},
        {4, 4, {0}},
        {FILES, 4, {3, 1, 1, 1}}, /* 2 would be the next one */
        {FILES, 4, {huge, 1, 1, 1}},
        {FILES, 3, {2, 1, 1}},
        {FILES, 5, {2, 1, 1, 1, 1}}, /* the ID of an upload has no NUL */
        {TILES, 0, {0}},
        {TILES, 1, {0}},
        {TILES, 2, {1, 0}},
        {TILES, 2, {0, 1}},
        {TILES, 2, {UINT64_MAX / 64 + 1, 0}},
        {TILES, 2, {0, UINT64_MAX / 48 + 1}},
        {TILES, 10, {1, 0, 2, 0, 0, 4, 8}},             /* a file that is not known */
        {TILES, 10, {1, 0, negative, 0, 0, 4, 8}},      /* the same */
        {TILES, 10, {1, 0, 0, 0, negative, 4, 8}},      /* begins before the item */
        {TILES, 10, {1, 0, 0, 0, 0, 0, 8}},             /* has no element */
        {TILES, 10, {1, 0, 0, 0, 0, negative, 8}},      /* the same */
        {TILES, 10, {1, 0, 0, 0, INT64_MAX - 3, 4, 8}}, /* ends after all numbers */
        {TILES, 10, {1, 1, 0, 0, 0, 4, 8}},             /* lacks a sum */
        {TILES, 11, {1, 0, 0, 0, 0, 4, 8}},
    };
    const size_t size = make();
    for (size_t i = 0; i < sizeof records / sizeof *records; i++) {
        append(size, records[i].kind, records[i].numbers, records[i].count);
        check_prefix(6);
    }
    append(size, TILES, (const uint64_t[]){1, 0, 0, 0, INT64_MAX - 4, 4, 8, 0, 0, 0}, 10);
    fc_tile_journal j = reopen();
    assert_int_equal(j.ntiles, 4);
    fc_tile_journal_free(&j);
}

/* A length that would not fit into memory is longer than the file. */
static void long_record_ends_the_journal(void **state) {
    (void)state;
    static const uint64_t lengths[] = {UINT64_MAX, UINT64_MAX - 7, UINT64_MAX - 24, INT64_MAX, 1 << 20};
    const size_t size = make();
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        fc_store_little(bytes + ends[4] + 8, lengths[i], 8);
        store(bytes, size);
        check_prefix(4);
    }
}

static int enter(void **state) {
    (void)state;
    snprintf(path, sizeof path, "%s/journal", mkdtemp(folder));
    return 0;
}

static int leave(void **state) {
    (void)state;
    unlink(path);
    return rmdir(folder);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(torn_journal_has_its_whole_records),
        cmocka_unit_test(changed_byte_ends_the_journal),
        cmocka_unit_test(lost_record_takes_those_after_it_along),
        cmocka_unit_test(record_in_another_place_ends_the_journal),
        cmocka_unit_test(new_file_forgets_its_tiles),
        cmocka_unit_test(senseless_records_end_the_journal),
        cmocka_unit_test(long_record_ends_the_journal),
    };
    return cmocka_run_group_tests(tests, enter, leave);
}
