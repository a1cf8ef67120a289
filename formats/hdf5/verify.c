/*
 * Verifies the headers of our own files: compares everything in a file except tensor data with the root attribute
 * `header_crc64`.
 */
#include "hdf5/verify.h"
#include "hdf5/h5.h"
#include "hdf5/header_file.h"
#include "hdf5/keras.h"

#include "base/crc.h"
#include "base/grow.h"
#include "fsdpckpt/order.h"
#include "fsdpckpt/try.h"
#include "fsdpckpt/verify.h"
#include "io/file.h"
#include "verify/report.h"

#include <inttypes.h>
#include <stdlib.h>
#include <unistd.h>

/* A range of tensor data in a file. */
typedef struct extent {
    uint32_t file;
    uint64_t offset, length;
} extent;

typedef struct extents {
    extent *items;
    size_t count, capacity;
} extents;

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
    fc_sort_items(all->items, all->count, sizeof *all->items, compare_extent_places);
    return FC_OK;
}

/* Adds the bytes from `from` to `to` to the CRC of the file. */
static fc_code add_range(fc_h5_header_file *f, uint64_t from, uint64_t to, uint64_t *sum) {
    while (from < to) {
        const size_t size = to - from < FC_H5_VIEW ? (size_t)(to - from) : FC_H5_VIEW;
        const unsigned char *bytes = fc_h5_header_bytes(f, from, size);
        if (!bytes) {
            return f->read;
        }
        *sum ^= fc_crc64_shift(fc_crc64_bare(bytes, size), f->size - from - size);
        from += size;
    }
    return FC_OK;
}

/* Computes the CRC of the file with zeros for its data, for the field, and for the checksum that covers the field. */
static fc_code header_crc(fc_h5_header_file *f, const extent *data, size_t count, const fc_h5_field *field,
                          uint64_t *crc) {
    uint64_t at = 0, sum = 0;
    fc_code rc = FC_OK;
    for (size_t i = 0; i < count; i++) {
        if (data[i].offset > at) {
            FC_TRY_GOTO(add_range(f, at, data[i].offset, &sum), rc, out);
        }
        uint64_t end = data[i].offset + data[i].length; /* within the file, which the reader has checked */
        at = end > at ? end : at;
    }
    FC_TRY_GOTO(add_range(f, at, f->size, &sum), rc, out);
    /* added twice, so that it cancels */
    FC_TRY_GOTO(add_range(f, field->value, field->value + 8, &sum), rc, out);
    rc = add_range(f, field->check, field->check + 4, &sum);
out:
    *crc = fc_crc64_finish(sum, f->size);
    return rc;
}

static fc_code check_file(const fc_checkpoint *checkpoint, uint32_t number, fc_h5_header_file *f, const extent *data,
                          size_t count, struct fc_findings *findings, struct fc_verify_report *report) {
    const fc_defect place = {.file = checkpoint->files[number].name};
    fc_h5_field field;
    uint64_t found, recorded;
    if (!fc_h5_root_field(f, FC_H5_A_HEADER_CRC64, &field) || !fc_h5_root_number(f, FC_H5_A_HEADER_CRC64, &recorded)) {
        return FC_OK; /* written by another program or an older fsdpckpt, so not covered */
    }
    fc_code rc;
    FC_TRY_GOTO(header_crc(f, data, count, &field, &found), rc, out);
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
    fc_error found;
    fc_h5_header_file f = {.fd = -1, .err = &found};
    fc_code rc;
    FC_TRY(fc_keras_verify(checkpoint, findings, report, err));
    FC_TRY_GOTO(list_extents(checkpoint, &all, err), rc, out);
    size_t next = 0;
    FC_TRY_GOTO(fc_h5_verify_tables(checkpoint, findings, err), rc, out);
    for (uint32_t i = 0; i < checkpoint->nfiles; i++) {
        size_t first = next;
        while (next < all.count && all.items[next].file == i) {
            next++;
        }
        f.path = checkpoint->files[i].path;
        fc_code opened = fc_open_input(f.path, &f.fd, &f.size, &found);
        opened =
            opened == FC_OK ? check_file(checkpoint, i, &f, all.items + first, next - first, findings, report) : opened;
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
    free(all.items);
    return rc;
}
