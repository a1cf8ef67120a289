/*
 * formats/torch: archives from zip/write.c against the bytes that PyTorch wrote (tests/corpus/pt), below and above
 * 4 GiB; and pickles from pickle/write.c, read back by the pickle machine.
 */
#include "torch/pickle/pickle.h"
#include "torch/pickle/write.h"
#include "torch/zip/write.h"
#include "torch/zip/zip.h"

#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

enum { ID_SIZE = 40, CENTRAL_OF_ID = 46 + 30, ENDS = 56 + 20 + 22 };

static unsigned char *load(const char *name, size_t *size) {
    char path[1024];
    snprintf(path, sizeof path, FSDPCKPT_CORPUS "/pt/%s", name);
    FILE *f = fopen(path, "rb");
    assert_non_null(f);
    unsigned char *bytes = malloc(1 << 20);
    *size = fread(bytes, 1, 1 << 20, f);
    fclose(f);
    return bytes;
}

/* Blanks the id of an archive and its CRC. PyTorch makes the id with std::hash, so ours differs. */
static void forget_id(unsigned char *bytes, const unsigned char *end_of_file, size_t folder) {
    (void)bytes;
    unsigned char *crc = (unsigned char *)(uintptr_t)end_of_file - ENDS - (46 + folder + 22) + 16;
    memset(crc, 0, 4);
    for (unsigned char *p = crc; p > bytes; p--) {
        if (memcmp(p, "PK\x07\x08", 4) == 0) { /* the last descriptor belongs to the id */
            memset(p + 4, 0, 4);
            memset(p - ID_SIZE, 0, ID_SIZE);
            return;
        }
    }
    fail_msg("no descriptor");
}

static void same_bytes(const unsigned char *ours, const unsigned char *theirs, size_t n, const char *what) {
    for (size_t i = 0; i < n; i++) {
        if (ours[i] != theirs[i]) {
            fail_msg("%s: byte %zu is %02x, PyTorch's is %02x", what, i, ours[i], theirs[i]);
        }
    }
}

static void writes_what_torch_writes(void **state) {
    (void)state;
    size_t size;
    unsigned char *theirs = load("layout.pt", &size);
    for (uint64_t start = 0; start <= 640; start += 640) { /* a file of its own, and an item after another */
        FILE *file = tmpfile();
        fc_error err = {0};
        fc_zip zip;
        fc_torch_zip out = {0};
        assert_int_equal(pwrite(fileno(file), theirs, size, (off_t)start), size);
        assert_int_equal(fc_zip_open(fileno(file), "x", start, size, &zip, &err), FC_OK);
        const fc_zip_entry *pickle = fc_zip_find(&zip, "layout/data.pkl");
        assert_int_equal(fc_torch_zip_begin(&out, "layout", theirs + pickle->data - start, pickle->size, &err), FC_OK);
        for (int i = 0; i < 3; i++) {
            char name[32];
            uint64_t offset;
            snprintf(name, sizeof name, "layout/data/%d", i);
            const fc_zip_entry *entry = fc_zip_find(&zip, name);
            assert_int_equal(fc_torch_zip_add_data(&out, entry->size, &offset, &err), FC_OK);
            assert_int_equal(offset, entry->data - start);
            fc_torch_zip_set_crc32(&out, (uint64_t)i, entry->crc);
        }
        assert_int_equal(fc_torch_zip_end(&out, &err), FC_OK);
        assert_int_equal(out.length, size);
        for (int again = 0; again < 2; again++) { /* every run gives the same bytes */
            assert_int_equal(fc_torch_zip_write(&out, fileno(file), "x", start, &err), FC_OK);
        }
        unsigned char *ours = malloc(size), *expected = malloc(size);
        assert_int_equal(pread(fileno(file), ours, size, (off_t)start), size);
        memcpy(expected, theirs, size);
        forget_id(ours, ours + size, 7);
        forget_id(expected, expected + size, 7);
        same_bytes(ours, expected, size, "layout.pt");
        fc_zip_close(&zip);
        fc_torch_zip_free(&out);
        free(ours);
        free(expected);
        fclose(file);
    }
    free(theirs);
}

static void needs_zip64_where_torch_does(void **state) {
    (void)state;
    const uint64_t large = UINT64_C(4400000000);
    const size_t head = 832;
    const char *path = "x";
    size_t size;
    fc_error err = {0};
    unsigned char *theirs = load("layout-zip64.bin", &size), *ours = malloc(size);
    FILE *file = tmpfile();
    fc_torch_zip out = {0};
    uint64_t offset;
    assert_int_equal(fc_torch_zip_begin(&out, "archive", theirs + 64, 306, &err), FC_OK);
    assert_int_equal(fc_torch_zip_add_data(&out, large, &offset, &err), FC_OK);
    assert_int_equal(offset, head);
    assert_int_equal(fc_torch_zip_add_data(&out, 16, &offset, &err), FC_OK);
    assert_int_equal(fc_torch_zip_add_data(&out, 0, &offset, &err), FC_OK);
    assert_int_equal(fc_torch_zip_end(&out, &err), FC_OK);
    assert_int_equal(out.length, size + large);
    assert_int_equal(fc_torch_zip_write(&out, fileno(file), path, 0, &err), FC_OK);
    uint64_t b = out.records[out.first_data + 1].data;
    assert_int_equal(pwrite(fileno(file), theirs + (size_t)(b - large), 16, (off_t)b), 16);
    assert_int_equal(pread(fileno(file), ours, head, 0), head);
    assert_int_equal(pread(fileno(file), ours + head, size - head, (off_t)(head + large)), size - head);

    fc_zip zip;
    assert_int_equal(fc_zip_open(fileno(file), path, 0, out.length, &zip, &err), FC_OK);
    assert_int_equal(fc_zip_find(&zip, "archive/data/0")->size, large);
    assert_int_equal(fc_zip_find(&zip, "archive/data/1")->data, b);
    fc_zip_close(&zip);

    /* PyTorch was configured without CRCs, so those of the small records are zero in its file. */
    for (size_t i = 0; i < out.nrecords; i++) {
        out.records[i].crc32 = 0;
    }
    forget_id(ours, ours + size, 7);
    forget_id(theirs, theirs + size, 7);
    for (size_t i = 0; i + 4 < size; i++) { /* ours are right and were compared above, so blank them */
        size_t at = memcmp(ours + i, "PK\x07\x08", 4) == 0   ? i + 4
                    : memcmp(ours + i, "PK\x01\x02", 4) == 0 ? i + 16
                                                             : 0;
        if (at) {
            memset(ours + at, 0, 4);
            memset(theirs + at, 0, 4);
        }
    }
    same_bytes(ours, theirs, size, "layout-zip64.bin");
    fc_torch_zip_free(&out);
    free(ours);
    free(theirs);
    fclose(file);
}

static void impossible_archives_are_refused(void **state) {
    (void)state;
    fc_torch_zip out = {0};
    fc_error err = {0};
    uint64_t offset;
    char name[600];
    memset(name, 'x', sizeof name - 1);
    name[sizeof name - 1] = '\0';
    assert_int_equal(fc_torch_zip_begin(&out, name, "", 0, &err), FC_EUNSUPPORTED);
    assert_int_equal(fc_torch_zip_begin(&out, "archive", "", 0, &err), FC_OK);
    assert_int_equal(fc_torch_zip_add(&out, name, "", 0, &err), FC_EUNSUPPORTED);
    assert_int_equal(fc_torch_zip_add_data(&out, UINT64_MAX, &offset, &err), FC_EUNSUPPORTED);
    assert_int_equal(fc_torch_zip_add_data(&out, INT64_MAX, &offset, &err), FC_EUNSUPPORTED);
    fc_torch_zip_free(&out);
}

/* Writes one of everything. */
static void write_values(fc_torch_pickler *w) {
    static const unsigned char big[] = {0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f, 0, 0};
    static const int64_t shape[] = {1, 2, 3, 4, -1};
    fc_torch_pickle_op(w, FC_PICKLE_EMPTY_LIST);
    uint32_t last = fc_torch_pickle_put(w);
    fc_torch_pickle_op(w, FC_PICKLE_MARK);
    fc_torch_pickle_op(w, FC_PICKLE_NONE);
    fc_torch_pickle_bool(w, true);
    static const int64_t integers[] = {0, 255, 256, 65535, 65536, INT32_MAX, INT32_MIN, -1, INT64_C(1) << 40};
    for (size_t i = 0; i < sizeof integers / sizeof *integers; i++) {
        fc_torch_pickle_int(w, integers[i]);
    }
    fc_torch_pickle_bigint(w, big, sizeof big);
    fc_torch_pickle_float(w, -0.5);
    fc_torch_pickle_str(w, "caf\xc3\xa9");
    fc_torch_pickle_bytes(w, "\x00\x7f\x80\xff", 4);
    for (size_t n = 0; n < 6; n++) {
        fc_torch_pickle_ints(w, shape, n);
    }
    for (int i = 0; i < 300; i++) { /* the last of them by LONG_BINPUT */
        fc_torch_pickle_op(w, FC_PICKLE_EMPTY_DICT);
        last = fc_torch_pickle_put(w);
    }
    for (int i = 0; i < 2; i++) {
        fc_torch_pickle_global(w, "collections", "OrderedDict");
        fc_torch_pickle_often(w, "storage");
    }
    fc_torch_pickle_get(w, last);
    fc_torch_pickle_op(w, FC_PICKLE_APPENDS);
}

static void check_values(const fc_pickle *p) {
    size_t n, length;
    int64_t value;
    const fc_pv *items = fc_pickle_items(p, p->root, &n);
    assert_int_equal(n, 2 + 9 + 1 + 1 + 1 + 1 + 6 + 300 + 4 + 1);
    assert_int_equal(fc_pv_typeof(items[0]), FC_PV_NONE);
    assert_true(fc_pv_is_true(items[1]));
    static const int64_t integers[] = {0, 255, 256, 65535, 65536, INT32_MAX, INT32_MIN, -1, INT64_C(1) << 40};
    for (size_t i = 0; i < 9; i++) {
        assert_true(fc_pickle_int(p, items[2 + i], &value));
        assert_int_equal(value, integers[i]);
    }
    assert_int_equal(fc_pv_typeof(items[11]), FC_PV_BIGINT);
    fc_pickle_bytes(p, items[11], &length);
    assert_int_equal(length, 9); /* 0x7fff… in its shortest form */
    assert_true(fc_pickle_float(p, items[12]) == -0.5);
    assert_true(fc_pickle_is_str(p, items[13], "caf\xc3\xa9"));
    assert_int_equal(fc_pv_typeof(items[14]), FC_PV_BYTES);
    assert_memory_equal(fc_pickle_bytes(p, items[14], &length), "\x00\x7f\x80\xff", 4);
    assert_int_equal(length, 4);
    for (size_t i = 0; i < 6; i++) {
        fc_pickle_tuple(p, items[15 + i], &length);
        assert_int_equal(length, i);
    }
    assert_int_equal(fc_pv_typeof(items[21 + 299]), FC_PV_DICT);
    assert_int_equal(fc_pv_typeof(items[321]), FC_PV_GLOBAL);
    assert_true(fc_pickle_is_str(p, items[322], "storage"));
    assert_true(items[323] == items[321] && items[324] == items[322]);
    assert_true(items[325] == items[21 + 299]);
}

static void pickles_are_read_back(void **state) {
    (void)state;
    for (int protocol = 2; protocol <= 4; protocol += 2) {
        for (int to_file = 0; to_file < 2; to_file++) {
            FILE *file = tmpfile();
            fc_error err = {0};
            fc_torch_pickler w;
            fc_pickle *p = NULL;
            if (to_file) {
                fc_torch_pickle_begin_file(&w, protocol, fileno(file), "x");
            } else {
                fc_torch_pickle_begin(&w, protocol);
            }
            write_values(&w);
            assert_int_equal(fc_torch_pickle_end(&w, &err), FC_OK);
            fc_pickle_source source = {"x", 0, to_file ? w.written : w.size, to_file ? fileno(file) : -1,
                                       to_file ? NULL : w.bytes};
            assert_int_equal(fc_pickle_load(&source, FC_PICKLE_ITEM, &p, &err), FC_OK);
            check_values(p);
            fc_pickle_free(p);
            fc_torch_pickle_free(&w);
            fclose(file);
        }
    }
}

/* A pickle larger than the write buffer, and a file that cannot be written. */
static void pickles_go_to_files(void **state) {
    (void)state;
    FILE *file = tmpfile();
    fc_error err = {0};
    fc_torch_pickler w;
    fc_pickle *p = NULL;
    char *text = malloc(300000);
    memset(text, 'x', 300000);
    fc_torch_pickle_begin_file(&w, 4, fileno(file), "x");
    fc_torch_pickle_op(&w, FC_PICKLE_EMPTY_LIST);
    fc_torch_pickle_op(&w, FC_PICKLE_MARK);
    for (int i = 0; i < 100000; i++) {
        fc_torch_pickle_int(&w, i);
    }
    fc_torch_pickle_strn(&w, text, 300000);
    fc_torch_pickle_op(&w, FC_PICKLE_APPENDS);
    assert_int_equal(fc_torch_pickle_end(&w, &err), FC_OK);
    assert_true(w.capacity < 1 << 20);
    fc_pickle_source source = {"x", 0, w.written, fileno(file), NULL};
    assert_int_equal(fc_pickle_load(&source, FC_PICKLE_ITEM, &p, &err), FC_OK);
    size_t n;
    fc_pickle_items(p, p->root, &n);
    assert_int_equal(n, 100001);
    fc_pickle_free(p);
    fc_torch_pickle_free(&w);
    free(text);

    int readonly = open("/dev/null", O_RDONLY);
    fc_torch_pickle_begin_file(&w, 4, readonly, "nowhere");
    fc_torch_pickle_op(&w, FC_PICKLE_NONE);
    assert_int_equal(fc_torch_pickle_end(&w, &err), FC_EIO);
    assert_non_null(strstr(err.message, "nowhere"));
    fc_torch_pickle_free(&w);
    close(readonly);
    fclose(file);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(writes_what_torch_writes),
        cmocka_unit_test(needs_zip64_where_torch_does),
        cmocka_unit_test(impossible_archives_are_refused),
        cmocka_unit_test(pickles_are_read_back),
        cmocka_unit_test(pickles_go_to_files),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
