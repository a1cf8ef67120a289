/*
 * Builds targets by hand and writes their data in place of the engine; see h5_make.h.
 */
#include "h5_make.h"
#include "base/crc.h"
#include "fsdpckpt/select.h"
#include "io/file.h"
#include "plan/target_file.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static fc_code object_json(const fc_checkpoint *checkpoint, const fc_tensor *object, fc_arena *arena, const char **json,
                           fc_error *err) {
    (void)checkpoint;
    *json = fc_arena_strndup(arena, object->detail, strlen(object->detail));
    return *json ? FC_OK : fc_fail(err, FC_ENOMEM, "out of memory");
}

static const fc_format made_format = {
    .name = "made",
    .reader = {.object_json = object_json},
};

void h5_made_begin(h5_made *made, int ndim, const char *const *names, const int64_t *sizes) {
    memset(made, 0, sizeof *made);
    made->arena = fc_arena_new();
    made->source.format = &made_format;
    made->source.path = "made";
    made->mesh.ndim = ndim;
    for (int i = 0; i < ndim; i++) {
        snprintf(made->mesh.names[i], sizeof made->mesh.names[i], "%s", names[i]);
        made->mesh.sizes[i] = sizes[i];
    }
    made->capacity = 20000;
    made->sources = fc_arena_calloc(made->arena, made->capacity, sizeof *made->sources);
    made->tensors = fc_arena_calloc(made->arena, made->capacity, sizeof *made->tensors);
    made->target = (fc_target){.source = &made->source, .mesh = &made->mesh, .tensors = made->tensors};
}

void h5_made_end(h5_made *made) {
    fc_arena_free(made->arena);
}

static fc_path parse_path(fc_arena *arena, const char *text) {
    size_t count = 1;
    for (const char *p = text; *p; p++) {
        count += *p == '|';
    }
    fc_path_element *elements = fc_arena_calloc(arena, count, sizeof *elements);
    for (size_t i = 0; i < count; i++) {
        size_t len = strcspn(text, "|");
        bool index = *text == '#';
        elements[i].is_index = index;
        elements[i].key = *text == '~' ? "" : fc_arena_strndup(arena, text + index, len - index);
        text += len + 1;
    }
    return (fc_path){elements, count};
}

static char *join(fc_arena *arena, const fc_path *path) {
    char *name = fc_arena_printf(arena, "%s", path->elements[0].key);
    for (size_t i = 1; i < path->count; i++) {
        name = fc_arena_printf(arena, "%s.%s", name, path->elements[i].key);
    }
    return name;
}

fc_target_tensor *h5_made_add(h5_made *made, const char *path, fc_dtype dtype, int ndim, const int64_t *shape,
                              int tp_dim) {
    size_t at = made->target.ntensors++;
    if (at >= made->capacity) {
        abort();
    }
    fc_tensor *source = &made->sources[at];
    fc_target_tensor *tensor = &made->tensors[at];
    int64_t *dims = fc_arena_calloc(made->arena, FC_MAX_DIMS, sizeof *dims);
    fc_placement *placements = fc_arena_calloc(made->arena, FC_MAX_MESH_DIMS, sizeof *placements);
    for (int d = 0; d < ndim; d++) {
        dims[d] = shape[d];
    }
    source->path = parse_path(made->arena, path);
    source->name = join(made->arena, &source->path);
    source->dtype = dtype;
    source->ndim = ndim;
    source->shape = dims;
    tensor->source = source;
    tensor->name = source->name;
    tensor->path = source->path;
    tensor->dtype = dtype;
    tensor->owner_offset = (uint32_t)at;
    if (made->mesh.ndim > 0) {
        fc_layout_placements(&made->mesh, ndim, tp_dim, placements);
        tensor->placements = placements;
    }
    return tensor;
}

void h5_made_object(h5_made *made, const char *path, int64_t bytes, const char *json) {
    static const fc_object encoded = {.encoding = "torch.save"};
    h5_made_add(made, path, FC_OPAQUE, 1, &bytes, -1);
    fc_tensor *source = &made->sources[made->target.ntensors - 1];
    source->object = &encoded;
    source->detail = fc_arena_strndup(made->arena, json, strlen(json));
}

void h5_made_zoo(h5_made *made) {
    char path[64];
    for (int d = 0; d < FC_OPAQUE; d++) {
        snprintf(path, sizeof path, "model|dtypes.%s", fc_dtype_get((fc_dtype)d)->torch_name);
        h5_made_add(made, path, (fc_dtype)d, 2, (const int64_t[]){16, 6}, d % 3 - 1);
    }
    h5_made_add(made, "model|scalar", FC_F32, 0, NULL, -1);
    h5_made_add(made, "model|scalar_bf16", FC_BF16, 0, NULL, -1);
    h5_made_add(made, "model|scalar_c128", FC_C128, 0, NULL, -1);
    h5_made_add(made, "model|none", FC_F32, 2, (const int64_t[]){0, 4}, -1);
    h5_made_add(made, "model|none_inside", FC_F16, 3, (const int64_t[]){3, 0, 5}, 0);
    h5_made_add(made, "model|uneven", FC_F32, 2, (const int64_t[]){7, 3}, -1);
    h5_made_add(made, "model|few_rows", FC_I64, 2, (const int64_t[]){2, 4}, 1);
    h5_made_add(made, "model|one_row", FC_U8, 1, (const int64_t[]){1}, -1);
    h5_made_add(made, "model|large", FC_F32, 2, (const int64_t[]){257, 160}, 0);
    h5_made_add(made, "model|many.dims", FC_I16, 7, (const int64_t[]){5, 1, 2, 3, 1, 2, 2}, 0);
    static const char *const odd[] = {"a/b",          "100% %b",          "%2F", ".",   "..", "~",
                                      " spaced out ", "gewicht ü 重み 🎉", "%%",  "x\ty"};
    for (size_t i = 0; i < sizeof odd / sizeof *odd; i++) {
        snprintf(path, sizeof path, "odd names|%s", odd[i]);
        h5_made_add(made, path, FC_I32, 1, (const int64_t[]){9}, -1);
    }
    for (int i = 0; i < 12; i++) {
        snprintf(path, sizeof path, "optim|groups|#%d|lr", i);
        h5_made_add(made, path, FC_F64, 1, (const int64_t[]){4}, -1);
    }
    h5_made_add(made, "zz|first", FC_BOOL, 1, (const int64_t[]){33}, -1);
    h5_made_add(made, "model|again", FC_BF16, 1, (const int64_t[]){33}, 0);
    h5_made_add(made, "renamed|path", FC_BF16, 1, (const int64_t[]){5}, -1)->name = "another.name";
    h5_made_object(made, "state|step", 1000, "12345678901234567890123456789");
    h5_made_object(made, "state|text", 1, "{\"text\": \"ü 重み\", \"$tuple\": [null]}");
    h5_made_object(made, "state|empty", 0, "null");
    char *big = malloc(300001);
    memset(big, 'x', 300000);
    big[0] = big[299999] = '"';
    big[300000] = '\0';
    h5_made_object(made, "state|big", 70001, big);
    free(big);
}

fc_target_file h5_made_file(h5_made *made, int64_t rank) {
    fc_target_file file;
    if (fc_target_file_of(&made->target, (uint32_t)rank, made->arena, &file, NULL) != FC_OK) {
        abort();
    }
    return file;
}

static unsigned char byte_at(uint64_t i, uint32_t tensor, fc_dtype dtype) {
    unsigned char byte = (unsigned char)(i * 131 + i / 256 * 7 + tensor * 29);
    return dtype == FC_BOOL ? byte & 1 : byte;
}

/* Returns the bytes of a box in row-major order, in a new buffer. */
static unsigned char *box_bytes(const fc_tensor *t, uint32_t index, const int64_t *dims, size_t *size) {
    const fc_box box = {t->ndim, dims, dims + t->ndim};
    const size_t width = fc_dtype_size(t->dtype), count = (size_t)fc_box_volume(&box);
    unsigned char *bytes = malloc(count * width + 1);
    *size = count * width;
    for (size_t e = 0; e < count; e++) {
        uint64_t global = 0, rest = e, scale = 1;
        for (int d = t->ndim - 1; d >= 0; d--) {
            uint64_t size_d = (uint64_t)box.sizes[d];
            global += (rest % size_d + (uint64_t)box.offsets[d]) * scale;
            rest /= size_d;
            scale *= (uint64_t)t->shape[d];
        }
        for (size_t b = 0; b < width; b++) {
            bytes[e * width + b] = byte_at(global * width + b, index, t->dtype);
        }
    }
    return bytes;
}

fc_code h5_made_fill(const h5_made *made, const fc_target_file *file, fc_error *err) {
    int fd = open(file->path, O_WRONLY | O_CLOEXEC);
    if (fd < 0) {
        return fc_fail(err, FC_EIO, "%s: cannot be opened", file->path);
    }
    fc_code rc = FC_OK;
    for (size_t i = 0; rc == FC_OK && i < file->nitems; i++) {
        const fc_target_item *item = &file->items[i];
        if (!item->owned) {
            continue;
        }
        size_t size;
        unsigned char *bytes = box_bytes(made->tensors[item->tensor].source, item->tensor, item->dims, &size);
        rc = fc_pwrite_full(fd, bytes, size, item->offset, file->path, err);
        file->items[i].crc64 = fc_crc64(0, bytes, size);
        free(bytes);
    }
    close(fd);
    return rc;
}

/* Returns the digests of all whole values. The caller frees them. */
static uint64_t *whole_digests(const h5_made *made) {
    uint64_t *digests = calloc(made->target.ntensors + 1, sizeof *digests);
    for (size_t i = 0; digests && i < made->target.ntensors; i++) {
        const fc_tensor *t = made->tensors[i].source;
        int64_t dims[2 * FC_MAX_DIMS] = {0};
        size_t size;
        for (int d = 0; d < t->ndim; d++) {
            dims[t->ndim + d] = t->shape[d];
        }
        unsigned char *bytes = box_bytes(t, i, dims, &size);
        digests[i] = fc_crc64(0, bytes, size);
        free(bytes);
    }
    return digests;
}

fc_code h5_made_write(h5_made *made, const char *staging, fc_error *err) {
    const fc_format *format = fc_format_find("h5");
    fc_writer writer = {format, NULL};
    int64_t ranks = made->mesh.ndim ? fc_mesh_ranks(&made->mesh) : 1;
    fc_code rc = format->writer.create(&made->target, staging, &writer, err);
    if (rc != FC_OK) {
        return rc;
    }
    for (int64_t rank = 0; rc == FC_OK && rank < ranks; rank++) {
        fc_target_file file = h5_made_file(made, rank);
        rc = format->writer.reserve(&writer, &file, err);
        rc = rc == FC_OK ? h5_made_fill(made, &file, err) : rc;
        rc = rc == FC_OK ? format->writer.finish_file(&writer, &file, err) : rc;
    }
    uint64_t *digests = whole_digests(made);
    rc = rc == FC_OK ? format->writer.finish(&writer, digests, err) : rc;
    free(digests);
    format->writer.destroy(&writer);
    return rc;
}
