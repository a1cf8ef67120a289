/*
 * Writing HDF5: a target becomes the headers of the full file or of one file a rank, with a reserved extent
 * for each stored tensor. The engine fills the extents afterwards; nothing here touches tensor data.
 * The schema is docs/HDF5_SCHEMA.md.
 */
#include "hdf5/writer/writer.h"

#include "base/try.h"
#include "hdf5/h5.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *layout_name(const fc_mesh *mesh) {
    static const struct {
        const char *dims, *layout;
    } known[] = {
        {"", "full"},
        {"dp ", "fsdp"},
        {"tp ", "tp"},
        {"dp tp ", "fsdp+tp"},
        {"replicate ", "ddp"},
        {"replicate tp ", "ddp+tp"},
        {"replicate dp ", "hsdp"},
        {"replicate dp tp ", "hsdp+tp"},
    };
    char dims[FC_MAX_MESH_DIMS * (sizeof mesh->names[0] + 1) + 1] = "";
    int used = 0;
    for (int i = 0; i < mesh->ndim; i++) {
        used += snprintf(dims + used, sizeof dims - (size_t)used, "%.16s ", mesh->names[i]);
    }
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        if (strcmp(dims, known[i].dims) == 0) {
            return known[i].layout;
        }
    }
    return "sharded";
}

/* A copy: bytes that another rank's file stores, seen through a virtual dataset. */
static fc_code add_copy(fc_h5_writer *w, fc_h5_out *out, const fc_target_item *item, hid_t *id, fc_error *err) {
    const fc_target_tensor *tensor = &w->target->tensors[item->tensor];
    const int ndim = tensor->source->ndim;
    const int64_t *sizes = item->dims + ndim;
    const int64_t origin[FC_MAX_DIMS] = {0};
    uint32_t node = w->tree.leaves[item->tensor];
    char owner[FC_H5_SHARD_NAME];
    fc_h5_shard_name(w, item->owner, owner);
    fc_h5_mapping whole = {owner, origin, sizes, NULL};
    hid_t list = H5I_INVALID_HID;
    fc_arena *scratch = fc_arena_new();
    const char *source = scratch ? fc_h5_tree_path(&w->tree, node, scratch) : NULL;
    fc_code rc;
    FC_TRY_GOTO(source ? fc_h5_out_mappings(out, &list, err) : fc_no_memory(err, NULL), rc, out);
    FC_TRY_GOTO(fc_h5_out_map(out, list, ndim, sizes, &whole, source, err), rc, out);
    rc = fc_h5_out_virtual(out, node, tensor->dtype, ndim, sizes, list, id, err);
out:
    if (list >= 0) {
        H5Pclose(list);
    }
    fc_arena_free(scratch);
    return rc;
}

static fc_code add_item(fc_h5_writer *w, fc_h5_out *out, fc_target_item *item, fc_h5_patch *patch, fc_error *err) {
    const fc_target_tensor *tensor = &w->target->tensors[item->tensor];
    const int ndim = tensor->source->ndim;
    const fc_box box = {ndim, item->dims, item->dims + ndim};
    const bool copy = !item->owned && fc_box_volume(&box) > 0;
    const uint32_t node = w->tree.leaves[item->tensor];
    hid_t id = H5I_INVALID_HID;
    item->offset = 0;
    fc_code rc = FC_OK;
    if (copy) {
        FC_TRY_GOTO(add_copy(w, out, item, &id, err), rc, out);
    } else if (item->chunk) {
        item->offset = w->ordinal++; /* items come in the order of the tree, and so shall their chunks */
        FC_TRY_GOTO(
            fc_h5_out_chunked(out, node, tensor->dtype, ndim, box.sizes, item->chunk, w->target->compress, &id, err),
            rc, out);
    } else {
        FC_TRY_GOTO(fc_h5_out_stored(out, node, tensor->dtype, ndim, box.sizes, &id, &item->offset, err), rc, out);
    }
    fc_h5_holder holder = fc_h5_held(out, id);
    FC_TRY_GOTO(fc_h5_value_attributes(w, &holder, tensor, err), rc, out);
    if (w->target->mesh->ndim > 0 && !tensor->source->object) {
        FC_TRY_GOTO(fc_h5_box_attributes(&holder, tensor, item, copy, err), rc, out);
    }
    if (!copy) {
        FC_TRY_GOTO(fc_h5_set_number(&holder, FC_H5_A_CRC64, 0, err), rc, out);
        FC_TRY_GOTO(fc_h5_out_address(out, id, &patch->object, err), rc, out);
    }
out:
    if (id >= 0) {
        H5Dclose(id);
    }
    return rc == FC_OK ? rc : fc_context(err, rc, "tensor \"%s\"", tensor->name);
}

/* The items in the order of the tree; a part may lack some tensors. */
static fc_code add_items(fc_h5_writer *w, fc_h5_out *out, fc_target_file *file, fc_error *err) {
    fc_target_item **of_tensor = calloc(w->target->ntensors + 1, sizeof(fc_target_item *));
    fc_code rc;
    FC_TRY_GOTO(of_tensor ? FC_OK : fc_no_memory(err, out->path), rc, out);
    for (size_t i = 0; i < file->nitems; i++) {
        of_tensor[file->items[i].tensor] = &file->items[i];
    }
    for (size_t i = 0; i < w->target->ntensors; i++) {
        fc_target_item *item = of_tensor[w->tree.order[i]];
        FC_TRY_GOTO(item ? add_item(w, out, item, &w->patches[item - file->items], err) : FC_OK, rc, out);
    }
out:
    free(of_tensor);
    return rc;
}

fc_code fc_h5_create(const fc_target *target, const char *staging, fc_writer *writer, fc_error *err) {
    writer->state = NULL;
    fc_arena *arena = fc_arena_new();
    fc_h5_writer *w = arena ? fc_arena_calloc(arena, 1, sizeof *w) : NULL;
    if (w) {
        w->target = target;
        w->arena = arena;
        w->ranks = fc_mesh_ranks(target->mesh);
        w->layout = layout_name(target->mesh);
        w->dataset = H5I_INVALID_HID;
        w->image.fd = -1;
        w->staging = fc_arena_strndup(arena, staging, strlen(staging));
    }
    fc_code rc = w && w->staging ? fc_h5_tree_build(target, arena, &w->tree, err) : fc_no_memory(err, staging);
    if (rc != FC_OK) {
        fc_arena_free(arena);
        return rc;
    }
    writer->state = w;
    return FC_OK;
}

/* Writes the headers into the open file. */
static fc_code add_headers(fc_h5_writer *w, fc_target_file *file, fc_error *err) {
    fc_h5_holder root = fc_h5_held(&w->out, w->out.file);
    FC_TRY(fc_h5_root_attributes(w, &root, w->target->mesh->ndim > 0 ? (int64_t)file->rank : -1, err));
    return add_items(w, &w->out, file, err);
}

/* Through libhdf5: the full file, and any with compressed tensors. */
static fc_code reserve_by_library(fc_h5_writer *w, fc_target_file *file, bool chunked, fc_error *err) {
    fc_h5_estimate estimate = {0};
    for (size_t i = 0; i < file->nitems; i++) {
        fc_h5_estimate_value(w, &estimate, file->items[i].tensor, !file->items[i].owned);
        if (file->items[i].chunk) {
            fc_h5_estimate_chunks(w, &estimate, &file->items[i]);
        }
    }
    fc_h5_out_release(&w->out);
    free(w->patches);
    w->patches = calloc(file->nitems + 1, sizeof *w->patches);
    if (!w->patches) {
        return fc_no_memory(err, file->path);
    }
    FC_TRY(fc_h5_out_open(&w->out, &w->tree, file->path, &estimate, err));
    fc_code rc = add_headers(w, file, err);
    w->open = rc == FC_OK && chunked;
    return w->open ? rc : fc_h5_out_close(&w->out, rc, err);
}

fc_code fc_h5_reserve(fc_writer *writer, fc_target_file *file, fc_error *err) {
    fc_h5_writer *w = writer->state;
    const bool sharded = w->target->mesh->ndim > 0;
    bool chunked = false;
    file->path = w->staging;
    if (sharded) {
        char name[FC_H5_SHARD_NAME];
        fc_h5_shard_name(w, file->rank, name);
        FC_TRY(fc_h5_staged_path(w, name, &file->path, err));
    }
    for (size_t i = 0; i < file->nitems; i++) {
        chunked |= file->items[i].chunk != NULL;
    }
    w->imaged = sharded && !chunked;
    w->written.compressed |= chunked;
    return w->imaged ? fc_h5_shard_reserve(w, file, err) : reserve_by_library(w, file, chunked, err);
}

/* The items' digests are known by now. A dataset's place in the file is 0 for those that are copies. */
static fc_code finish_by_library(fc_h5_writer *w, const fc_target_file *file, fc_error *err) {
    size_t count = 0;
    FC_TRY(fc_h5_end_chunks(w, FC_OK, err));
    for (size_t i = 0; i < file->nitems; i++) {
        if (w->patches[i].object != 0) {
            w->patches[count++] = (fc_h5_patch){w->patches[i].object, file->items[i].crc64};
        }
    }
    return fc_h5_out_finish_file(&w->out, w->patches, count, err);
}

fc_code fc_h5_finish_file(fc_writer *writer, const fc_target_file *file, fc_error *err) {
    fc_h5_writer *w = writer->state;
    return w->imaged ? fc_h5_shard_finish(w, file, err) : finish_by_library(w, file, err);
}

const char *fc_h5_index(const fc_target *target) {
    return target->mesh->ndim > 0 ? "index.h5" : NULL;
}

fc_code fc_h5_finish(fc_writer *writer, const uint64_t *digests, fc_error *err) {
    fc_h5_writer *w = writer->state;
    return w->target->mesh->ndim > 0 ? fc_h5_write_index(w, digests, err) : FC_OK;
}

void fc_h5_destroy(fc_writer *writer) {
    fc_h5_writer *w = writer->state;
    if (w) {
        fc_h5_end_chunks(w, FC_EINTERRUPTED, NULL);
        fc_h5_out_release(&w->out);
        free(w->patches);
        fc_h5_image_free(&w->image);
        free(w->crc64_at);
        fc_h5_written_free(&w->written);
        fc_arena_free(w->arena);
        writer->state = NULL;
    }
}
