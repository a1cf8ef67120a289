/*
 * What all files of a target say of it and of its values: names of files, attributes, and about how many bytes these
 * take. docs/HDF5_SCHEMA.md lists them.
 */
#include "hdf5/writer/writer.h"

#include "fsdpckpt/format.h"

#include <stdio.h>
#include <string.h>

void fc_h5_shard_name(const fc_h5_writer *w, int64_t rank, char name[FC_H5_SHARD_NAME]) {
    snprintf(name, FC_H5_SHARD_NAME, "shard-%05lld-of-%05lld.h5", (long long)rank, (long long)w->ranks);
}

fc_code fc_h5_staged_path(fc_h5_writer *w, const char *name, const char **path, fc_error *err) {
    *path = fc_arena_printf(w->arena, "%s/%s", w->staging, name);
    return *path ? FC_OK : fc_fail(err, FC_ENOMEM, "%s: out of memory", w->staging);
}

static fc_code mesh_attributes(const fc_h5_writer *w, fc_h5_out *out, fc_error *err) {
    const fc_mesh *mesh = w->target->mesh;
    const char *names[FC_MAX_MESH_DIMS];
    for (int i = 0; i < mesh->ndim; i++) {
        names[i] = mesh->names[i];
    }
    fc_code rc = fc_h5_out_ints(out, out->file, "mesh_shape", (size_t)mesh->ndim, mesh->sizes, err);
    rc = rc == FC_OK ? fc_h5_out_texts(out, out->file, "mesh_names", (size_t)mesh->ndim, names, err) : rc;
    return rc == FC_OK ? fc_h5_out_int(out, out->file, "world_size", w->ranks, err) : rc;
}

fc_code fc_h5_root_attributes(const fc_h5_writer *w, fc_h5_out *out, int64_t rank, fc_error *err) {
    fc_code rc = fc_h5_out_int(out, out->file, "fsdpckpt_schema", 1, err);
    rc = rc == FC_OK ? fc_h5_out_text(out, out->file, "producer", "fsdpckpt " FSDPCKPT_VERSION, err) : rc;
    rc = rc == FC_OK ? fc_h5_out_text(out, out->file, "layout", w->layout, err) : rc;
    if (rc == FC_OK && w->target->mesh->ndim > 0) {
        rc = mesh_attributes(w, out, err);
    }
    rc = rc == FC_OK ? fc_h5_out_crc(out, out->file, "header_crc64", 0, err) : rc; /* set by fc_h5_out_finish_file */
    return rc == FC_OK && rank >= 0 ? fc_h5_out_int(out, out->file, "rank", rank, err) : rc;
}

static fc_code placements_attribute(const fc_h5_writer *w, fc_h5_out *out, hid_t id, const fc_target_tensor *tensor,
                                    fc_error *err) {
    char text[FC_MAX_MESH_DIMS * 64];
    int needed = fc_placements_format(w->target->mesh->ndim, tensor->placements, text, (int)sizeof text);
    if (needed < 0 || needed >= (int)sizeof text) {
        return fc_fail(err, FC_EUNSUPPORTED, "%s: the placements of tensor \"%s\" are too long", out->path,
                       tensor->name);
    }
    return fc_h5_out_text(out, id, "placements", text, err);
}

static fc_code object_attributes(const fc_h5_writer *w, fc_h5_out *out, hid_t id, const fc_target_tensor *tensor,
                                 fc_error *err) {
    fc_arena *scratch = fc_arena_new();
    const char *json = NULL;
    fc_code rc = scratch ? fc_h5_out_text(out, id, "encoding", tensor->source->object->encoding, err)
                         : fc_fail(err, FC_ENOMEM, "%s: out of memory", out->path);
    rc = rc == FC_OK ? fc_checkpoint_object_json(w->target->source, tensor->source, scratch, &json, err) : rc;
    rc = rc == FC_OK ? fc_h5_out_text(out, id, "json", json, err) : rc;
    fc_arena_free(scratch);
    return rc;
}

fc_code fc_h5_value_attributes(const fc_h5_writer *w, fc_h5_out *out, hid_t id, const fc_target_tensor *tensor,
                               fc_error *err) {
    fc_code rc = fc_h5_out_text(out, id, "dtype", fc_dtype_get(tensor->dtype)->torch_name, err);
    if (rc == FC_OK && tensor->path.count > 0 && !fc_path_spells(&tensor->path, tensor->name)) {
        rc = fc_h5_out_text(out, id, "fqn", tensor->name, err);
    }
    if (rc == FC_OK && tensor->source->object) {
        rc = object_attributes(w, out, id, tensor, err);
    } else if (rc == FC_OK && w->target->mesh->ndim > 0) {
        rc = placements_attribute(w, out, id, tensor, err);
    }
    return rc;
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
