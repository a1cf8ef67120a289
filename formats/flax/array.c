/*
 * Arrays as flax.serialization stores them: an extension whose payload is msgpack again, [shape, name of the dtype,
 * row-major little-endian bytes]. Arrays above 1 GiB are a dict {"__msgpack_chunked_array__": true, "shape": {"0": …},
 * "chunks": {"0": array, …}} of runs of their elements. The bytes stay in the file.
 */
#include "flax/walk.h"

#include "base/checked.h"
#include "fsdpckpt/try.h"
#include "sharding/flat_runs.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

enum { MAX_DTYPE = 64 };

/* An array as its headers describe it. */
typedef struct array {
    char dtype_name[MAX_DTYPE + 1];
    bool known; /* whether `dtype` is set */
    fc_dtype dtype;
    uint64_t ndim; /* `sizes` has the first FC_MAX_DIMS */
    int64_t sizes[FC_MAX_DIMS];
    uint64_t data, length; /* where its bytes are in the file */
} array;

static fc_code bad_array(const fc_flax_walk *w, uint64_t at, const char *what) {
    char text[128];
    snprintf(text, sizeof text, "an array of Flax is damaged: %s", what);
    return fc_mp_fail(&w->r, at, FC_ECORRUPT, text, w->err);
}

/* Reads the size of dimension `i`. Sizes of more dimensions than tensors have are only checked. */
static fc_code read_size(fc_flax_walk *w, array *a, uint64_t i, uint64_t start) {
    fc_mp_head head;
    FC_TRY(fc_mp_next(&w->r, &head, w->err));
    if (head.kind != FC_MP_INT || head.integer < 0) {
        return bad_array(w, start, "a size is not an integer >= 0");
    }
    if (i < FC_MAX_DIMS) {
        a->sizes[i] = head.integer;
    }
    return FC_OK;
}

static fc_code read_sizes(fc_flax_walk *w, array *a) {
    const uint64_t start = w->r.at;
    fc_mp_head head;
    FC_TRY(fc_mp_next(&w->r, &head, w->err));
    if (head.kind != FC_MP_ARRAY) {
        return bad_array(w, start, "its shape is no list");
    }
    a->ndim = head.length;
    for (uint64_t i = 0; i < a->ndim; i++) {
        FC_TRY(read_size(w, a, i, start));
    }
    return FC_OK;
}

static fc_code read_dtype(fc_flax_walk *w, array *a) {
    const uint64_t start = w->r.at;
    fc_mp_head head;
    FC_TRY(fc_mp_next(&w->r, &head, w->err));
    if ((head.kind != FC_MP_STR && head.kind != FC_MP_BIN) || head.length > MAX_DTYPE) {
        return bad_array(w, start, "its dtype is no name");
    }
    FC_TRY(fc_mp_read(&w->r, a->dtype_name, (size_t)head.length, w->err));
    a->dtype_name[head.length] = '\0';
    a->known = fc_dtype_find(a->dtype_name, (size_t)head.length, &a->dtype) && a->dtype != FC_OPAQUE &&
               strcmp(a->dtype_name, fc_dtype_get(a->dtype)->torch_name) == 0;
    return FC_OK;
}

/* Computes the bytes of `ndim` sizes. @return false if they overflow. */
static bool bytes_of(const array *a, int64_t *bytes) {
    int64_t elements;
    return fc_numel((int)a->ndim, a->sizes, &elements) && fc_mul_i64(elements, fc_dtype_size(a->dtype), bytes);
}

/* Reads the array whose extension has the header `head`. The position moves behind it. */
static fc_code read_array(fc_flax_walk *w, const fc_mp_head *head, array *a) {
    const uint64_t start = w->r.at, outer = w->r.end;
    fc_mp_head part;
    int64_t bytes = 0;
    *a = (array){.known = false};
    w->r.end = start + head->length; /* nothing of the array is behind its payload */
    FC_TRY(fc_mp_next(&w->r, &part, w->err));
    if (part.kind != FC_MP_ARRAY || part.length != 3) {
        return bad_array(w, start, "it is not [shape, dtype, bytes]");
    }
    FC_TRY(read_sizes(w, a));
    FC_TRY(read_dtype(w, a));
    FC_TRY(fc_mp_next(&w->r, &part, w->err));
    if ((part.kind != FC_MP_BIN && part.kind != FC_MP_STR) || part.length != w->r.end - w->r.at) {
        return bad_array(w, start, "its bytes do not end where it ends");
    }
    a->data = w->r.at;
    a->length = part.length;
    if (a->known && a->ndim <= FC_MAX_DIMS && (!bytes_of(a, &bytes) || (uint64_t)bytes != a->length)) {
        return bad_array(w, start, "its bytes are not as many as its shape needs");
    }
    w->r.at = w->r.end;
    w->r.end = outer;
    return FC_OK;
}

static fc_code refuse_array(fc_flax_walk *w, const array *a) {
    return a->known ? fc_flax_refuse(w, "it has %" PRIu64 " dimensions; at most %d are supported", a->ndim, FC_MAX_DIMS)
                    : fc_flax_refuse(w, "the element type %s is not supported", a->dtype_name);
}

/* Adds a tensor with room for `most` chunks. */
static fc_code start_tensor(fc_flax_walk *w, const array *a, size_t most, fc_tensor **out, int64_t **dims) {
    const size_t ndim = (size_t)a->ndim;
    size_t width;
    FC_TRY(fc_flax_add(w, out));
    fc_tensor *t = *out;
    int64_t *shape = fc_arena_copy(w->arena, a->sizes, ndim, sizeof *shape);
    *dims = fc_mul_size(most, 2 * ndim, &width) ? fc_arena_calloc(w->arena, width, sizeof **dims) : NULL;
    fc_chunk *chunks = fc_arena_calloc(w->arena, most, sizeof *chunks);
    FC_NEED(shape && *dims && chunks, w->err, w->r.path);
    t->dtype = a->dtype;
    t->ndim = (int)a->ndim;
    t->shape = shape;
    t->chunks = chunks;
    return FC_OK;
}

static fc_chunk chunk_at(const fc_flax_walk *w, const int64_t *dims, uint64_t offset, uint64_t length) {
    return (fc_chunk){.dims = dims, .place = fc_place_bytes(w->file, offset, length), .rank = FC_NO_RANK};
}

fc_code fc_flax_add_array(fc_flax_walk *w, const fc_mp_head *head) {
    array a;
    fc_tensor *t;
    int64_t *dims;
    if (head->extension != FC_FLAX_ARRAY && head->extension != FC_FLAX_SCALAR) {
        FC_TRY(fc_mp_skip(&w->r, head, w->err));
        return fc_flax_refuse(w, "extension %d of msgpack, which Flax does not write", head->extension);
    }
    FC_TRY(read_array(w, head, &a));
    if (!a.known || a.ndim > FC_MAX_DIMS) {
        return refuse_array(w, &a);
    }
    FC_TRY(start_tensor(w, &a, 1, &t, &dims));
    memcpy(dims + a.ndim, a.sizes, (size_t)a.ndim * sizeof *dims);
    *(fc_chunk *)(uintptr_t)t->chunks = chunk_at(w, dims, a.data, a.length);
    t->nchunks = a.length > 0;
    return FC_OK;
}

/* ---- arrays in several chunks ---- */

/* Reads a dict {"0": size, "1": …}. */
static fc_code read_shape(fc_flax_walk *w, array *a) {
    fc_mp_head head;
    char key[24];
    const uint64_t start = w->r.at;
    FC_TRY(fc_flax_expect_key(w, "shape"));
    FC_TRY(fc_mp_next(&w->r, &head, w->err));
    if (head.kind != FC_MP_MAP) {
        return bad_array(w, start, "its shape is no dict");
    }
    a->ndim = head.length;
    for (uint64_t i = 0; i < a->ndim; i++) {
        snprintf(key, sizeof key, "%" PRIu64, i);
        FC_TRY(fc_flax_expect_key(w, key));
        FC_TRY(read_size(w, a, i, start));
    }
    return FC_OK;
}

/* Reads the next chunk, which must be a list of elements. */
static fc_code read_chunk(fc_flax_walk *w, uint64_t number, array *out) {
    fc_mp_head head;
    char key[24];
    snprintf(key, sizeof key, "%" PRIu64, number);
    FC_TRY(fc_flax_expect_key(w, key));
    const uint64_t start = w->r.at;
    FC_TRY(fc_mp_next(&w->r, &head, w->err));
    if (head.kind != FC_MP_EXT || head.extension != FC_FLAX_ARRAY) {
        return bad_array(w, start, "a chunk is no array");
    }
    FC_TRY(read_array(w, &head, out));
    return out->ndim == 1 ? FC_OK : bad_array(w, start, "a chunk has more than one dimension");
}

/* A tensor while its chunks are read. */
typedef struct joining {
    array whole;
    fc_tensor *tensor;
    int64_t *dims;
    int64_t done; /* elements so far */
} joining;

/* Adds the boxes of the elements of a chunk. */
static fc_code add_run(fc_flax_walk *w, joining *j, const array *chunk) {
    fc_tensor *t = j->tensor;
    const uint64_t size = fc_dtype_size(t->dtype);
    const int64_t first = j->done;
    int64_t start;
    fc_flat_run run;
    if (!fc_add_i64(first, chunk->sizes[0], &j->done) || !fc_flat_run_start(&run, t->ndim, t->shape, first, j->done)) {
        return bad_array(w, chunk->data, "its chunks have more elements than its shape");
    }
    for (int64_t *dims = j->dims; fc_flat_run_next(&run, dims, &start); dims += 2 * (size_t)t->ndim) {
        const fc_box box = {t->ndim, dims, dims + t->ndim};
        const uint64_t at = chunk->data + (uint64_t)(start - first) * size;
        ((fc_chunk *)(uintptr_t)t->chunks)[t->nchunks++] = chunk_at(w, dims, at, (uint64_t)fc_box_volume(&box) * size);
        j->dims = dims + 2 * (size_t)t->ndim;
    }
    return FC_OK;
}

/* Starts the tensor when its first chunk shows the dtype. */
static fc_code join_chunk(fc_flax_walk *w, joining *j, const array *chunk, uint64_t number, uint64_t count) {
    size_t most;
    int64_t elements;
    if (number > 0 && strcmp(chunk->dtype_name, j->whole.dtype_name) != 0) {
        return bad_array(w, chunk->data, "its chunks have different dtypes");
    }
    if (number == 0) {
        memcpy(j->whole.dtype_name, chunk->dtype_name, sizeof chunk->dtype_name);
        j->whole.known = chunk->known;
        j->whole.dtype = chunk->dtype;
        if (!chunk->known || j->whole.ndim > FC_MAX_DIMS) {
            return FC_OK;
        }
        if (!fc_numel((int)j->whole.ndim, j->whole.sizes, &elements) ||
            !fc_mul_size((size_t)count, (size_t)fc_flat_run_most((int)j->whole.ndim), &most)) {
            return bad_array(w, chunk->data, "its shape is too large");
        }
        FC_TRY(start_tensor(w, &j->whole, most, &j->tensor, &j->dims));
    }
    return j->tensor ? add_run(w, j, chunk) : FC_OK;
}

static fc_code read_chunks(fc_flax_walk *w, joining *j) {
    const uint64_t start = w->r.at;
    int64_t elements = 0;
    fc_mp_head head;
    FC_TRY(fc_flax_expect_key(w, "chunks"));
    FC_TRY(fc_mp_next(&w->r, &head, w->err));
    if (head.kind != FC_MP_MAP || head.length == 0) {
        return bad_array(w, start, "it has no chunks");
    }
    const uint64_t count = head.length;
    for (uint64_t i = 0; i < count; i++) {
        array chunk = {.known = false};
        FC_TRY(read_chunk(w, i, &chunk));
        FC_TRY(join_chunk(w, j, &chunk, i, count));
    }
    if (!j->tensor) {
        return refuse_array(w, &j->whole);
    }
    return fc_numel((int)j->whole.ndim, j->whole.sizes, &elements) && j->done == elements
               ? FC_OK
               : bad_array(w, start, "its chunks have fewer elements than its shape");
}

fc_code fc_flax_add_chunked(fc_flax_walk *w, uint64_t pairs) {
    const uint64_t start = w->r.at;
    fc_mp_head head;
    joining j = {.tensor = NULL};
    if (pairs != 3) {
        return bad_array(w, start, "one in several chunks is not {mark, shape, chunks}");
    }
    FC_TRY(fc_mp_next(&w->r, &head, w->err));
    FC_TRY(fc_mp_skip(&w->r, &head, w->err));
    FC_TRY(read_shape(w, &j.whole));
    return read_chunks(w, &j);
}
