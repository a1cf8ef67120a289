/*
 * lib/move/compress.c and chunks.c with a writer that only counts. Compares every chunk with known data, and checks
 * that the order is the same for any number of threads and any memory. Covers raw chunks, casts, boxes, errors and
 * interruption.
 */
#include "codec/codec.h"
#include "codec/shuffle.h"
#include "fake_target.h"
#include "fsdpckpt/cast.h"
#include "move/file.h"
#include "plan/target_file.h"

enum { MOST_CHUNKS = 4096 };

typedef struct placed {
    const fc_target_item *item;
    int64_t start[FAKE_DIMS];
    bool raw;
    uint64_t size, offset;
} placed;

typedef struct counter {
    const fake_target *target;
    placed chunks[MOST_CHUNKS];
    size_t count;
    uint64_t end;
    size_t fail_at; /* number of the chunk; MOST_CHUNKS: never */
    fc_progress *cancel_at_first;
} counter;

static fc_code place(fc_writer *writer, const fc_target_item *item, const int64_t *start, bool raw, uint64_t size,
                     uint64_t *offset, fc_error *err) {
    counter *c = writer->state;
    if (c->count == c->fail_at) {
        return fc_fail(err, FC_EIO, "the index is full");
    }
    assert_true(c->count < MOST_CHUNKS);
    placed *p = &c->chunks[c->count++];
    *p = (placed){.item = item, .raw = raw, .size = size, .offset = c->end};
    memcpy(p->start, start, (size_t)c->target->tensors[item->tensor].source->ndim * sizeof *start);
    *offset = c->end;
    c->end += size;
    if (c->cancel_at_first) {
        atomic_store(&c->cancel_at_first->cancel, true);
    }
    return FC_OK;
}

/* Stores items with large enough boxes in chunks, and shuffles their order in the file. */
static void make_chunked(fake_target *t, int64_t (*chunks)[FAKE_DIMS]) {
    t->target.compress = 1;
    for (size_t i = 0; i < t->file.nitems; i++) {
        const fc_target_tensor *target = &t->tensors[t->items[i].tensor];
        int ndim = target->source->ndim;
        bool chunked = fc_target_chunk(ndim, t->dims[i] + ndim, fc_dtype_size(target->dtype), chunks[i]);
        t->items[i].chunk = chunked ? chunks[i] : NULL;
        t->items[i].offset = (i * 7 + 3) % t->file.nitems;
    }
}

/* Returns the elements of a chunk as they must be before the shuffle filter. */
static unsigned char *truth_of(const fake *f, const fake_target *t, const placed *p, size_t *bytes) {
    const fc_target_tensor *target = &t->tensors[p->item->tensor];
    const fake_tensor *details = &f->details[p->item->tensor];
    int ndim = target->source->ndim;
    const uint32_t from_size = fc_dtype_size(target->source->dtype), size = fc_dtype_size(target->dtype);
    int64_t from[FAKE_DIMS], to[FAKE_DIMS], sizes[FAKE_DIMS], at = 0, whole = 1, volume = 1;
    fc_row_major_strides(ndim, details->shape, from);
    for (int d = 0; d < ndim; d++) {
        int64_t left = p->item->dims[ndim + d] - p->start[d];
        sizes[d] = left < p->item->chunk[d] ? left : p->item->chunk[d];
        at += (p->item->dims[d] + p->start[d]) * from[d];
        whole *= p->item->chunk[d];
        volume *= sizes[d];
    }
    fc_row_major_strides(ndim, p->item->chunk, to);
    *bytes = (size_t)whole * size;
    unsigned char *plain = calloc((size_t)whole, from_size), *out = calloc((size_t)whole, size);
    assert_true(plain && out);
    fc_strided copy;
    assert_true(fc_strided_make(&copy, ndim, sizes, from, to, from_size));
    fc_strided_copy(&copy, details->truth + at * from_size, plain);
    if (target->dtype == target->source->dtype) {
        memcpy(out, plain, *bytes);
    } else {
        fc_cast(target->source->dtype, plain, target->dtype, out, (size_t)volume);
    }
    free(plain);
    return out;
}

static void check_chunk(const fake *f, const fake_target *t, const placed *p, int fd) {
    const uint32_t element = fc_dtype_size(t->tensors[p->item->tensor].dtype);
    size_t bytes;
    unsigned char *truth = truth_of(f, t, p, &bytes), *stored = malloc(p->size), *plain = malloc(bytes);
    unsigned char *shuffled = malloc(bytes);
    fc_error err;
    assert_true(stored && plain && shuffled);
    assert_int_equal(pread(fd, stored, p->size, (off_t)p->offset), (ssize_t)p->size);
    if (p->raw) {
        assert_int_equal(p->size, bytes);
        memcpy(plain, stored, bytes);
    } else {
        assert_true(p->size < bytes);
        assert_int_equal(fc_inflate(stored, p->size, shuffled, bytes, &err), FC_OK);
        fc_unshuffle(shuffled, plain, bytes, element);
    }
    assert_memory_equal(plain, truth, bytes);
    free(truth);
    free(stored);
    free(plain);
    free(shuffled);
}

/* Checks that every chunk of every item occurs once: items by offset, chunks in row-major order. */
static void check_order(const fake_target *t, const counter *c) {
    uint64_t volume = 0, target = 0;
    for (size_t i = 0; i < c->count; i++) {
        const placed *p = &c->chunks[i];
        const int ndim = t->tensors[p->item->tensor].source->ndim;
        uint64_t chunk = 1;
        for (int d = 0; d < ndim; d++) {
            int64_t left = p->item->dims[ndim + d] - p->start[d];
            assert_int_equal(p->start[d] % p->item->chunk[d], 0);
            chunk *= (uint64_t)(left < p->item->chunk[d] ? left : p->item->chunk[d]);
        }
        volume += chunk;
        if (i > 0) {
            const placed *before = p - 1;
            assert_true(before->item->offset <= p->item->offset);
            int d = 0;
            while (before->item == p->item && before->start[d] == p->start[d]) {
                d++;
                assert_true(d < ndim);
            }
            assert_true(before->item != p->item || before->start[d] < p->start[d]);
        }
    }
    for (size_t i = 0; i < t->file.nitems; i++) {
        const fc_tensor *tensor = t->tensors[t->items[i].tensor].source;
        fc_box box = {tensor->ndim, t->dims[i], t->dims[i] + tensor->ndim};
        target += t->items[i].chunk ? (uint64_t)fc_box_volume(&box) : 0;
    }
    assert_int_equal(volume, target);
}

static fc_code press(const fake *f, fake_target *t, counter *c, int threads, uint64_t memory, fc_error *err) {
    fc_format format = f->format;
    format.writer.place = place;
    fc_writer writer = {&format, c};
    fc_progress progress = {0};
    fc_move_options options = {.work = {threads, memory, &progress}, .crc32 = true, .digests = t->digests};
    memset(t->digests, 0, sizeof t->digests);
    uint64_t stored = 0;
    int fd = open(t->path, O_RDWR | O_CREAT | O_TRUNC, 0600);
    assert_true(fd >= 0);
    c->target = t;
    if (c->cancel_at_first) {
        c->cancel_at_first = &progress;
    }
    fc_code rc = fc_compress_file(&t->target, &t->file, &writer, NULL, &options, &stored, err);
    if (rc == FC_OK) {
        assert_int_equal(stored, c->end);
        check_order(t, c);
        for (size_t i = 0; i < c->count; i++) {
            check_chunk(f, t, &c->chunks[i], fd);
        }
        target_check_digests(f, t, true);
    }
    close(fd);
    return rc;
}

static counter *counter_new(void) {
    counter *c = calloc(1, sizeof *c);
    assert_non_null(c);
    c->fail_at = MOST_CHUNKS;
    return c;
}

/* Random tensors in every kind of storage. Noise makes some chunks raw; others compress. */
static void random_source(fake *f, int64_t side, int tensors) {
    for (int i = 0; i < tensors; i++) {
        int64_t shape[FAKE_DIMS];
        int ndim = 1 + rand() % 3;
        for (int d = 0; d < ndim; d++) {
            shape[d] = d == ndim - 1 ? 1 + rand() % side : 1 + rand() % (ndim == 2 ? side : 40);
        }
        fake_add(f, (fc_dtype)(rand() % FC_OPAQUE), ndim, shape, 0);
    }
}

static void count_kinds(const counter *c, size_t *raw, size_t *small, size_t *second) {
    for (size_t i = 0; i < c->count; i++) {
        *raw += c->chunks[i].raw;
        *small += !c->chunks[i].raw;
        *second += i > 0 && c->chunks[i].item == c->chunks[i - 1].item;
    }
}

static void any_threads_and_memory(void **state) {
    size_t raw = 0, small = 0, second = 0;
    (void)state;
    srand(11);
    for (int round = 0; round < 12; round++) {
        fake *f = fake_new();
        f->only_raw = round % 3 == 0;
        random_source(f, 1200, 4);
        fake_target *t = target_new(f);
        int64_t chunks[MOST_ITEMS][FAKE_DIMS];
        for (size_t i = 0; i < f->checkpoint.ntensors; i++) {
            const fc_tensor *tensor = &f->tensors[i];
            int64_t offsets[FAKE_DIMS], sizes[FAKE_DIMS];
            if (fc_dtype_get(tensor->dtype)->cls == FC_CLASS_FLOAT && rand() % 2 == 0) {
                t->tensors[i].dtype = rand() % 2 ? FC_BF16 : FC_F64;
            }
            target_add_whole(t, i, 0);
            for (int d = 0; d < tensor->ndim; d++) {
                sizes[d] = 1 + rand() % tensor->shape[d];
                offsets[d] = rand() % (tensor->shape[d] - sizes[d] + 1);
            }
            target_add(t, i, offsets, sizes, 0);
        }
        make_chunked(t, chunks);
        counter *first = counter_new(), *other = counter_new();
        fc_error err = {FC_OK, ""};
        fc_code rc = press(f, t, first, 1, 0, &err);
        assert_string_equal(err.message, "");
        assert_int_equal(rc, FC_OK);
        rc = press(f, t, other, 2 + round % 4, (uint64_t)(round % 2 ? 0 : 24) << 20, &err);
        assert_string_equal(err.message, "");
        assert_int_equal(rc, FC_OK);
        assert_int_equal(first->count, other->count);
        assert_int_equal(first->end, other->end);
        for (size_t i = 0; i < first->count; i++) {
            assert_true(first->chunks[i].size == other->chunks[i].size &&
                        first->chunks[i].item == other->chunks[i].item);
        }
        count_kinds(first, &raw, &small, &second);
        free(first);
        free(other);
        target_free(t);
        fake_free(f);
    }
    assert_true(raw > 40 && small > 15 && second > 30); /* every kind of chunk occurs */
}

static fake_target *one_tensor(fake *f, int64_t chunks[][FAKE_DIMS]) {
    const int64_t shape[] = {4000, 600};
    fake_add(f, FC_F32, 2, shape, 3);
    fake_target *t = target_new(f);
    target_add_whole(t, 0, 0);
    make_chunked(t, chunks);
    return t;
}

static void an_error_stops_all_threads(void **state) {
    (void)state;
    int64_t chunks[1][FAKE_DIMS];
    fake *f = fake_new();
    fake_target *t = one_tensor(f, chunks);
    counter *c = counter_new();
    fc_error err;
    for (int threads = 1; threads <= 4; threads += 3) {
        memset(c, 0, sizeof *c);
        c->fail_at = 4;
        assert_int_equal(press(f, t, c, threads, 0, &err), FC_EIO);
        assert_non_null(strstr(err.message, "layers.0.weight"));
        assert_non_null(strstr(err.message, "the index is full"));
        memset(c, 0, sizeof *c);
        c->fail_at = MOST_CHUNKS;
        c->cancel_at_first = (fc_progress *)c; /* replaced by the progress of the job */
        assert_int_equal(press(f, t, c, threads, 0, &err), FC_EINTERRUPTED);
    }
    c->cancel_at_first = NULL;
    assert_int_equal(press(f, t, c, 1, (uint64_t)2 << 20, &err), FC_EUSAGE);
    assert_int_equal(err.hint, FC_HINT_MEMORY);
    free(c);
    target_free(t);
    fake_free(f);
}

static void damaged_sources_are_reported(void **state) {
    (void)state;
    int64_t chunks[1][FAKE_DIMS];
    fake *f = fake_new();
    f->only_raw = true;
    fake_target *t = one_tensor(f, chunks);
    counter *c = counter_new();
    fc_error err;
    for (int i = 0; i < FAKE_FILES; i++) {
        assert_int_equal(ftruncate(f->fds[i], 0), 0);
    }
    assert_int_equal(press(f, t, c, 3, 0, &err), FC_ECORRUPT);
    assert_non_null(strstr(err.message, "truncated"));
    free(c);
    target_free(t);
    fake_free(f);
}

/* Chunks have at most 1 MiB: whole inner dimensions, one dimension divided evenly, and size 1 in those before it. */
static void chunk_sizes(void **state) {
    (void)state;
    int64_t chunk[FAKE_DIMS];
    assert_true(fc_target_chunk(2, (int64_t[]){8192, 1024}, 2, chunk));
    assert_true(chunk[0] == 512 && chunk[1] == 1024);
    assert_true(fc_target_chunk(3, (int64_t[]){3, 1, 20000}, 4, chunk));
    assert_true(chunk[0] == 3 && chunk[1] == 1 && chunk[2] == 20000);
    assert_true(fc_target_chunk(2, (int64_t[]){7, 300001}, 8, chunk));
    assert_true(chunk[0] == 1 && chunk[1] == 100001);
    assert_true(fc_target_chunk(1, (int64_t[]){FC_CHUNK_LEAST}, 1, chunk));
    assert_false(fc_target_chunk(1, (int64_t[]){FC_CHUNK_LEAST - 1}, 1, chunk));
    assert_true(fc_target_chunk(1, (int64_t[]){FC_CHUNK_LEAST / 16}, 16, chunk));
    assert_false(fc_target_chunk(1, (int64_t[]){FC_CHUNK_LEAST / 16 - 1}, 16, chunk));
    assert_false(fc_target_chunk(0, NULL, 16, chunk));
    assert_false(fc_target_chunk(2, (int64_t[]){1 << 20, 0}, 8, chunk));
    srand(12);
    for (int round = 0; round < 20000; round++) {
        int ndim = 1 + rand() % FAKE_DIMS, d = 0;
        uint32_t element = 1u << rand() % 5;
        int64_t sizes[FAKE_DIMS], volume = 1;
        for (int i = 0, bits = 34; i < ndim; i++) {
            int some = rand() % 3 ? rand() % (bits < 20 ? bits : 20) : 0;
            sizes[i] = 1 + rand() % (1 << some);
            volume *= sizes[i];
            bits = bits > some ? bits - some : 1;
        }
        if (!fc_target_chunk(ndim, sizes, element, chunk)) {
            assert_true(volume * element < FC_CHUNK_LEAST);
            continue;
        }
        int64_t bytes = element;
        for (int i = 0; i < ndim; i++) {
            assert_in_range(chunk[i], 1, sizes[i]);
            bytes *= chunk[i];
        }
        assert_true(bytes <= FC_CHUNK_BYTES);
        while (d < ndim && chunk[d] == 1) {
            d++;
        }
        for (d++; d < ndim; d++) {
            assert_int_equal(chunk[d], sizes[d]);
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(any_threads_and_memory),
        cmocka_unit_test(an_error_stops_all_threads),
        cmocka_unit_test(damaged_sources_are_reported),
        cmocka_unit_test(chunk_sizes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
