/*
 * Whether what two ranks' files hold is the same, without reading it where the CRC-32s of the archives tell.
 */
#include "pt/pt.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { COMPARE_BYTES = 16 << 20 /* of tensors whose CRCs do not say whether they are equal */ };

bool fc_pt_same_object(const pt_object *a, const pt_object *b) {
    bool same = a->size == b->size && a->nstorages == b->nstorages && memcmp(a->pickle, b->pickle, a->size) == 0;
    for (size_t i = 0; same && i < a->nstorages; i++) {
        same = a->storages[i].size == b->storages[i].size && a->storages[i].crc == b->storages[i].crc &&
               a->storages[i].crc != 0;
    }
    return same;
}

/* Reads the bytes of a stored record from `first` on. */
static fc_code read_bytes(const fc_checkpoint *checkpoint, const pt_record *record, uint64_t first, unsigned char *out,
                          size_t size, fc_error *err) {
    const char *path = checkpoint->files[record->file].path;
    int fd;
    uint64_t length;
    fc_code rc = fc_open_input(path, &fd, &length, err);
    if (rc == FC_OK) {
        rc = fc_pread_full(fd, out, size, record->offset + first, path, err);
        close(fd);
    }
    return rc;
}

/* The bytes from the first to the last element, which is all of it or holes, too: both must have the same strides. */
static uint64_t span_of(const pt_piece *piece, int ndim, const int64_t *sizes, uint32_t element) {
    uint64_t last = 0;
    for (int i = 0; i < ndim; i++) {
        if (sizes[i] == 0) {
            return 0;
        }
        last += (uint64_t)(sizes[i] - 1) * (uint64_t)piece->strides[i];
    }
    return (last + 1) * element;
}

fc_code fc_pt_same_piece(const fc_checkpoint *checkpoint, fc_dtype dtype, int ndim, const int64_t *sizes,
                         const pt_piece *a, const pt_piece *b, bool *same, fc_error *err) {
    bool alike = a->swap == b->swap && a->negate == b->negate && a->conjugate == b->conjugate;
    for (int i = 0; alike && i < ndim; i++) {
        alike = a->strides[i] == b->strides[i];
    }
    uint64_t span = span_of(a, ndim, sizes, fc_dtype_size(dtype));
    *same = alike && (span == 0 || (a->first == b->first && a->record.crc == b->record.crc && a->record.crc != 0 &&
                                    a->record.size == b->record.size));
    bool whole = span == a->record.size && span == b->record.size && a->record.crc != 0 && b->record.crc != 0;
    if (*same || !alike || whole || a->record.method != FC_ZIP_STORED || b->record.method != FC_ZIP_STORED ||
        span > COMPARE_BYTES) {
        return FC_OK;
    }
    unsigned char *x = malloc((size_t)span), *y = malloc((size_t)span);
    fc_code rc = x && y ? FC_OK : fc_fail(err, FC_ENOMEM, "%s: out of memory", checkpoint->path);
    rc = rc == FC_OK ? read_bytes(checkpoint, &a->record, a->first, x, (size_t)span, err) : rc;
    rc = rc == FC_OK ? read_bytes(checkpoint, &b->record, b->first, y, (size_t)span, err) : rc;
    *same = rc == FC_OK && memcmp(x, y, (size_t)span) == 0;
    free(x);
    free(y);
    return rc;
}
