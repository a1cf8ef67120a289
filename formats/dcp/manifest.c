/*
 * Makes tensors from the loaded `.metadata`: names, paths, dtypes, shapes and boxes. storage.c locates the chunks
 * later.
 */
#include "dcp/stages.h"

#include "base/checked.h"
#include "base/text.h"
#include "fsdpckpt/order.h"
#include "fsdpckpt/try.h"
#include "torch/file/file.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    LEAST_BYTES = 8
}; /* fewest bytes of a chunk in the pickle, unless lists of chunks are shared; PyTorch writes about 60 */

static const fc_object torch_save_object = {.encoding = "torch.save"};

bool fc_dcp_read_size(const fc_pickle *p, fc_pv v, int ndim, int64_t *out) {
    size_t n;
    if (fc_pv_typeof(v) != FC_PV_SIZE && fc_pv_typeof(v) != FC_PV_TUPLE) {
        return false;
    }
    const fc_pv *items = fc_pickle_tuple(p, v, &n);
    if (n != (size_t)ndim) {
        return false;
    }
    for (size_t i = 0; i < n; i++) {
        if (!fc_pickle_int(p, items[i], &out[i]) || out[i] < 0) {
            return false;
        }
    }
    return true;
}

static fc_code copy_text(const fc_dcp_builder *b, fc_pv v, const char *tensor, const char **out) {
    size_t n;
    const char *s = fc_pickle_bytes(b->p, v, &n);
    if (!fc_is_plain_text(s, n)) {
        return fc_dcp_fail(b, FC_EUNSUPPORTED, tensor ? tensor : s,
                           "a name with NUL or lone surrogates is not supported");
    }
    *out = fc_arena_strndup(b->checkpoint->arena, s, n);
    return *out ? FC_OK : fc_no_memory(b->err, b->metadata_path);
}

/* Lists the value as unreadable, with the reason, so that all others can be read. */
static fc_code refuse_value(const fc_dcp_builder *b, fc_tensor *t, const char *reason) {
    fc_object *object = fc_arena_calloc(b->checkpoint->arena, 1, sizeof *object);
    FC_NEED(object && reason, b->err, b->metadata_path);
    *object = (fc_object){.encoding = torch_save_object.encoding, .refusal = reason};
    t->object = object;
    return FC_OK;
}

static fc_code read_layout(fc_dcp_builder *b, fc_tensor *t, fc_pv layout) {
    size_t n, length;
    if (fc_pv_typeof(layout) != FC_PV_CALL) { /* torch.serialization._get_layout("torch.strided") */
        return FC_OK;
    }
    const fc_pv *arg = fc_pickle_call_items(b->p, layout, &n);
    if (n == 1 && fc_pickle_is_str(b->p, arg[0], "torch.strided")) {
        return FC_OK;
    }
    FC_TRY(fc_dcp_open_later(b, t));
    return refuse_value(
        b, t,
        fc_arena_printf(b->checkpoint->arena, "only dense tensors are supported, this one is %.64s",
                        n == 1 && fc_pv_typeof(arg[0]) == FC_PV_STR ? fc_pickle_bytes(b->p, arg[0], &length) : "not"));
}

static fc_code read_dtype(fc_dcp_builder *b, fc_tensor *t, fc_pv properties) {
    char name[128] = "?";
    uint32_t aux;
    if (!fc_pickle_is_object(b->p, properties, FC_CLASS_TENSOR_PROPERTIES)) {
        return fc_dcp_fail(b, FC_ECORRUPT, t->name, "its properties are missing");
    }
    fc_pv dtype = fc_pickle_slot(b->p, properties, FC_PROPERTIES_DTYPE);
    if (fc_pv_typeof(dtype) != FC_PV_GLOBAL || fc_pickle_global(b->p, dtype, &aux) != FC_GLOBAL_DTYPE) {
        return fc_dcp_fail(b, FC_ECORRUPT, t->name, "its element type is missing");
    }
    t->dtype = (fc_dtype)aux;
    if (aux == FC_OPAQUE) {
        fc_pickle_global_name(b->p, dtype, name, sizeof name);
        return refuse_value(b, t, fc_arena_printf(b->checkpoint->arena, "the element type %s is not supported", name));
    }
    return read_layout(b, t, fc_pickle_slot(b->p, properties, FC_PROPERTIES_LAYOUT));
}

static fc_code read_shape(const fc_dcp_builder *b, fc_tensor *t, fc_pv size) {
    size_t n;
    if (fc_pv_typeof(size) != FC_PV_SIZE && fc_pv_typeof(size) != FC_PV_TUPLE) {
        return fc_dcp_fail(b, FC_ECORRUPT, t->name, "its size is missing");
    }
    fc_pickle_tuple(b->p, size, &n);
    if (n > FC_MAX_DIMS) {
        return refuse_value(
            b, t,
            fc_arena_printf(b->checkpoint->arena, "it has %zu dimensions; at most %d are supported", n, FC_MAX_DIMS));
    }
    int64_t *shape = fc_arena_calloc(b->checkpoint->arena, n, sizeof *shape);
    FC_NEED(shape, b->err, b->metadata_path);
    t->ndim = (int)n;
    t->shape = shape;
    if (!fc_dcp_read_size(b->p, size, t->ndim, shape) || !fc_torch_shape_fits(t->dtype, t->ndim, shape)) {
        return fc_dcp_fail(b, FC_ECORRUPT, t->name, "its size is invalid");
    }
    return FC_OK;
}

static fc_code read_chunk(const fc_dcp_builder *b, const fc_tensor *t, fc_pv v, int64_t *dims) {
    if (!fc_pickle_is_object(b->p, v, FC_CLASS_CHUNK_STORAGE) ||
        !fc_dcp_read_size(b->p, fc_pickle_slot(b->p, v, FC_CHUNK_OFFSETS), t->ndim, dims) ||
        !fc_dcp_read_size(b->p, fc_pickle_slot(b->p, v, FC_CHUNK_SIZES), t->ndim, dims + t->ndim)) {
        return fc_dcp_fail(b, FC_ECORRUPT, t->name, "the offsets or sizes of a chunk are invalid");
    }
    for (int i = 0; i < t->ndim; i++) {
        if (!fc_range_within((uint64_t)dims[i], (uint64_t)dims[t->ndim + i], (uint64_t)t->shape[i])) {
            return fc_dcp_fail(b, FC_ECORRUPT, t->name,
                               "a chunk of %" PRId64 " elements at offset %" PRId64
                               " does not fit into dimension %d of size %" PRId64,
                               dims[t->ndim + i], dims[i], i, t->shape[i]);
        }
    }
    return FC_OK;
}

static fc_code read_chunks(fc_dcp_builder *b, fc_tensor *t, fc_pv list) {
    size_t n;
    if (fc_pv_typeof(list) != FC_PV_LIST) {
        return fc_dcp_fail(b, FC_ECORRUPT, t->name, "its list of chunks is missing");
    }
    const fc_pv *items = fc_pickle_items(b->p, list, &n);
    b->nchunks += n;
    if (n > 0 && b->nchunks > b->p->size / LEAST_BYTES) {
        return fc_dcp_fail(b, FC_EUNSUPPORTED, t->name, "too many tensors share one list of chunks");
    }
    size_t width = 2 * (size_t)t->ndim, total;
    fc_chunk *chunks = fc_arena_calloc(b->checkpoint->arena, n, sizeof *chunks);
    int64_t *dims = fc_mul_size(n, width, &total) ? fc_arena_calloc(b->checkpoint->arena, total, sizeof *dims) : NULL;
    FC_NEED(chunks && dims, b->err, b->metadata_path);
    for (size_t i = 0; i < n; i++) {
        FC_TRY(read_chunk(b, t, items[i], dims + i * width));
        chunks[i] = (fc_chunk){.dims = dims + i * width, .rank = FC_NO_RANK};
    }
    t->chunks = chunks;
    t->nchunks = n;
    return FC_OK;
}

/* Makes an object, or an unreadable value. Its length, and so its shape, is known when it has been located. */
static fc_code make_object(const fc_dcp_builder *b, fc_tensor *t) {
    fc_arena *arena = b->checkpoint->arena;
    int64_t *shape = fc_arena_calloc(arena, 1, sizeof *shape);
    int64_t *dims = fc_arena_calloc(arena, 2, sizeof *dims);
    fc_chunk *chunk = fc_arena_calloc(arena, 1, sizeof *chunk);
    FC_NEED(shape && dims && chunk, b->err, b->metadata_path);
    *chunk = (fc_chunk){.dims = dims, .rank = FC_NO_RANK};
    t->dtype = FC_OPAQUE;
    t->ndim = 1;
    t->shape = shape;
    t->chunks = chunk;
    t->nchunks = 1;
    t->object = t->object ? t->object : &torch_save_object;
    return FC_OK;
}

fc_code fc_dcp_refuse_tensor(const fc_dcp_builder *b, fc_tensor *tensor, const fc_chunk *chunk, const char *reason) {
    FC_TRY(refuse_value(b, tensor, reason));
    FC_TRY(make_object(b, tensor));
    fc_chunk *one = (fc_chunk *)(uintptr_t)tensor->chunks;
    const int64_t *dims = one->dims;
    *one = *chunk;
    one->dims = dims;
    *(int64_t *)(uintptr_t)tensor->shape = ((int64_t *)(uintptr_t)dims)[1] = (int64_t)chunk->place.length;
    return FC_OK;
}

static fc_code read_tensor(fc_dcp_builder *b, fc_tensor *t, fc_pv v) {
    if (fc_pickle_is_object(b->p, v, FC_CLASS_BYTES_STORAGE)) {
        FC_TRY(fc_pickle_slot(b->p, v, FC_BYTES_ENCODING) ? fc_dcp_open_later(b, t) : FC_OK);
        return make_object(b, t);
    }
    FC_TRY(fc_dcp_check_class(b, t->name, v));
    if (!fc_pickle_is_object(b->p, v, FC_CLASS_TENSOR_STORAGE)) {
        return fc_dcp_fail(b, FC_ECORRUPT, t->name, "the kind of its metadata is unknown");
    }
    FC_TRY(read_dtype(b, t, fc_pickle_slot(b->p, v, FC_TENSOR_PROPERTIES)));
    if (!t->object) {
        FC_TRY(read_shape(b, t, fc_pickle_slot(b->p, v, FC_TENSOR_SIZE)));
    }
    if (t->object) {
        return make_object(b, t);
    }
    return read_chunks(b, t, fc_pickle_slot(b->p, v, FC_TENSOR_CHUNKS));
}

static fc_code flat_path(const fc_dcp_builder *b, fc_tensor *t) {
    fc_path_element *element = fc_arena_calloc(b->checkpoint->arena, 1, sizeof *element);
    FC_NEED(element, b->err, b->metadata_path);
    element->key = t->name;
    t->path = (fc_path){element, 1};
    return FC_OK;
}

/* Advances `*rest`, the unmatched end of a name, past element `number` of its path. @return false if it does not match.
 */
static bool spells_next(const char **rest, size_t number, const char *key, size_t n) {
    const char *at = *rest;
    if (number > 0 && *at++ != '.') {
        return false;
    }
    if (memchr(key, '\0', n) || strncmp(at, key, n) != 0) {
        return false;
    }
    *rest = at + n;
    return true;
}

/* Converts an element of a path in planner_data: strings are dict keys, numbers are list indexes. */
static fc_code path_element(const fc_dcp_builder *b, const fc_tensor *t, fc_pv v, size_t number, const char **rest,
                            fc_path_element *out) {
    char digits[24];
    const char *key = digits;
    size_t n;
    int64_t index;
    if (fc_pv_typeof(v) == FC_PV_STR) {
        key = fc_pickle_bytes(b->p, v, &n);
    } else if (fc_pickle_int(b->p, v, &index) && index >= 0) {
        out->is_index = true;
        n = (size_t)snprintf(digits, sizeof digits, "%" PRId64, index);
    } else {
        return fc_dcp_fail(b, FC_ECORRUPT, t->name, "its path in planner_data is not a tuple of keys");
    }
    if (!spells_next(rest, number, key, n)) { /* PyTorch would load it under another name */
        return fc_dcp_fail(b, FC_ECORRUPT, t->name,
                           "its path in planner_data does not match its name: it has the key %.64s; .metadata is "
                           "damaged; copy it again, or save again",
                           key);
    }
    out->key = fc_arena_strndup(b->checkpoint->arena, key, n);
    return out->key ? FC_OK : fc_no_memory(b->err, b->metadata_path);
}

static fc_code nested_path(const fc_dcp_builder *b, fc_tensor *t, fc_pv tuple) {
    size_t n = 0;
    const char *rest = t->name;
    const fc_pv *items = fc_pv_typeof(tuple) == FC_PV_TUPLE ? fc_pickle_tuple(b->p, tuple, &n) : NULL;
    if (n == 0) {
        return fc_dcp_fail(b, FC_ECORRUPT, t->name, "its path in planner_data is not a tuple of keys");
    }
    fc_path_element *elements = fc_arena_calloc(b->checkpoint->arena, n, sizeof *elements);
    FC_NEED(elements, b->err, b->metadata_path);
    for (size_t i = 0; i < n; i++) {
        FC_TRY(path_element(b, t, items[i], i, &rest, &elements[i]));
    }
    if (*rest) {
        return fc_dcp_fail(b, FC_ECORRUPT, t->name,
                           "its path in planner_data ends before its name: .metadata is damaged; copy it again, or "
                           "save again");
    }
    t->path = (fc_path){elements, n};
    return FC_OK;
}

/* ---- lists ---- */

/* Compares two paths key by key. The values of each container are neighbors in this order. */
static int compare_tensor_paths(const void *a, const void *b) {
    const fc_path *x = &(*(const fc_tensor *const *)a)->path, *y = &(*(const fc_tensor *const *)b)->path;
    const size_t count = x->count < y->count ? x->count : y->count;
    int order = 0;
    for (size_t i = 0; order == 0 && i < count; i++) {
        order = strcmp(x->elements[i].key, y->elements[i].key);
    }
    return order != 0 ? order : (x->count > y->count) - (x->count < y->count);
}

/* Refuses two neighbors if one has the index of a list where the other has the key of a dict. PyTorch cannot make such
   a container. */
static fc_code check_neighbors(const fc_dcp_builder *b, const fc_tensor *t, const fc_tensor *u) {
    for (size_t i = 0; i < t->path.count && i < u->path.count; i++) {
        const fc_path_element *x = &t->path.elements[i], *y = &u->path.elements[i];
        if (i > 0 && x->is_index != y->is_index) {
            return fc_dcp_fail(b, FC_ECORRUPT, x->is_index ? u->name : t->name,
                               "its path in planner_data has the key '%.64s' of a dict where other paths have a list; "
                               ".metadata is damaged; copy it again, or save again",
                               x->is_index ? y->key : x->key);
        }
        if (strcmp(x->key, y->key) != 0) {
            break;
        }
    }
    return FC_OK;
}

static bool has_list(const fc_tensor *t) {
    bool has = false;
    for (size_t i = 1; !has && i < t->path.count; i++) {
        has = t->path.elements[i].is_index;
    }
    return has;
}

static fc_code check_lists(const fc_dcp_builder *b) {
    size_t lists = 0;
    for (size_t i = 0; i < b->ntensors; i++) {
        lists += has_list(&b->tensors[i]);
    }
    if (lists == 0) {
        return FC_OK;
    }
    const fc_tensor **sorted = calloc(b->ntensors, sizeof *sorted);
    FC_NEED(sorted, b->err, b->metadata_path);
    for (size_t i = 0; i < b->ntensors; i++) {
        sorted[i] = &b->tensors[i];
    }
    fc_sort_items(sorted, b->ntensors, sizeof *sorted, compare_tensor_paths);
    fc_code rc = FC_OK;
    for (size_t i = 1; rc == FC_OK && i < b->ntensors; i++) {
        rc = check_neighbors(b, sorted[i - 1], sorted[i]);
    }
    free(sorted);
    return rc;
}

static fc_code read_paths(fc_dcp_builder *b, fc_pv planner) {
    size_t n = 0;
    /* A custom planner may store anything here. The default planner stores a dict, or nothing for a flat dict. */
    const fc_pv *pairs = fc_pv_typeof(planner) == FC_PV_DICT ? fc_pickle_items(b->p, planner, &n) : NULL;
    for (size_t i = n / 2 * 2; i >= 2; i -= 2) { /* PyTorch keeps the last of several paths for a name */
        fc_pv name = pairs[i - 2];
        uint32_t tensor = fc_pv_typeof(name) == FC_PV_STR ? fc_pickle_record(b->p, name)->tag[0] : 0;
        if (tensor == 0 || b->tensors[tensor - 1].path.count > 0) {
            continue;
        }
        FC_TRY(nested_path(b, &b->tensors[tensor - 1], pairs[i - 1]));
    }
    for (size_t i = 0; i < b->ntensors; i++) {
        FC_TRY(b->tensors[i].path.count ? FC_OK : flat_path(b, &b->tensors[i]));
    }
    return check_lists(b);
}

fc_code fc_dcp_build_tensors(fc_dcp_builder *b, fc_pv metadata) {
    size_t n;
    fc_pv dict = fc_pickle_slot(b->p, metadata, FC_METADATA_STATE_DICT);
    if (fc_pv_typeof(dict) != FC_PV_DICT) {
        return fc_dcp_fail(b, FC_ECORRUPT, NULL, "state_dict_metadata is missing");
    }
    const fc_pv *pairs = fc_pickle_items(b->p, dict, &n);
    if (n / 2 >= UINT32_MAX) {
        return fc_dcp_fail(b, FC_EUNSUPPORTED, NULL, "it has more than 2^32 tensors");
    }
    b->tensors = fc_arena_calloc(b->checkpoint->arena, n / 2, sizeof *b->tensors);
    FC_NEED(b->tensors, b->err, b->metadata_path);
    for (size_t i = 0; i + 1 < n; i += 2) {
        fc_tensor *t = &b->tensors[b->ntensors++];
        if (fc_pv_typeof(pairs[i]) != FC_PV_STR) {
            return fc_dcp_fail(b, FC_ECORRUPT, NULL, "the name of a tensor is not a string");
        }
        FC_TRY(copy_text(b, pairs[i], NULL, &t->name));
        uint32_t *tag = fc_pickle_record(b->p, pairs[i])->tag;
        if (tag[0] != 0) {
            return fc_dcp_fail(b, FC_ECORRUPT, t->name, "it is listed twice");
        }
        tag[0] = (uint32_t)b->ntensors;
        FC_TRY(read_tensor(b, t, pairs[i + 1]));
    }
    return read_paths(b, fc_pickle_slot(b->p, metadata, FC_METADATA_PLANNER));
}
