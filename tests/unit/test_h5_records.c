/*
 * The records of the reader process for HDF5 headers: wrong ones do no harm.
 */
#include "hdf5/reader_process/records.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

/* A child that sends the given bytes, in which the parent must find the error. */
static int send_bytes(void *context, int out, fc_h5_shared *shared) {
    const fc_h5_bytes *bytes = context;
    (void)shared;
    return write(out, bytes->data, bytes->size) != (ssize_t)bytes->size;
}

static fc_code decode(const void *data, size_t size, uint64_t file_size) {
    fc_h5_child child;
    fc_h5_bytes bytes = {data, size};
    fc_h5_job job = {.run = send_bytes, .context = &bytes};
    fc_error err = {0};
    fc_h5_file file;
    fc_arena *arena = fc_arena_new();
    assert_int_equal(fc_h5_child_start(&child, &job, &err), FC_OK);
    fc_h5_in in = {.child = &child, .budget = 1 << 20};
    fc_code rc = fc_h5_read_file(&in, arena, "x.h5", file_size, &file, &err);
    fc_h5_in_free(&in);
    fc_h5_child_finish(&child, "x.h5", &err);
    assert_true(fc_arena_size(arena) < 8 << 20);
    fc_arena_free(arena);
    return rc;
}

/* Encodes ROOT, one dataset, one chunk and END into a buffer instead of a pipe. */
static fc_h5_sink encode(const fc_h5_dataset *d, uint64_t offset, uint64_t size, int64_t at) {
    fc_h5_sink out = {.fd = -1};
    fc_h5_root root = {.rank = -1, .world_size = -1, .nmesh = -1};
    fc_h5_put_root(&out, &root);
    fc_h5_put_dataset(&out, d);
    if (d->where == FC_H5_IN_CHUNKS) {
        fc_h5_begin(&out, FC_H5_CHUNKS);
        fc_h5_put_u64(&out, 1);
        fc_h5_put_u64(&out, offset);
        fc_h5_put_u64(&out, size);
        fc_h5_put_u64(&out, 0);
        fc_h5_put_u64(&out, (uint64_t)at);
        fc_h5_end(&out);
    }
    fc_h5_begin(&out, FC_H5_END);
    fc_h5_end(&out);
    return out;
}

static fc_code decode_dataset(const fc_h5_dataset *d, uint64_t offset, uint64_t size, int64_t at) {
    fc_h5_sink out = encode(d, offset, size, at);
    fc_code rc = decode(out.buf, out.used, 1000);
    free(out.buf);
    return rc;
}

static const unsigned char zeros[64];
static const int64_t hundred[] = {100}, ten[] = {10}, most[] = {INT64_MAX}, too_many[] = {INT64_MAX, 2},
                     square[] = {10, 10};

static const fc_h5_dataset good = {.path = "w",
                                   .lists = {zeros, 1},
                                   .where = FC_H5_AT_OFFSET,
                                   .dtype = FC_U8,
                                   .element = 1,
                                   .ndim = 1,
                                   .shape = hundred,
                                   .offset = 900,
                                   .length = 100,
                                   .owner = -1,
                                   .nglobal_shape = -1,
                                   .noffsets = -1};

static void accept(const fc_h5_dataset *d) {
    assert_int_equal(decode_dataset(d, 990, 10, 90), FC_OK);
}

/* Refuses a dataset that differs from `start` in what `change` sets. */
#define REFUSE(start, change)                                                                                          \
    d = start;                                                                                                         \
    change;                                                                                                            \
    assert_int_equal(decode_dataset(&d, 990, 10, 90), FC_ECORRUPT)

static void parent_checks_every_dataset(void **state) {
    fc_h5_dataset d;
    (void)state;
    accept(&good);
    REFUSE(good, d.offset = 901); /* one byte beyond the end */
    REFUSE(good, d.offset = UINT64_MAX - 50);
    REFUSE(good, d.length = 99);
    REFUSE(good, d.element = 2);
    REFUSE(good, (d.shape = most, d.dtype = FC_F64, d.element = 8));
    REFUSE(good, (d.ndim = 2, d.shape = too_many));
    REFUSE(good, (d.element = 0, d.length = 0));
    REFUSE(good, d.ndim = -1);
    REFUSE(good, d.dtype = FC_OPAQUE);
    REFUSE(good, d.where = FC_H5_ELSEWHERE + 1);
    REFUSE(good, d.where = FC_H5_NOWHERE);    /* without a fill value */
    REFUSE(good, d.where = FC_H5_BY_LIBRARY); /* without a chunk */
    REFUSE(good, (d.kind = FC_H5_UNREADABLE, d.code = FC_EIO));
    REFUSE(good, (d.kind = FC_H5_UNREADABLE, d.message = "why"));
    static const char *const paths[] = {NULL, "", "/w", "w/", "a//b", "a/b", "\xff"};
    for (size_t i = 0; i < sizeof paths / sizeof *paths; i++) {
        REFUSE(good, d.path = paths[i]);
    }
}

static void parent_checks_every_object(void **state) {
    fc_h5_dataset object = good, d;
    (void)state;
    object.kind = FC_H5_OBJECT;
    object.dtype = FC_OPAQUE;
    object.encoding = "torch.save";
    accept(&object);
    REFUSE(object, d.encoding = NULL);
    REFUSE(object, d.dtype = FC_U8);
    REFUSE(object, d.swap = true);
    REFUSE(object, (d.element = 2, d.length = 200, d.offset = 0));
    REFUSE(object, (d.ndim = 2, d.shape = square));
}

static void parent_checks_every_chunk(void **state) {
    fc_h5_dataset chunked = good, d;
    (void)state;
    chunked.where = FC_H5_IN_CHUNKS;
    chunked.chunk = ten;
    chunked.bytes = (fc_h5_bytes){zeros, 1};
    accept(&chunked);
    assert_int_equal(decode_dataset(&chunked, 991, 10, 90), FC_ECORRUPT);
    assert_int_equal(decode_dataset(&chunked, 990, 0, 90), FC_ECORRUPT);
    assert_int_equal(decode_dataset(&chunked, 990, 10, 91), FC_ECORRUPT);
    assert_int_equal(decode_dataset(&chunked, 990, 10, 100), FC_ECORRUPT);
    REFUSE(chunked,
           (d.nfilters = 2, d.filters[0].id = d.filters[1].id = 1)); /* no useful limit for what deflate gives twice */
    REFUSE(chunked, (d.nfilters = 1, d.filters[0].id = 4));
    REFUSE(chunked, (d.nfilters = 1, d.filters[0].id = 0));
    REFUSE(chunked, d.bytes.size = 2);
    REFUSE(chunked, d.chunk = NULL);
    REFUSE(chunked, d.chunk = (const int64_t[]){0});
    REFUSE(chunked, (d.ndim = 0, d.length = 1));
}

/* Appends the record that a letter stands for. */
static void put_record(fc_h5_sink *out, char letter, const fc_h5_root *root, const fc_h5_dataset *d) {
    switch (letter) {
    case 'r':
        fc_h5_put_root(out, root);
        return;
    case 'd':
        fc_h5_put_dataset(out, d);
        return;
    case 'c':
        fc_h5_begin(out, FC_H5_CHUNKS);
        fc_h5_put_u64(out, 0);
        break;
    case 'a':
    case 'A':
        fc_h5_begin(out, FC_H5_ATTRIBUTES);
        fc_h5_put_text(out, letter == 'a' ? "g" : NULL);
        fc_h5_put_bytes(out, "{}", 2);
        break;
    case 'L': /* longer than its content */
        fc_h5_begin(out, FC_H5_ATTRIBUTES);
        fc_h5_put_text(out, "g");
        fc_h5_put_bytes(out, "{}", 2);
        fc_h5_put_u64(out, 0);
        break;
    case 'f': /* a failure without an error */
    case 'F': /* a failure without a text */
    case 'u': /* a failure whose text is not UTF-8 */
        fc_h5_begin(out, FC_H5_FAILURE);
        fc_h5_put_u64(out, letter == 'f' ? FC_OK : FC_EIO);
        fc_h5_put_text(out, letter == 'F' ? NULL : letter == 'f' ? "why" : "\xff");
        break;
    case 'x':
        fc_h5_begin(out, (fc_h5_tag)99);
        break;
    default:
        fc_h5_begin(out, FC_H5_END);
        break;
    }
    fc_h5_end(out);
}

/* Records in an order, or of a kind, that the reader process never sends. Each letter is one record. */
static void parent_checks_the_order_of_records(void **state) {
    static const char *const bad[] = {"", "e", "d", "c", "a", "rr", "rc", "rdc", "rx", "rd", "rA", "rL", "rf", "ru"};
    (void)state;
    const fc_h5_root root = {.rank = -1, .world_size = -1, .nmesh = -1};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        fc_h5_sink out = {.fd = -1};
        for (const char *c = bad[i]; *c; c++) {
            put_record(&out, *c, &root, &good);
        }
        assert_int_equal(decode(out.buf, out.used, 1000), FC_ECORRUPT);
        free(out.buf);
    }
}

/* Every truncation and many random changes of a good stream give a result or an error, never a crash. */
static void any_stream_is_survived(void **state) {
    fc_h5_dataset d = good;
    d.where = FC_H5_IN_CHUNKS;
    d.chunk = ten;
    d.bytes = (fc_h5_bytes){zeros, 1};
    d.json = "{}";
    fc_h5_sink out = encode(&d, 990, 10, 90);
    unsigned seed = 1;
    (void)state;
    assert_int_equal(decode(out.buf, out.used, 1000), FC_OK);
    for (size_t n = 0; n < out.used; n += 7) {
        assert_int_equal(decode(out.buf, n, 1000), FC_ECORRUPT);
    }
    unsigned char *copy = malloc(out.used);
    for (int i = 0; i < 300; i++) {
        memcpy(copy, out.buf, out.used);
        seed = seed * 1103515245 + 12345;
        copy[seed / 65536 % out.used] ^= (unsigned char)(1 << seed / 4096 % 8);
        seed = seed * 1103515245 + 12345;
        copy[seed / 65536 % out.used] = (unsigned char)(seed >> 8);
        decode(copy, out.used, 1000);
    }
    free(copy);
    free(out.buf);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(parent_checks_every_dataset), cmocka_unit_test(parent_checks_every_object),
        cmocka_unit_test(parent_checks_every_chunk),   cmocka_unit_test(parent_checks_the_order_of_records),
        cmocka_unit_test(any_stream_is_survived),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
