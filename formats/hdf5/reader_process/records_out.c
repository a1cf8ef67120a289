/*
 * Encodes records in the reader process. See records.h.
 */
#include "hdf5/reader_process/records.h"

#include "base/checked.h"
#include "base/grow.h"
#include "hdf5/reader_process/child.h"

#include <errno.h>
#include <string.h>
#include <unistd.h>

enum { FLUSH_SIZE = 64 << 10 };

static bool reserve_out(fc_h5_sink *out, size_t more) {
    if (out->failed) {
        return false;
    }
    if (out->cap - out->used >= more) {
        return true;
    }
    size_t needed;
    out->failed = !fc_add_size(out->used, more, &needed);
    if (!out->failed && !fc_grow(&out->buf, &out->cap, needed, 1)) {
        fc_h5_child_no_memory();
    }
    return !out->failed;
}

static void put_raw(fc_h5_sink *out, const void *data, size_t size) {
    if (reserve_out(out, size) && size > 0) {
        memcpy(out->buf + out->used, data, size);
        out->used += size;
    }
}

void fc_h5_begin(fc_h5_sink *out, fc_h5_tag tag) {
    uint32_t head[2] = {(uint32_t)tag, 0};
    out->start = out->used;
    out->open = true;
    put_raw(out, head, sizeof head);
}

void fc_h5_put_u64(fc_h5_sink *out, uint64_t value) {
    put_raw(out, &value, sizeof value);
}

void fc_h5_put_bytes(fc_h5_sink *out, const void *data, size_t size) {
    fc_h5_put_u64(out, size);
    put_raw(out, data, size);
}

void fc_h5_put_text(fc_h5_sink *out, const char *text) {
    fc_h5_put_u64(out, text != NULL);
    if (text) {
        fc_h5_put_bytes(out, text, strlen(text));
    }
}

static void put_i64s(fc_h5_sink *out, int64_t count, const int64_t *values) {
    fc_h5_put_u64(out, (uint64_t)count);
    if (count > 0) {
        put_raw(out, values, (size_t)count * sizeof *values);
    }
}

static void write_all(fc_h5_sink *out, const void *bytes, size_t size) {
    size_t done = 0;
    while (!out->failed && done < size) {
        ssize_t n = write(out->fd, (const char *)bytes + done, size - done);
        if (n < 0 && errno != EINTR) {
            out->failed = true;
        }
        done += n > 0 ? (size_t)n : 0;
    }
}

void fc_h5_flush(fc_h5_sink *out) {
    write_all(out, out->buf, out->used);
    out->used = 0;
}

void fc_h5_put_want(fc_h5_sink *out, const fc_h5_part *parts, size_t count) {
    const uint32_t head[2] = {FC_H5_WANT, (uint32_t)(count * sizeof *parts)};
    const size_t finished = out->open ? out->start : out->used;
    write_all(out, out->buf, finished);
    if (finished > 0) {
        memmove(out->buf, out->buf + finished, out->used - finished);
        out->used -= finished;
        out->start = 0;
    }
    write_all(out, head, sizeof head);
    write_all(out, parts, head[1]);
}

void fc_h5_end(fc_h5_sink *out) {
    size_t length = out->used - out->start - 8;
    out->open = false;
    if (out->failed || length > FC_H5_MAX_RECORD) {
        out->failed = true;
        return;
    }
    uint32_t length32 = (uint32_t)length;
    memcpy(out->buf + out->start + 4, &length32, sizeof length32);
    if (out->used >= FLUSH_SIZE) {
        fc_h5_flush(out);
    }
}

void fc_h5_put_root(fc_h5_sink *out, const fc_h5_root *root) {
    fc_h5_begin(out, FC_H5_ROOT);
    fc_h5_put_u64(out, (uint64_t)root->schema);
    fc_h5_put_text(out, root->layout);
    fc_h5_put_text(out, root->mesh_names);
    fc_h5_put_text(out, root->producer);
    fc_h5_put_u64(out, (uint64_t)root->rank);
    fc_h5_put_u64(out, (uint64_t)root->world_size);
    put_i64s(out, root->nmesh, root->mesh_shape);
    fc_h5_end(out);
}

void fc_h5_put_dataset(fc_h5_sink *out, const fc_h5_dataset *d) {
    fc_h5_begin(out, FC_H5_DATASET);
    fc_h5_put_text(out, d->path);
    fc_h5_put_bytes(out, d->lists.data, d->lists.size);
    fc_h5_put_u64(out, d->kind);
    fc_h5_put_u64(out, d->where);
    fc_h5_put_u64(out, d->code);
    fc_h5_put_text(out, d->message);
    fc_h5_put_u64(out, d->dtype);
    fc_h5_put_u64(out, d->swap);
    fc_h5_put_u64(out, d->element);
    put_i64s(out, d->ndim, d->shape);
    fc_h5_put_u64(out, d->offset);
    fc_h5_put_u64(out, d->length);
    fc_h5_put_bytes(out, d->bytes.data, d->bytes.size);
    put_i64s(out, d->chunk ? d->ndim : -1, d->chunk);
    fc_h5_put_u64(out, d->nfilters);
    for (uint32_t i = 0; i < d->nfilters; i++) {
        fc_h5_put_u64(out, d->filters[i].id);
        fc_h5_put_u64(out, d->filters[i].inner);
        fc_h5_put_u64(out, d->filters[i].block);
    }
    fc_h5_put_text(out, d->dtype_name);
    fc_h5_put_text(out, d->placements);
    fc_h5_put_text(out, d->encoding);
    fc_h5_put_text(out, d->json);
    fc_h5_put_text(out, d->fqn);
    fc_h5_put_u64(out, d->has_crc64);
    fc_h5_put_u64(out, d->crc64);
    fc_h5_put_u64(out, (uint64_t)d->owner);
    put_i64s(out, d->nglobal_shape, d->global_shape);
    put_i64s(out, d->noffsets, d->offsets);
    fc_h5_end(out);
}
