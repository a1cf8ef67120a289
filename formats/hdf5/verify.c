/*
 * Verifies the headers of our own files: compares everything in a file except tensor data with the root attribute
 * `header_crc64`.
 */
#include "hdf5/verify.h"
#include "hdf5/h5.h"
#include "hdf5/object_header.h"
#include "hdf5/schema.h"

#include "base/checked.h"
#include "base/crc.h"
#include "base/grow.h"
#include "base/little.h"
#include "fsdpckpt/try.h"
#include "fsdpckpt/verify.h"
#include "io/file.h"
#include "verify/report.h"

#include <inttypes.h>
#include <stdlib.h>
#include <unistd.h>

enum { BLOCK = 256 << 10 };

/* A range of tensor data in a file. */
typedef struct extent {
    uint32_t file;
    uint64_t offset, length;
} extent;

typedef struct extents {
    extent *items;
    size_t count, capacity;
} extents;

/* The file that is being verified. */
typedef struct file {
    const char *path;
    int fd;
    uint64_t size;
    unsigned char *block;  /* BLOCK bytes */
    unsigned char *viewed; /* the bytes that fc_h5_view returned last */
} file;

static int compare_extent_places(const void *a, const void *b) {
    const extent *x = a, *y = b;
    int order = (x->file > y->file) - (x->file < y->file);
    return order ? order : (x->offset > y->offset) - (x->offset < y->offset);
}

static bool add_extent(extents *all, const fc_extent *e) {
    if (!fc_grow(&all->items, &all->capacity, all->count + 1, sizeof *all->items)) {
        return false;
    }
    all->items[all->count++] = (extent){e->file, e->offset, e->length};
    return true;
}

/* Lists the data of all files, sorted. Chunks without an extent were already reported. */
static fc_code list_extents(const fc_checkpoint *checkpoint, extents *all, fc_error *err) {
    for (size_t i = 0; i < checkpoint->ntensors; i++) {
        const fc_tensor *t = &checkpoint->tensors[i];
        for (size_t k = 0; k < t->nchunks; k++) {
            fc_extent e;
            if (fc_checkpoint_extent(checkpoint, t, k, &e, NULL) != FC_OK ||
                (e.codec != FC_CODEC_RAW && e.codec != FC_CODEC_FILTERED)) {
                continue;
            }
            FC_NEED(add_extent(all, &e), err, checkpoint->path);
        }
    }
    if (all->count > 0) {
        qsort(all->items, all->count, sizeof *all->items, compare_extent_places);
    }
    return FC_OK;
}

static const unsigned char *view_bytes(void *context, uint64_t at, uint64_t size) {
    file *f = context;
    if (size > BLOCK || !fc_range_within(at, size, f->size) ||
        fc_pread_full(f->fd, f->viewed, (size_t)size, at, f->path, NULL) != FC_OK) {
        return NULL;
    }
    return f->viewed;
}

/* Adds the bytes from `from` to `to` to the CRC of the file. */
static fc_code add_range(file *f, uint64_t from, uint64_t to, uint64_t *sum, fc_error *err) {
    while (from < to) {
        size_t size = to - from < BLOCK ? (size_t)(to - from) : BLOCK;
        FC_TRY(fc_pread_full(f->fd, f->block, size, from, f->path, err));
        *sum ^= fc_crc64_shift(fc_crc64_bare(f->block, size), f->size - from - size);
        from += size;
    }
    return FC_OK;
}

/* Computes the CRC of the file with zeros for its data, for the field, and for the checksum that covers the field. */
static fc_code header_crc(file *f, const extent *data, size_t count, const fc_h5_field *field, uint64_t *crc,
                          fc_error *err) {
    uint64_t at = 0, sum = 0;
    fc_code rc = FC_OK;
    for (size_t i = 0; i < count; i++) {
        if (data[i].offset > at) {
            FC_TRY_GOTO(add_range(f, at, data[i].offset, &sum, err), rc, out);
        }
        uint64_t end = data[i].offset + data[i].length; /* within the file, which the reader has checked */
        at = end > at ? end : at;
    }
    FC_TRY_GOTO(add_range(f, at, f->size, &sum, err), rc, out);
    /* added twice, so that it cancels */
    FC_TRY_GOTO(add_range(f, field->value, field->value + 8, &sum, err), rc, out);
    rc = add_range(f, field->check, field->check + 4, &sum, err);
out:
    *crc = fc_crc64_finish(sum, f->size);
    return rc;
}

static fc_code check_file(const fc_checkpoint *checkpoint, uint32_t number, file *f, const extent *data, size_t count,
                          struct fc_findings *findings, struct fc_verify_report *report, fc_error *err) {
    const fc_h5_view view = {view_bytes, f};
    const fc_defect place = {.file = checkpoint->files[number].name};
    fc_h5_field field;
    uint64_t root, found, recorded;
    const unsigned char *p = NULL;
    bool has = fc_h5_find_root(&view, &root) &&
               fc_h5_find_field(&view, root, fc_h5_attribute_get(FC_H5_A_HEADER_CRC64)->name, &field) &&
               (p = view_bytes(f, field.value, 8)) != NULL;
    if (!has) {
        return FC_OK; /* written by another program or an older fsdpckpt, so not covered */
    }
    recorded = fc_load_little(p, 8);
    fc_code rc;
    FC_TRY_GOTO(header_crc(f, data, count, &field, &found, err), rc, out);
    if (found != recorded) {
        fc_report_defect(findings, &place,
                         "%s: its headers are damaged: their CRC-64 is %016" PRIx64 ", but %016" PRIx64 " is recorded"
                         ": a name, a shape, an attribute or an offset may be wrong: restore the file",
                         f->path, found, recorded);
    }
out:
    report->headers_digested++;
    return rc;
}

fc_code fc_h5_verify(const fc_checkpoint *checkpoint, struct fc_findings *findings, struct fc_verify_report *report,
                     fc_error *err) {
    extents all = {0};
    file f = {.fd = -1, .block = malloc(BLOCK), .viewed = malloc(BLOCK)};
    fc_code rc;
    FC_TRY_GOTO(f.block && f.viewed ? list_extents(checkpoint, &all, err) : fc_no_memory(err, checkpoint->path), rc,
                out);
    size_t next = 0;
    FC_TRY_GOTO(fc_h5_verify_tables(checkpoint, findings, err), rc, out);
    for (uint32_t i = 0; i < checkpoint->nfiles; i++) {
        fc_error found;
        size_t first = next;
        while (next < all.count && all.items[next].file == i) {
            next++;
        }
        f.path = checkpoint->files[i].path;
        fc_code opened = fc_open_input(f.path, &f.fd, &f.size, &found);
        opened = opened == FC_OK
                     ? check_file(checkpoint, i, &f, all.items + first, next - first, findings, report, &found)
                     : opened;
        if (f.fd >= 0) {
            close(f.fd);
            f.fd = -1;
        }
        if (opened != FC_OK) {
            const fc_defect place = {.file = checkpoint->files[i].name};
            fc_report_defect(findings, &place, "%s", found.message);
        }
    }
out:
    free(f.block);
    free(f.viewed);
    free(all.items);
    return rc;
}
