/*
 * A target for tests of the engine: random boxes of the tensors of fake_format.h in one file, and the check of every
 * byte of that file.
 */
#pragma once

#include "base/crc.h"
#include "fsdpckpt/move.h"

#include "fake_format.h"

#include "fsdpckpt/cast.h"

enum { MOST_ITEMS = 256, FILL = 0x55 };

/* A target of random boxes in one file. */
typedef struct fake_target {
    fc_target_tensor tensors[FAKE_TENSORS];
    fc_mesh mesh;
    fc_target target;
    fc_target_item items[MOST_ITEMS];
    int64_t dims[MOST_ITEMS][2 * FAKE_DIMS];
    fc_target_file file;
    uint64_t digests[FAKE_TENSORS];
    char path[96];
    uint64_t size;
} fake_target;

static inline fake_target *target_new(fake *f) {
    fake_target *t = calloc(1, sizeof *t);
    assert_non_null(t);
    for (size_t i = 0; i < f->checkpoint.ntensors; i++) {
        t->tensors[i] =
            (fc_target_tensor){.source = &f->tensors[i], .name = f->tensors[i].name, .dtype = f->tensors[i].dtype};
    }
    t->target = (fc_target){
        .source = &f->checkpoint, .mesh = &t->mesh, .tensors = t->tensors, .ntensors = f->checkpoint.ntensors};
    snprintf(t->path, sizeof t->path, "%s/target", f->directory);
    t->file = (fc_target_file){0, t->items, 0, t->path};
    return t;
}

static inline void target_free(fake_target *t) {
    unlink(t->path);
    free(t);
}

static inline void target_add(fake_target *t, size_t tensor, const int64_t *offsets, const int64_t *sizes,
                              uint64_t gap) {
    size_t i = t->file.nitems++;
    assert_true(i < MOST_ITEMS);
    int ndim = t->tensors[tensor].source->ndim;
    int64_t volume = 1;
    for (int d = 0; d < ndim; d++) {
        t->dims[i][d] = offsets[d];
        t->dims[i][ndim + d] = sizes[d];
        volume *= sizes[d];
    }
    t->items[i] =
        (fc_target_item){.tensor = (uint32_t)tensor, .owned = true, .dims = t->dims[i], .offset = t->size + gap};
    t->size += gap + (uint64_t)volume * fc_dtype_size(t->tensors[tensor].dtype);
}

static inline void target_add_whole(fake_target *t, size_t tensor, uint64_t gap) {
    static const int64_t origin[FAKE_DIMS];
    target_add(t, tensor, origin, t->tensors[tensor].source->shape, gap);
}

/* Makes the file with its final length, as a writer does, and fills it so that a stray write is detected. */
static inline void target_reserve(const fake_target *t) {
    unsigned char *bytes = malloc(t->size + 1);
    assert_non_null(bytes);
    memset(bytes, FILL, t->size);
    int fd = open(t->path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    assert_true(fd >= 0);
    assert_int_equal(write(fd, bytes, t->size), (ssize_t)t->size);
    close(fd);
    free(bytes);
}

static inline void expect_item(const fake *f, const fake_target *t, const fc_target_item *item,
                               unsigned char *expected) {
    const fc_target_tensor *target = &t->tensors[item->tensor];
    const fake_tensor *truth = &f->details[item->tensor];
    int ndim = target->source->ndim;
    uint32_t size = fc_dtype_size(target->source->dtype);
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
    if (target->dtype == target->source->dtype) {
        fc_strided_copy(&copy, truth->truth + at * size, expected + item->offset);
        return;
    }
    unsigned char *plain = malloc((size_t)volume * size);
    assert_non_null(plain);
    fc_strided_copy(&copy, truth->truth + at * size, plain);
    fc_cast(target->source->dtype, plain, target->dtype, expected + item->offset, (size_t)volume);
    free(plain);
}

/* Checks the whole file: the bytes of every item, and that nothing else was written. */
static inline void target_check(const fake *f, const fake_target *t) {
    unsigned char *expected = malloc(t->size + 1), *found = malloc(t->size + 1);
    assert_true(expected && found);
    memset(expected, FILL, t->size);
    for (size_t i = 0; i < t->file.nitems; i++) {
        expect_item(f, t, &t->items[i], expected);
    }
    int fd = open(t->path, O_RDONLY);
    assert_int_equal(read(fd, found, t->size + 1), (ssize_t)t->size);
    close(fd);
    assert_memory_equal(found, expected, t->size);
    free(expected);
    free(found);
}

/* Returns a full tensor of zeros with `bytes` in the item's box. */
static inline unsigned char *in_tensor(const fake_target *t, const fc_target_item *item, const unsigned char *bytes,
                                       size_t *size) {
    const fc_tensor *tensor = t->tensors[item->tensor].source;
    const uint32_t element = fc_dtype_size(t->tensors[item->tensor].dtype);
    const fc_box box = {tensor->ndim, item->dims, item->dims + tensor->ndim};
    int64_t index[FAKE_DIMS] = {0}, numel;
    assert_true(fc_numel(tensor->ndim, tensor->shape, &numel));
    *size = (size_t)numel * element;
    unsigned char *whole = calloc(*size + 1, 1);
    assert_non_null(whole);
    for (int64_t n = fc_box_volume(&box); n > 0; n--, bytes += element) {
        int64_t at = 0;
        for (int d = 0; d < box.ndim; d++) {
            at = at * tensor->shape[d] + item->dims[d] + index[d];
        }
        memcpy(whole + (size_t)at * element, bytes, element);
        for (int d = box.ndim - 1; d >= 0 && ++index[d] == box.sizes[d]; d--) {
            index[d] = 0;
        }
    }
    return whole;
}

/* Checks the digests of the items with chunks, or of those without, and what these items add to their tensors. */
static inline void target_check_digests(const fake *f, const fake_target *t, bool chunked) {
    uint64_t sums[FAKE_TENSORS] = {0};
    for (size_t i = 0; i < t->file.nitems; i++) {
        const fc_target_item *item = &t->items[i];
        if (!item->owned || chunked != (item->chunk != NULL)) {
            continue;
        }
        fc_target_item at_0 = *item;
        at_0.offset = 0;
        size_t size = (size_t)fc_target_item_bytes(&t->target, item), whole_size;
        unsigned char *bytes = calloc(size + 1, 1);
        assert_non_null(bytes);
        expect_item(f, t, &at_0, bytes);
        assert_true(item->crc64 == fc_crc64(0, bytes, size));
        assert_true(item->crc32 == fc_crc32(0, bytes, size));
        unsigned char *whole = in_tensor(t, item, bytes, &whole_size);
        sums[item->tensor] ^= item->owner == t->file.rank ? fc_crc64_bare(whole, whole_size) : 0;
        free(whole);
        free(bytes);
    }
    assert_memory_equal(t->digests, sums, sizeof sums);
}
