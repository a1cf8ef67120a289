/*
 * Finds the file, offset and length of every chunk in storage_data, which maps a MetadataIndex to a _StorageInfo. An
 * index is a tensor's name and the offsets of a chunk, with the chunk's number as a hint.
 *
 * torch looks chunks up by name and offsets only, so chunks with the same offsets (replicas of older versions) share
 * one item.
 */
#include "dcp/stages.h"

#include "base/checked.h"
#include "codec/zstd.h"
#include "fsdpckpt/order.h"
#include "fsdpckpt/try.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The numbers of a tensor's chunks sorted by offsets, if the hints are wrong. */
typedef struct order {
    uint32_t *chunks; /* NULL until it is needed */
} order;

static fc_chunk *chunks_of(const fc_tensor *t) {
    return (fc_chunk *)(uintptr_t)t->chunks; /* may be changed while the manifest is built */
}

static int compare_chunk_offsets(const void *a, const void *b, void *tensor) {
    const fc_tensor *t = tensor;
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    int c = fc_order_row(t->chunks[x].dims, t->chunks[y].dims, (size_t)t->ndim);
    return c ? c : x < y ? -1 : x > y;
}

static bool sort_chunks(const fc_tensor *t, order *o) {
    if (o->chunks) {
        return true;
    }
    o->chunks = malloc((t->nchunks + 1) * sizeof *o->chunks);
    if (!o->chunks) {
        return false;
    }
    for (size_t i = 0; i < t->nchunks; i++) {
        o->chunks[i] = (uint32_t)i;
    }
    fc_sort_items_by(o->chunks, t->nchunks, sizeof *o->chunks, compare_chunk_offsets, (void *)(uintptr_t)t);
    return true;
}

/* @return the first position in the sorted order whose chunk has `offsets`, or t->nchunks. */
static size_t lower_bound(const fc_tensor *t, const order *o, const int64_t *offsets) {
    size_t low = 0;
    FC_BISECT(low, t->nchunks, middle, fc_order_row(t->chunks[o->chunks[middle]].dims, offsets, (size_t)t->ndim) < 0);
    return low;
}

static void format_offsets(const int64_t *offsets, int ndim, char *buf, size_t size) {
    size_t at = (size_t)snprintf(buf, size, "[");
    for (int i = 0; i < ndim && at < size; i++) {
        at += (size_t)snprintf(buf + at, size - at, "%s%" PRId64, i ? ", " : "", offsets[i]);
    }
    if (at < size) {
        snprintf(buf + at, size - at, "]");
    }
}

/* Finds the chunk that a MetadataIndex refers to. */
static fc_code find_chunk(const fc_dcp_builder *b, const fc_tensor *t, fc_pv index, order *o, fc_chunk **out) {
    int64_t offsets[FC_MAX_DIMS], hint;
    char text[256];
    fc_pv offset = fc_pickle_slot(b->p, index, FC_INDEX_OFFSET);
    bool none = fc_pv_typeof(offset) == FC_PV_NONE || fc_pv_typeof(offset) == FC_PV_ABSENT;
    fc_chunk *chunks = chunks_of(t);
    if (t->object || (none && t->nchunks == 1)) {
        *out = chunks;
        return FC_OK;
    }
    if (!fc_dcp_read_size(b->p, offset, t->ndim, offsets)) {
        return fc_dcp_fail(b, FC_ECORRUPT, t->name, "the offsets of its entry in storage_data are invalid");
    }
    if (fc_pickle_int(b->p, fc_pickle_slot(b->p, index, FC_INDEX_INDEX), &hint) && hint >= 0 &&
        (uint64_t)hint < t->nchunks && fc_order_row(chunks[hint].dims, offsets, (size_t)t->ndim) == 0) {
        *out = &chunks[hint];
        return FC_OK;
    }
    FC_NEED(t->nchunks < UINT32_MAX && sort_chunks(t, o), b->err, b->metadata_path);
    size_t at = lower_bound(t, o, offsets);
    if (at == t->nchunks || fc_order_row(chunks[o->chunks[at]].dims, offsets, (size_t)t->ndim) != 0) {
        format_offsets(offsets, t->ndim, text, sizeof text);
        return fc_dcp_fail(b, FC_ECORRUPT, t->name, "storage_data has a chunk at %s that is not in state_dict_metadata",
                           text);
    }
    *out = &chunks[o->chunks[at]];
    return FC_OK;
}

/* The extension ZStandard of torch: "stream.zstd/1", or a later version that says that it is compatible. */
static bool is_zstd(const char *name) {
    static const char zstd[] = "stream.zstd/1";
    const size_t n = sizeof zstd - 1;
    return strncmp(name, zstd, n) == 0 && (name[n] == '\0' || name[n] == '.');
}

/* @param packed receives whether the item is a zstd stream. */
static fc_code check_transforms(const fc_dcp_builder *b, const fc_tensor *t, fc_pv transforms, bool *packed) {
    size_t n = 0, length;
    const fc_pv *items = NULL;
    const char *name = "?";
    if (fc_pv_typeof(transforms) == FC_PV_LIST) {
        items = fc_pickle_items(b->p, transforms, &n);
    } else if (fc_pv_typeof(transforms) == FC_PV_TUPLE) {
        items = fc_pickle_tuple(b->p, transforms, &n);
    } else if (fc_pv_typeof(transforms) != FC_PV_NONE && fc_pv_typeof(transforms) != FC_PV_ABSENT) {
        n = 1;
    }
    if (n == 0) {
        return FC_OK;
    }
    if (items && fc_pv_typeof(items[0]) == FC_PV_STR) {
        name = fc_pickle_bytes(b->p, items[0], &length);
    }
    *packed = n == 1 && is_zstd(name);
    if (*packed && !fc_zstd_is_built_in()) {
        return fc_dcp_fail(b, FC_EUNSUPPORTED, t->name, "it is compressed with zstd, and this build has no libzstd");
    }
    if (*packed) {
        return FC_OK;
    }
    return fc_dcp_fail(b, FC_EUNSUPPORTED, t->name,
                       "it was saved with the extension %.64s, which is not supported; save it without _extensions",
                       name);
}

/* Returns whether the place of a chunk was read from storage_data. */
static bool is_placed(const fc_chunk *chunk) {
    return chunk->place.kind == FC_PLACE_BYTES;
}

static fc_code place_chunk(fc_dcp_builder *b, size_t tensor, fc_chunk *chunk, fc_pv info) {
    fc_tensor *t = &b->tensors[tensor];
    int64_t offset, length, end;
    if (!fc_pickle_is_object(b->p, info, FC_CLASS_STORAGE_INFO) ||
        !fc_pickle_int(b->p, fc_pickle_slot(b->p, info, FC_INFO_OFFSET), &offset) ||
        !fc_pickle_int(b->p, fc_pickle_slot(b->p, info, FC_INFO_LENGTH), &length) || offset < 0 || length < 0 ||
        !fc_add_i64(offset, length, &end)) {
        return fc_dcp_fail(b, FC_ECORRUPT, t->name, "its entry in storage_data is invalid");
    }
    bool packed = false;
    FC_TRY(check_transforms(b, t, fc_pickle_slot(b->p, info, FC_INFO_TRANSFORMS), &packed));
    if (is_placed(chunk) && t->object && t->object->refusal) {
        return FC_OK; /* a refused tensor with several chunks, which are not read */
    }
    if (is_placed(chunk)) {
        return fc_dcp_fail(b, FC_ECORRUPT, t->name, "storage_data lists one of its chunks twice");
    }
    uint32_t file = 0;
    FC_TRY(fc_dcp_add_item(b, fc_pickle_slot(b->p, info, FC_INFO_PATH), tensor, (uint64_t)offset, (uint64_t)length,
                           &file));
    chunk->place = fc_place_bytes(file, (uint64_t)offset, (uint64_t)length);
    chunk->rank = b->files[file].rank;
    chunk->detail = packed ? DCP_PACKED : chunk->detail;
    if (t->object) { /* an object is as long as its item */
        *(int64_t *)(uintptr_t)t->shape = length;
        ((int64_t *)(uintptr_t)chunk->dims)[1] = length;
    }
    return FC_OK;
}

static bool is_empty(const fc_tensor *t, const fc_chunk *chunk) {
    return fc_is_empty(t->ndim, chunk->dims + t->ndim);
}

/* Gives a chunk that has no location that of another chunk with the same offsets. */
static fc_code share_place(const fc_dcp_builder *b, const fc_tensor *t, fc_chunk *chunk, order *o) {
    FC_NEED(sort_chunks(t, o), b->err, b->metadata_path);
    for (size_t at = lower_bound(t, o, chunk->dims); at < t->nchunks; at++) {
        const fc_chunk *other = &t->chunks[o->chunks[at]];
        if (fc_order_row(other->dims, chunk->dims, (size_t)t->ndim) != 0) {
            break;
        }
        if (is_placed(other)) {
            const int64_t *dims = chunk->dims;
            *chunk = *other;
            chunk->dims = dims;
            /* Moves the located chunk to the front of its group, so that many replicas take linear time. */
            uint32_t number = o->chunks[at];
            size_t first = lower_bound(t, o, dims);
            o->chunks[at] = o->chunks[first];
            o->chunks[first] = number;
            return FC_OK;
        }
    }
    return FC_OK;
}

static fc_code complete_chunks(const fc_dcp_builder *b, fc_tensor *t, order *o) {
    fc_chunk *chunks = chunks_of(t);
    size_t kept = 0;
    for (size_t i = 0; i < t->nchunks && !t->object; i++) {
        if (!is_placed(&chunks[i]) && !is_empty(t, &chunks[i])) {
            FC_TRY(share_place(b, t, &chunks[i], o));
        }
    }
    const bool keep_empty = fc_dcp_may_be_misplaced(b, t);
    for (size_t i = 0; i < t->nchunks; i++) {
        if (is_empty(t, &chunks[i]) && !(t->object && !is_placed(&chunks[i])) &&
            !(keep_empty && is_placed(&chunks[i]))) {
            continue; /* nothing to read */
        }
        if (!is_placed(&chunks[i])) {
            char text[256];
            format_offsets(chunks[i].dims, t->ndim, text, sizeof text);
            return t->object ? fc_dcp_fail(b, FC_ECORRUPT, t->name, "storage_data does not list this object")
                             : fc_dcp_fail(b, FC_ECORRUPT, t->name, "storage_data does not list its chunk at %s", text);
        }
        chunks[kept++] = chunks[i];
    }
    t->nchunks = kept;
    return FC_OK;
}

static fc_code place_all(fc_dcp_builder *b, const fc_pv *pairs, size_t n, order *orders) {
    for (size_t i = 0; i + 1 < n; i += 2) {
        fc_chunk *chunk;
        size_t length;
        if (!fc_pickle_is_object(b->p, pairs[i], FC_CLASS_METADATA_INDEX)) {
            return fc_dcp_fail(b, FC_ECORRUPT, NULL, "a key of storage_data is of an unknown kind");
        }
        fc_pv fqn = fc_pickle_slot(b->p, pairs[i], FC_INDEX_FQN);
        if (fc_pv_typeof(fqn) != FC_PV_STR) {
            return fc_dcp_fail(b, FC_ECORRUPT, NULL, "a key of storage_data has no name");
        }
        uint32_t number = fc_pickle_record(b->p, fqn)->tag[0];
        if (number == 0) {
            return fc_dcp_fail(b, FC_ECORRUPT, fc_pickle_bytes(b->p, fqn, &length),
                               "it is in storage_data, but not in state_dict_metadata");
        }
        FC_TRY(find_chunk(b, &b->tensors[number - 1], pairs[i], &orders[number - 1], &chunk));
        FC_TRY(place_chunk(b, number - 1, chunk, pairs[i + 1]));
    }
    for (size_t i = 0; i < b->ntensors; i++) {
        FC_TRY(complete_chunks(b, &b->tensors[i], &orders[i]));
    }
    return FC_OK;
}

fc_code fc_dcp_place_chunks(fc_dcp_builder *b, fc_pv storage_data) {
    size_t n = 0;
    const fc_pv *pairs = NULL;
    if (fc_pv_typeof(storage_data) == FC_PV_DICT) {
        pairs = fc_pickle_items(b->p, storage_data, &n);
    } else if (fc_pv_typeof(storage_data) != FC_PV_NONE || b->ntensors > 0) {
        return fc_dcp_fail(b, FC_ECORRUPT, NULL, "storage_data is missing");
    }
    order *orders = calloc(b->ntensors + 1, sizeof *orders);
    FC_NEED(orders, b->err, b->metadata_path);
    fc_code rc = place_all(b, pairs, n, orders);
    for (size_t i = 0; i < b->ntensors; i++) {
        free(orders[i].chunks);
    }
    free(orders);
    return rc;
}
