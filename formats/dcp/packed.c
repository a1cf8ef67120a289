/*
 * Decodes items that are zstd streams: see packed.h. A stream must be one frame that ends where the item ends, because
 * PyTorch reads no further than the first one. What it decodes to is checked like any archive before it is used.
 */
#include "dcp/packed_stream.h"

#include "base/crc.h"
#include "dcp/extent.h"
#include "dcp/files.h"
#include "dcp/stages.h"
#include "fsdpckpt/try.h"
#include "io/file.h"
#include "torch/file/file.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    MOST_HEAD = 1 << 20, /* bytes; the pickle of a tensor takes a few hundred */
    MOST_TAIL = 64 << 10 /* bytes after a tensor's data: two small records and the directory */
};

fc_code fc_dcp_stream_begin(fc_dcp_stream *s, int fd, const char *path, const fc_chunk *chunk, fc_error *err) {
    *s = (fc_dcp_stream){
        .fd = fd, .path = path, .at = chunk->place.offset, .end = chunk->place.offset + chunk->place.length};
    FC_TRY(fc_zstd_decoder_new(&s->decoder, err));
    s->in = malloc(FC_DCP_BLOCK);
    return s->in ? FC_OK : fc_no_memory(err, path);
}

void fc_dcp_stream_free(fc_dcp_stream *s) {
    fc_zstd_decoder_free(s->decoder);
    free(s->in);
}

static fc_code refill(fc_dcp_stream *s, fc_error *err) {
    const size_t n = s->end - s->at < FC_DCP_BLOCK ? (size_t)(s->end - s->at) : FC_DCP_BLOCK;
    if (n == 0) {
        return fc_fail(err, FC_ECORRUPT, "the zstd stream is cut off");
    }
    FC_TRY(fc_pread_full(s->fd, s->in, n, s->at, s->path, err));
    s->at += n;
    s->taken = 0;
    s->filled = n;
    return FC_OK;
}

fc_code fc_dcp_stream_read(fc_dcp_stream *s, unsigned char *out, size_t size, size_t *made, fc_error *err) {
    *made = 0;
    while (*made < size && !s->finished) {
        fc_zstd_step step;
        FC_TRY(s->taken == s->filled ? refill(s, err) : FC_OK);
        FC_TRY(fc_zstd_decode_step(s->decoder, s->in + s->taken, s->filled - s->taken, out + *made, size - *made, &step,
                                   err));
        s->taken += step.taken;
        *made += step.made;
        s->finished = step.finished;
    }
    if (s->finished && (s->taken < s->filled || s->at < s->end)) {
        return fc_fail(err, FC_ECORRUPT, "bytes follow the end of the zstd stream");
    }
    return FC_OK;
}

/* Adds the place of the item to an error. */
static fc_code at_item(const char *path, const fc_chunk *chunk, fc_code rc, fc_error *err) {
    return rc == FC_OK ? rc : fc_context(err, rc, "%s: offset %" PRIu64, path, chunk->place.offset);
}

/* ---- objects ---- */

/* Decodes a stream into memory that grows with it. */
static fc_code unpack(fc_dcp_stream *s, unsigned char **bytes, uint64_t *size, fc_error *err) {
    size_t capacity = 0, made = 0;
    *size = 0;
    while (!s->finished) {
        const size_t wanted = capacity ? 2 * capacity : FC_DCP_BLOCK;
        if (wanted > 2 * (size_t)FC_DCP_MOST_OBJECT) {
            return fc_fail(err, FC_EUNSUPPORTED, "an object that decodes to more than %d MiB",
                           FC_DCP_MOST_OBJECT >> 20);
        }
        unsigned char *larger = realloc(*bytes, wanted);
        FC_NEED(larger, err, s->path);
        *bytes = larger;
        FC_TRY(fc_dcp_stream_read(s, *bytes + capacity, wanted - capacity, &made, err));
        *size += made;
        capacity = wanted;
    }
    return *size <= FC_DCP_MOST_OBJECT
               ? FC_OK
               : fc_fail(err, FC_EUNSUPPORTED, "an object that decodes to more than %d MiB", FC_DCP_MOST_OBJECT >> 20);
}

fc_code fc_dcp_unpack(int fd, const char *path, const fc_chunk *chunk, unsigned char **bytes, uint64_t *size,
                      fc_error *err) {
    fc_dcp_stream s;
    *bytes = NULL;
    fc_code rc = fc_dcp_stream_begin(&s, fd, path, chunk, err);
    rc = rc == FC_OK ? unpack(&s, bytes, size, err) : rc;
    fc_dcp_stream_free(&s);
    if (rc != FC_OK) {
        free(*bytes);
        *bytes = NULL;
    }
    return at_item(path, chunk, rc, err);
}

/* Finds out how many bytes an object has. */
static fc_code measure_object(const fc_dcp_builder *b, fc_tensor *t, fc_error *err) {
    const fc_chunk *chunk = &t->chunks[0];
    const char *path = b->checkpoint->files[chunk->place.file].path;
    unsigned char *bytes = NULL;
    uint64_t size = 0, file_size;
    int fd;
    FC_TRY(fc_open_input(path, &fd, &file_size, err));
    const fc_code rc = fc_dcp_unpack(fd, path, chunk, &bytes, &size, err);
    free(bytes);
    close(fd);
    FC_TRY(rc);
    *(int64_t *)(uintptr_t)t->shape = (int64_t)size; /* may be changed while the manifest is built */
    ((int64_t *)(uintptr_t)chunk->dims)[1] = (int64_t)size;
    return FC_OK;
}

fc_code fc_dcp_measure_objects(fc_dcp_builder *b) {
    for (size_t i = 0; i < b->ntensors; i++) {
        fc_tensor *t = &b->tensors[i];
        fc_error why;
        if (!t->object || t->object->refusal || t->nchunks == 0 || !fc_dcp_is_packed(&t->chunks[0])) {
            continue;
        }
        const fc_code rc = measure_object(b, t, &why);
        if (rc == FC_ENOMEM || (rc == FC_ECORRUPT && !b->options->headers_only)) {
            return fc_fail(b->err, rc, "object %.256s: %s", t->name, why.message);
        }
        FC_TRY(rc == FC_OK
                   ? FC_OK
                   : fc_dcp_refuse_tensor(b, t, &t->chunks[0],
                                          fc_arena_strndup(b->checkpoint->arena, why.message, strlen(why.message))));
    }
    return FC_OK;
}

/* ---- tensors ---- */

/* Whether the record of a tensor's data begins in the head of its archive. Only the pickle says how long it is, until
 * the directory is read (check_archive). */
static bool has_data(const fc_torch_item *item) {
    bool has = false;
    fc_torch_tensor t = {0};
    const bool good = fc_torch_tensor_decode(item->pickle, item->pickle->root, &t, NULL) == FC_OK;
    for (size_t i = 0; i < item->zip.nentries; i++) {
        fc_zip_entry *entry = &item->zip.entries[i];
        has = has || strstr(entry->name, "/data/");
        if (entry->size == FC_ZIP_UNKNOWN && good && t.storage_bytes <= INT64_MAX / 2) {
            entry->size = entry->stored = t.storage_bytes;
        }
    }
    return has;
}

static fc_code read_head(fc_dcp_stream *s, const fc_chunk *chunk, size_t size, fc_torch_item *item, bool *more,
                         fc_error *err) {
    unsigned char *bytes = malloc(size);
    size_t made = 0;
    FC_NEED(bytes, err, s->path);
    const fc_code rc = fc_dcp_stream_read(s, bytes, size, &made, err);
    if (rc != FC_OK) {
        free(bytes);
        return at_item(s->path, chunk, rc, err);
    }
    FC_TRY(fc_torch_item_open_head(s->path, chunk->place.offset, bytes, made, item, more, err));
    if (*more && made < size) {
        return fc_fail(err, FC_ECORRUPT, "%s: offset %" PRIu64 ": the decoded item is cut off", s->path,
                       chunk->place.offset);
    }
    *more = *more || (!has_data(item) && made == size); /* `*more` means that `item` is closed */
    return FC_OK;
}

fc_code fc_dcp_open_packed(int fd, const char *path, const fc_chunk *chunk, fc_torch_item *item, fc_error *err) {
    bool more = true;
    fc_code rc = FC_OK;
    *item = (fc_torch_item){0};
    for (size_t size = FC_DCP_BLOCK / 2; rc == FC_OK && more && size <= MOST_HEAD; size *= 4) {
        fc_dcp_stream s;
        rc = at_item(path, chunk, fc_dcp_stream_begin(&s, fd, path, chunk, err), err);
        rc = rc == FC_OK ? read_head(&s, chunk, size, item, &more, err) : rc;
        fc_dcp_stream_free(&s);
        if (rc != FC_OK || more) {
            fc_torch_item_close(item);
        }
    }
    return rc == FC_OK && more ? fc_fail(err, FC_EUNSUPPORTED,
                                         "%s: offset %" PRIu64 ": the decoded item does not begin with its pickle",
                                         path, chunk->place.offset)
                               : rc;
}

fc_code fc_dcp_open_item(int fd, const char *path, const fc_chunk *chunk, fc_torch_item *item, fc_error *err) {
    *item = (fc_torch_item){0};
    return fc_dcp_is_packed(chunk) ? fc_dcp_open_packed(fd, path, chunk, item, err)
                                   : fc_torch_item_open(fd, path, chunk->place.offset, chunk->place.length, item, err);
}

/* Whether the directory lists the records as they were found without it. The CRC-32 of the data was not found. */
static bool lists_same(const fc_zip *whole, const fc_zip *head) {
    bool same = true;
    for (size_t i = 0; i < head->nentries && same; i++) {
        const fc_zip_entry *found = &head->entries[i], *entry = fc_zip_find(whole, found->name);
        same = entry && entry->data == found->data && entry->size == found->size && entry->method == found->method &&
               (entry->crc == found->crc || found->crc == 0);
    }
    return same;
}

/* Checks the whole archive, whose parts are in memory: its beginning, and its last bytes. */
static fc_code check_archive(const char *path, const fc_chunk *chunk, const fc_zip_window *start,
                             const fc_zip_window *end, const fc_zip *head, const fc_zip_entry *record, uint32_t crc,
                             fc_error *err) {
    const uint64_t offset = chunk->place.offset;
    fc_zip zip;
    FC_TRY(fc_zip_open_windows(path, offset, end->offset + end->size - offset, *start, *end, &zip, err));
    const bool same = lists_same(&zip, head);
    const fc_zip_entry *entry = fc_zip_find(&zip, record->name);
    const bool good = same && (entry->crc == 0 || entry->crc == crc);
    fc_zip_close_windows(&zip);
    return good ? FC_OK
                : fc_fail(err, FC_ECORRUPT, "the decoded item is damaged: %s",
                          same ? "its CRC-32 does not match" : "its directory disagrees with its records");
}

fc_code fc_dcp_check_tail(fc_dcp_stream *s, const fc_chunk *chunk, const fc_zip *head, const fc_zip_entry *record,
                          const fc_zip_window *start, const unsigned char *last, size_t nlast, uint32_t crc,
                          fc_error *err) {
    size_t more = 0;
    unsigned char *tail = malloc(nlast + MOST_TAIL);
    FC_NEED(tail, err, s->path);
    memcpy(tail, last, nlast);
    fc_code rc = fc_dcp_stream_read(s, tail + nlast, MOST_TAIL, &more, err);
    if (rc == FC_OK && !s->finished) {
        rc = fc_fail(err, FC_ECORRUPT, "the zstd stream decodes to many more bytes than its archive has");
    }
    const fc_zip_window end = {tail, record->data + record->size - nlast, nlast + more};
    rc = rc == FC_OK ? check_archive(s->path, chunk, start, &end, head, record, crc, err) : rc;
    free(tail);
    return rc;
}

/* Decodes up to the end of the tensor's record into `buf`, and checks the rest. */
static fc_code read_tensor(int fd, const char *path, const fc_chunk *chunk, const fc_zip *head,
                           const fc_zip_entry *record, unsigned char *buf, fc_error *err) {
    const size_t data = (size_t)(record->data - chunk->place.offset), size = data + (size_t)record->size;
    const size_t nlast = size < FC_DCP_LAST ? size : FC_DCP_LAST;
    const fc_zip_window start = {buf, chunk->place.offset, size};
    size_t made = 0;
    fc_dcp_stream s;
    fc_code rc = fc_dcp_stream_begin(&s, fd, path, chunk, err);
    rc = rc == FC_OK ? fc_dcp_stream_read(&s, buf, size, &made, err) : rc;
    if (rc == FC_OK && made < size) {
        rc = fc_fail(err, FC_ECORRUPT, "the zstd stream decodes to fewer bytes than its archive has");
    }
    rc = rc == FC_OK ? fc_dcp_check_tail(&s, chunk, head, record, &start, buf + size - nlast, nlast,
                                         fc_crc32(0, buf + data, (size_t)record->size), err)
                     : rc;
    fc_dcp_stream_free(&s);
    return at_item(path, chunk, rc, err);
}

static fc_code read_chunk(int fd, const char *path, const fc_chunk *chunk, unsigned char *buf, fc_error *err) {
    fc_torch_item item;
    fc_torch_tensor t = {0};
    const fc_zip_entry *record = NULL;
    FC_TRY(fc_dcp_open_packed(fd, path, chunk, &item, err));
    fc_code rc = fc_torch_tensor_decode(item.pickle, item.pickle->root, &t, err);
    rc = rc == FC_OK ? fc_torch_item_storage(&item, &t, &record, err) : rc;
    rc = rc == FC_OK ? read_tensor(fd, path, chunk, &item.zip, record, buf, err) : rc;
    fc_torch_item_close(&item);
    return rc;
}

static fc_code read_object(int fd, const char *path, const fc_tensor *tensor, const fc_chunk *chunk, void *buf,
                           fc_error *err) {
    unsigned char *bytes = NULL;
    uint64_t size = 0;
    FC_TRY(fc_dcp_unpack(fd, path, chunk, &bytes, &size, err));
    const bool same = size == (uint64_t)tensor->shape[0];
    memcpy(buf, bytes, same ? (size_t)size : 0);
    free(bytes);
    return same ? FC_OK : fc_fail(err, FC_ECORRUPT, "%s: the file has changed since the checkpoint was opened", path);
}

fc_code fc_dcp_read(const fc_checkpoint *checkpoint, const fc_tensor *tensor, size_t index, void *buf, fc_error *err) {
    if (fc_dcp_is_opened(tensor, index)) {
        return fc_torch_read(checkpoint, tensor, index, buf, err);
    }
    const fc_dcp_listed listed = fc_dcp_find_listed(tensor, index);
    const uint32_t file = listed.chunk.place.file;
    const char *path = checkpoint->files[file].path;
    int fd;
    FC_TRY(fc_dcp_acquire(checkpoint, file, &fd, err));
    const fc_code rc = tensor->object ? read_object(fd, path, tensor, &listed.chunk, buf, err)
                                      : read_chunk(fd, path, &listed.chunk, buf, err);
    fc_dcp_release(checkpoint, file);
    return rc;
}
