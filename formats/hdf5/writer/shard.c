/*
 * A shard file without compressed tensors: its headers as an image, in memory from fc_format.reserve to
 * fc_format.finish_file, when the digests are known. A checkpoint of a thousand ranks has a million datasets, so what
 * one costs is what the whole costs.
 */
#include "fsdpckpt/select.h"
#include "hdf5/writer/writer.h"

#include "base/try.h"
#include "hdf5/writer/groups.h"
#include "hdf5/writer/image_map.h"

#include <stdlib.h>
#include <string.h>

/* What is in use while one file is put together. */
typedef struct making {
    fc_h5_writer *w;
    fc_h5_image *image;
    fc_h5_groups groups;
    fc_h5_list list;
    fc_arena *scratch; /* paths */
} making;

/* A copy: bytes that another rank's file stores, seen through a virtual dataset. */
static fc_code add_copy(making *m, const fc_target_item *item, fc_error *err) {
    const fc_target_tensor *tensor = &m->w->target->tensors[item->tensor];
    const int ndim = tensor->source->ndim;
    const int64_t origin[FC_MAX_DIMS] = {0};
    char owner[FC_H5_SHARD_NAME];
    const char *path = fc_h5_tree_path(&m->w->tree, m->w->tree.leaves[item->tensor], m->scratch);
    if (!path) {
        return fc_no_memory(err, m->image->path);
    }
    fc_h5_shard_name(m->w, item->owner, owner);
    fc_h5_list_begin(&m->list);
    fc_h5_list_add(&m->list, owner, path, ndim, origin, item->dims + ndim);
    const fc_h5_heap_id list = fc_h5_list_end(&m->list, m->image);
    fc_h5_image_virtual(m->image, tensor->dtype, &list);
    return FC_OK;
}

/* Writes the object of an item into the image. `*crc64_at`: its digest field, to be set by fc_h5_shard_finish. */
static fc_code describe_item(making *m, fc_target_item *item, size_t *crc64_at, fc_error *err) {
    const fc_h5_writer *w = m->w;
    const fc_target_tensor *tensor = &w->target->tensors[item->tensor];
    const int ndim = tensor->source->ndim;
    const fc_box box = {ndim, item->dims, item->dims + ndim};
    const bool copy = !item->owned && fc_box_volume(&box) > 0;
    fc_h5_holder holder = {.image = m->image, .messages = &m->image->objects};
    FC_TRY(fc_h5_image_shape(m->image, tensor->dtype, ndim, box.sizes, err));
    if (copy) {
        FC_TRY(add_copy(m, item, err));
    } else {
        item->offset = fc_h5_image_contiguous(m->image, fc_target_item_bytes(w->target, item));
    }
    FC_TRY(fc_h5_value_attributes(w, &holder, tensor, err));
    if (!tensor->source->object) {
        FC_TRY(fc_h5_box_attributes(&holder, tensor, item, copy, err));
    }
    if (!copy) {
        FC_TRY(fc_h5_set_number(&holder, FC_H5_A_CRC64, 0, err));
        *crc64_at = holder.last;
    }
    return FC_OK;
}

static fc_code add_item(making *m, fc_target_item *item, size_t *crc64_at, fc_error *err) {
    const size_t start = fc_h5_object_begin(m->image, 0);
    item->offset = 0;
    *crc64_at = SIZE_MAX;
    FC_TRY_CONTEXT(describe_item(m, item, crc64_at, err), err, "tensor \"%s\"",
                   m->w->target->tensors[item->tensor].name);
    fc_h5_object_end(m->image, start);
    m->groups.made[m->w->tree.leaves[item->tensor]] = start + 1;
    return FC_OK;
}

/* The items in the order of the tree; a file may lack some tensors. */
static fc_code add_items(making *m, fc_target_file *file, fc_error *err) {
    fc_h5_writer *w = m->w;
    fc_target_item **of_tensor = calloc(w->target->ntensors + 1, sizeof(fc_target_item *));
    fc_code rc;
    FC_TRY_GOTO(of_tensor ? FC_OK : fc_no_memory(err, file->path), rc, out);
    for (size_t i = 0; i < file->nitems; i++) {
        of_tensor[file->items[i].tensor] = &file->items[i];
    }
    for (size_t i = 0; i < w->target->ntensors; i++) {
        fc_target_item *item = of_tensor[w->tree.order[i]];
        FC_TRY_GOTO(item ? add_item(m, item, &w->crc64_at[item - file->items], err) : FC_OK, rc, out);
    }
out:
    free(of_tensor);
    return rc;
}

static fc_code add_root(making *m, const fc_target_file *file, fc_error *err) {
    fc_h5_buffer root = {NULL, 0, 0, false};
    fc_h5_holder holder = {.image = m->image, .messages = &root};
    fc_code rc;
    FC_TRY_GOTO(fc_h5_root_attributes(m->w, &holder, file->rank, err), rc, out);
    FC_TRY_GOTO(fc_h5_groups_find(&m->groups, m->image, err), rc, out);
    fc_h5_image_close_heap(m->image);
    rc = fc_h5_groups_make(&m->groups, m->image, &root, holder.last, err);
out:
    free(root.data);
    return rc;
}

fc_code fc_h5_shard_reserve(fc_h5_writer *w, fc_target_file *file, fc_error *err) {
    making m = {.w = w, .image = &w->image, .scratch = fc_arena_new()};
    fc_h5_image_free(&w->image);
    free(w->crc64_at);
    w->crc64_at = calloc(file->nitems + 1, sizeof *w->crc64_at);
    fc_h5_image_open(&w->image, file->path);
    fc_code rc;
    FC_TRY_GOTO(fc_h5_groups_new(&w->tree, file->path, &m.groups, err), rc, out);
    if (!m.scratch || !w->crc64_at) {
        rc = fc_no_memory(err, file->path);
        goto out;
    }
    FC_TRY_GOTO(add_items(&m, file, err), rc, out);
    FC_TRY_GOTO(add_root(&m, file, err), rc, out);
    FC_TRY_GOTO(fc_h5_image_lay_out(&w->image, err), rc, out);
    FC_TRY_GOTO(fc_h5_image_create(&w->image, err), rc, out);
    for (size_t i = 0; i < file->nitems; i++) {
        if (w->crc64_at[i] != SIZE_MAX && fc_target_item_bytes(w->target, &file->items[i]) > 0) {
            file->items[i].offset += w->image.data_at;
        }
    }
out:
    fc_h5_groups_free(&m.groups);
    fc_h5_list_free(&m.list);
    fc_arena_free(m.scratch);
    return rc;
}

fc_code fc_h5_shard_finish(fc_h5_writer *w, const fc_target_file *file, fc_error *err) {
    for (size_t i = 0; i < file->nitems; i++) {
        if (w->crc64_at[i] != SIZE_MAX) {
            fc_h5_store(w->image.objects.data + w->crc64_at[i], file->items[i].crc64, 8);
        }
    }
    fc_h5_file_row row = {.size = w->image.file_size, .header_crc64_at = w->image.objects_at + w->image.header_crc64};
    fc_code rc;
    FC_TRY_GOTO(fc_h5_image_write(&w->image, &row.header_crc64, err), rc, out);
    rc = fc_h5_note_file(&w->written, w->target, file, &row, err);
out:
    fc_h5_image_free(&w->image);
    return rc;
}
