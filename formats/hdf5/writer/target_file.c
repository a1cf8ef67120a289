/*
 * Makes one target file, a shard file or the full file. Its headers are an image in memory from fc_format.reserve until
 * fc_format.finish_file, when the digests and the offsets of all chunks are known. A checkpoint of a thousand ranks has
 * a million datasets, so the time per dataset matters.
 */
#include "fsdpckpt/select.h"
#include "hdf5/h5.h"
#include "hdf5/writer/writer.h"

#include "fsdpckpt/try.h"
#include "hdf5/writer/groups.h"
#include "hdf5/writer/image_chunks.h"
#include "hdf5/writer/image_map.h"

#include <stdlib.h>

/* A file under construction. */
typedef struct file_writer {
    fc_h5_writer *w;
    fc_h5_image *image;
    fc_h5_groups groups;
    fc_h5_list list;
    fc_arena *scratch; /* for paths */
} file_writer;

/* Adds a copy: a virtual dataset for bytes that another rank's file stores. */
static fc_code add_copy(file_writer *m, const fc_target_item *item, fc_error *err) {
    const fc_target_tensor *tensor = &m->w->target->tensors[item->tensor];
    const int ndim = tensor->source->ndim;
    const int64_t origin[FC_MAX_DIMS] = {0};
    char owner[FC_H5_SHARD_NAME];
    const char *path = fc_h5_tree_path(&m->w->tree, m->w->tree.leaves[item->tensor], m->scratch);
    FC_NEED(path, err, m->image->path);
    fc_h5_shard_name(m->w, item->owner, owner);
    fc_h5_list_begin(&m->list);
    fc_h5_list_add(&m->list, owner, path, NULL, ndim, origin, item->dims + ndim);
    const fc_h5_heap_id list = fc_h5_list_end(&m->list, m->image);
    fc_h5_image_virtual(m->image, tensor->dtype, &list);
    return FC_OK;
}

static fc_h5_grid grid_of(const fc_target *target, const fc_target_item *item) {
    const fc_target_tensor *tensor = &target->tensors[item->tensor];
    return (fc_h5_grid){.ndim = tensor->source->ndim,
                        .element = fc_dtype_size(tensor->dtype),
                        .shape = item->dims + tensor->source->ndim,
                        .chunk = item->chunk};
}

/* Adds the storage of an item. The index of its chunks must already be in the image. */
static fc_code add_storage(file_writer *m, fc_target_item *item, bool copy, fc_h5_item_fields *fields, fc_error *err) {
    if (copy) {
        return add_copy(m, item, err);
    }
    if (item->chunk) {
        fc_h5_image_chunked(m->image, item->offset, m->w->target->compress);
    } else {
        const uint64_t bytes = fc_target_item_bytes(m->w->target, item);
        fields->address = fc_h5_image_contiguous(m->image, bytes);
    }
    return FC_OK;
}

static fc_code add_item(file_writer *m, fc_target_item *item, fc_h5_item_fields *fields, fc_error *err) {
    const fc_h5_writer *w = m->w;
    const fc_target_tensor *tensor = &w->target->tensors[item->tensor];
    const int ndim = tensor->source->ndim;
    const fc_box box = {ndim, item->dims, item->dims + ndim};
    const bool copy = !item->owned && fc_box_volume(&box) > 0;
    fc_h5_holder holder = {.image = m->image, .messages = &m->image->objects};
    item->offset = 0;
    if (item->chunk) {
        const fc_h5_grid grid = grid_of(w->target, item);
        item->offset =
            fc_h5_image_add_index(m->image, &grid); /* in the order of the tree, so that the chunks are, too */
    }
    const size_t start = fc_h5_object_begin(m->image);
    *fields = (fc_h5_item_fields){SIZE_MAX, SIZE_MAX};
    fc_code rc;
    FC_TRY_GOTO(fc_h5_image_shape(m->image, tensor->dtype, ndim, box.sizes, err), rc, out);
    FC_TRY_GOTO(add_storage(m, item, copy, fields, err), rc, out);
    FC_TRY_GOTO(fc_h5_value_attributes(w, &holder, tensor, err), rc, out);
    if (w->target->mesh->ndim > 0 && !tensor->source->object) {
        fc_h5_box_attributes(&holder, tensor, item, copy);
    }
    if (!copy) {
        fc_h5_set_number(&holder, FC_H5_A_CRC64, 0); /* set by fc_h5_finish_file */
        fields->crc64 = holder.last;
    }
    fc_h5_object_end(m->image, start);
    m->groups.made[w->tree.leaves[item->tensor]] = start + 1;
out:
    return rc == FC_OK ? rc : fc_context(err, rc, "tensor \"%s\"", tensor->name);
}

static fc_code choose_nodes(file_writer *m, const fc_target_file *file, fc_error *err) {
    fc_h5_grid *grids = calloc(file->nitems + 1, sizeof *grids);
    size_t count = 0;
    for (size_t i = 0; grids && i < file->nitems; i++) {
        if (file->items[i].chunk) {
            grids[count++] = grid_of(m->w->target, &file->items[i]);
        }
    }
    if (count > 0) {
        fc_h5_image_choose_nodes(m->image, grids, count);
    }
    free(grids);
    return grids ? FC_OK : fc_no_memory(err, file->path);
}

/* Adds the items in the order of the tree. A file may lack some tensors. */
static fc_code add_items(file_writer *m, fc_target_file *file, fc_error *err) {
    fc_h5_writer *w = m->w;
    fc_target_item **of_tensor = calloc(w->target->ntensors + 1, sizeof(fc_target_item *));
    fc_code rc;
    FC_TRY_GOTO(of_tensor ? FC_OK : fc_no_memory(err, file->path), rc, out);
    for (size_t i = 0; i < file->nitems; i++) {
        of_tensor[file->items[i].tensor] = &file->items[i];
    }
    for (size_t i = 0; i < w->target->ntensors; i++) {
        fc_target_item *item = of_tensor[w->tree.order[i]];
        FC_TRY_GOTO(item ? add_item(m, item, &w->fields[item - file->items], err) : FC_OK, rc, out);
    }
out:
    free(of_tensor);
    return rc;
}

/* Adds the root and all groups. The tables of a full file get their rows, which fill_tables sets. */
static fc_code add_root(file_writer *m, const fc_target_file *file, fc_error *err) {
    fc_h5_writer *w = m->w;
    const bool full = w->target->mesh->ndim == 0;
    FC_TRY(full ? fc_h5_note_boxes(&w->written, w->target, file, m->image, w->fields, err) : FC_OK);
    return fc_h5_make_root(w, m->image, &m->groups, full ? -1 : (int64_t)file->rank, err);
}

static fc_code name_file(fc_h5_writer *w, fc_target_file *file, fc_error *err) {
    char name[FC_H5_SHARD_NAME];
    file->path = w->staging;
    if (w->target->mesh->ndim == 0) {
        return FC_OK;
    }
    fc_h5_shard_name(w, file->rank, name);
    return fc_h5_staged_path(w, name, &file->path, err);
}

/* Sets the offsets of contiguous items in the file; the offsets of other items have another meaning. */
static void set_offsets(const fc_h5_writer *w, fc_target_file *file) {
    for (size_t i = 0; i < file->nitems; i++) {
        if (w->fields[i].address != SIZE_MAX) {
            file->items[i].offset = fc_load_little(w->image.objects.data + w->fields[i].address, 8);
        }
    }
}

fc_code fc_h5_reserve(fc_writer *writer, fc_target_file *file, fc_error *err) {
    fc_h5_writer *w = writer->state;
    file_writer m = {.w = w, .image = &w->image, .scratch = fc_arena_new()};
    fc_h5_image_free(&w->image);
    free(w->fields);
    w->fields = calloc(file->nitems + 1, sizeof *w->fields);
    fc_code rc;
    FC_TRY_GOTO(name_file(w, file, err), rc, out);
    fc_h5_image_open(&w->image, file->path);
    FC_TRY_GOTO(fc_h5_groups_new(&w->tree, file->path, &m.groups, err), rc, out);
    FC_TRY_GOTO(m.scratch && w->fields ? FC_OK : fc_no_memory(err, file->path), rc, out);
    FC_TRY_GOTO(choose_nodes(&m, file, err), rc, out);
    FC_TRY_GOTO(add_items(&m, file, err), rc, out);
    FC_TRY_GOTO(add_root(&m, file, err), rc, out);
    FC_TRY_GOTO(fc_h5_image_lay_out(&w->image, err), rc, out);
    FC_TRY_GOTO(fc_h5_image_create(&w->image, err), rc, out);
    set_offsets(w, file);
out:
    fc_h5_groups_free(&m.groups);
    fc_h5_list_free(&m.list);
    fc_arena_free(m.scratch);
    return rc;
}

fc_code fc_h5_place(fc_writer *writer, const fc_target_item *item, const int64_t *start, bool raw, uint64_t size,
                    uint64_t *offset, fc_error *err) {
    fc_h5_writer *w = writer->state;
    return fc_h5_image_place(&w->image, item->offset, start, raw, size, offset, err);
}

/* Sets the rows of the tables of a full file. */
static fc_code fill_tables(fc_h5_writer *w, const fc_target_file *file, fc_error *err) {
    uint64_t *digests = calloc(w->target->ntensors + 1, sizeof *digests);
    fc_code rc;
    FC_TRY_GOTO(digests ? FC_OK : fc_no_memory(err, file->path), rc, out);
    for (size_t i = 0; i < file->nitems; i++) {
        digests[file->items[i].tensor] = file->items[i].crc64;
    }
    FC_TRY_GOTO(fc_h5_note_boxes(&w->written, w->target, file, &w->image, w->fields, err), rc, out);
    rc = fc_h5_tables_fill(w, digests, &w->image, err);
out:
    free(digests);
    return rc;
}

fc_code fc_h5_finish_file(fc_writer *writer, const fc_target_file *file, fc_error *err) {
    fc_h5_writer *w = writer->state;
    for (size_t i = 0; i < file->nitems; i++) {
        if (w->fields[i].crc64 != SIZE_MAX) {
            fc_store_little(w->image.objects.data + w->fields[i].crc64, file->items[i].crc64, 8);
        }
    }
    const bool full = w->target->mesh->ndim == 0;
    fc_h5_file_row row = {.header_crc64_at = w->image.objects_at + w->image.header_crc64};
    fc_code rc;
    FC_TRY_GOTO(full ? fill_tables(w, file, err) : FC_OK, rc, out);
    FC_TRY_GOTO(fc_h5_image_write(&w->image, &row.header_crc64, err), rc, out);
    row.size = w->image.file_size;
    rc = full ? FC_OK : fc_h5_note_file(&w->written, w->target, file, &w->image, w->fields, &row, err);
out:
    fc_h5_image_free(&w->image);
    return rc;
}
