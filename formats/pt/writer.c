/*
 * Writes torch.save files: one for a full target, one per rank for a sharded one. A file is a pickle with the nested
 * values, in a zip archive. The engine writes the data; what follows the data of a tensor is written when its CRC is
 * known, the directory at the end. Objects are small and are written into the pickle. A rank's file holds plain local
 * tensors, as tensor-parallel servers load them, and one record that torch.load ignores: the layout of the whole
 * checkpoint (layout.c).
 */
#include "pt/writer.h"

#include "derived/flat_units.h"
#include "fsdpckpt/try.h"
#include "io/file.h"
#include "io/path.h"
#include "torch/object/write.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

typedef struct pt_writer {
    const fc_target *target;
    fc_arena *arena; /* lives as long as the writer */
    const char *staging;
    int64_t ranks;
    /* The current file, from reserve to finish_file. */
    fc_arena *scratch;
    fc_target_file *file;
    const char *path;
    fc_pt_tie *ties;
    const fc_pt_tree *tree; /* while its pickle is written */
    uint64_t *numbers;      /* per item: number of its data record; a view has that of its root */
    uint64_t nstored;
    fc_torch_pickler pickler;
    fc_torch_zip zip;
    char *layout;
    fc_torch_inners inners; /* of the objects in the file */
} pt_writer;

bool fc_pt_is_directory(const fc_target *target) {
    return target->mesh->ndim > 0;
}

size_t fc_pt_files(const fc_target *target) {
    return (size_t)fc_mesh_ranks(target->mesh);
}

static void end_file(pt_writer *w) {
    fc_torch_inners_free(&w->inners);
    free(w->layout);
    fc_torch_pickle_free(&w->pickler);
    fc_torch_zip_free(&w->zip);
    fc_arena_free(w->scratch);
    w->layout = NULL;
    w->scratch = NULL;
    w->path = NULL;
}

fc_code fc_pt_create(const fc_target *target, const char *staging, fc_writer *writer, fc_error *err) {
    fc_arena *arena = fc_arena_new();
    pt_writer *w = arena ? fc_arena_calloc(arena, 1, sizeof *w) : NULL;
    if (w) {
        w->target = target;
        w->arena = arena;
        w->ranks = fc_mesh_ranks(target->mesh);
        w->staging = fc_arena_strndup(arena, staging, strlen(staging));
    }
    if (!w || !w->staging) {
        fc_arena_free(arena);
        return fc_no_memory(err, staging);
    }
    writer->state = w;
    return FC_OK;
}

/* Numbers the stored items in order. A view gets the number of its root. */
static fc_code number_items(pt_writer *w, fc_error *err) {
    const fc_target_file *file = w->file;
    w->numbers = fc_arena_calloc(w->scratch, file->nitems, sizeof *w->numbers);
    FC_NEED(w->numbers, err, w->staging);
    w->nstored = 0;
    for (size_t i = 0; i < file->nitems; i++) {
        if (!w->target->tensors[file->items[i].tensor].source->object && w->ties[i].root == i) {
            w->numbers[i] = w->nstored++;
        }
    }
    for (size_t i = 0; i < file->nitems; i++) {
        w->numbers[i] = w->numbers[w->ties[i].root];
    }
    return FC_OK;
}

static uint64_t elements_of(const pt_writer *w, size_t item) {
    const fc_target_item *it = &w->file->items[item];
    return fc_target_item_bytes(w->target, it) / fc_dtype_size(w->target->tensors[it->tensor].dtype);
}

static void write_tensor(void *context, fc_torch_pickler *p, uint32_t item) {
    const pt_writer *w = context;
    const fc_target_item *it = &w->file->items[item];
    const fc_target_tensor *t = &w->target->tensors[it->tensor];
    fc_torch_tensor_out out = {.dtype = t->dtype,
                               .key = w->numbers[item],
                               .numel = elements_of(w, w->ties[item].root),
                               .offset = w->ties[item].offset,
                               .ndim = t->source->ndim,
                               .sizes = it->dims + t->source->ndim,
                               .strides = w->ties[item].strides};
    fc_torch_pickle_tensor(p, &out);
}

static fc_code write_object(pt_writer *w, fc_torch_pickler *p, const fc_target_tensor *t, fc_error *err) {
    bool readable;
    if (strcmp(t->source->object->encoding, FC_TORCH_OBJECT) != 0) {
        return fc_torch_write_object(w->target, t, p, err);
    }
    FC_TRY(fc_torch_copy_object(w->target, t->source, w->nstored + w->inners.count, p, &w->inners, &readable, err));
    return readable ? FC_OK : FC_EUNSUPPORTED; /* `err` says why */
}

static fc_code write_leaf(void *context, fc_torch_pickler *p, uint32_t item, fc_error *err) {
    pt_writer *w = context;
    const fc_target_tensor *t = &w->target->tensors[w->file->items[item].tensor];
    if (!t->source->object) {
        if (w->target->flat_state && fc_is_flat_parameter(t->source)) {
            fc_pt_write_sharded(w->target, w->file, item, write_tensor, w, p);
        } else {
            write_tensor(w, p, item);
        }
        return FC_OK;
    }
    fc_code rc = write_object(w, p, t, err);
    return rc == FC_OK ? rc : fc_context(err, rc, "object %.256s", t->name);
}

static fc_code write_sparse(void *context, fc_torch_pickler *p, uint32_t node, bool *written, fc_error *err) {
    pt_writer *w = context;
    return fc_pt_write_sparse(w->target, w->file, w->tree, node, p, write_tensor, w, written, err);
}

static fc_code write_pickle(pt_writer *w, fc_error *err) {
    fc_pt_tree tree;
    fc_torch_pickle_begin(&w->pickler, 2);
    fc_code rc;
    FC_TRY_GOTO(fc_pt_tree_build(w->target, w->file, &tree, err), rc, out);
    w->tree = &tree;
    rc = fc_pt_tree_write(&tree, &w->pickler, write_leaf, write_sparse, w, err);
    w->tree = NULL;
out:
    fc_pt_tree_free(&tree);
    return rc == FC_OK ? fc_torch_pickle_end(&w->pickler, err) : rc;
}

/* Lays out the archive and sets the offsets of the data for the engine. */
static fc_code lay_out(pt_writer *w, fc_error *err) {
    fc_target_file *file = w->file;
    FC_TRY(fc_torch_zip_begin(&w->zip, "archive", w->pickler.bytes, w->pickler.size, err));
    for (size_t i = 0; i < file->nitems; i++) {
        fc_target_item *item = &file->items[i];
        bool object = w->target->tensors[item->tensor].source->object;
        if (!object && w->ties[i].root == i) {
            FC_TRY(fc_torch_zip_add_data(&w->zip, fc_target_item_bytes(w->target, item), &item->offset, err));
        } else {
            item->owned = false; /* it is in the pickle, or in the record of another item */
            item->offset = 0;
        }
    }
    FC_TRY(fc_torch_inners_add(&w->inners, &w->zip, err));
    if (w->layout) {
        FC_TRY(fc_torch_zip_add(&w->zip, FC_PT_LAYOUT, w->layout, strlen(w->layout), err));
    }
    return fc_torch_zip_end(&w->zip, err);
}

static fc_code open_again(const pt_writer *w, int *fd, fc_error *err) {
    *fd = fc_open(w->path, O_WRONLY, 0);
    return *fd < 0 ? fc_fail_errno(err, errno, "%s: cannot be reopened", w->path) : FC_OK;
}

/* Creates the file, with all that is before the data of the first tensor. */
static fc_code create_file(const pt_writer *w, fc_error *err) {
    int fd = -1;
    FC_TRY(fc_create_zeros(w->path, w->zip.length, err));
    FC_TRY(open_again(w, &fd, err));
    return fc_close_written(fd, fc_torch_zip_write_first(&w->zip, fd, w->path, err), w->path, err);
}

fc_code fc_pt_reserve(fc_writer *writer, fc_target_file *file, fc_error *err) {
    pt_writer *w = writer->state;
    end_file(w);
    w->scratch = fc_arena_new();
    w->file = file;
    w->path = w->staging;
    if (w->scratch && w->target->mesh->ndim > 0) {
        w->path = fc_arena_printf(w->scratch, "%s/model_world_size_%" PRId64 "_rank_%" PRIu32 ".pt", w->staging,
                                  w->ranks, file->rank);
    }
    file->path = w->path;
    FC_NEED((w->scratch && w->path), err, w->staging);
    FC_TRY(fc_pt_find_ties(w->target, file, w->scratch, &w->ties, err));
    FC_TRY(number_items(w, err));
    FC_TRY(write_pickle(w, err));
    if (w->target->mesh->ndim > 0 && !w->target->flat_state) {
        FC_TRY(fc_pt_layout_json(w->target, file, &w->layout, err));
    }
    FC_TRY(lay_out(w, err));
    return create_file(w, err);
}

fc_code fc_pt_finish_item(fc_writer *writer, const fc_target_item *item, int fd, fc_error *err) {
    pt_writer *w = writer->state;
    const uint64_t number = w->numbers[item - w->file->items];
    fc_torch_zip_set_crc32(&w->zip, number, item->crc32);
    return fc_torch_zip_write_after(&w->zip, number, fd, w->path, err);
}

fc_code fc_pt_finish_file(fc_writer *writer, const fc_target_file *file, fc_error *err) {
    pt_writer *w = writer->state;
    int fd = -1;
    (void)file;
    FC_TRY(open_again(w, &fd, err));
    return fc_close_written(fd, fc_torch_zip_write_last(&w->zip, fd, w->path, err), w->path, err);
}

fc_code fc_pt_finish(fc_writer *writer, const uint64_t *digests, fc_error *err) {
    (void)writer;
    (void)digests;
    (void)err;
    return FC_OK; /* no file spans the others */
}

void fc_pt_destroy(fc_writer *writer) {
    pt_writer *w = writer->state;
    if (w) {
        end_file(w);
        fc_arena_free(w->arena);
        writer->state = NULL;
    }
}
