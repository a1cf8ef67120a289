/*
 * lib/move and lib/read: compares fc_move_file and fc_read_box with known data on random checkpoints.
 */
#include "base/crc.h"
#include "fake_target.h"
#include "move/file.h"
#include "move/queue.h"

static void random_part_of(const int64_t *shape, int ndim, int64_t *offsets, int64_t *sizes) {
    for (int d = 0; d < ndim; d++) {
        sizes[d] = shape[d] && rand() % 8 ? 1 + rand() % shape[d] : 0;
        offsets[d] = rand() % (shape[d] - sizes[d] + 1);
    }
}

static fc_dtype random_dtype(void) {
    return (fc_dtype)(rand() % FC_DTYPE_COUNT);
}

/* Writes a target file by several shares, one after the other; their sums make the digests. */
static void move_in_shares(fake_target *t, fc_move_options *options, uint32_t shares) {
    uint64_t sums[MOST_ITEMS] = {0};
    uint32_t sums32[MOST_ITEMS] = {0};
    for (options->share = 0, options->shares = shares; options->share < shares; options->share++) {
        fc_error err = {FC_OK, ""};
        fc_code rc = fc_move_file(&t->target, &t->file, options, &err);
        assert_string_equal(err.message, "");
        assert_int_equal(rc, FC_OK);
        for (size_t i = 0; i < t->file.nitems; i++) {
            uint64_t bytes = fc_target_item_bytes(&t->target, &t->items[i]);
            sums[i] ^= fc_crc64_finish(t->items[i].crc64, bytes);
            sums32[i] ^= fc_crc32_finish(t->items[i].crc32, bytes);
        }
    }
    for (size_t i = 0; i < t->file.nitems; i++) {
        uint64_t bytes = fc_target_item_bytes(&t->target, &t->items[i]);
        t->items[i].crc64 = fc_crc64_finish(sums[i], bytes);
        t->items[i].crc32 = fc_crc32_finish(sums32[i], bytes);
    }
}

/* Random tensors with random boxes, adjacent or with gaps, moved by `threads` threads. */
static void one_random_job(int side, int threads, uint64_t memory, uint32_t shares) {
    fake *f = fake_new();
    for (int i = 1 + rand() % 12; i > 0; i--) {
        int64_t shape[FAKE_DIMS];
        int ndim = rand() % 4;
        for (int d = 0; d < ndim; d++) {
            shape[d] = rand() % 20 == 0 ? 0 : 1 + rand() % side;
        }
        fake_add(f, random_dtype(), ndim, shape, rand() % 5);
    }
    fake_target *t = target_new(f);
    for (size_t i = 0; i < f->checkpoint.ntensors; i++) {
        if (fc_dtype_get(t->tensors[i].dtype)->cls == FC_CLASS_FLOAT && rand() % 4 == 0) {
            t->tensors[i].dtype = rand() % 2 ? FC_BF16 : FC_F32;
        }
        for (int n = rand() % 4; n > 0; n--) {
            int64_t offsets[FAKE_DIMS], sizes[FAKE_DIMS];
            random_part_of(f->tensors[i].shape, f->tensors[i].ndim, offsets, sizes);
            target_add(t, i, offsets, sizes, rand() % 2 ? 0 : (uint64_t)rand() % 100);
            t->items[t->file.nitems - 1].owned = rand() % 8 != 0;
            t->items[t->file.nitems - 1].owner = rand() % 3 == 0;
        }
    }
    target_reserve(t);
    fc_progress progress = {0};
    fc_move_options options = {.work = {threads, memory, &progress}, .crc32 = true, .digests = t->digests};
    if (shares == 0) {
        fc_error err = {FC_OK, ""};
        fc_code rc = fc_move_file(&t->target, &t->file, &options, &err);
        assert_string_equal(err.message, "");
        assert_int_equal(rc, FC_OK);
    } else {
        move_in_shares(t, &options, shares);
    }
    target_check(f, t);
    target_check_digests(f, t, false);
    uint64_t bytes = 0;
    for (size_t i = 0; i < t->file.nitems; i++) {
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
        one_random_job(12, 1 + rand() % 3, 0, (uint32_t)(i % 4));
    }
}

/* Tensors large enough for many tiles, windows and decoded chunks with the least memory. */
static void larger_random_jobs(void **state) {
    (void)state;
    srand(6);
    for (int i = 0; i < 12; i++) {
        one_random_job(90, 4, (uint64_t)8 << 20, (uint32_t)(i % 6));
    }
}

/* Tensor-parallel columns and rows of 2 MiB each: direct runs and grouped windows, with 1 MiB for everything. */
static void tall_and_wide(void **state) {
    (void)state;
    srand(7);
    static const int64_t shapes[][2] = {{3, 400000}, {700, 1500}, {100000, 7}, {1, 1000000}, {1000000, 1}};
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++) {
        fake *f = fake_new();
        f->only_raw = true;
        size_t a = fake_add(f, FC_BF16, 2, shapes[s], 3);
        f->only_raw = false;
        fake_target *t = target_new(f);
        target_add_whole(t, a, 64);
        target_reserve(t);
        fc_move_options options = {.work = {.threads = 3, .memory = 1 << 20}, .crc32 = true, .digests = t->digests};
        fc_error err = {FC_OK, ""};
        assert_int_equal(fc_move_file(&t->target, &t->file, &options, &err), FC_OK);
        target_check(f, t);
        target_check_digests(f, t, false);
        target_free(t);
        fake_free(f);
    }
}

/* A transposed view and an expanded one: strides (1, rows) and 0. */
static void transposed_and_expanded_views(void **state) {
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
    ssize_t written = pwrite(f->fds[chunk->extent.file], stored, 900 * 1100 * 2, (off_t)chunk->extent.offset);
    assert_int_equal(written, 900 * 1100 * 2);
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
    fake_target *t = target_new(f);
    target_add_whole(t, a, 0);
    target_add_whole(t, b, 0);
    target_reserve(t);
    fc_move_options options = {.work.threads = 2, .crc32 = true, .digests = t->digests};
    fc_error err;
    assert_int_equal(fc_move_file(&t->target, &t->file, &options, &err), FC_OK);
    target_check(f, t);
    target_check_digests(f, t, false);
    target_free(t);
    fake_free(f);
}

/* 128 chunks of one tensor exceed the extents that a worker remembers. */
static void many_chunks(void **state) {
    (void)state;
    srand(10);
    fake *f = fake_new();
    f->only_raw = true;
    size_t a = fake_add(f, FC_F32, 2, (int64_t[]){1000, 900}, 7);
    assert_true(f->tensors[a].nchunks > 100);
    fake_target *t = target_new(f);
    target_add_whole(t, a, 0);
    target_reserve(t);
    fc_move_options options = {.work = {.threads = 2, .memory = 1 << 20}, .crc32 = true, .digests = t->digests};
    fc_error err;
    assert_int_equal(fc_move_file(&t->target, &t->file, &options, &err), FC_OK);
    target_check(f, t);
    target_check_digests(f, t, false);
    target_free(t);
    fake_free(f);
}

/* A view with wide gaps along three dimensions: each run of 24 bytes is a separate read. */
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
        ssize_t written = pwrite(f->fds[extent->file], f->details[a].truth + i * 24, 24, (off_t)extent->offset + at);
        assert_int_equal(written, 24);
    }
    fake_target *t = target_new(f);
    target_add_whole(t, a, 0);
    target_reserve(t);
    fc_error err;
    assert_int_equal(fc_move_file(&t->target, &t->file, &(fc_move_options){.crc32 = true, .digests = t->digests}, &err),
                     FC_OK);
    target_check(f, t);
    target_check_digests(f, t, false);
    target_free(t);
    fake_free(f);
}

/* Small values share a write, but a batch never exceeds a tile, and each value is written once. */
static void batches_fit_a_tile(void **state) {
    (void)state;
    srand(11);
    fake *f = fake_new();
    f->only_raw = true;
    for (int i = 0; i < 60; i++) {
        fake_add(f, FC_I16, 1, (int64_t[]){i % 13 == 0 ? 0 : 1 + rand() % 900}, 0);
    }
    fake_target *t = target_new(f);
    for (size_t i = 0; i < 60; i++) {
        target_add_whole(t, i, 0);
    }
    fc_queue queue;
    fc_batch batch;
    fc_error err;
    fc_queue_init(&queue, &t->target, &t->file, 1000, 1000);
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
        fc_queue_give_back(&queue, &batch, true);
    } while (next < t->size);
    assert_true(most > 1);
    assert_int_equal(fc_queue_take(&queue, &batch, &err), FC_OK);
    assert_int_equal(batch.count, 0);
    fc_queue_destroy(&queue);
    target_free(t);
    fake_free(f);
}

/*
 * Items that begin within a block are cut at the file's block boundaries, even within rows, and nothing is lost. All
 * batches but an item's first begin at a block.
 */
static void runs_go_from_block_to_block(void **state) {
    (void)state;
    static const int64_t shapes[][3] = {{60, 70, 9}, {1, 1, 90000}, {7, 1, 5000}, {90000, 1, 1}, {3, 200, 41}};
    const size_t limit = 10000;
    fake *f = fake_new();
    f->only_raw = true;
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        fake_add(f, i % 2 ? FC_I16 : FC_F32, 3, shapes[i], 0);
    }
    fake_target *t = target_new(f);
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        target_add_whole(t, i, 64 + 4 * i);
    }
    fc_queue queue;
    fc_batch batch;
    fc_error err;
    fc_queue_init(&queue, &t->target, &t->file, limit, limit);
    for (size_t i = 0; i < t->file.nitems; i++) {
        const fc_target_item *item = &t->items[i];
        uint64_t next = item->offset, end = next + fc_target_item_bytes(&t->target, item);
        while (next < end) {
            size_t size = 0;
            assert_int_equal(fc_queue_take(&queue, &batch, &err), FC_OK);
            assert_true(batch.count > 0);
            assert_true(next == item->offset || next % 4096 == 0);
            for (int k = 0; k < batch.count; k++) {
                assert_int_equal(batch.tiles[k].offset, next);
                next += batch.tiles[k].size;
                size += batch.tiles[k].size;
            }
            assert_in_range(size, 1, limit + 4096);
            fc_queue_give_back(&queue, &batch, true);
        }
        assert_int_equal(next, end);
    }
    assert_int_equal(fc_queue_take(&queue, &batch, &err), FC_OK);
    assert_int_equal(batch.count, 0);
    fc_queue_destroy(&queue);
    target_free(t);
    fake_free(f);
}

/* An item is complete when all its tiles were moved and given back, and is listed once; a failed one never is. */
static void complete_items_are_listed(void **state) {
    (void)state;
    enum { MOST = 40 };
    static const int64_t shape[] = {10000};
    fake *f = fake_new();
    f->only_raw = true;
    for (int i = 0; i < 3; i++) {
        fake_add(f, FC_I16, 1, shape, 0);
    }
    fake_target *t = target_new(f);
    for (size_t i = 0; i < 3; i++) {
        target_add_whole(t, i, 0);
    }
    fc_queue queue;
    fc_batch batches[MOST];
    fc_error err;
    int count = 0;
    fc_queue_init(&queue, &t->target, &t->file, 4000, 4000);
    queue.lists_complete = true;
    do {
        assert_true(count < MOST);
        assert_int_equal(fc_queue_take(&queue, &batches[count], &err), FC_OK);
        assert_null(fc_queue_take_complete(&queue));
    } while (batches[count++].count > 0);
    int last[3] = {0};
    for (int i = 0; i + 1 < count; i++) {
        last[batches[i].tiles[0].active->item - t->items] = i;
    }
    assert_true(last[0] > 1 && last[1] > last[0] + 1 && last[2] > last[1] + 1);
    for (int i = 0; i < count; i++) {
        fc_queue_give_back(&queue, &batches[i], i != last[0] + 1); /* a tile of the second item is not moved */
        const fc_target_item *complete = i == last[0] ? &t->items[0] : i == last[2] ? &t->items[2] : NULL;
        assert_ptr_equal(fc_queue_take_complete(&queue), complete);
        assert_null(fc_queue_take_complete(&queue));
    }
    fc_queue_destroy(&queue);
    target_free(t);
    fake_free(f);
}

static void fc_read_box_reads_any_box(void **state) {
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
        cmocka_unit_test(transposed_and_expanded_views),
        cmocka_unit_test(many_chunks),
        cmocka_unit_test(wide_gaps),
        cmocka_unit_test(batches_fit_a_tile),
        cmocka_unit_test(runs_go_from_block_to_block),
        cmocka_unit_test(complete_items_are_listed),
        cmocka_unit_test(fc_read_box_reads_any_box),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
