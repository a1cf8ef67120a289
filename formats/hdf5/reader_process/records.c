/*
 * Decodes the records of the reader process in the parent, without trusting them. See records.h.
 */
#include "hdf5/reader_process/records.h"

#include "base/checked.h"
#include "base/grow.h"
#include "base/text.h"
#include "codec/filter.h"
#include "fsdpckpt/try.h"
#include "hdf5/reader_process/lend.h"

#include <stdlib.h>
#include <string.h>

enum { READ_SIZE = 64 << 10, MAX_PATH_TEXT = 1 << 20, MAX_TENSORS_PER_FILE = 1 << 26 };

/*
 * Makes `size` bytes available at in->at. @return the number of available bytes, which is smaller only at the end of
 * the stream.
 */
static size_t fill_buffer(fc_h5_in *in, size_t size) {
    if (in->have - in->at >= size) {
        return size;
    }
    memmove(in->buf, in->buf + in->at, in->have - in->at);
    in->have -= in->at;
    in->at = 0;
    while (in->have < size) {
        /* Grows as bytes arrive, not by the claimed length. */
        if (!fc_grow(&in->buf, &in->cap, in->have + 1, 1)) {
            in->no_memory = true;
            return in->have;
        }
        size_t n = fc_h5_child_read(in->child, in->buf + in->have, in->cap - in->have);
        if (n == 0) {
            return in->have;
        }
        in->have += n;
    }
    return size;
}

static int next_record(fc_h5_in *in, fc_h5_record *record) {
    uint32_t head[2];
    if (!in->buf) {
        in->buf = malloc(READ_SIZE);
        in->cap = in->buf ? READ_SIZE : 0;
        if (!in->buf) {
            in->no_memory = true;
            return -1;
        }
    }
    size_t got = fill_buffer(in, sizeof head);
    if (got < sizeof head) {
        return got == 0 ? 0 : -1;
    }
    memcpy(head, in->buf + in->at, sizeof head);
    in->over_budget = head[1] + sizeof head > in->budget;
    if (head[1] > FC_H5_MAX_RECORD || in->over_budget) {
        return -1;
    }
    in->at += sizeof head;
    if (fill_buffer(in, head[1]) < head[1]) {
        return -1;
    }
    *record = (fc_h5_record){(fc_h5_tag)head[0], in->buf + in->at, head[1], 0, false, false};
    in->at += head[1];
    in->budget -= head[1] + sizeof head;
    return 1;
}

int fc_h5_next(fc_h5_in *in, fc_h5_record *record) {
    int found;
    do {
        found = next_record(in, record);
        if (found == 1 && record->tag == FC_H5_WANT && !fc_h5_lend(in, record)) {
            found = -1;
        }
    } while (found == 1 && record->tag == FC_H5_WANT);
    return found;
}

void fc_h5_in_free(fc_h5_in *in) {
    free(in->buf);
    in->buf = NULL;
}

uint64_t fc_h5_get_u64(fc_h5_record *r) {
    uint64_t value = 0;
    if (r->bad || r->size - r->at < sizeof value) {
        r->bad = true;
        return 0;
    }
    memcpy(&value, r->data + r->at, sizeof value);
    r->at += sizeof value;
    return value;
}

fc_h5_bytes fc_h5_get_bytes(fc_h5_record *r) {
    uint64_t size = fc_h5_get_u64(r);
    if (r->bad || size > r->size - r->at) {
        r->bad = true;
        return (fc_h5_bytes){NULL, 0};
    }
    fc_h5_bytes bytes = {r->data + r->at, (size_t)size};
    r->at += (size_t)size;
    return bytes;
}

static uint64_t get_at_most(fc_h5_record *r, uint64_t max) {
    uint64_t value = fc_h5_get_u64(r);
    if (value > max) {
        r->bad = true;
        return 0;
    }
    return value;
}

static fc_h5_bytes keep_bytes(fc_h5_record *r, fc_arena *arena) {
    fc_h5_bytes bytes = fc_h5_get_bytes(r);
    if (r->bad || bytes.size == 0) {
        return (fc_h5_bytes){NULL, 0};
    }
    unsigned char *copy = fc_arena_alloc(arena, bytes.size);
    if (!copy) {
        r->bad = r->no_memory = true;
        return (fc_h5_bytes){NULL, 0};
    }
    memcpy(copy, bytes.data, bytes.size);
    return (fc_h5_bytes){copy, bytes.size};
}

/* Reads UTF-8 text without NUL; NULL if the child sent none. */
static const char *keep_text(fc_h5_record *r, fc_arena *arena) {
    if (get_at_most(r, 1) == 0) {
        return NULL;
    }
    fc_h5_bytes bytes = fc_h5_get_bytes(r);
    if (r->bad || !fc_is_plain_text((const char *)bytes.data, bytes.size)) {
        r->bad = true;
        return NULL;
    }
    const char *text = fc_arena_strndup(arena, (const char *)bytes.data, bytes.size);
    r->no_memory = text == NULL;
    r->bad |= r->no_memory;
    return text;
}

/* Reads a list of numbers >= 0 into `out`. @return their count, or -1 if the child sent none. */
static int64_t keep_i64s(fc_h5_record *r, fc_arena *arena, const int64_t **out) {
    uint64_t count = fc_h5_get_u64(r);
    *out = NULL;
    if (r->bad || count == (uint64_t)-1) {
        return -1;
    }
    if (count > FC_MAX_DIMS || count * sizeof(int64_t) > r->size - r->at) {
        r->bad = true;
        return -1;
    }
    int64_t *values = fc_arena_alloc(arena, (size_t)count * sizeof *values);
    if (!values) {
        r->bad = r->no_memory = true;
        return -1;
    }
    memcpy(values, r->data + r->at, (size_t)count * sizeof *values);
    r->at += (size_t)count * sizeof *values;
    for (uint64_t i = 0; i < count; i++) {
        r->bad |= values[i] < 0;
    }
    *out = values;
    return (int64_t)count;
}

/* Reads a number >= 0, or -1 for a missing one. */
static int64_t get_or_none(fc_h5_record *r) {
    int64_t value = (int64_t)fc_h5_get_u64(r);
    r->bad |= value < -1;
    return value;
}

static bool decode_root(fc_h5_record *r, fc_arena *arena, fc_h5_root *root) {
    root->schema = (int64_t)get_at_most(r, INT32_MAX);
    root->layout = keep_text(r, arena);
    root->mesh_names = keep_text(r, arena);
    root->producer = keep_text(r, arena);
    root->rank = get_or_none(r);
    root->world_size = get_or_none(r);
    root->nmesh = keep_i64s(r, arena, &root->mesh_shape);
    return !r->bad && root->nmesh <= FC_MAX_MESH_DIMS;
}

bool fc_h5_path_is_sane(const fc_h5_dataset *d) {
    if (!d->path || d->path[0] == '\0' || d->path[0] == '/' || strlen(d->path) > MAX_PATH_TEXT) {
        return false;
    }
    size_t elements = 1;
    for (const char *p = d->path; *p; p++) {
        if (*p == '/') {
            elements++;
            if (p[1] == '/' || p[1] == '\0') {
                return false;
            }
        }
    }
    return elements == d->lists.size;
}

/* Whether the filters are those that the engine decodes, with at most one compression. */
static bool filters_are_sane(const fc_h5_dataset *d) {
    int compressions = 0;
    for (uint32_t i = 0; i < d->nfilters; i++) {
        const fc_filter *filter = &d->filters[i];
        if ((filter->id != FC_FILTER_FLETCHER32 && !fc_filter_find(filter->id)) || filter->inner > 3 ||
            filter->block % 8 != 0) {
            return false;
        }
        compressions += fc_filter_compresses(filter);
    }
    return compressions <= 1;
}

/* Checks the numbers of a dataset before they are used in computations. */
static bool dataset_is_sane(const fc_h5_dataset *d, uint64_t size) {
    int64_t numel;
    uint64_t total;
    if (!fc_h5_path_is_sane(d) || d->ndim < 0) {
        return false;
    }
    if (d->kind == FC_H5_UNREADABLE) {
        return d->message && d->code != FC_OK;
    }
    if (!fc_numel(d->ndim, d->shape, &numel) || d->element == 0 || !fc_mul_u64((uint64_t)numel, d->element, &total)) {
        return false;
    }
    bool is_object = d->kind == FC_H5_OBJECT;
    if (is_object ? d->dtype != FC_OPAQUE || d->ndim != 1 || d->element != 1 || !d->encoding || d->swap
                  : d->dtype == FC_OPAQUE || d->element != fc_dtype_size(d->dtype)) {
        return false;
    }
    switch (d->where) {
    case FC_H5_AT_OFFSET:
        return d->length == total && fc_range_within(d->offset, d->length, size);
    case FC_H5_IN_RECORD:
        return d->bytes.size == total;
    case FC_H5_NOWHERE:
        return numel == 0 || d->bytes.size == d->element;
    case FC_H5_IN_CHUNKS:
        return d->chunk && d->ndim > 0 && d->bytes.size == d->element && filters_are_sane(d);
    case FC_H5_BY_LIBRARY:
        return d->chunk || is_object;
    case FC_H5_ELSEWHERE:
        return true;
    }
    return false;
}

static bool decode_dataset(fc_h5_record *r, fc_arena *arena, uint64_t size, fc_h5_dataset *d) {
    d->path = keep_text(r, arena);
    d->lists = keep_bytes(r, arena);
    d->kind = (fc_h5_kind)get_at_most(r, FC_H5_UNREADABLE);
    d->where = (fc_h5_where)get_at_most(r, FC_H5_ELSEWHERE);
    d->code = (fc_code)get_at_most(r, FC_ENOMEM);
    d->message = keep_text(r, arena);
    d->dtype = (fc_dtype)get_at_most(r, FC_OPAQUE);
    d->swap = get_at_most(r, 1) != 0;
    d->element = (uint32_t)get_at_most(r, UINT32_MAX);
    d->ndim = (int)keep_i64s(r, arena, &d->shape);
    d->offset = fc_h5_get_u64(r);
    d->length = fc_h5_get_u64(r);
    d->bytes = keep_bytes(r, arena);
    if (keep_i64s(r, arena, &d->chunk) != d->ndim && d->chunk) {
        return false;
    }
    for (int i = 0; d->chunk && i < d->ndim; i++) {
        r->bad |= d->chunk[i] == 0;
    }
    d->nfilters = (uint8_t)get_at_most(r, FC_H5_MAX_FILTERS);
    for (uint32_t i = 0; i < d->nfilters; i++) {
        d->filters[i].id = (uint16_t)get_at_most(r, UINT16_MAX);
        d->filters[i].inner = (uint16_t)get_at_most(r, UINT16_MAX);
        d->filters[i].block = (uint32_t)get_at_most(r, UINT32_MAX);
    }
    d->dtype_name = keep_text(r, arena);
    d->placements = keep_text(r, arena);
    d->encoding = keep_text(r, arena);
    d->json = keep_text(r, arena);
    d->fqn = keep_text(r, arena);
    d->has_crc64 = get_at_most(r, 1) != 0;
    d->crc64 = fc_h5_get_u64(r);
    d->owner = get_or_none(r);
    d->nglobal_shape = keep_i64s(r, arena, &d->global_shape);
    d->noffsets = keep_i64s(r, arena, &d->offsets);
    return !r->bad && r->at == r->size && dataset_is_sane(d, size);
}

static bool decode_chunks(fc_h5_record *r, fc_arena *arena, uint64_t size, fc_h5_dataset *d) {
    uint64_t count = get_at_most(r, FC_H5_CHUNKS_PER_RECORD);
    if (r->bad || !d || d->kind != FC_H5_TENSOR || d->where != FC_H5_IN_CHUNKS) {
        return false;
    }
    int64_t *at = fc_arena_calloc(arena, (size_t)count, (size_t)d->ndim * sizeof *at);
    if (!at ||
        !fc_arena_grow(arena, &d->chunks, &d->chunks_cap, d->nchunks, d->nchunks + (size_t)count, sizeof *d->chunks)) {
        r->no_memory = true;
        return false;
    }
    for (uint64_t i = 0; i < count; i++, at += d->ndim) {
        fc_h5_stored_chunk *c = &d->chunks[d->nchunks++];
        c->offset = fc_h5_get_u64(r);
        c->size = fc_h5_get_u64(r);
        c->mask = (uint32_t)get_at_most(r, UINT32_MAX);
        c->at = at;
        for (int k = 0; k < d->ndim; k++) {
            at[k] = (int64_t)get_at_most(r, INT64_MAX);
            r->bad |= at[k] >= d->shape[k] || at[k] % d->chunk[k] != 0;
        }
        if (r->bad || c->size == 0 || !fc_range_within(c->offset, c->size, size)) {
            return false;
        }
    }
    return r->at == r->size;
}

/* @return the next free slot of a growing array in the arena, or NULL with r->no_memory set accordingly. */
static void *grow(fc_h5_record *r, fc_arena *arena, void **array, size_t *count, size_t *cap, size_t element) {
    if (*count == MAX_TENSORS_PER_FILE) {
        return NULL;
    }
    if (!fc_arena_grow(arena, array, cap, *count, *count + 1, element)) {
        r->no_memory = true;
        return NULL;
    }
    return (unsigned char *)*array + (*count)++ * element;
}

static bool decode_attributes(fc_h5_record *r, fc_arena *arena, fc_h5_file *file) {
    void *array = file->attributes;
    fc_h5_attributes *a = grow(r, arena, &array, &file->nattributes, &file->attributes_cap, sizeof *a);
    file->attributes = array;
    if (!a) {
        return false;
    }
    a->path = keep_text(r, arena);
    a->json = keep_bytes(r, arena);
    return !r->bad && a->path && r->at == r->size;
}

/* A path can have any bytes but NUL. */
static bool decode_other(fc_h5_record *r, fc_arena *arena, fc_h5_file *file) {
    void *array = file->others;
    const char **other = grow(r, arena, &array, &file->nothers, &file->others_cap, sizeof *other);
    file->others = array;
    if (!other) {
        return false;
    }
    fc_h5_bytes path = fc_h5_get_bytes(r);
    if (r->bad || path.size == 0 || memchr(path.data, '\0', path.size) || r->at != r->size) {
        return false;
    }
    *other = fc_arena_strndup(arena, (const char *)path.data, path.size);
    r->no_memory = !*other;
    return *other != NULL;
}

fc_code fc_h5_child_failure(fc_h5_record *r, const char *path, fc_error *err) {
    fc_code code = (fc_code)get_at_most(r, FC_ENOMEM);
    fc_h5_bytes text = {NULL, 0};
    if (get_at_most(r, 1) == 1) {
        text = fc_h5_get_bytes(r);
    }
    if (r->bad || code == FC_OK || !fc_is_utf8((const char *)text.data, text.size)) {
        return fc_fail(err, FC_ECORRUPT, "%s: corrupt HDF5 file", path);
    }
    return fc_fail(err, code, "%s: %.*s", path, (int)text.size, (const char *)text.data);
}

/* Grows with malloc, because the arena would keep every smaller copy. */
static fc_h5_dataset *new_dataset(fc_h5_file *file) {
    if (file->ndatasets == MAX_TENSORS_PER_FILE ||
        !fc_grow(&file->datasets, &file->datasets_cap, file->ndatasets + 1, sizeof *file->datasets)) {
        return NULL;
    }
    fc_h5_dataset *d = &file->datasets[file->ndatasets++];
    *d = (fc_h5_dataset){0};
    return d;
}

static fc_code read_records(fc_h5_in *in, fc_arena *arena, const char *path, uint64_t size, fc_h5_file *file,
                            fc_error *err) {
    fc_h5_record r;
    bool has_root = false;
    while (fc_h5_next(in, &r) == 1) {
        bool ok = has_root;
        switch (r.tag) {
        case FC_H5_ROOT:
            ok = !has_root && decode_root(&r, arena, &file->root);
            has_root = true;
            break;
        case FC_H5_DATASET: {
            fc_h5_dataset *d = ok ? new_dataset(file) : NULL;
            r.no_memory = ok && !d && file->ndatasets < MAX_TENSORS_PER_FILE;
            ok = d && decode_dataset(&r, arena, size, d);
            break;
        }
        case FC_H5_CHUNKS:
            ok = ok && file->ndatasets > 0 && decode_chunks(&r, arena, size, &file->datasets[file->ndatasets - 1]);
            break;
        case FC_H5_ATTRIBUTES:
            ok = ok && decode_attributes(&r, arena, file);
            break;
        case FC_H5_OTHER:
            ok = ok && decode_other(&r, arena, file);
            break;
        case FC_H5_END:
            return has_root ? FC_OK : FC_ECORRUPT;
        case FC_H5_FAILURE:
            return fc_h5_child_failure(&r, path, err);
        default:
            ok = false;
        }
        if (!ok) {
            return r.no_memory ? fc_no_memory(err, path) : FC_ECORRUPT;
        }
    }
    return in->no_memory ? fc_no_memory(err, path) : FC_ECORRUPT;
}

fc_code fc_h5_read_file(fc_h5_in *in, fc_arena *arena, const char *path, uint64_t size, fc_h5_file *file,
                        fc_error *err) {
    *file = (fc_h5_file){0};
    fc_fail(err, FC_ECORRUPT, "%s", "");
    fc_code rc = read_records(in, arena, path, size, file, err);
    fc_h5_dataset *datasets = file->datasets;
    file->datasets = NULL;
    FC_TRY_GOTO(rc, rc, out);
    file->datasets = fc_arena_calloc(arena, file->ndatasets, sizeof *datasets);
    FC_TRY_GOTO(file->datasets ? FC_OK : fc_no_memory(err, path), rc, out);
    if (file->ndatasets > 0) {
        memcpy(file->datasets, datasets, file->ndatasets * sizeof *datasets);
    }
out:
    free(datasets);
    return rc;
}
