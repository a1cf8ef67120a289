/*
 * Builds the superblock, the global heap and object headers as bytes: see image.h. image_group.c builds groups.
 */
#include "hdf5/writer/image.h"

#include "base/crc.h"
#include "fsdpckpt/try.h"
#include "hdf5/object_header.h"
#include "hdf5/tables.h"
#include "hdf5/writer/image_chunks.h"
#include "hdf5/writer/types_write.h"
#include "io/file.h"
#include "io/path.h"
#include "io/staged_objects.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    SUPERBLOCK = 48,
    HEAP_OBJECT = 16,       /* bytes before an object in a global heap */
    HEAP_LEAST = 4096,      /* the minimum size in libhdf5 */
    HEAP_ENOUGH = 64 << 10, /* a collection ends when it has this many bytes */
    HEAP_NUMBERS = 65535,   /* or this many objects */
    FLUSH = 4 << 20,
    CHECKSUM = 4,
    ALIGN = 8,
    NONE_OPEN = -1
};

void fc_h5_image_open(fc_h5_image *image, const char *path) {
    *image = (fc_h5_image){.path = path, .fd = NONE_OPEN, .collection = SIZE_MAX, .header_crc64 = SIZE_MAX};
    fc_h5_add_zeros(&image->heap, SUPERBLOCK);
}

void fc_h5_image_free(fc_h5_image *image) {
    if (image->path && image->fd >= 0) {
        close(image->fd);
    }
    free(image->heap.data);
    free(image->objects.data);
    free(image->made);
    free(image->places);
    free(image->inner);
    free(image->indexes);
    for (int i = 0; i < FC_DTYPE_COUNT; i++) {
        free(image->types[i].bytes);
    }
    *image = (fc_h5_image){.fd = NONE_OPEN};
}

/* ---- the global heap ---- */

static void close_collection(fc_h5_image *image) {
    fc_h5_buffer *heap = &image->heap;
    if (image->collection == SIZE_MAX || heap->failed) {
        return;
    }
    size_t size = heap->size - image->collection;
    if (size < HEAP_LEAST) { /* object 0 stands for the free space */
        const size_t left = HEAP_LEAST - size;
        fc_h5_add_zeros(heap, left);
        if (left >= HEAP_OBJECT && !heap->failed) {
            fc_store_little(heap->data + image->collection + size + 8, left, 8);
        }
        size = HEAP_LEAST;
    }
    if (!heap->failed) {
        fc_store_little(heap->data + image->collection + 8, size, 8);
    }
    image->collection = SIZE_MAX;
}

fc_h5_heap_id fc_h5_image_heap_add(fc_h5_image *image, const void *bytes, size_t size) {
    fc_h5_buffer *heap = &image->heap;
    if (size == 0) {
        return (fc_h5_heap_id){0, 0, 0};
    }
    if (image->collection != SIZE_MAX &&
        (heap->size - image->collection >= HEAP_ENOUGH || image->next_object > HEAP_NUMBERS)) {
        close_collection(image);
    }
    if (image->collection == SIZE_MAX) {
        image->collection = heap->size;
        image->next_object = 1;
        fc_h5_add_bytes(heap, "GCOL\1\0\0\0", 8);
        fc_h5_add_zeros(heap, 8); /* its size */
    }
    const fc_h5_heap_id id = {image->heap_at + image->collection, image->next_object++, (uint32_t)size};
    fc_h5_add_number(heap, id.object, 2);
    fc_h5_add_zeros(heap, 6); /* references, reserved */
    fc_h5_add_number(heap, size, 8);
    fc_h5_add_bytes(heap, bytes, size);
    fc_h5_pad(heap, ALIGN);
    heap->failed |= size > UINT32_MAX;
    return id;
}

/* Opens the file for writing, and creates it the first time. */
static fc_code open_file(fc_h5_image *image, int flags, fc_error *err) {
    if (image->fd < 0) {
        image->fd = fc_open(image->path, O_WRONLY | flags, 0666);
    }
    return image->fd < 0 ? fc_fail_errno(err, errno, "%s: cannot be created", image->path) : FC_OK;
}

static fc_code close_file(fc_h5_image *image, fc_code rc, fc_error *err) {
    if (image->fd >= 0 && close(image->fd) != 0 && rc == FC_OK) {
        rc = fc_fail_errno(err, errno, "%s: cannot be written", image->path);
    }
    image->fd = NONE_OPEN;
    return rc;
}

static fc_code write_heap(fc_h5_image *image, fc_error *err) {
    fc_h5_buffer *heap = &image->heap;
    fc_code rc;
    FC_TRY_GOTO(open_file(image, O_CREAT | O_EXCL, err), rc, out);
    rc = fc_pwrite_full(image->fd, heap->data, heap->size, image->heap_at, image->path, err);
out:
    image->heap_sum = fc_crc64_shift(image->heap_sum, heap->size) ^ fc_crc64_bare(heap->data, heap->size);
    image->heap_at += heap->size;
    heap->size = 0;
    return rc;
}

fc_code fc_h5_image_flush_heap(fc_h5_image *image, fc_error *err) {
    if (image->heap.size < FLUSH) {
        return FC_OK;
    }
    close_collection(image);
    return image->heap.failed ? fc_no_memory(err, image->path) : write_heap(image, err);
}

void fc_h5_image_close_heap(fc_h5_image *image) {
    close_collection(image);
    image->objects_at = image->heap_at + image->heap.size;
}

/* ---- object headers ---- */

enum { OBJECT_HEAD = 10, MESSAGE_HEAD = 4, NEVER_SHARED = 4 };

size_t fc_h5_object_begin(fc_h5_image *image) {
    fc_h5_buffer *to = &image->objects;
    fc_h5_pad(to, ALIGN);
    const size_t start = to->size;
    fc_h5_add_bytes(to, "OHDR\2", 5);
    fc_h5_add_number(to, 2, 1); /* flags: the next size has 4 bytes */
    fc_h5_add_zeros(to, 4);     /* bytes of messages */
    return start;
}

void fc_h5_object_end(fc_h5_image *image, size_t start) {
    fc_h5_buffer *to = &image->objects;
    const fc_h5_made_object object = {start, to->size};
    if (to->failed || !fc_grow(&image->made, &image->made_capacity, image->nmade + 1, sizeof *image->made)) {
        to->failed = true;
        return;
    }
    fc_store_little(to->data + start + OBJECT_HEAD - 4, object.end - start - OBJECT_HEAD, 4);
    fc_h5_add_zeros(to, CHECKSUM);
    image->made[image->nmade++] = object;
}

size_t fc_h5_message_begin(fc_h5_buffer *to, int type) {
    const size_t start = to->size;
    fc_h5_add_number(to, (uint64_t)type, 1);
    fc_h5_add_zeros(to, 3);
    return start;
}

void fc_h5_message_end(fc_h5_buffer *to, size_t start) {
    const size_t size = to->size - start - MESSAGE_HEAD;
    to->failed |= size > UINT16_MAX;
    if (!to->failed) {
        fc_store_little(to->data + start + 1, size, 2);
    }
}

void fc_h5_attributes_begin(fc_h5_buffer *to) {
    const size_t message = fc_h5_message_begin(to, FC_H5_M_ATTRIBUTE_INFO);
    fc_h5_add_number(to, 0, 1);               /* version */
    fc_h5_add_number(to, 0, 1);               /* flags: no creation order */
    fc_h5_add_number(to, FC_H5_UNDEFINED, 8); /* no fractal heap */
    fc_h5_add_number(to, FC_H5_UNDEFINED, 8); /* no B-tree */
    fc_h5_message_end(to, message);
    if (!to->failed) {
        to->data[message + 3] = NEVER_SHARED;
    }
}

/* Encodes `type` as a malloc'ed datatype message, and closes it. H5Tencode puts two bytes before the message. */
static fc_code encode_type(const fc_h5_image *image, hid_t type, unsigned char **bytes, size_t *size, fc_error *err) {
    *size = 0;
    *bytes = type >= 0 && H5Tencode(type, NULL, size) >= 0 ? malloc(*size + 1) : NULL;
    const bool ok = *bytes && *size > 2 && H5Tencode(type, *bytes, size) >= 0;
    if (type >= 0) {
        H5Tclose(type);
    }
    if (!ok) {
        free(*bytes);
        *bytes = NULL;
        return fc_fail(err, FC_EIO, "%s: libhdf5 cannot encode a datatype", image->path);
    }
    *size -= 2;
    memmove(*bytes, *bytes + 2, *size);
    return FC_OK;
}

static void add_type(fc_h5_buffer *to, const unsigned char *bytes, size_t size) {
    const size_t message = fc_h5_message_begin(to, FC_H5_M_DATATYPE);
    fc_h5_add_bytes(to, bytes, size);
    fc_h5_message_end(to, message);
    if (!to->failed) {
        to->data[message + 3] = 1; /* constant */
    }
}

static void add_space(fc_h5_buffer *to, int ndim, const int64_t *shape) {
    const size_t message = fc_h5_message_begin(to, FC_H5_M_DATASPACE);
    fc_h5_add_number(to, 2, 1); /* version */
    fc_h5_add_number(to, (uint64_t)ndim, 1);
    fc_h5_add_number(to, 0, 1);
    fc_h5_add_number(to, ndim > 0, 1); /* simple, or scalar */
    for (int k = 0; k < ndim; k++) {
        fc_h5_add_number(to, (uint64_t)shape[k], 8);
    }
    fc_h5_message_end(to, message);
}

fc_code fc_h5_image_shape(fc_h5_image *image, fc_dtype dtype, int ndim, const int64_t *shape, fc_error *err) {
    if (!image->types[dtype].bytes) {
        FC_TRY(encode_type(image, fc_h5_type_new(dtype), &image->types[dtype].bytes, &image->types[dtype].size, err));
    }
    add_space(&image->objects, ndim, shape);
    add_type(&image->objects, image->types[dtype].bytes, image->types[dtype].size);
    return FC_OK;
}

fc_code fc_h5_image_list_shape(fc_h5_image *image, hid_t type, uint64_t count, fc_error *err) {
    const int64_t shape[1] = {(int64_t)count};
    unsigned char *bytes;
    size_t size;
    FC_TRY(encode_type(image, type, &bytes, &size, err));
    add_space(&image->objects, 1, shape);
    add_type(&image->objects, bytes, size);
    free(bytes);
    return FC_OK;
}

/* When space is allocated and fill values are written, as libhdf5 encodes them. */
enum { EARLY_NEVER = 0x05, LATE_IF_SET = 0x0a, HAS_VALUE = 0x20 };

void fc_h5_image_fill(fc_h5_buffer *to, int how, const unsigned char *value, size_t size) {
    const size_t message = fc_h5_message_begin(to, FC_H5_M_FILL);
    fc_h5_add_number(to, 3, 1); /* version */
    fc_h5_add_number(to, (uint64_t)(how | (value ? HAS_VALUE : 0)), 1);
    if (value) {
        fc_h5_add_number(to, size, 4);
        fc_h5_add_bytes(to, value, size);
    }
    fc_h5_message_end(to, message);
}

void fc_h5_image_add_contiguous(fc_h5_buffer *to, uint64_t address, uint64_t bytes) {
    const size_t message = fc_h5_message_begin(to, FC_H5_M_LAYOUT);
    fc_h5_add_number(to, 3, 1); /* version */
    fc_h5_add_number(to, 1, 1); /* contiguous */
    fc_h5_add_number(to, address, 8);
    fc_h5_add_number(to, bytes, 8);
    fc_h5_message_end(to, message);
}

void fc_h5_image_add_inner(fc_h5_image *image, size_t at) {
    if (!fc_grow(&image->inner, &image->inner_capacity, image->ninner + 1, sizeof *image->inner)) {
        image->objects.failed = true;
        return;
    }
    image->inner[image->ninner++] = image->objects.size;
    fc_h5_add_number(&image->objects, at, 8);
}

static uint64_t align_up(uint64_t at, uint64_t to) {
    return (at + to - 1) / to * to;
}

size_t fc_h5_image_contiguous(fc_h5_image *image, uint64_t bytes) {
    fc_h5_buffer *to = &image->objects;
    if (bytes == 0) {
        fc_h5_image_fill(to, LATE_IF_SET, NULL, 0);
        fc_h5_image_add_contiguous(to, FC_H5_UNDEFINED, 0);
        return SIZE_MAX;
    }
    const bool large = bytes >= FC_H5_LARGE;
    const uint64_t at = align_up(image->data_size, large ? FC_H5_LARGE_ALIGN : FC_H5_SMALL_ALIGN);
    fc_h5_image_fill(to, EARLY_NEVER, NULL, 0);
    fc_h5_image_add_contiguous(to, at, bytes);
    if (to->failed || at < image->data_size || bytes > INT64_MAX - at ||
        !fc_grow(&image->places, &image->places_capacity, image->nplaces + 1, sizeof *image->places)) {
        to->failed = true;
        return SIZE_MAX;
    }
    image->places[image->nplaces++] = to->size - 16;
    image->data_size = at + bytes;
    image->data_large |= large;
    return to->size - 16;
}

void fc_h5_image_among_headers(fc_h5_image *image, uint64_t address, uint64_t bytes) {
    fc_h5_image_fill(&image->objects, EARLY_NEVER, NULL, 0);
    fc_h5_image_add_contiguous(&image->objects, bytes ? address : FC_H5_UNDEFINED, bytes);
}

void fc_h5_image_virtual(fc_h5_image *image, fc_dtype dtype, const fc_h5_heap_id *list) {
    fc_h5_buffer *to = &image->objects;
    unsigned char absent[FC_H5_ELEMENT_MAX];
    fc_h5_absent_value(dtype, absent);
    fc_h5_image_fill(to, LATE_IF_SET, absent, fc_dtype_size(dtype));
    const size_t message = fc_h5_message_begin(to, FC_H5_M_LAYOUT);
    fc_h5_add_number(to, 4, 1); /* version */
    fc_h5_add_number(to, 3, 1); /* virtual */
    fc_h5_add_number(to, list->collection, 8);
    fc_h5_add_number(to, list->object, 4);
    fc_h5_message_end(to, message);
}

/* ---- the file ---- */

/* Adds `base` to the addresses at `places` in `objects`. */
static void set_addresses(fc_h5_image *image, const size_t *places, size_t count, uint64_t base) {
    for (size_t i = 0; i < count; i++) {
        unsigned char *field = image->objects.data + places[i];
        fc_store_little(field, base + fc_load_little(field, 8), 8);
    }
}

fc_code fc_h5_image_check(const fc_h5_image *image, fc_error *err) {
    return image->heap.failed || image->objects.failed ? fc_no_memory(err, image->path) : FC_OK;
}

fc_code fc_h5_image_lay_out(fc_h5_image *image, fc_error *err) {
    fc_h5_buffer *to = &image->objects;
    FC_TRY(fc_h5_image_check(image, err));
    const uint64_t headers_end = image->objects_at + to->size;
    image->data_at = align_up(headers_end, image->data_large ? FC_H5_LARGE_ALIGN : FC_H5_SMALL_ALIGN);
    image->file_size = image->data_size ? image->data_at + image->data_size : headers_end;
    if (image->file_size > INT64_MAX) {
        return fc_fail_errno(err, EFBIG, "%s: reserving space", image->path);
    }
    set_addresses(image, image->places, image->nplaces, image->data_at);
    set_addresses(image, image->inner, image->ninner, image->objects_at);
    image->nplaces = image->ninner = 0;
    return FC_OK;
}

static fc_code set_length(fc_h5_image *image, fc_error *err) {
    return ftruncate(image->fd, (off_t)image->file_size) == 0
               ? FC_OK
               : fc_fail_errno(err, errno, "%s: cannot be extended to %llu bytes", image->path,
                               (unsigned long long)image->file_size);
}

fc_code fc_h5_image_create(fc_h5_image *image, fc_error *err) {
    FC_TRY(open_file(image, O_CREAT | O_EXCL, err));
    fc_code rc = set_length(image, err);
    fc_staged_final_from(image->path, image->data_at);
    return close_file(image, rc, err);
}

static void make_superblock(const fc_h5_image *image, unsigned char block[SUPERBLOCK]) {
    static const unsigned char start[] = {0x89, 'H', 'D', 'F', '\r', '\n', 0x1a, '\n', 2, 8, 8, 0};
    memset(block, 0, SUPERBLOCK);
    memcpy(block, start, sizeof start);
    fc_store_little(block + 20, image->extension ? image->objects_at + image->extension - 1 : FC_H5_UNDEFINED, 8);
    fc_store_little(block + 28, image->file_size, 8);
    fc_store_little(block + 36, image->root, 8);
    fc_store_little(block + 44, fc_h5_checksum(block, SUPERBLOCK - CHECKSUM), CHECKSUM);
}

/*
 * Sets the checksums of all object headers except the root's, which depends on the digest. @return the root's header.
 */
static const fc_h5_made_object *set_checksums(fc_h5_image *image) {
    const fc_h5_made_object *root = NULL;
    for (size_t i = 0; i < image->nmade; i++) {
        const fc_h5_made_object *object = &image->made[i];
        unsigned char *start = image->objects.data + object->start;
        if (image->objects_at + object->start == image->root) {
            root = object;
            continue;
        }
        fc_store_little(start + (object->end - object->start), fc_h5_checksum(start, object->end - object->start),
                        CHECKSUM);
    }
    return root;
}

/*
 * Sets in the tables what depends on all other object headers. header_crc64 and the checksum over it are still 0.
 */
static void seal_tables(fc_h5_image *image) {
    const fc_h5_buffer *objects = &image->objects;
    unsigned char *row = objects->data + image->tables_at;
    const size_t end = image->tables_at + image->tables_size;
    fc_h5_manifest_row manifest;
    memcpy(&manifest, row, sizeof manifest);
    manifest.file_size = image->file_size;
    manifest.objects[0] = image->objects_at;
    manifest.objects[1] = objects->size;
    manifest.objects_crc64 =
        fc_crc64(fc_crc64(0, objects->data, image->tables_at), objects->data + end, objects->size - end);
    manifest.crc64 = 0;
    memcpy(row, &manifest, sizeof manifest);
    manifest.crc64 = fc_crc64(0, row, image->tables_size);
    memcpy(row, &manifest, sizeof manifest);
}

/* Sets the digest, for which the digest itself and the checksum over it count as 0 (docs/HDF5_SCHEMA.md, "Digests"). */
static uint64_t set_digest(fc_h5_image *image, const unsigned char superblock[SUPERBLOCK]) {
    fc_h5_buffer *to = &image->objects;
    const fc_h5_made_object *root = set_checksums(image);
    if (image->tables_size > 0) {
        seal_tables(image);
    }
    uint64_t sum =
        fc_crc64_shift(image->heap_sum, image->heap.size) ^ fc_crc64_bare(image->heap.data, image->heap.size);
    sum = fc_crc64_shift(sum, to->size) ^ fc_crc64_bare(to->data, to->size);
    sum = fc_crc64_shift(sum, image->file_size - image->objects_at - to->size);
    sum ^= fc_crc64_shift(fc_crc64_bare(superblock, SUPERBLOCK), image->file_size - SUPERBLOCK);
    const uint64_t digest = fc_crc64_finish(sum, image->file_size);
    fc_store_little(to->data + image->header_crc64, digest, 8);
    unsigned char *start = to->data + root->start;
    fc_store_little(start + (root->end - root->start), fc_h5_checksum(start, root->end - root->start), CHECKSUM);
    return digest;
}

fc_code fc_h5_image_write(fc_h5_image *image, uint64_t *header_crc64, fc_error *err) {
    unsigned char superblock[SUPERBLOCK];
    FC_TRY(fc_h5_image_finish_indexes(image, err));
    make_superblock(image, superblock);
    const uint64_t digest = set_digest(image, superblock);
    if (header_crc64) {
        *header_crc64 = digest;
    }
    fc_code rc;
    FC_TRY_GOTO(open_file(image, O_CREAT, err), rc, out);
    FC_TRY_GOTO(image->nindexes > 0 ? set_length(image, err) : FC_OK, rc, out);
    FC_TRY_GOTO(fc_pwrite_full(image->fd, image->heap.data, image->heap.size, image->heap_at, image->path, err), rc,
                out);
    FC_TRY_GOTO(
        fc_pwrite_full(image->fd, image->objects.data, image->objects.size, image->objects_at, image->path, err), rc,
        out);
    rc = fc_pwrite_full(image->fd, superblock, sizeof superblock, 0, image->path, err);
out:
    return close_file(image, rc, err);
}
