/*
 * Checkpoints in memory: a manifest of arrays that the calling program owns. Their format only locates elements. It is
 * not in the table of formats, because no file can have it.
 */
#include "fsdpckpt/memory.h"

#include "base/checked.h"
#include "base/name_table.h"
#include "checkpoint/extent.h"
#include "checkpoint/memory_data.h"
#include "checkpoint/path.h"
#include "fsdpckpt/format.h"
#include "fsdpckpt/try.h"

#include <stdlib.h>
#include <string.h>

/* Computes the bytes from the first element to the end of the last. @return false on overflow. */
static bool span(const fc_memory_chunk *chunk, int ndim, uint32_t element, uint64_t *out) {
    int64_t last = 0, step;
    for (int d = 0; d < ndim; d++) {
        if (chunk->strides[d] < 0 || !fc_mul_i64(chunk->sizes[d] - 1, chunk->strides[d], &step) ||
            !fc_add_i64(last, step, &last)) {
            return false;
        }
    }
    return fc_add_i64(last, 1, &last) && fc_mul_u64((uint64_t)last, element, out);
}

/* fc_tensor.detail is an array of our copies of the caller's chunks, and fc_chunk.detail is an index into it. */
static fc_code memory_extent(const fc_checkpoint *checkpoint, const fc_tensor *tensor, size_t index, fc_extent *out,
                             fc_error *err) {
    const fc_chunk *chunk = &tensor->chunks[index];
    const fc_memory_chunk *from = &((const fc_memory_chunk *)tensor->detail)[chunk->detail];
    if (!from->data) {
        return fc_fail(err, FC_EUSAGE, "%s: tensor %s: chunk %zu is in the memory of another rank", checkpoint->path,
                       tensor->name, index);
    }
    uint64_t bytes = 0;
    span(from, tensor->ndim, fc_dtype_size(tensor->dtype), &bytes); /* add_chunk has found that it fits */
    *out = fc_inline_extent(from->data, bytes);
    memcpy(out->strides, from->strides, (size_t)tensor->ndim * sizeof *out->strides);
    return FC_OK;
}

static fc_code memory_object_json(const fc_checkpoint *checkpoint, const fc_tensor *object, fc_arena *arena,
                                  const char **json, fc_error *err) {
    const fc_memory_chunk *from = object->detail;
    size_t size = (size_t)object->shape[0];
    unsigned char *bytes = malloc(size + 1);
    FC_NEED(bytes, err, checkpoint->path);
    if (size > 0) {
        memcpy(bytes, from->data, size);
    }
    const fc_object_encoding *encoding = fc_object_encoding_find(object->object->encoding);
    fc_code rc = encoding->json_memory(bytes, size, checkpoint->path, arena, json, err);
    return rc == FC_OK ? rc : fc_context(err, rc, "object %.256s", object->name);
}

static bool no_probe(const fc_probe *probe) {
    (void)probe;
    return false;
}

static const fc_format memory = {
    .name = "memory",
    .description = "arrays in memory",
    .reader =
        {
            .probe = no_probe,
            .extent = memory_extent,
            .object_json = memory_object_json,
        },
};

/* Copies the description of a chunk. *kept reports whether the chunk has elements and belongs in the manifest. */
static fc_code add_chunk(const fc_memory_tensor *t, size_t index, fc_memory_chunk *own, fc_arena *arena, fc_chunk *out,
                         bool *kept, fc_error *err) {
    size_t n = (size_t)t->ndim;
    int64_t *dims = fc_arena_calloc(arena, 2 * n, sizeof *dims);
    int64_t *strides = fc_arena_calloc(arena, n, sizeof *strides);
    const fc_memory_chunk *given = &t->chunks[index];
    FC_NEED(dims && strides, err, t->name);
    if (n > 0) {
        memcpy(dims, given->offsets, n * sizeof *dims);
        memcpy(dims + n, given->sizes, n * sizeof *dims);
    }
    *own = (fc_memory_chunk){dims, dims + n, strides, given->data};
    fc_box box = {t->ndim, dims, dims + n};
    if (!fc_box_within(&box, t->shape)) {
        return fc_fail(err, FC_EUSAGE, "tensor %s: chunk %zu is outside the tensor's shape", t->name, index);
    }
    *kept = fc_box_volume(&box) > 0;
    if (!*kept) {
        return FC_OK;
    }
    uint64_t bytes;
    bool fits = given->strides || fc_row_major_strides(t->ndim, own->sizes, strides);
    if (given->strides) {
        memcpy(strides, given->strides, n * sizeof *strides);
    }
    *out = (fc_chunk){.dims = dims, .rank = t->ranks ? t->ranks[index] : FC_NO_RANK, .detail = index};
    if (!fits || !span(own, t->ndim, fc_dtype_size(t->dtype), &bytes)) {
        return fc_fail(err, FC_EUSAGE, "tensor %s: chunk %zu: a stride is negative or too large", t->name, index);
    }
    return FC_OK;
}

static fc_code copy_path(const fc_memory_tensor *t, const char *name, fc_arena *arena, fc_path *out, fc_error *err) {
    const fc_path_element own = {.key = name};
    const fc_path *path = t->path.count ? &t->path : &(fc_path){&own, 1};
    return fc_path_copy(arena, path, out) ? FC_OK : fc_no_memory(err, name);
}

static fc_code add_object(const fc_memory_tensor *t, fc_arena *arena, const fc_object **out, fc_error *err) {
    const fc_object_encoding *encoding = t->encoding ? fc_object_encoding_find(t->encoding) : NULL;
    if ((t->encoding != NULL) != (t->dtype == FC_OPAQUE) || (t->encoding && (t->ndim != 1 || t->nchunks != 1))) {
        return fc_fail(err, FC_EUSAGE, "tensor %s: an object is opaque and has one dimension and one chunk", t->name);
    }
    if (t->encoding && (!encoding || !encoding->json_memory)) {
        return fc_fail(err, FC_EUSAGE, "object %s: its encoding '%s' is unknown", t->name, t->encoding);
    }
    if (encoding) {
        fc_object *object = fc_arena_calloc(arena, 1, sizeof *object);
        FC_NEED(object, err, t->name);
        object->encoding = encoding->name;
        *out = object;
    }
    return FC_OK;
}

static fc_code add_tensor(const fc_memory_tensor *t, fc_arena *arena, fc_tensor *out, fc_error *err) {
    int64_t elements;
    const fc_object *object = NULL;
    if (t->ndim < 0 || t->ndim > FC_MAX_DIMS || !fc_numel(t->ndim, t->shape, &elements)) {
        return fc_fail(err, FC_EUSAGE, "tensor %s: its shape is invalid or too large", t->name);
    }
    const char *name = fc_arena_strndup(arena, t->name, strlen(t->name));
    int64_t *shape = fc_arena_copy(arena, t->shape, (size_t)t->ndim, sizeof *shape);
    fc_chunk *chunks = fc_arena_calloc(arena, t->nchunks, sizeof *chunks);
    fc_memory_chunk *own = fc_arena_calloc(arena, t->nchunks, sizeof *own);
    const char *tied_to = t->tied_to ? fc_arena_strndup(arena, t->tied_to, strlen(t->tied_to)) : NULL;
    FC_NEED(name && shape && chunks && own && !t->tied_to == !tied_to, err, t->name);
    FC_TRY(add_object(t, arena, &object, err));
    size_t count = 0;
    for (size_t i = 0; i < t->nchunks; i++) {
        bool kept = false;
        FC_TRY(add_chunk(t, i, &own[i], arena, &chunks[count], &kept, err));
        count += kept;
    }
    *out = (fc_tensor){.name = name,
                       .dtype = t->dtype,
                       .ndim = t->ndim,
                       .shape = shape,
                       .chunks = chunks,
                       .nchunks = count,
                       .object = object,
                       .tied_to = tied_to,
                       .detail = own};
    return copy_path(t, name, arena, &out->path, err);
}

static fc_code add_named(const fc_memory_tensor *tensor, fc_arena *arena, size_t number, fc_name_table *names,
                         fc_tensor *made, fc_error *err) {
    FC_TRY(add_tensor(tensor, arena, made, err));
    return fc_name_table_put(names, made->name, strlen(made->name), number) == number
               ? FC_OK
               : fc_fail(err, FC_EUSAGE, "tensor %s: the name is used twice", made->name);
}

static fc_code add_tensors(fc_checkpoint *checkpoint, const fc_memory_tensor *tensors, size_t count, fc_error *err) {
    fc_arena *arena = checkpoint->arena;
    fc_tensor *made = fc_arena_calloc(arena, count, sizeof *made);
    fc_name_table *names = fc_name_table_new(arena, count);
    FC_NEED(made && names, err, checkpoint->path);
    for (size_t i = 0; i < count; i++) {
        FC_TRY_CONTEXT(add_named(&tensors[i], arena, i, names, &made[i], err), err, "%s", checkpoint->path);
    }
    checkpoint->tensors = made;
    checkpoint->ntensors = count;
    return FC_OK;
}

fc_code fc_checkpoint_in_memory(const char *label, const fc_memory_tensor *tensors, size_t count, fc_checkpoint **out,
                                fc_error *err) {
    *out = NULL;
    fc_arena *arena = fc_arena_new();
    fc_checkpoint *checkpoint = arena ? fc_arena_calloc(arena, 1, sizeof *checkpoint) : NULL;
    const char *path = checkpoint ? fc_arena_strndup(arena, label, strlen(label)) : NULL;
    fc_code rc;
    FC_TRY_GOTO(path ? FC_OK : fc_no_memory(err, label), rc, failed);
    checkpoint->format = &memory;
    checkpoint->path = path;
    checkpoint->arena = arena;
    FC_TRY_GOTO(add_tensors(checkpoint, tensors, count, err), rc, failed);
    *out = checkpoint;
    return FC_OK;
failed:
    fc_arena_free(arena); /* there is nothing else to close yet */
    return rc;
}

bool fc_memory_lacks_data(const fc_checkpoint *checkpoint, size_t index) {
    const fc_tensor *t = &checkpoint->tensors[index];
    const fc_memory_chunk *own = t->detail;
    for (size_t i = 0; i < t->nchunks; i++) {
        if (!own[t->chunks[i].detail].data) {
            return true;
        }
    }
    return false;
}

bool fc_memory_has_data(const fc_checkpoint *checkpoint, size_t index, size_t chunk) {
    const fc_tensor *t = &checkpoint->tensors[index];
    return ((const fc_memory_chunk *)t->detail)[t->chunks[chunk].detail].data != NULL;
}

void fc_memory_set_data(const fc_checkpoint *checkpoint, size_t index, size_t chunk, const void *data) {
    ((fc_memory_chunk *)checkpoint->tensors[index].detail)[chunk].data = data;
}

fc_code fc_memory_set_layout(fc_checkpoint *checkpoint, const fc_mesh *mesh, const fc_placement *placements,
                             fc_error *err) {
    size_t count = checkpoint->ntensors, width = (size_t)mesh->ndim;
    fc_tensor *tensors = fc_arena_copy(checkpoint->arena, checkpoint->tensors, count, sizeof *tensors);
    fc_placement *kept = fc_arena_copy(checkpoint->arena, placements, count * width, sizeof *kept);
    FC_NEED(tensors && kept, err, checkpoint->path);
    for (size_t i = 0; i < count; i++) {
        tensors[i].placements = kept + i * width;
    }
    checkpoint->tensors = tensors;
    checkpoint->mesh = *mesh;
    return FC_OK;
}
