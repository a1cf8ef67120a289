/*
 * Reads bytes of a torch.save archive: windows keep the number of preads small; whole records are inflated and checked.
 */
#include "base/checked.h"
#include "fsdpckpt/try.h"
#include "io/file.h"
#include "torch/zip/window.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <zlib.h>

fc_code fc_zip_load(fc_zip *zip, fc_zip_window *window, uint64_t at, uint64_t size, fc_error *err) {
    if (zip->fd < 0 || size > SIZE_MAX - 1 || !fc_range_within(at, size, zip->length)) {
        return fc_fail(err, FC_ECORRUPT, "%s: offset %" PRIu64 ": the torch.save archive is damaged: it is too short",
                       zip->path, zip->offset);
    }
    unsigned char *bytes = malloc((size_t)size + 1);
    FC_NEED(bytes, err, zip->path);
    fc_code rc = fc_pread_full(zip->fd, bytes, (size_t)size, zip->offset + at, zip->path, err);
    if (rc != FC_OK) {
        free(bytes);
        return rc;
    }
    free(window->bytes);
    *window = (fc_zip_window){bytes, zip->offset + at, (size_t)size};
    return FC_OK;
}

static const unsigned char *window_bytes(const fc_zip_window *window, uint64_t offset, uint64_t size) {
    return window->bytes && offset >= window->offset &&
                   fc_range_within(offset - window->offset, size, (uint64_t)window->size)
               ? window->bytes + (offset - window->offset)
               : NULL;
}

static const unsigned char *in_windows(const fc_zip *zip, uint64_t offset, uint64_t size) {
    const fc_zip_window *windows[] = {&zip->head, &zip->tail, &zip->other};
    for (size_t i = 0; i < 3; i++) {
        const unsigned char *bytes = window_bytes(windows[i], offset, size);
        if (bytes) {
            return bytes;
        }
    }
    return NULL;
}

fc_code fc_zip_view(fc_zip *zip, uint64_t at, uint64_t size, const unsigned char **bytes, fc_error *err) {
    fc_code rc = FC_OK;
    *bytes = in_windows(zip, zip->offset + at, size);
    if (!*bytes) {
        rc = fc_zip_load(zip, &zip->other, at, size, err);
        *bytes = zip->other.bytes;
    }
    return rc;
}

void fc_zip_close(fc_zip *zip) {
    free(zip->entries);
    free(zip->sorted);
    free(zip->names);
    free(zip->head.bytes);
    free(zip->tail.bytes);
    free(zip->other.bytes);
    *zip = (fc_zip){0};
}

static fc_code record_damaged(const fc_zip *zip, const fc_zip_entry *entry, const char *what, fc_error *err) {
    return fc_fail(err, FC_ECORRUPT, "%s: offset %" PRIu64 ": record %s is damaged: %s", zip->path, entry->data,
                   entry->name, what);
}

/* Inflates `stored` into `out`. The input must be used up exactly, and give exactly entry->size bytes. */
static fc_code inflate_record(const fc_zip *zip, const fc_zip_entry *entry, const unsigned char *stored,
                              unsigned char *out, fc_error *err) {
    z_stream z = {0};
    FC_NEED(inflateInit2(&z, -MAX_WBITS) == Z_OK, err, zip->path);
    uint64_t in_left = entry->stored, out_left = entry->size;
    unsigned char extra;
    int state = Z_OK;
    z.next_in = (Bytef *)(uintptr_t)stored;
    z.next_out = entry->size ? out : &extra;
    while (state == Z_OK) {
        uInt in_step = in_left < UINT32_MAX ? (uInt)in_left : UINT32_MAX;
        uInt out_step = out_left < UINT32_MAX ? (uInt)out_left : UINT32_MAX;
        z.avail_in = in_step;
        z.avail_out = out_step;
        if (out_step == 0) { /* one more byte of room shows whether the stream ends here */
            z.next_out = &extra;
            z.avail_out = 1;
        }
        state = inflate(&z, Z_NO_FLUSH);
        in_left -= in_step - z.avail_in;
        if (out_step == 0 && z.avail_out == 0) {
            state = Z_DATA_ERROR;
        }
        out_left -= out_step == 0 ? 0 : out_step - z.avail_out;
    }
    inflateEnd(&z);
    if (state != Z_STREAM_END || in_left != 0 || out_left != 0) {
        return record_damaged(zip, entry, "it does not inflate to its declared size", err);
    }
    return FC_OK;
}

static bool crc_matches(const fc_zip_entry *entry, const unsigned char *bytes) {
    return entry->crc == 0 || crc32_z(0, bytes, (size_t)entry->size) == entry->crc;
}

/* Reads from a window, or directly into place, so that a large record is not in memory twice. */
static fc_code read_stored(const fc_zip *zip, const fc_zip_entry *entry, unsigned char *out, fc_error *err) {
    const unsigned char *bytes = in_windows(zip, entry->data, entry->stored);
    if (!bytes) {
        return fc_pread_full(zip->fd, out, (size_t)entry->size, entry->data, zip->path, err);
    }
    memcpy(out, bytes, (size_t)entry->size);
    return FC_OK;
}

/* The data of a record, as it was before compression. */
static fc_code read_data(fc_zip *zip, const fc_zip_entry *entry, unsigned char *out, fc_error *err) {
    const unsigned char *stored;
    if (entry->method == FC_ZIP_STORED) {
        FC_TRY(read_stored(zip, entry, out, err));
    } else {
        FC_TRY(fc_zip_view(zip, entry->data - zip->offset, entry->stored, &stored, err));
        FC_TRY(inflate_record(zip, entry, stored, out, err));
    }
    return crc_matches(entry, out) ? FC_OK : record_damaged(zip, entry, "its CRC does not match", err);
}

fc_code fc_zip_read(fc_zip *zip, const fc_zip_entry *entry, unsigned char **bytes, fc_error *err) {
    *bytes = NULL;
    if (entry->method == FC_ZIP_DEFLATED && entry->size / FC_ZIP_MAX_RATIO > entry->stored) {
        return record_damaged(zip, entry, "its declared size is invalid", err);
    }
    if (entry->size > SIZE_MAX - 1) {
        return record_damaged(zip, entry, "its declared size is invalid", err);
    }
    unsigned char *out = malloc((size_t)entry->size + 1);
    FC_NEED(out, err, zip->path);
    fc_code rc = read_data(zip, entry, out, err);
    if (rc != FC_OK) {
        free(out);
        return rc;
    }
    *bytes = out;
    return FC_OK;
}
