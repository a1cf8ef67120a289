/*
 * What all files of a target say of it and of its values: names of files, attributes, and about how many bytes these
 * take. docs/HDF5_SCHEMA.md lists them.
 */
#include "hdf5/writer/writer.h"

#include "base/try.h"
#include "fsdpckpt/format.h"

#include <stdio.h>
#include <string.h>

void fc_h5_shard_name(const fc_h5_writer *w, int64_t rank, char name[FC_H5_SHARD_NAME]) {
    snprintf(name, FC_H5_SHARD_NAME, "shard-%05lld-of-%05lld.h5", (long long)rank, (long long)w->ranks);
}

fc_code fc_h5_staged_path(fc_h5_writer *w, const char *name, const char **path, fc_error *err) {
    *path = fc_arena_printf(w->arena, "%s/%s", w->staging, name);
    return *path ? FC_OK : fc_no_memory(err, w->staging);
}

static fc_code set_mesh(const fc_h5_writer *w, fc_h5_holder *root, fc_error *err) {
    const fc_mesh *mesh = w->target->mesh;
    const char *names[FC_MAX_MESH_DIMS];
    for (int i = 0; i < mesh->ndim; i++) {
        names[i] = mesh->names[i];
    }
    FC_TRY(fc_h5_set_ints(root, FC_H5_A_MESH_SHAPE, (size_t)mesh->ndim, mesh->sizes, err));
    FC_TRY(fc_h5_set_texts(root, FC_H5_A_MESH_NAMES, (size_t)mesh->ndim, names, err));
    return fc_h5_set_number(root, FC_H5_A_WORLD_SIZE, (uint64_t)w->ranks, err);
}

fc_code fc_h5_root_attributes(const fc_h5_writer *w, fc_h5_holder *root, int64_t rank, fc_error *err) {
    FC_TRY(fc_h5_set_number(root, FC_H5_A_SCHEMA, FC_H5_SCHEMA, err));
    FC_TRY(fc_h5_set_text(root, FC_H5_A_PRODUCER, FC_H5_PRODUCER, err));
    FC_TRY(fc_h5_set_text(root, FC_H5_A_LAYOUT, w->layout, err));
    if (w->target->mesh->ndim > 0) {
        FC_TRY(set_mesh(w, root, err));
    }
    if (rank >= 0) {
        FC_TRY(fc_h5_set_number(root, FC_H5_A_RANK, (uint64_t)rank, err));
    }
    /* set when all else is there */
    return fc_h5_set_number(root, FC_H5_A_HEADER_CRC64, 0, err);
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
    FC_TRY(fc_h5_placements_text(w, tensor, fc_h5_holder_path(value), text, err));
    return fc_h5_set_text(value, FC_H5_A_PLACEMENTS, text, err);
}

static fc_code set_object(const fc_h5_writer *w, fc_h5_holder *value, const fc_target_tensor *tensor, fc_error *err) {
    fc_arena *scratch = fc_arena_new();
    const char *json = NULL;
    fc_code rc;
    FC_TRY_GOTO(scratch ? fc_h5_set_text(value, FC_H5_A_ENCODING, tensor->source->object->encoding, err)
                        : fc_fail(err, FC_ENOMEM, "%s: out of memory", fc_h5_holder_path(value)),
                rc, out);
    FC_TRY_GOTO(fc_checkpoint_object_json(w->target->source, tensor->source, scratch, &json, err), rc, out);
    rc = fc_h5_set_text(value, FC_H5_A_JSON, json, err);
out:
    fc_arena_free(scratch);
    return rc;
}

bool fc_h5_needs_fqn(const fc_target_tensor *tensor) {
    return tensor->path.count > 0 && !fc_path_spells(&tensor->path, tensor->name);
}

fc_code fc_h5_value_attributes(const fc_h5_writer *w, fc_h5_holder *value, const fc_target_tensor *tensor,
                               fc_error *err) {
    FC_TRY(fc_h5_set_text(value, FC_H5_A_DTYPE, fc_dtype_get(tensor->dtype)->torch_name, err));
    if (fc_h5_needs_fqn(tensor)) {
        FC_TRY(fc_h5_set_text(value, FC_H5_A_FQN, tensor->name, err));
    }
    if (tensor->source->object) {
        FC_TRY(set_object(w, value, tensor, err));
    } else if (w->target->mesh->ndim > 0) {
        FC_TRY(set_placements(w, value, tensor, err));
    }
    return FC_OK;
}

fc_code fc_h5_box_attributes(fc_h5_holder *value, const fc_target_tensor *tensor, const fc_target_item *item, bool copy,
                             fc_error *err) {
    size_t ndim = (size_t)tensor->source->ndim;
    FC_TRY(fc_h5_set_ints(value, FC_H5_A_GLOBAL_SHAPE, ndim, tensor->source->shape, err));
    FC_TRY(fc_h5_set_ints(value, FC_H5_A_OFFSETS, ndim, item->dims, err));
    return copy ? fc_h5_set_number(value, FC_H5_A_OWNER, item->owner, err) : FC_OK;
}

void fc_h5_estimate_value(const fc_h5_writer *w, fc_h5_estimate *estimate, uint32_t tensor, uint64_t mappings) {
    const fc_target_tensor *t = &w->target->tensors[tensor];
    size_t link = strlen(w->tree.nodes[w->tree.leaves[tensor]].link);
    estimate->datasets++;
    estimate->attributes += t->source->object ? 4 : w->target->mesh->ndim > 0 ? 5 : 2;
    estimate->mappings += mappings;
    /* The name is in the link and in the group's index; the path of the source in each mapping. */
    estimate->text += link + 24 * (w->target->mesh->ndim > 0) + mappings * strlen(t->name) / 2;
}
