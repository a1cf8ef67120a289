/*
 * The record in a rank's file that describes the whole checkpoint: the mesh, the rank, and for each tensor its global
 * shape, the offsets of this rank's shard, and the placements. The writer writes it, and ranks.c reads it.
 *
 *   {"fsdpckpt_layout": 1, "rank": 0, "mesh_names": ["dp", "tp"], "mesh_shape": [4, 2],
 *    "tensors": {"layers.0.weight": {"shape": [64, 8], "offsets": [0, 0], "placements": "..."}, ...}}
 */
#include "base/checked.h"
#include "fsdpckpt/try.h"
#include "pt/ranks.h"
#include "pt/writer.h"
#include "sharding/recorded.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static json_t *numbers(int n, const int64_t *values) {
    json_t *array = json_array();
    for (int i = 0; i < n; i++) {
        json_array_append_new(array, json_integer(values[i]));
    }
    return array;
}

static fc_code add_layout_tensor(const fc_target *target, const fc_target_item *item, json_t *tensors, fc_error *err) {
    const fc_target_tensor *t = &target->tensors[item->tensor];
    char placements[FC_MAX_MESH_DIMS * 64];
    int ndim = t->source->ndim;
    int needed = fc_placements_format(target->mesh->ndim, t->placements, placements, (int)sizeof placements);
    if (needed < 0 || needed >= (int)sizeof placements) {
        return fc_fail(err, FC_EUNSUPPORTED, "tensor %.256s: its placements are too long", t->name);
    }
    json_t *entry = json_pack("{s:o, s:o, s:s}", "shape", numbers(ndim, t->source->shape), "offsets",
                              numbers(ndim, item->dims), "placements", placements);
    return entry && json_object_set_new(tensors, t->name, entry) == 0
               ? FC_OK
               : fc_fail(err, FC_ENOMEM, "tensor %.256s: out of memory, or its name is not UTF-8", t->name);
}

fc_code fc_pt_layout_json(const fc_target *target, const fc_target_file *file, char **out, fc_error *err) {
    const fc_mesh *mesh = target->mesh;
    json_t *tensors = json_object(), *names = json_array();
    fc_code rc = FC_OK;
    for (int i = 0; i < mesh->ndim; i++) {
        json_array_append_new(names, json_string(mesh->names[i]));
    }
    for (size_t i = 0; i < file->nitems && rc == FC_OK; i++) {
        if (!target->tensors[file->items[i].tensor].source->object) {
            rc = add_layout_tensor(target, &file->items[i], tensors, err);
        }
    }
    json_t *root = json_pack("{s:i, s:I, s:o, s:o, s:o}", "fsdpckpt_layout", 1, "rank", (json_int_t)file->rank,
                             "mesh_names", names, "mesh_shape", numbers(mesh->ndim, mesh->sizes), "tensors", tensors);
    *out = root && rc == FC_OK ? json_dumps(root, JSON_COMPACT) : NULL;
    json_decref(root);
    return rc == FC_OK && !*out ? fc_no_memory(err, NULL) : rc;
}

static fc_code damaged(const torch_file *f, const char *what, fc_error *err) {
    return fc_fail(err, FC_ECORRUPT, "%s: its record %s is damaged: %s", f->path, FC_PT_LAYOUT, what);
}

/* Reads at most `most` numbers >= 0. @return their count, or -1. */
static int read_numbers(const json_t *array, int most, int64_t *out) {
    if (!json_is_array(array) || json_array_size(array) > (size_t)most) {
        return -1;
    }
    for (size_t i = 0; i < json_array_size(array); i++) {
        const json_t *value = json_array_get(array, i);
        if (!json_is_integer(value) || json_integer_value(value) < 0) {
            return -1;
        }
        out[i] = json_integer_value(value);
    }
    return (int)json_array_size(array);
}

static fc_code read_mesh(const torch_file *f, const json_t *root, int64_t rank, int64_t ranks, fc_mesh *mesh,
                         fc_error *err) {
    const json_t *names = json_object_get(root, "mesh_names");
    int64_t product = 1;
    *mesh = (fc_mesh){0};
    mesh->ndim = read_numbers(json_object_get(root, "mesh_shape"), FC_MAX_MESH_DIMS, mesh->sizes);
    if (mesh->ndim < 1 || json_array_size(names) != (size_t)mesh->ndim) {
        return damaged(f, "the mesh is missing or invalid", err);
    }
    for (int i = 0; i < mesh->ndim; i++) {
        const char *name = json_string_value(json_array_get(names, (size_t)i));
        if (!name || strlen(name) >= sizeof mesh->names[i] || mesh->sizes[i] < 1 ||
            !fc_mul_i64(product, mesh->sizes[i], &product)) {
            return damaged(f, "the mesh is missing or invalid", err);
        }
        snprintf(mesh->names[i], sizeof mesh->names[i], "%s", name);
    }
    if (product != ranks || json_integer_value(json_object_get(root, "rank")) != rank) {
        return damaged(f, "its rank or its number of ranks differs from the file's name", err);
    }
    return FC_OK;
}

fc_code fc_pt_layout_load(torch_file *f, int64_t rank, int64_t ranks, fc_pt_layout *out, fc_error *err) {
    char name[512];
    unsigned char *bytes = NULL;
    *out = (fc_pt_layout){0};
    if (f->pickle) {
        return FC_OK; /* a legacy file */
    }
    snprintf(name, sizeof name, "%.*s/%s", (int)f->item.prefix, f->item.zip.entries[0].name, FC_PT_LAYOUT);
    const fc_zip_entry *entry = fc_zip_find(&f->item.zip, name);
    if (!entry) {
        return FC_OK;
    }
    FC_TRY(fc_zip_read(&f->item.zip, entry, &bytes, err));
    json_t *root = json_loadb((const char *)bytes, (size_t)entry->size, JSON_REJECT_DUPLICATES, NULL);
    free(bytes);
    if (!root) {
        return damaged(f, "it is not JSON", err);
    }
    if (json_integer_value(json_object_get(root, "fsdpckpt_layout")) != 1) {
        json_decref(root);
        return fc_fail(err, FC_EUNSUPPORTED, "%s: its record %s is not of version 1: use a newer fsdpckpt", f->path,
                       FC_PT_LAYOUT);
    }
    fc_code rc = read_mesh(f, root, rank, ranks, &out->mesh, err);
    if (rc != FC_OK) {
        json_decref(root);
        return rc;
    }
    out->root = root;
    return FC_OK;
}

void fc_pt_layout_free(fc_pt_layout *layout) {
    json_decref(layout->root);
    layout->root = NULL;
}

fc_code fc_pt_layout_shard(const fc_pt_layout *layout, const torch_file *f, int64_t rank, const char *name, fc_pv v,
                           fc_pt_shard *out, fc_error *err) {
    const json_t *entry = json_object_get(json_object_get(layout->root, "tensors"), name);
    int64_t coordinate[FC_MAX_MESH_DIMS], stated[FC_MAX_DIMS] = {0};
    *out = (fc_pt_shard){.ndim = -1, .local = v, .mesh = layout->mesh};
    if (!entry) {
        return FC_OK;
    }
    const char *placements = json_string_value(json_object_get(entry, "placements"));
    int ndim = read_numbers(json_object_get(entry, "shape"), FC_MAX_DIMS, out->shape);
    if (ndim < 0 || read_numbers(json_object_get(entry, "offsets"), FC_MAX_DIMS, stated) != ndim || !placements ||
        !fc_placements_parse(placements, layout->mesh.ndim, out->placements)) {
        return damaged(f, "the layout of a tensor is missing", err);
    }
    out->ndim = ndim;
    if (!fc_pt_shard_sane(out)) {
        return damaged(f, "the shape or the placements of a tensor are invalid", err);
    }
    fc_mesh_coordinate(&layout->mesh, rank, coordinate);
    fc_code rc =
        fc_local_box(ndim, out->shape, &layout->mesh, out->placements, coordinate, out->offsets, out->sizes, err);
    for (int i = 0; i < ndim && rc == FC_OK; i++) {
        rc = stated[i] == out->offsets[i] ? FC_OK
                                          : damaged(f, "the offsets of a tensor disagree with its placements", err);
    }
    return rc;
}
