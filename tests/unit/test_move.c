/*
 * lib/move: the engine on random checkpoints against the truth, its faults, and fc_read_box.
 */
#include "fsdpckpt/move.h"

#include "fake_format.h"
#include "move/queue.h"

#include <pthread.h>
#include <signal.h>
#include <sys/resource.h>

enum { MOST_ITEMS = 256, FILL = 0x55 };

/* A target of random boxes, each at its place in one file. */
typedef struct target {
    fc_wanted_tensor tensors[FAKE_TENSORS];
    fc_mesh mesh;
    fc_wanted wanted;
    fc_part_item items[MOST_ITEMS];
    int64_t dims[MOST_ITEMS][2 * FAKE_DIMS];
    fc_part part;
    char path[96];
    uint64_t size;
} target;

static target *target_new(fake *f) {
    target *t = calloc(1, sizeof *t);
    assert_non_null(t);
    for (size_t i = 0; i < f->checkpoint.ntensors; i++) {
        t->tensors[i] =
            (fc_wanted_tensor){.source = &f->tensors[i], .name = f->tensors[i].name, .dtype = f->tensors[i].dtype};
    }
    t->wanted = (fc_wanted){&f->checkpoint, &t->mesh, t->tensors, f->checkpoint.ntensors};
    snprintf(t->path, sizeof t->path, "%s/target", f->directory);
    t->part = (fc_part){0, t->items, 0, t->path};
    return t;
}

static void target_free(target *t) {
    unlink(t->path);
    free(t);
}

static void target_add(target *t, size_t tensor, const int64_t *offsets, const int64_t *sizes, uint64_t gap) {
    size_t i = t->part.nitems++;
    assert_true(i < MOST_ITEMS);
    int ndim = t->tensors[tensor].source->ndim;
    int64_t volume = 1;
    for (int d = 0; d < ndim; d++) {
        t->dims[i][d] = offsets[d];
        t->dims[i][ndim + d] = sizes[d];
        volume *= sizes[d];
    }
    t->items[i] =
        (fc_part_item){.tensor = (uint32_t)tensor, .owned = true, .dims = t->dims[i], .offset = t->size + gap};
    t->size += gap + (uint64_t)volume * fc_dtype_size(t->tensors[tensor].dtype);
}

static void target_add_whole(target *t, size_t tensor, uint64_t gap) {
    static const int64_t origin[FAKE_DIMS];
    target_add(t, tensor, origin, t->tensors[tensor].source->shape, gap);
}

/* Makes the file with its final length, as a writer does, filled so that a stray write shows. */
static void target_reserve(const target *t) {
    unsigned char *bytes = malloc(t->size + 1);
    assert_non_null(bytes);
    memset(bytes, FILL, t->size);
    int fd = open(t->path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    assert_true(fd >= 0);
    assert_int_equal(write(fd, bytes, t->size), (ssize_t)t->size);
    close(fd);
    free(bytes);
}

static void expect_item(const fake *f, const target *t, const fc_part_item *item, unsigned char *expected) {
    const fc_wanted_tensor *wanted = &t->tensors[item->tensor];
    const fake_tensor *truth = &f->details[item->tensor];
    int ndim = wanted->source->ndim;
    uint32_t size = fc_dtype_size(wanted->source->dtype);
    int64_t from[FAKE_DIMS], to[FAKE_DIMS], at = 0, volume = 1;
    fc_row_major_strides(ndim, truth->shape, from);
    fc_row_major_strides(ndim, item->dims + ndim, to);
    for (int d = 0; d < ndim; d++) {
        at += item->dims[d] * from[d];
        volume *= item->dims[ndim + d];
    }
    fc_strided copy;
    if (volume == 0 || !item->owned) {
        return;
    }
    assert_true(fc_strided_make(&copy, ndim, item->dims + ndim, from, to, size));
    if (wanted->dtype == wanted->source->dtype) {
        fc_strided_copy(&copy, truth->truth + at * size, expected + item->offset);
        return;
    }
    unsigned char *plain = malloc((size_t)volume * size);
    assert_non_null(plain);
    fc_strided_copy(&copy, truth->truth + at * size, plain);
    fc_cast(wanted->source->dtype, plain, wanted->dtype, expected + item->offset, (size_t)volume);
    free(plain);
}

/* The whole file: every item's bytes, and nothing written anywhere else. */
static void target_check(const fake *f, const target *t) {
    unsigned char *expected = malloc(t->size + 1), *found = malloc(t->size + 1);
    assert_true(expected && found);
    memset(expected, FILL, t->size);
    for (size_t i = 0; i < t->part.nitems; i++) {
        expect_item(f, t, &t->items[i], expected);
    }
    int fd = open(t->path, O_RDONLY);
    assert_int_equal(read(fd, found, t->size + 1), (ssize_t)t->size);
    close(fd);
    assert_memory_equal(found, expected, t->size);
    free(expected);
    free(found);
}

static void random_part_of(const int64_t *shape, int ndim, int64_t *offsets, int64_t *sizes) {
    for (int d = 0; d < ndim; d++) {
        sizes[d] = shape[d] && rand() % 8 ? 1 + rand() % shape[d] : 0;
        offsets[d] = rand() % (shape[d] - sizes[d] + 1);
    }
}

static fc_dtype random_dtype(void) {
    return (fc_dtype)(rand() % FC_DTYPE_COUNT);
}

/* Random tensors with random boxes, side by side or with gaps, for `threads`. */
static void one_random_job(int side, int threads, uint64_t memory) {
    fake *f = fake_new();
    for (int i = 1 + rand() % 12; i > 0; i--) {
        int64_t shape[FAKE_DIMS];
        int ndim = rand() % 4;
        for (int d = 0; d < ndim; d++) {
            shape[d] = rand() % 20 == 0 ? 0 : 1 + rand() % side;
        }
        fake_add(f, random_dtype(), ndim, shape, rand() % 5);
    }
    target *t = target_new(f);
    for (size_t i = 0; i < f->checkpoint.ntensors; i++) {
        if (fc_dtype_get(t->tensors[i].dtype)->cls == FC_CLASS_FLOAT && rand() % 4 == 0) {
            t->tensors[i].dtype = rand() % 2 ? FC_BF16 : FC_F32;
        }
        for (int n = rand() % 4; n > 0; n--) {
            int64_t offsets[FAKE_DIMS], sizes[FAKE_DIMS];
            random_part_of(f->tensors[i].shape, f->tensors[i].ndim, offsets, sizes);
            target_add(t, i, offsets, sizes, rand() % 2 ? 0 : (uint64_t)rand() % 100);
            t->items[t->part.nitems - 1].owned = rand() % 8 != 0;
        }
    }
    target_reserve(t);
    fc_progress progress = {0};
    fc_move_options options = {threads, memory, &progress};
    fc_error err = {FC_OK, ""};
    fc_code rc = fc_move_part(&t->wanted, &t->part, &options, &err);
    assert_string_equal(err.message, "");
    assert_int_equal(rc, FC_OK);
    target_check(f, t);
    uint64_t bytes = 0;
    for (size_t i = 0; i < t->part.nitems; i++) {
        const fc_tensor *tensor = t->tensors[t->items[i].tensor].source;
        fc_box box = {tensor->ndim, t->items[i].dims, t->items[i].dims + tensor->ndim};
        bytes +=
            t->items[i].owned ? (uint64_t)fc_box_volume(&box) * fc_dtype_size(t->tensors[t->items[i].tensor].dtype) : 0;
    }
    assert_int_equal(atomic_load(&progress.done), bytes);
    target_free(t);
    fake_free(f);
}

static void small_random_jobs(void **state) {
    (void)state;
    srand(5);
    for (int i = 0; i < 400; i++) {
        one_random_job(12, 1 + rand() % 3, 0);
    }
}

/* Large enough for many tiles, windows and decoded chunks in the least memory. */
static void larger_random_jobs(void **state) {
    (void)state;
    srand(6);
    for (int i = 0; i < 12; i++) {
        one_random_job(90, 4, (uint64_t)8 << 20);
    }
}

/* Tensor-parallel columns and rows of 2 MiB each: direct runs, grouped windows, and 1 MiB for everything. */
static void tall_and_wide(void **state) {
    (void)state;
    srand(7);
    static const int64_t shapes[][2] = {{3, 400000}, {700, 1500}, {100000, 7}, {1, 1000000}, {1000000, 1}};
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++) {
        fake *f = fake_new();
        f->only_raw = true;
        size_t a = fake_add(f, FC_BF16, 2, shapes[s], 3);
        f->only_raw = false;
        target *t = target_new(f);
        target_add_whole(t, a, 64);
        target_reserve(t);
        fc_move_options options = {3, 1 << 20, NULL};
        fc_error err = {FC_OK, ""};
        assert_int_equal(fc_move_part(&t->wanted, &t->part, &options, &err), FC_OK);
        target_check(f, t);
        target_free(t);
        fake_free(f);
    }
}

/* A transposed view and an expanded one: strides (1, rows), and 0. */
static void views(void **state) {
    (void)state;
    fake *f = fake_new();
    f->only_raw = true;
    size_t a = fake_add(f, FC_I16, 2, (int64_t[]){900, 1100}, 0);
    fake_chunk *chunk = &f->details[a].details[0];
    uint16_t *truth = (uint16_t *)f->details[a].truth, *stored = malloc(900 * 1100 * 2);
    assert_non_null(stored);
    for (int r = 0; r < 900; r++) {
        for (int c = 0; c < 1100; c++) {
            stored[c * 900 + r] = truth[r * 1100 + c];
        }
    }
    pwrite(f->fds[chunk->extent.file], stored, 900 * 1100 * 2, (off_t)chunk->extent.offset);
    free(stored);
    chunk->extent.strides[0] = 1;
    chunk->extent.strides[1] = 900;
    size_t b = fake_add(f, FC_F64, 2, (int64_t[]){500, 300}, 0);
    chunk = &f->details[b].details[0];
    chunk->extent.strides[0] = 0;
    chunk->extent.length = chunk->extent.decoded = 300 * 8;
    for (int r = 1; r < 500; r++) {
        memcpy(f->details[b].truth + r * 2400, f->details[b].truth, 2400);
    }
    target *t = target_new(f);
    target_add_whole(t, a, 0);
    target_add_whole(t, b, 0);
    target_reserve(t);
    fc_move_options options = {2, 0, NULL};
    fc_error err;
    assert_int_equal(fc_move_part(&t->wanted, &t->part, &options, &err), FC_OK);
    target_check(f, t);
    target_free(t);
    fake_free(f);
}

/* 128 chunks of one tensor: more than a worker remembers, so resolved chunks make room for others. */
static void many_chunks(void **state) {
    (void)state;
    srand(10);
    fake *f = fake_new();
    f->only_raw = true;
    size_t a = fake_add(f, FC_F32, 2, (int64_t[]){1000, 900}, 7);
    assert_true(f->tensors[a].nchunks > 100);
    target *t = target_new(f);
    target_add_whole(t, a, 0);
    target_reserve(t);
    fc_move_options options = {2, 1 << 20, NULL};
    fc_error err;
    assert_int_equal(fc_move_part(&t->wanted, &t->part, &options, &err), FC_OK);
    target_check(f, t);
    target_free(t);
    fake_free(f);
}

/* A view with wide gaps along three dimensions: each run of 24 bytes is a read of its own. */
static void wide_gaps(void **state) {
    (void)state;
    static const int64_t strides[] = {700000, 150000, 9000, 1};
    fake *f = fake_new();
    f->only_raw = true;
    size_t a = fake_add(f, FC_I64, 4, (int64_t[]){3, 4, 5, 3}, 0);
    fc_extent *extent = &f->details[a].details[0].extent;
    memcpy(extent->strides, strides, sizeof strides);
    extent->length = extent->decoded = (uint64_t)(2 * 700000 + 3 * 150000 + 4 * 9000 + 3) * 8;
    for (int64_t i = 0; i < 60; i++) {
        int64_t at = (i / 20 * strides[0] + i / 5 % 4 * strides[1] + i % 5 * strides[2]) * 8;
        pwrite(f->fds[extent->file], f->details[a].truth + i * 24, 24, (off_t)extent->offset + at);
    }
    target *t = target_new(f);
    target_add_whole(t, a, 0);
    target_reserve(t);
    fc_error err;
    assert_int_equal(fc_move_part(&t->wanted, &t->part, NULL, &err), FC_OK);
    target_check(f, t);
    target_free(t);
    fake_free(f);
}

/* Small values go out many at a time, but never more than a tile holds, and each once. */
static void batches_fit_a_tile(void **state) {
    (void)state;
    srand(11);
    fake *f = fake_new();
    f->only_raw = true;
    for (int i = 0; i < 60; i++) {
        fake_add(f, FC_I16, 1, (int64_t[]){i % 13 == 0 ? 0 : 1 + rand() % 900}, 0);
    }
    target *t = target_new(f);
    for (size_t i = 0; i < 60; i++) {
        target_add_whole(t, i, 0);
    }
    fc_queue queue;
    fc_batch batch;
    fc_error err;
    fc_queue_init(&queue, &t->wanted, &t->part, 1000, 1000);
    uint64_t next = 0;
    int most = 0;
    do {
        size_t size = 0;
        assert_int_equal(fc_queue_take(&queue, &batch, &err), FC_OK);
        for (int i = 0; i < batch.count; i++) {
            assert_int_equal(batch.tiles[i].offset, next);
            next += batch.tiles[i].size;
            size += batch.tiles[i].size;
        }
        assert_in_range(size, 0, 1000);
        most = batch.count > most ? batch.count : most;
        fc_queue_give_back(&queue, &batch);
    } while (next < t->size);
    assert_true(most > 1);
    assert_int_equal(fc_queue_take(&queue, &batch, &err), FC_OK);
    assert_int_equal(batch.count, 0);
    fc_queue_destroy(&queue);
    target_free(t);
    fake_free(f);
}

/* A job of one tensor of 200 × 300 bytes, raw in two chunks, on which the faults below are tried. */
typedef struct job {
    fake *f;
    target *t;
    fc_progress progress;
    fc_move_options options;
    fc_error err;
} job;

static void job_start(job *j) {
    memset(j, 0, sizeof *j);
    srand(8);
    j->f = fake_new();
    j->f->only_raw = true;
    size_t a = fake_add(j->f, FC_U8, 2, (int64_t[]){200, 300}, 1);
    j->t = target_new(j->f);
    target_add_whole(j->t, a, 0);
    target_reserve(j->t);
    j->options = (fc_move_options){2, 0, &j->progress};
}

static fc_code job_run(job *j) {
    return fc_move_part(&j->t->wanted, &j->t->part, &j->options, &j->err);
}

static void job_end(job *j) {
    target_free(j->t);
    fake_free(j->f);
}

static void truncated_source(void **state) {
    (void)state;
    job j;
    job_start(&j);
    uint32_t file = j.f->details[0].details[1].extent.file;
    assert_int_equal(ftruncate(j.f->fds[file], (off_t)j.f->ends[file] - 10), 0);
    assert_int_equal(job_run(&j), FC_ECORRUPT);
    assert_non_null(strstr(j.err.message, "tensor layers.0.weight, chunk ["));
    assert_non_null(strstr(j.err.message, j.f->paths[file]));
    assert_non_null(strstr(j.err.message, ": truncated: the file ends at offset "));
    job_end(&j);
}

static void missing_source(void **state) {
    (void)state;
    job j;
    job_start(&j);
    unlink(j.f->paths[j.f->details[0].details[0].extent.file]);
    assert_int_equal(job_run(&j), FC_ECORRUPT);
    assert_non_null(strstr(j.err.message, ": the file is missing"));
    job_end(&j);
}

static void strides_beyond_the_extent(void **state) {
    (void)state;
    job j;
    static const int64_t bad[] = {301, (int64_t)1 << 40, INT64_MAX, INT64_MIN, -1};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        job_start(&j);
        j.f->details[0].details[1].extent.strides[0] = bad[i];
        assert_int_equal(job_run(&j), FC_ECORRUPT);
        assert_non_null(strstr(j.err.message, "the elements reach beyond the"));
        job_end(&j);
    }
    job_start(&j);
    j.f->details[0].details[1].extent.first = UINT64_MAX - 3;
    assert_int_equal(job_run(&j), FC_ECORRUPT);
    job_end(&j);
}

static void hole_writes_nothing(void **state) {
    (void)state;
    job j;
    job_start(&j);
    j.f->tensors[0].nchunks = 1;
    assert_int_equal(job_run(&j), FC_ECORRUPT);
    assert_non_null(strstr(j.err.message, "are in no chunk"));
    assert_int_equal(atomic_load(&j.progress.done), 0);
    job_end(&j);
}

static void cancelled(void **state) {
    (void)state;
    job j;
    job_start(&j);
    atomic_store(&j.progress.cancel, true);
    assert_int_equal(job_run(&j), FC_EINTERRUPTED);
    assert_int_equal(atomic_load(&j.progress.done), 0);
    job_end(&j);
}

static void target_missing(void **state) {
    (void)state;
    job j;
    job_start(&j);
    unlink(j.t->path);
    assert_int_equal(job_run(&j), FC_EIO);
    assert_non_null(strstr(j.err.message, j.t->path));
    job_end(&j);
}

/* A file size limit stands in for a full disk: the write fails in the middle. */
static void target_full(void **state) {
    (void)state;
    job j;
    job_start(&j);
    struct rlimit before, small;
    getrlimit(RLIMIT_FSIZE, &before);
    small = before;
    small.rlim_cur = 40000;
    signal(SIGXFSZ, SIG_IGN);
    assert_int_equal(truncate(j.t->path, 0), 0);
    setrlimit(RLIMIT_FSIZE, &small);
    fc_code rc = job_run(&j);
    setrlimit(RLIMIT_FSIZE, &before);
    assert_int_equal(rc, FC_EIO);
    assert_non_null(strstr(j.err.message, j.t->path));
    assert_non_null(strstr(j.err.message, "writing at offset"));
    job_end(&j);
}

static void too_little_memory(void **state) {
    (void)state;
    job j;
    job_start(&j);
    j.options.memory = 512000;
    assert_int_equal(job_run(&j), FC_EUSAGE);
    assert_string_equal(j.err.message, "512000 bytes of memory are too few: --memory must be at least 1M");
    j.options.memory = 1 << 20;
    j.options.threads = 256;
    assert_int_equal(job_run(&j), FC_OK);
    target_check(j.f, j.t);
    job_end(&j);
}

static void decoded_chunk_above_memory(void **state) {
    (void)state;
    job j;
    job_start(&j);
    fc_extent *extent = &j.f->details[0].details[0].extent;
    extent->codec = FC_CODEC_FORMAT;
    extent->decoded = (uint64_t)1 << 40;
    assert_int_equal(job_run(&j), FC_EUNSUPPORTED);
    assert_non_null(strstr(j.err.message, "decoding the chunk of 1099511627776 bytes takes"));
    assert_non_null(strstr(j.err.message, "raise --memory"));
    job_end(&j);
}

/* One bit of a deflated chunk: the message leads to the bytes. */
static void damaged_chunk(void **state) {
    (void)state;
    job j;
    job_start(&j);
    fake_chunk *chunk = &j.f->details[0].details[0];
    unsigned char bytes[64] = {0x78, 0x01, 0xff, 0xff};
    chunk->extent.codec = FC_CODEC_FILTERED;
    chunk->extent.filters = (fc_filters){{1}, 1, 0};
    chunk->extent.offset = fake_append(j.f, (int)chunk->extent.file, bytes, sizeof bytes);
    chunk->extent.length = sizeof bytes;
    assert_int_equal(job_run(&j), FC_ECORRUPT);
    char expected[300];
    snprintf(expected, sizeof expected,
             "tensor layers.0.weight, chunk [0:%d, 0:%d]: %s: 64 bytes at offset %d: the compressed data is damaged "
             "after 0 of %d bytes",
             (int)chunk->dims[2], (int)chunk->dims[3], j.f->paths[chunk->extent.file], (int)chunk->extent.offset,
             (int)chunk->extent.decoded);
    assert_string_equal(j.err.message, expected);
    job_end(&j);
}

static void cast_of_integers_is_refused(void **state) {
    (void)state;
    job j;
    job_start(&j);
    j.t->tensors[0].dtype = FC_F32;
    assert_int_equal(job_run(&j), FC_EUSAGE);
    assert_string_equal(j.err.message, "tensor layers.0.weight: uint8 cannot become float32");
    job_end(&j);
}

/* More source files than descriptors: the least recently used make room. */
static void few_descriptors(void **state) {
    (void)state;
    job j;
    job_start(&j);
    struct rlimit before, small;
    getrlimit(RLIMIT_NOFILE, &before);
    small = before;
    small.rlim_cur = 16;
    setrlimit(RLIMIT_NOFILE, &small);
    fc_code rc = job_run(&j);
    setrlimit(RLIMIT_NOFILE, &before);
    assert_int_equal(rc, FC_OK);
    target_check(j.f, j.t);
    job_end(&j);
}

static void read_box(void **state) {
    (void)state;
    srand(9);
    for (int i = 0; i < 300; i++) {
        fake *f = fake_new();
        int64_t shape[FAKE_DIMS], offsets[FAKE_DIMS], sizes[FAKE_DIMS], strides[FAKE_DIMS], to[FAKE_DIMS];
        int ndim = rand() % 4;
        for (int d = 0; d < ndim; d++) {
            shape[d] = 1 + rand() % 20;
        }
        fc_dtype dtype = random_dtype();
        size_t a = fake_add(f, dtype, ndim, shape, rand() % 5);
        random_part_of(shape, ndim, offsets, sizes);
        fc_box box = {ndim, offsets, sizes};
        size_t element = fc_dtype_size(dtype), size = (size_t)fc_box_volume(&box) * element;
        unsigned char *found = calloc(1, size + 1), *expected = calloc(1, size + 1);
        fc_error err = {FC_OK, ""};
        assert_int_equal(fc_read_box(&f->checkpoint, &f->tensors[a], &box, dtype, found, &err), FC_OK);
        int64_t at = 0;
        fc_row_major_strides(ndim, shape, strides);
        fc_row_major_strides(ndim, sizes, to);
        for (int d = 0; d < ndim; d++) {
            at += offsets[d] * strides[d];
        }
        fc_strided copy;
        if (size > 0) {
            assert_true(fc_strided_make(&copy, ndim, sizes, strides, to, (int64_t)element));
            fc_strided_copy(&copy, f->details[a].truth + (size_t)at * element, expected);
        }
        assert_memory_equal(found, expected, size + 1);
        free(found);
        free(expected);
        fake_free(f);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(small_random_jobs),
        cmocka_unit_test(larger_random_jobs),
        cmocka_unit_test(tall_and_wide),
        cmocka_unit_test(views),
        cmocka_unit_test(truncated_source),
        cmocka_unit_test(missing_source),
        cmocka_unit_test(strides_beyond_the_extent),
        cmocka_unit_test(hole_writes_nothing),
        cmocka_unit_test(cancelled),
        cmocka_unit_test(target_missing),
        cmocka_unit_test(target_full),
        cmocka_unit_test(too_little_memory),
        cmocka_unit_test(decoded_chunk_above_memory),
        cmocka_unit_test(damaged_chunk),
        cmocka_unit_test(many_chunks),
        cmocka_unit_test(wide_gaps),
        cmocka_unit_test(batches_fit_a_tile),
        cmocka_unit_test(cast_of_integers_is_refused),
        cmocka_unit_test(few_descriptors),
        cmocka_unit_test(read_box),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
