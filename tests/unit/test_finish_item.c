/*
 * fc_format_writer.finish_item of the formats with zip archives: whatever can be written when an item is complete is
 * written then, and not changed later. Otherwise no part of a large file could be sent before all of it is made.
 */
#include "base/crc.h"
#include "fsdpckpt/memory.h"
#include "fsdpckpt/move.h"

#include <fcntl.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

enum { TENSORS = 40, MOST = 200, LARGE = 3 << 20 };

static char directory[] = "/tmp/fsdpckpt-finish-XXXXXX";
static unsigned char *values; /* of the largest tensor, and so of all */

/* What a file had when the writer had finished an item, or had reserved the file. */
typedef struct seen {
    uint32_t tensor; /* UINT32_MAX: reserved */
    uint64_t offset; /* of its data */
    unsigned char *bytes;
    uint64_t size;
} seen;

/* A format that notes what the writer of another one does. */
static struct {
    fc_format format;
    fc_code (*reserve)(fc_writer *, fc_target_file *, fc_error *);
    fc_code (*finish_item)(fc_writer *, const fc_target_item *, int, fc_error *);
    fc_code (*finish_file)(fc_writer *, const fc_target_file *, fc_error *);
    pthread_mutex_t lock;
    const fc_target_file *file;
    seen seen[MOST];
    size_t count;
    uint32_t fails_at; /* the tensor with which finish_item fails; UINT32_MAX: none */
    bool file_finished;
} spy = {.lock = PTHREAD_MUTEX_INITIALIZER};

static int setup(void **state) {
    (void)state;
    values = malloc(LARGE);
    for (int i = 0; values && i < LARGE; i++) {
        values[i] = (unsigned char)(i * 7 + i / 251 + 1);
    }
    return !values || !mkdtemp(directory);
}

static int teardown(void **state) {
    (void)state;
    free(values);
    return rmdir(directory);
}

static unsigned char *read_file(const char *path, uint64_t *size) {
    struct stat st;
    const int fd = open(path, O_RDONLY);
    assert_true(fd >= 0);
    assert_int_equal(fstat(fd, &st), 0);
    unsigned char *bytes = malloc((size_t)st.st_size + 1);
    assert_non_null(bytes);
    assert_int_equal(pread(fd, bytes, (size_t)st.st_size, 0), st.st_size);
    close(fd);
    *size = (uint64_t)st.st_size;
    return bytes;
}

static void note(uint32_t tensor, uint64_t offset) {
    pthread_mutex_lock(&spy.lock);
    assert_in_range(spy.count, 0, MOST - 1);
    seen *s = &spy.seen[spy.count++];
    s->tensor = tensor;
    s->offset = offset;
    s->bytes = read_file(spy.file->path, &s->size);
    pthread_mutex_unlock(&spy.lock);
}

static fc_code spy_reserve(fc_writer *writer, fc_target_file *file, fc_error *err) {
    fc_code rc = spy.reserve(writer, file, err);
    assert_int_equal(rc, FC_OK);
    spy.file = file;
    note(UINT32_MAX, 0);
    return rc;
}

static fc_code spy_finish_item(fc_writer *writer, const fc_target_item *item, int fd, fc_error *err) {
    assert_true(item >= spy.file->items && item < spy.file->items + spy.file->nitems);
    assert_false(spy.file_finished);
    if (item->tensor == spy.fails_at) {
        return fc_fail(err, FC_EIO, "it fails");
    }
    fc_code rc = spy.finish_item(writer, item, fd, err);
    note(item->tensor, item->offset);
    return rc;
}

static fc_code spy_finish_file(fc_writer *writer, const fc_target_file *file, fc_error *err) {
    spy.file_finished = true;
    return spy.finish_file ? spy.finish_file(writer, file, err) : FC_OK;
}

static void watch(const char *format) {
    for (size_t i = 0; i < spy.count; i++) {
        free(spy.seen[i].bytes);
    }
    spy.count = 0;
    spy.file_finished = false;
    spy.fails_at = UINT32_MAX;
    spy.format = *fc_format_find(format);
    spy.reserve = spy.format.writer.reserve;
    spy.finish_item = spy.format.writer.finish_item;
    spy.finish_file = spy.format.writer.finish_file;
    assert_non_null(spy.finish_item);
    spy.format.writer.reserve = spy_reserve;
    spy.format.writer.finish_item = spy_finish_item;
    spy.format.writer.finish_file = spy_finish_file;
}

/* Tensors of all sizes, some of them empty or without dimensions, and an object. */
static fc_checkpoint *make_source(void) {
    static const int64_t zero[1];
    static int64_t sizes[TENSORS][1];
    static char names[TENSORS][24];
    static fc_memory_chunk chunks[TENSORS];
    static fc_memory_tensor tensors[TENSORS];
    for (int i = 0; i < TENSORS; i++) {
        const bool object = i == 5, scalar = i == 6;
        sizes[i][0] = i % 9 == 0 ? 0 : i == 10 || i == 25 ? LARGE : i == 11 ? 200000 : 1 + i * 37;
        snprintf(names[i], sizeof names[i], "layer.%d.weight", i);
        chunks[i] = (fc_memory_chunk){zero, sizes[i], NULL, object ? (const void *)"{\"a\": 1}" : values};
        sizes[i][0] = object ? 8 : sizes[i][0];
        tensors[i] = (fc_memory_tensor){.name = names[i],
                                        .dtype = object ? FC_OPAQUE : FC_U8,
                                        .ndim = scalar ? 0 : 1,
                                        .shape = sizes[i],
                                        .chunks = &chunks[i],
                                        .nchunks = 1,
                                        .encoding = object ? "hdf5.attributes" : NULL};
    }
    fc_checkpoint *source = NULL;
    fc_error err = {FC_OK, ""};
    fc_code rc = fc_checkpoint_in_memory("this test", tensors, TENSORS, &source, &err);
    assert_string_equal(err.message, "");
    assert_int_equal(rc, FC_OK);
    return source;
}

static fc_code convert(const char *name, int threads, char path[96]) {
    fc_error err = {FC_OK, ""};
    const fc_convert_options how = {.format = &spy.format, .work = {.threads = threads, .memory = 64 << 20}};
    snprintf(path, 96, "%s/%s", directory, name);
    fc_checkpoint *source = make_source();
    fc_code rc = fc_convert(source, path, &how, NULL, &err);
    assert_string_equal(err.message, rc == FC_OK ? "" : "it fails");
    fc_checkpoint_close(source);
    return rc;
}

/* What was seen when the item of this value was finished; at reserve, if it has none. */
static const seen *seen_of(uint32_t tensor) {
    const seen *found = NULL;
    for (size_t i = 0; i < spy.count; i++) {
        if (spy.seen[i].tensor == tensor) {
            assert_null(found); /* finished once */
            found = &spy.seen[i];
        }
    }
    return found;
}

static bool has_bytes(uint32_t tensor) {
    return tensor != 5 && tensor % 9 != 0;
}

/* Each value with bytes was finished once, and no other; with one thread, before the data of later ones was written. */
static void check_calls(int threads) {
    assert_true(spy.file_finished);
    assert_non_null(seen_of(UINT32_MAX));
    for (uint32_t i = 0; i < TENSORS; i++) {
        assert_int_equal(seen_of(i) != NULL, has_bytes(i));
    }
    if (threads == 1) {
        assert_int_equal(seen_of(10)->bytes[seen_of(25)->offset], 0);
        assert_int_equal(seen_of(25)->bytes[seen_of(25)->offset], values[0]);
    }
}

static void check_range(const seen *s, const unsigned char *bytes, uint64_t size, uint64_t from, uint64_t to) {
    assert_non_null(s);
    assert_int_equal(s->size, size);
    assert_true(from < to && to <= size);
    assert_memory_equal(s->bytes + from, bytes + from, to - from);
}

/* An item of DCP is an archive of its own. */
static void archives_are_complete(void **state) {
    (void)state;
    for (int threads = 1; threads <= 4; threads += 3) {
        char path[96], file[128];
        uint64_t size, covered = 0;
        fc_checkpoint *target;
        fc_error err;
        watch("dcp");
        assert_int_equal(convert("target", threads, path), FC_OK);
        check_calls(threads);
        snprintf(file, sizeof file, "%s/__0_0.distcp", path);
        unsigned char *bytes = read_file(file, &size);
        assert_int_equal(fc_checkpoint_open(path, NULL, &target, &err), FC_OK);
        assert_int_equal(target->ntensors, TENSORS);
        for (size_t i = 0; i < target->ntensors; i++) {
            const fc_tensor *t = &target->tensors[i];
            const uint32_t number = (uint32_t)strtoul(t->name + strlen("layer."), NULL, 10);
            for (size_t k = 0; k < t->nchunks; k++) {
                const fc_place *place = &t->chunks[k].place;
                check_range(seen_of(has_bytes(number) ? number : UINT32_MAX), bytes, size, place->offset,
                            place->offset + place->length);
                assert_memory_equal(bytes + place->offset, "PK\3\4", 4);
                covered++;
            }
        }
        assert_true(covered > TENSORS / 2);
        fc_checkpoint_close(target);
        free(bytes);
        unlink(file);
        snprintf(file, sizeof file, "%s/.metadata", path);
        unlink(file);
        assert_int_equal(rmdir(path), 0);
    }
}

/* Finds where a text begins. */
static uint64_t find(const unsigned char *bytes, uint64_t size, uint64_t from, const char *text) {
    const unsigned char *at = memmem(bytes + from, (size_t)(size - from), text, strlen(text));
    assert_non_null(at);
    return (uint64_t)(at - bytes);
}

/* In a torch.save file, what is between the data of two tensors is written when the first is finished. */
static void headers_follow_the_data(void **state) {
    (void)state;
    for (int threads = 1; threads <= 4; threads += 3) {
        char path[96];
        uint64_t size, at = 0;
        watch("pt");
        assert_int_equal(convert("target.pt", threads, path), FC_OK);
        check_calls(threads);
        unsigned char *bytes = read_file(path, &size);
        const seen *last = seen_of(UINT32_MAX);
        for (uint32_t i = 0, stored = 0; i < TENSORS; i++) {
            char name[32];
            if (i == 5) {
                continue;
            }
            snprintf(name, sizeof name, "archive/data/%u", stored++);
            /* The tag and the length of the padding, and the padding, follow the name. */
            const uint64_t data = (find(bytes, size, at, name) + strlen(name) + 4 + 63) / 64 * 64;
            if (!has_bytes(i)) {
                continue;
            }
            check_range(last, bytes, size, at, data);
            last = seen_of(i);
            at = data;
        }
        check_range(last, bytes, size, at, find(bytes, size, at, "archive/.data/serialization_id") - 30);
        free(bytes);
        unlink(path);
    }
}

/* An error of finish_item ends the conversion, and the file is not finished. */
static void errors_end_the_conversion(void **state) {
    (void)state;
    static const char *const names[] = {"pt", "dcp"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        char path[96];
        watch(names[i]);
        spy.fails_at = 25;
        assert_int_equal(convert("none.pt" + (i ? 5 : 0), 2, path), FC_EIO);
        assert_false(spy.file_finished);
        assert_null(seen_of(25));
        assert_int_equal(access(path, F_OK), -1);
    }
    watch("pt");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(archives_are_complete),
        cmocka_unit_test(headers_follow_the_data),
        cmocka_unit_test(errors_end_the_conversion),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
