/*
 * Values whose items are opened together with the checkpoint, because `.metadata` does not say enough of them: objects
 * of other formats, whose bytes are in a pickle (torch/object/kept.h), sparse tensors, which become their parts
 * (torch/object/sparse.h), and tensors of torchao, which get their parts besides (torch/object/torchao.h). There are
 * few of them.
 */
#include "dcp/stages.h"

#include "base/grow.h"
#include "checkpoint/same_name.h"
#include "fsdpckpt/order.h"
#include "fsdpckpt/try.h"
#include "io/file.h"
#include "torch/file/file.h"
#include "torch/object/sparse.h"
#include "torch/object/torchao.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

fc_code fc_dcp_open_later(fc_dcp_builder *b, const fc_tensor *tensor) {
    FC_NEED(fc_grow(&b->to_open, &b->to_open_capacity, b->nto_open + 1, sizeof *b->to_open), b->err, b->metadata_path);
    b->to_open[b->nto_open++] = (size_t)(tensor - b->tensors);
    return FC_OK;
}

/* The list of tensors that replaces that of the builder. */
typedef struct list {
    fc_tensor *tensors;
    size_t count;
} list;

/* Makes a value below a tensor. */
static fc_code start_part(const fc_dcp_builder *b, const fc_tensor *of, const char *key, fc_tensor *out) {
    fc_arena *arena = b->checkpoint->arena;
    const size_t n = of->path.count;
    fc_path_element *elements = fc_arena_calloc(arena, n + 1, sizeof *elements);
    const char *name = fc_arena_printf(arena, "%s.%s", of->name, key);
    FC_NEED(elements && name, b->err, b->metadata_path);
    if (n > 0) {
        memcpy(elements, of->path.elements, n * sizeof *elements);
    }
    elements[n].key = key;
    *out = (fc_tensor){.name = name, .path = {elements, n + 1}};
    return FC_OK;
}

static fc_code add_dense(const fc_dcp_builder *b, const torch_file *f, fc_pv v, const fc_tensor *of, fc_tensor *out) {
    fc_arena *arena = b->checkpoint->arena;
    fc_torch_tensor t;
    torch_extent *extent = NULL;
    FC_TRY(fc_torch_find_extent(f, v, &t, arena, &extent, b->err));
    if (extent->record.method != FC_ZIP_STORED) {
        return fc_fail(b->err, FC_EUNSUPPORTED, "its record is compressed");
    }
    int64_t *dims = fc_arena_calloc(arena, 2 * (size_t)t.ndim, sizeof *dims);
    fc_chunk *chunk = fc_arena_calloc(arena, 1, sizeof *chunk);
    FC_NEED(dims && chunk, b->err, b->metadata_path);
    memcpy(dims + t.ndim, t.sizes, (size_t)t.ndim * sizeof *dims);
    *chunk = fc_torch_chunk(dims, extent, of->chunks[0].rank);
    out->dtype = t.dtype;
    out->ndim = t.ndim;
    out->shape = dims + t.ndim;
    out->chunks = chunk;
    out->nchunks = fc_is_empty(t.ndim, out->shape) ? 0 : 1;
    return FC_OK;
}

/* Makes an object of the value of an item. The place stays that of the item, whose records `verify` compares. */
static fc_code add_object(const fc_dcp_builder *b, const torch_object *object, const fc_tensor *of, fc_tensor *out) {
    const fc_chunk *item = &of->chunks[0];
    FC_TRY(fc_torch_object_tensor(object, item->place.file, b->checkpoint->arena, out, b->err));
    fc_chunk *chunk = (fc_chunk *)(uintptr_t)out->chunks;
    chunk->place = item->place;
    chunk->rank = item->rank;
    return FC_OK;
}

static fc_code add_sparse(const fc_dcp_builder *b, const torch_file *f, const fc_torch_sparse *sparse,
                          const fc_tensor *of, list *out) {
    torch_object *rest = NULL;
    fc_tensor *made = &out->tensors[out->count];
    const size_t n = sparse->layout->nparts;
    for (size_t i = 0; i < n; i++) {
        FC_TRY(start_part(b, of, sparse->layout->keys[i], &made[i]));
        FC_TRY(add_dense(b, f, sparse->parts[i], of, &made[i]));
    }
    FC_TRY(start_part(b, of, FC_TORCH_SPARSE_KEY, &made[n]));
    FC_TRY(fc_torch_object_new(f, f->p->root, b->checkpoint->arena, &rest, b->err));
    FC_TRY(add_object(b, rest, of, &made[n]));
    out->count += n + 1;
    return FC_OK;
}

/* Adds a tensor of torchao, and its parts next to it. */
static fc_code add_torchao(const fc_dcp_builder *b, const torch_file *f, const fc_torchao *found, const fc_tensor *of,
                           list *out) {
    fc_arena *arena = b->checkpoint->arena;
    const size_t n = of->path.count;
    out->tensors[out->count++] = *of;
    for (size_t i = 0; i < found->count; i++) {
        fc_tensor *made = &out->tensors[out->count++];
        fc_path_element *elements = fc_arena_calloc(arena, n + 1, sizeof *elements);
        const char *name = fc_torchao_key(of->name, found->keys[i], arena);
        FC_NEED(elements && name, b->err, b->metadata_path);
        if (n > 0) {
            memcpy(elements, of->path.elements, n * sizeof *elements);
            elements[n - 1].key = fc_torchao_key(elements[n - 1].key, found->keys[i], arena);
            FC_NEED(elements[n - 1].key, b->err, b->metadata_path);
        }
        *made = (fc_tensor){.name = name, .path = {elements, n}};
        FC_TRY(add_dense(b, f, found->parts[i], of, made));
    }
    return FC_OK;
}

/* Adds what the open item of `of` is. */
static fc_code add_item_value(const fc_dcp_builder *b, const torch_file *f, const fc_tensor *of, list *out) {
    fc_torch_sparse sparse;
    fc_torchao found;
    torch_object *object = NULL;
    if (of->object->refusal && fc_torchao_find(f->p, f->p->root, &found)) {
        return add_torchao(b, f, &found, of, out);
    }
    if (of->object->refusal) {
        FC_TRY(fc_torch_sparse_decode(f->p, f->p->root, &sparse, b->err));
        return add_sparse(b, f, &sparse, of, out);
    }
    FC_TRY(fc_torch_object_new(f, f->p->root, b->checkpoint->arena, &object, b->err));
    fc_tensor *made = &out->tensors[out->count++];
    *made = *of;
    return object->encoding ? add_object(b, object, of, made) : FC_OK;
}

/* Adds the value `of`, as its item says it is. */
static fc_code add_opened(const fc_dcp_builder *b, const fc_tensor *of, list *out) {
    const fc_chunk *chunk = &of->chunks[0];
    const char *path = b->checkpoint->files[chunk->place.file].path;
    torch_file f = {.path = path, .index = chunk->place.file, .fd = -1};
    uint64_t left;
    int fd;
    FC_TRY(fc_open_input(path, &fd, &f.size, b->err));
    f.fd = fd;
    fc_code rc;
    FC_TRY_GOTO(fc_torch_item_open(fd, path, chunk->place.offset, chunk->place.length, &f.item, b->err), rc, out);
    f.p = f.item.pickle;
    f.swap = f.item.big_endian;
    left = (f.p->size + (1 << 16)) * 128;
    f.left = &left;
    rc = add_item_value(b, &f, of, out);
    fc_torch_item_close(&f.item);
out:
    close(fd);
    return rc;
}

static bool is_one_item(const fc_tensor *t) {
    return t->object && t->nchunks == 1 && (!t->detail || t->object->hint == FC_HINT_DEQUANTIZE) &&
           t->chunks[0].detail == DCP_ARCHIVE;
}

static int in_order(const void *a, const void *b) {
    return FC_ORDER(*(const size_t *)a, *(const size_t *)b);
}

static fc_code add_all(const fc_dcp_builder *b, list *out) {
    size_t next = 0;
    for (size_t i = 0; i < b->ntensors; i++) {
        const fc_tensor *t = &b->tensors[i];
        const size_t before = out->count;
        const bool open = next < b->nto_open && b->to_open[next] == i;
        next += open;
        fc_code rc = open && is_one_item(t) ? add_opened(b, t, out) : FC_EUNSUPPORTED;
        if (rc == FC_ENOMEM) {
            return rc;
        }
        if (rc != FC_OK) {
            out->count = before;
            out->tensors[out->count++] = *t;
        }
    }
    return FC_OK;
}

fc_code fc_dcp_open_items(fc_dcp_builder *b) {
    const size_t most = b->ntensors + b->nto_open * FC_TORCHAO_MOST; /* more than a sparse tensor has */
    const char *twice = NULL;
    list all = {0};
    if (b->nto_open == 0) {
        return FC_OK;
    }
    fc_sort_items(b->to_open, b->nto_open, sizeof *b->to_open, in_order); /* classes.c noted some later */
    all.tensors = fc_arena_calloc(b->checkpoint->arena, most, sizeof *all.tensors);
    FC_NEED(all.tensors, b->err, b->metadata_path);
    FC_TRY(add_all(b, &all));
    FC_TRY(fc_find_same_name(all.tensors, all.count, &twice, b->err));
    if (twice) {
        return fc_dcp_fail(b, FC_EUNSUPPORTED, twice, "a part of a tensor and another value have this name");
    }
    b->checkpoint->tensors = b->tensors = all.tensors;
    b->checkpoint->ntensors = b->ntensors = all.count;
    return FC_OK;
}
