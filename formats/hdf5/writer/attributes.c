/*
 * The names of target files, and the attributes that all of them give a target and its values. docs/HDF5_SCHEMA.md
 * lists them.
 */
#include "checkpoint/path.h"
#include "hdf5/writer/writer.h"

#include "fsdpckpt/format.h"
#include "fsdpckpt/try.h"

#include <stdio.h>

void fc_h5_shard_name(const fc_h5_writer *w, int64_t rank, char name[FC_H5_SHARD_NAME]) {
    snprintf(name, FC_H5_SHARD_NAME, "shard-%05lld-of-%05lld.h5", (long long)rank, (long long)w->ranks);
}

fc_code fc_h5_staged_path(fc_h5_writer *w, const char *name, const char **path, fc_error *err) {
    *path = fc_arena_printf(w->arena, "%s/%s", w->staging, name);
    return *path ? FC_OK : fc_no_memory(err, w->staging);
}

static void set_mesh(const fc_h5_writer *w, fc_h5_holder *root) {
    const fc_mesh *mesh = w->target->mesh;
    const char *names[FC_MAX_MESH_DIMS];
    for (int i = 0; i < mesh->ndim; i++) {
        names[i] = mesh->names[i];
    }
    fc_h5_set_ints(root, FC_H5_A_MESH_SHAPE, (size_t)mesh->ndim, mesh->sizes);
    fc_h5_set_texts(root, FC_H5_A_MESH_NAMES, (size_t)mesh->ndim, names);
    fc_h5_set_number(root, FC_H5_A_WORLD_SIZE, (uint64_t)w->ranks);
}

void fc_h5_root_attributes(const fc_h5_writer *w, fc_h5_holder *root, int64_t rank) {
    fc_h5_set_number(root, FC_H5_A_SCHEMA, FC_H5_SCHEMA);
    fc_h5_set_text(root, FC_H5_A_PRODUCER, FC_H5_PRODUCER);
    fc_h5_set_text(root, FC_H5_A_LAYOUT, w->layout);
    if (w->target->mesh->ndim > 0) {
        set_mesh(w, root);
    }
    if (rank >= 0) {
        fc_h5_set_number(root, FC_H5_A_RANK, (uint64_t)rank);
    }
    fc_h5_set_number(root, FC_H5_A_HEADER_CRC64, 0); /* set when everything else is known */
}

fc_code fc_h5_placements_text(const fc_h5_writer *w, const fc_target_tensor *tensor, const char *file,
                              char text[FC_H5_PLACEMENTS], fc_error *err) {
    int needed = fc_placements_format(w->target->mesh->ndim, tensor->placements, text, FC_H5_PLACEMENTS);
    if (needed < 0 || needed >= FC_H5_PLACEMENTS) {
        return fc_fail(err, FC_EUNSUPPORTED, "%s: the placements of tensor \"%s\" are too long", file, tensor->name);
    }
    return FC_OK;
}

static fc_code set_placements(const fc_h5_writer *w, fc_h5_holder *value, const fc_target_tensor *tensor,
                              fc_error *err) {
    char text[FC_H5_PLACEMENTS];
    FC_TRY(fc_h5_placements_text(w, tensor, value->image->path, text, err));
    fc_h5_set_text(value, FC_H5_A_PLACEMENTS, text);
    return FC_OK;
}

static fc_code set_object(const fc_h5_writer *w, fc_h5_holder *value, const fc_target_tensor *tensor, fc_error *err) {
    fc_arena *scratch = fc_arena_new();
    const char *json = NULL;
    fc_code rc;
    FC_TRY_GOTO(scratch ? FC_OK : fc_no_memory(err, value->image->path), rc, out);
    FC_TRY_GOTO(fc_checkpoint_object_json(w->target->source, tensor->source, scratch, &json, err), rc, out);
    fc_h5_set_text(value, FC_H5_A_ENCODING, tensor->source->object->encoding);
    fc_h5_set_text(value, FC_H5_A_JSON, json);
out:
    fc_arena_free(scratch);
    return rc;
}

bool fc_h5_needs_fqn(const fc_target_tensor *tensor) {
    return tensor->path.count > 0 && !fc_path_spells(&tensor->path, tensor->name);
}

fc_code fc_h5_value_attributes(const fc_h5_writer *w, fc_h5_holder *value, const fc_target_tensor *tensor,
                               fc_error *err) {
    fc_h5_attributes_begin(value->messages);
    fc_h5_set_text(value, FC_H5_A_DTYPE, fc_dtype_get(tensor->dtype)->torch_name);
    if (fc_h5_needs_fqn(tensor)) {
        fc_h5_set_text(value, FC_H5_A_FQN, tensor->name);
    }
    if (tensor->source->object) {
        return set_object(w, value, tensor, err);
    }
    return w->target->mesh->ndim > 0 ? set_placements(w, value, tensor, err) : FC_OK;
}

void fc_h5_box_attributes(fc_h5_holder *value, const fc_target_tensor *tensor, const fc_target_item *item, bool copy) {
    const size_t ndim = (size_t)tensor->source->ndim;
    fc_h5_set_ints(value, FC_H5_A_GLOBAL_SHAPE, ndim, tensor->source->shape);
    fc_h5_set_ints(value, FC_H5_A_OFFSETS, ndim, item->dims);
    if (copy) {
        fc_h5_set_number(value, FC_H5_A_OWNER, item->owner);
    }
}
