/*
 * The record in a rank's file that says what the whole is: mesh, rank, and for each tensor its global shape, where this
 * rank's piece lies in it, and the placements. Written by the writer, read by ranks.c.
 *
 *   {"fsdpckpt_layout": 1, "rank": 0, "mesh_names": ["dp", "tp"], "mesh_shape": [4, 2],
 *    "tensors": {"layers.0.weight": {"shape": [64, 8], "offsets": [0, 0], "placements": "…"}, …}}
 */
#include "pt/writer.h"

#include <jansson.h>

static json_t *numbers(int n, const int64_t *values) {
    json_t *array = json_array();
    for (int i = 0; i < n; i++) {
        json_array_append_new(array, json_integer(values[i]));
    }
    return array;
}

static fc_code add_tensor(const fc_wanted *wanted, const fc_part_item *item, json_t *tensors, fc_error *err) {
    const fc_wanted_tensor *t = &wanted->tensors[item->tensor];
    char placements[FC_MAX_MESH_DIMS * 64];
    int ndim = t->source->ndim;
    int needed = fc_placements_format(wanted->mesh->ndim, t->placements, placements, (int)sizeof placements);
    if (needed < 0 || needed >= (int)sizeof placements) {
        return fc_fail(err, FC_EUNSUPPORTED, "tensor %.256s: its placements are too long", t->name);
    }
    json_t *entry = json_pack("{s:o, s:o, s:s}", "shape", numbers(ndim, t->source->shape), "offsets",
                              numbers(ndim, item->dims), "placements", placements);
    return entry && json_object_set_new(tensors, t->name, entry) == 0
               ? FC_OK
               : fc_fail(err, FC_ENOMEM, "tensor %.256s: out of memory, or its name is not UTF-8", t->name);
}

fc_code fc_pt_layout_json(const fc_wanted *wanted, const fc_part *part, char **out, fc_error *err) {
    const fc_mesh *mesh = wanted->mesh;
    json_t *tensors = json_object(), *names = json_array();
    fc_code rc = FC_OK;
    for (int i = 0; i < mesh->ndim; i++) {
        json_array_append_new(names, json_string(mesh->names[i]));
    }
    for (size_t i = 0; i < part->nitems && rc == FC_OK; i++) {
        if (!wanted->tensors[part->items[i].tensor].source->object) {
            rc = add_tensor(wanted, &part->items[i], tensors, err);
        }
    }
    json_t *root = json_pack("{s:i, s:I, s:o, s:o, s:o}", "fsdpckpt_layout", 1, "rank", (json_int_t)part->rank,
                             "mesh_names", names, "mesh_shape", numbers(mesh->ndim, mesh->sizes), "tensors", tensors);
    *out = root && rc == FC_OK ? json_dumps(root, JSON_COMPACT) : NULL;
    json_decref(root);
    return rc == FC_OK && !*out ? fc_fail(err, FC_ENOMEM, "out of memory") : rc;
}
