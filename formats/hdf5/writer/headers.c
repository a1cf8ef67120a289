/*
 * Puts digests into a file that libhdf5 has closed. Its headers are read into memory, the values set where the
 * attributes are, the checksums of their object headers made anew, and all of it written back to its place. The data
 * between the headers is not touched.
 *
 * Why not through libhdf5: the digest of the headers cannot be known before they are complete, and opening every
 * dataset once more would take as long as making it.
 */
#include "hdf5/writer/headers.h"

#include "base/checked.h"
#include "base/crc.h"
#include "base/try.h"
#include "fsdpckpt/io.h"
#include "hdf5/object_header.h"
#include "hdf5/schema.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* The headers in memory. */
typedef struct headers {
    const char *path;
    int fd;
    const fc_h5_blocks *blocks;
    unsigned char **bytes; /* of each block */
} headers;

/* fc_h5_view.bytes: a place never reaches beyond its block, as libhdf5 asked for each piece of headers at once. */
static const unsigned char *view_bytes(void *context, uint64_t at, uint64_t size) {
    const headers *h = context;
    size_t low = 0, high = h->blocks->count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        const fc_h5_block *b = &h->blocks->items[middle];
        if (at < b->at) {
            high = middle;
        } else if (at - b->at >= b->size) {
            low = middle + 1;
        } else {
            return fc_range_within(at - b->at, size, b->size) ? h->bytes[middle] + (at - b->at) : NULL;
        }
    }
    return NULL;
}

static fc_code unexpected(const headers *h, uint64_t object, const char *what, fc_error *err) {
    return fc_fail(err, FC_EUNSUPPORTED,
                   "%s: offset %" PRIu64 ": this libhdf5 wrote an object header in which the attribute %s is not found",
                   h->path, object, what);
}

static void put_little(unsigned char *p, uint64_t value, int bytes) {
    for (int i = 0; i < bytes; i++) {
        p[i] = (unsigned char)(value >> 8 * i);
    }
}

/* Where the field is in memory; the view gives out what is ours to change. */
static unsigned char *at_place(headers *h, uint64_t at, uint64_t size) {
    return (unsigned char *)(uintptr_t)view_bytes(h, at, size);
}

static fc_code set_field(headers *h, uint64_t object, const char *name, uint64_t value, fc_error *err) {
    const fc_h5_view view = {view_bytes, h};
    fc_h5_field field;
    if (!fc_h5_find_field(&view, object, name, &field)) {
        return unexpected(h, object, name, err);
    }
    unsigned char *start = at_place(h, field.start, field.check - field.start + 4);
    if (!start) {
        return unexpected(h, object, name, err);
    }
    put_little(start + (field.value - field.start), value, 8);
    size_t size = (size_t)(field.check - field.start);
    put_little(start + size, fc_h5_checksum(start, size), 4);
    return FC_OK;
}

static fc_code load(headers *h, uint64_t *file_size, fc_error *err) {
    off_t end = lseek(h->fd, 0, SEEK_END);
    if (end < 0) {
        return fc_fail_errno(err, errno, "%s: cannot be measured", h->path);
    }
    *file_size = (uint64_t)end;
    h->bytes = calloc(h->blocks->count + 1, sizeof *h->bytes);
    if (!h->bytes) {
        return fc_no_memory(err, h->path);
    }
    for (size_t i = 0; i < h->blocks->count; i++) {
        const fc_h5_block *b = &h->blocks->items[i];
        h->bytes[i] = malloc(b->size + 1);
        FC_TRY(h->bytes[i] ? fc_pread_full(h->fd, h->bytes[i], (size_t)b->size, b->at, h->path, err)
                           : fc_fail(err, FC_ENOMEM, "%s: out of memory for its headers", h->path));
    }
    return FC_OK;
}

/* The digest of the file with everything but the headers taken as 0: of them, the field that will hold it and the
   checksum that depends on it are 0, too. */
static fc_code seal_headers(headers *h, uint64_t file_size, fc_error *err) {
    const char *name = fc_h5_attribute_get(FC_H5_A_HEADER_CRC64)->name;
    const fc_h5_view view = {view_bytes, h};
    uint64_t root, sum = 0;
    fc_h5_field field;
    if (!fc_h5_find_root(&view, &root) || !fc_h5_find_field(&view, root, name, &field)) {
        return unexpected(h, 0, name, err);
    }
    unsigned char *value = at_place(h, field.value, 8), *check = at_place(h, field.check, 4);
    if (!value || !check) {
        return unexpected(h, root, name, err);
    }
    memset(value, 0, 8);
    memset(check, 0, 4);
    for (size_t i = 0; i < h->blocks->count; i++) {
        const fc_h5_block *b = &h->blocks->items[i];
        sum ^= fc_crc64_shift(fc_crc64_bare(h->bytes[i], (size_t)b->size), file_size - b->at - b->size);
    }
    return set_field(h, root, name, fc_crc64_finish(sum, file_size), err);
}

static fc_code write_back(headers *h, fc_error *err) {
    for (size_t i = 0; i < h->blocks->count; i++) {
        const fc_h5_block *b = &h->blocks->items[i];
        FC_TRY(fc_pwrite_full(h->fd, h->bytes[i], (size_t)b->size, b->at, h->path, err));
    }
    return FC_OK;
}

fc_code fc_h5_headers_finish(const char *path, const fc_h5_blocks *blocks, const fc_h5_patch *patches, size_t count,
                             fc_error *err) {
    headers h = {path, open(path, O_RDWR | O_CLOEXEC), blocks, NULL};
    uint64_t file_size = 0;
    if (h.fd < 0) {
        return fc_fail_errno(err, errno, "%s: cannot be opened", path);
    }
    fc_code rc;
    FC_TRY_GOTO(load(&h, &file_size, err), rc, out);
    for (size_t i = 0; i < count; i++) {
        FC_TRY_GOTO(set_field(&h, patches[i].object, fc_h5_attribute_get(FC_H5_A_CRC64)->name, patches[i].crc64, err),
                    rc, out);
    }
    FC_TRY_GOTO(seal_headers(&h, file_size, err), rc, out);
    rc = write_back(&h, err);
out:
    if (close(h.fd) != 0 && rc == FC_OK) {
        rc = fc_fail_errno(err, errno, "%s: cannot be written", path);
    }
    for (size_t i = 0; h.bytes && i < blocks->count; i++) {
        free(h.bytes[i]);
    }
    free(h.bytes);
    return rc;
}
