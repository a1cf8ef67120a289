/*
 * formats/torch: the zip reader on archives that torch and Python write, and on archives that they never would. Most
 * refusals are tested with whole checkpoints in tests/corpus/bad (test_dcp.c).
 */
#include "torch/zip/zip.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <zlib.h>

#include <cmocka.h>

/* An archive under construction. */
typedef struct builder {
    unsigned char bytes[1 << 20];
    size_t size;
    unsigned char central[4096];
    size_t central_size;
    unsigned count;
} builder;

static void put(unsigned char *at, uint64_t value, int n) {
    for (int i = 0; i < n; i++) {
        at[i] = (unsigned char)(value >> (8 * i));
    }
}

static void append(builder *b, const void *bytes, size_t n) {
    memcpy(b->bytes + b->size, bytes, n);
    b->size += n;
}

enum { PLAIN = 0, ZIP64 = 1, DEFLATE = 2, DESCRIPTOR = 4 };

static void add(builder *b, const char *name, const unsigned char *data, size_t n, unsigned how) {
    unsigned char local[30] = "PK\x03\x04", central[46] = "PK\x01\x02", extra[28], packed[4096];
    size_t stored = n, len = strlen(name), nextra = how & ZIP64 ? 28 : 0;
    uint32_t crc = (uint32_t)crc32(0, data, (uInt)n);
    const unsigned char *body = data;
    unsigned flags = how & DESCRIPTOR ? 0x808 : 0x800;
    if (how & DEFLATE) {
        z_stream z = {0};
        deflateInit2(&z, 9, Z_DEFLATED, -15, 8, Z_DEFAULT_STRATEGY);
        z.next_in = (Bytef *)(uintptr_t)data;
        z.avail_in = (uInt)n;
        z.next_out = packed;
        z.avail_out = sizeof packed;
        assert_int_equal(deflate(&z, Z_FINISH), Z_STREAM_END);
        stored = z.total_out;
        deflateEnd(&z);
        body = packed;
    }
    put(local + 6, flags, 2);
    put(local + 8, how & DEFLATE ? 8 : 0, 2);
    put(local + 14, how & DESCRIPTOR ? 0 : crc, 4);
    put(local + 18, how & DESCRIPTOR ? 0 : how & ZIP64 ? UINT32_MAX : stored, 4);
    put(local + 22, how & DESCRIPTOR ? 0 : how & ZIP64 ? UINT32_MAX : n, 4);
    put(local + 26, len, 2);
    put(central + 8, flags, 2);
    put(central + 10, how & DEFLATE ? 8 : 0, 2);
    put(central + 16, crc, 4);
    put(central + 20, how & ZIP64 ? UINT32_MAX : stored, 4);
    put(central + 24, how & ZIP64 ? UINT32_MAX : n, 4);
    put(central + 28, len, 2);
    put(central + 30, nextra, 2);
    put(central + 42, how & ZIP64 ? UINT32_MAX : b->size, 4);
    put(extra, 1, 2);
    put(extra + 2, 24, 2);
    put(extra + 4, n, 8);
    put(extra + 12, stored, 8);
    put(extra + 20, b->size, 8);
    append(b, local, sizeof local);
    append(b, name, len);
    append(b, body, stored);
    memcpy(b->central + b->central_size, central, sizeof central);
    memcpy(b->central + b->central_size + sizeof central, name, len);
    memcpy(b->central + b->central_size + sizeof central + len, extra, nextra);
    b->central_size += sizeof central + len + nextra;
    b->count++;
}

static void finish(builder *b, unsigned how, const char *comment) {
    unsigned char end[22] = "PK\x05\x06", end64[56] = "PK\x06\x06", locator[20] = "PK\x06\x07";
    size_t start = b->size;
    append(b, b->central, b->central_size);
    if (how & ZIP64) {
        put(locator + 8, b->size, 8);
        put(locator + 16, 1, 4);
        put(end64 + 4, 44, 8);
        put(end64 + 24, b->count, 8);
        put(end64 + 32, b->count, 8);
        put(end64 + 40, b->central_size, 8);
        put(end64 + 48, start, 8);
        append(b, end64, sizeof end64);
        append(b, locator, sizeof locator);
    }
    put(end + 8, how & ZIP64 ? UINT16_MAX : b->count, 2);
    put(end + 10, how & ZIP64 ? UINT16_MAX : b->count, 2);
    put(end + 12, how & ZIP64 ? UINT32_MAX : b->central_size, 4);
    put(end + 16, how & ZIP64 ? UINT32_MAX : start, 4);
    put(end + 20, strlen(comment), 2);
    append(b, end, sizeof end);
    append(b, comment, strlen(comment));
}

/* Writes the archive of `b` after `before` other bytes, and opens it. */
static fc_code open_at(const builder *b, size_t before, FILE **file, fc_zip *zip, fc_error *err) {
    static const char junk[64] = "PK\x05\x06 not this one";
    *file = tmpfile();
    assert_int_equal(fwrite(junk, 1, before, *file), before);
    assert_int_equal(fwrite(b->bytes, 1, b->size, *file), b->size);
    fflush(*file);
    return fc_zip_open(fileno(*file), "x.distcp", before, b->size, zip, err);
}

static void assert_record(fc_zip *zip, const char *name, const unsigned char *data, size_t n) {
    unsigned char *bytes;
    fc_error err;
    const fc_zip_entry *entry = fc_zip_find(zip, name);
    assert_non_null(entry);
    assert_int_equal(entry->size, n);
    assert_int_equal(fc_zip_read(zip, entry, &bytes, &err), FC_OK);
    assert_memory_equal(bytes, data, n);
    free(bytes);
}

static void reads_every_variant(void **state) {
    (void)state;
    static builder b;
    static const unsigned char text[] = "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa";
    static const unsigned variants[] = {PLAIN, ZIP64, DESCRIPTOR, ZIP64 | DESCRIPTOR};
    for (size_t v = 0; v < 4; v++) {
        for (size_t before = 0; before <= 64; before += 32) {
            FILE *file;
            fc_zip zip;
            fc_error err;
            memset(&b, 0, sizeof b);
            add(&b, "archive/data.pkl", text, sizeof text, variants[v] | DEFLATE);
            add(&b, "archive/data/0", text, 17, variants[v]);
            add(&b, "archive/empty", text, 0, variants[v]);
            finish(&b, variants[v], v == 0 ? "a comment with PK\x05\x06 in it" : "");
            assert_int_equal(open_at(&b, before, &file, &zip, &err), FC_OK);
            assert_int_equal(zip.nentries, 3);
            assert_record(&zip, "archive/data.pkl", text, sizeof text);
            assert_record(&zip, "archive/data/0", text, 17);
            assert_record(&zip, "archive/empty", text, 0);
            assert_null(fc_zip_find(&zip, "archive/data/1"));
            assert_null(fc_zip_find(&zip, ""));
            fc_zip_close(&zip);
            fclose(file);
        }
    }
}

/* A large item takes two reads: one at its start and one at its end. */
static void large_archive_reads_its_edges(void **state) {
    (void)state;
    static builder b;
    static unsigned char data[300000];
    FILE *file;
    fc_zip zip;
    fc_error err;
    memset(&b, 0, sizeof b);
    memset(data, 7, sizeof data);
    add(&b, "archive/data.pkl", data, 100, PLAIN);
    add(&b, "archive/data/0", data, sizeof data, PLAIN);
    add(&b, "archive/version", data, 2, PLAIN);
    finish(&b, ZIP64, "");
    assert_int_equal(open_at(&b, 10, &file, &zip, &err), FC_OK);
    assert_null(zip.other.bytes);
    const fc_zip_entry *entry = fc_zip_find(&zip, "archive/data/0");
    assert_int_equal(entry->data, 10 + 30 + 16 + 100 + 30 + 14);
    assert_int_equal(entry->stored, sizeof data);
    assert_record(&zip, "archive/data.pkl", data, 100);
    assert_record(&zip, "archive/version", data, 2);
    assert_null(zip.other.bytes);
    assert_record(&zip, "archive/data/0", data, sizeof data);
    fc_zip_close(&zip);
    fclose(file);
}

static void assert_refused(const builder *b, const char *why) {
    FILE *file;
    fc_zip zip;
    fc_error err;
    assert_int_equal(open_at(b, 0, &file, &zip, &err), FC_ECORRUPT);
    assert_non_null(strstr(err.message, why));
    fc_zip_close(&zip);
    fclose(file);
}

/* torch.load goes by the first bytes of a file: it would load these as a pickle of their own. */
static void bytes_before_the_first_record_are_refused(void **state) {
    (void)state;
    static builder b, with;
    for (unsigned how = PLAIN; how <= ZIP64; how++) {
        memset(&b, 0, sizeof b);
        memset(&with, 0, sizeof with);
        add(&b, "a/b", (const unsigned char *)"text", 4, how);
        finish(&b, how, "");
        append(&with, "some prefix", 11);
        append(&with, b.bytes, b.size);
        assert_refused(&with, "does not begin with its first record");
        memset(&b, 0, sizeof b);
        append(&b, "some prefix", 11);
        add(&b, "a/b", (const unsigned char *)"text", 4, how);
        finish(&b, how, "");
        assert_refused(&b, "does not begin with its first record");
    }
}

/* PyTorch ignores the case of letters when it looks for a record. */
static void names_that_differ_only_in_case_are_refused(void **state) {
    (void)state;
    static builder b;
    memset(&b, 0, sizeof b);
    add(&b, "a/DATA.pkl", (const unsigned char *)"evil", 4, PLAIN);
    add(&b, "a/b", (const unsigned char *)"text", 4, PLAIN);
    add(&b, "a/data.pkl", (const unsigned char *)"good", 4, PLAIN);
    finish(&b, PLAIN, "");
    assert_refused(&b, "two records are called");
}

/* A change of any byte of a small archive is accepted only if it is harmless, and nothing is read out of bounds. */
static void changed_bytes_are_survived(void **state) {
    (void)state;
    static builder b;
    static const unsigned char text[] = "some text that can be compressed, compressed, compressed";
    memset(&b, 0, sizeof b);
    add(&b, "a/data.pkl", text, sizeof text, DEFLATE);
    add(&b, "a/data/0", text, 20, ZIP64);
    finish(&b, ZIP64, "");
    FILE *file = tmpfile();
    unsigned refused = 0;
    for (size_t i = 0; i < b.size; i++) {
        fc_zip zip;
        fc_error err = {FC_OK, ""};
        b.bytes[i] ^= 0x41;
        rewind(file);
        assert_int_equal(fwrite(b.bytes, 1, b.size, file), b.size);
        fflush(file);
        fc_code rc = fc_zip_open(fileno(file), "x", 0, b.size, &zip, &err);
        if (rc == FC_OK) {
            for (size_t e = 0; e < zip.nentries; e++) {
                unsigned char *bytes = NULL;
                assert_true(zip.entries[e].data + zip.entries[e].stored <= zip.records_end);
                rc = fc_zip_read(&zip, &zip.entries[e], &bytes, &err);
                if (rc != FC_OK) {
                    refused++;
                }
                free(bytes);
            }
        } else {
            refused++;
            assert_true(rc == FC_ECORRUPT || rc == FC_EUNSUPPORTED);
            assert_true(strncmp(err.message, "x: offset ", 10) == 0);
        }
        fc_zip_close(&zip);
        b.bytes[i] ^= 0x41;
    }
    assert_true(refused > b.size / 2);
    fclose(file);
}

static void truncated_archives_are_refused(void **state) {
    (void)state;
    static builder b;
    memset(&b, 0, sizeof b);
    add(&b, "a/data.pkl", (const unsigned char *)"text", 4, ZIP64);
    finish(&b, ZIP64, "");
    size_t whole = b.size;
    for (b.size = 0; b.size < whole; b.size++) {
        FILE *file;
        fc_zip zip;
        fc_error err;
        assert_int_equal(open_at(&b, 0, &file, &zip, &err), FC_ECORRUPT);
        assert_string_equal(err.message, "x.distcp: offset 0: the torch.save archive is damaged: the end record is "
                                         "missing; the archive may be truncated, or its offset in the file is wrong");
        fclose(file);
    }
}

static void bad_archives_are_refused(void **state) {
    (void)state;
    static builder b;
    FILE *file;
    fc_zip zip;
    fc_error err;
    memset(&b, 0, sizeof b);
    add(&b, "a/x", (const unsigned char *)"text", 4, PLAIN);
    add(&b, "a/y", (const unsigned char *)"text", 4, PLAIN);
    finish(&b, PLAIN, "");
    put(b.bytes + b.size - 14, 3, 2); /* three records instead of two */
    put(b.bytes + b.size - 12, 3, 2);
    assert_int_equal(open_at(&b, 0, &file, &zip, &err), FC_ECORRUPT);
    assert_true(strncmp(err.message, "x.distcp: offset ", 17) == 0);
    fclose(file);
    put(b.bytes + b.size - 14, 2, 2);
    put(b.bytes + b.size - 12, 1, 2);
    assert_int_equal(open_at(&b, 0, &file, &zip, &err), FC_EUNSUPPORTED);
    assert_string_equal(err.message, "x.distcp: offset 172: a zip archive in several parts is not supported");
    fclose(file);
    put(b.bytes + b.size - 12, 2, 2);
    put(b.bytes + b.size - 10, 1 << 20, 4); /* a directory larger than the file */
    assert_int_equal(open_at(&b, 0, &file, &zip, &err), FC_ECORRUPT);
    assert_string_equal(
        err.message,
        "x.distcp: offset 172: the torch.save archive is damaged: the numbers in the end record are invalid");
    fclose(file);
    put(b.bytes + b.size - 10, b.central_size, 4);
    put(b.bytes + b.size - 22 - b.central_size + 10, 12, 2); /* bzip2 */
    assert_int_equal(open_at(&b, 0, &file, &zip, &err), FC_EUNSUPPORTED);
    assert_string_equal(err.message, "x.distcp: offset 74: zip compression method 12 is not supported");
    fclose(file);
    /* The end is beyond 2^63. */
    assert_int_equal(fc_zip_open(0, "x", UINT64_MAX - 5, 10, &zip, &err), FC_ECORRUPT);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(reads_every_variant),
        cmocka_unit_test(large_archive_reads_its_edges),
        cmocka_unit_test(bytes_before_the_first_record_are_refused),
        cmocka_unit_test(names_that_differ_only_in_case_are_refused),
        cmocka_unit_test(changed_bytes_are_survived),
        cmocka_unit_test(truncated_archives_are_refused),
        cmocka_unit_test(bad_archives_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
