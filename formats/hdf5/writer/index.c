/*
 * index.h5: the whole of every value as a virtual dataset over the shard files, so that programs which know nothing of
 * shards see the full model. Made after the shards, from the mesh and the placements alone.
 */
#include "fsdpckpt/layout.h"
#include "hdf5/writer/writer.h"

#include <string.h>

/* An attribute of the root, for whoever looks into the file with h5dump. */
static const char absent_values[] =
    "floating-point and complex: NaN; signed integers: the smallest; unsigned integers, float4_e2m1fn_x2 and objects: "
    "all bits set; bool: -1";

/* Walks the distinct boxes of a tensor: the mesh dimensions that cut it, the others at 0. */
typedef struct boxes {
    const fc_mesh *mesh;
    const fc_placement *placements;
    int64_t coordinate[FC_MAX_MESH_DIMS];
} boxes;

static bool next_box(boxes *b) {
    for (int i = b->mesh->ndim - 1; i >= 0; i--) {
        if (b->placements[i].kind == FC_REPLICATE) {
            continue;
        }
        if (++b->coordinate[i] < b->mesh->sizes[i]) {
            return true;
        }
        b->coordinate[i] = 0;
    }
    return false;
}

static uint64_t count_boxes(const fc_mesh *mesh, const fc_target_tensor *tensor) {
    uint64_t count = 1;
    for (int i = 0; !tensor->source->object && i < mesh->ndim; i++) {
        count *= tensor->placements[i].kind == FC_REPLICATE ? 1 : (uint64_t)mesh->sizes[i];
    }
    return count;
}

/* One mapping for each distinct box that holds anything, onto the file that stores it. */
static fc_code map_boxes(const fc_h5_writer *w, fc_h5_out *out, hid_t list, const fc_target_tensor *tensor,
                         const char *source, fc_error *err) {
    const fc_tensor *t = tensor->source;
    boxes walk = {.mesh = w->target->mesh, .placements = tensor->placements};
    int64_t offsets[FC_MAX_DIMS], sizes[FC_MAX_DIMS], covered = 0;
    const fc_box whole = {t->ndim, t->shape, t->shape}, box = {t->ndim, offsets, sizes};
    do {
        fc_code rc = fc_local_box(t->ndim, t->shape, walk.mesh, walk.placements, walk.coordinate, offsets, sizes, err);
        int64_t volume = rc == FC_OK ? fc_box_volume(&box) : 0;
        if (rc == FC_OK && volume > 0) {
            char file[FC_H5_SHARD_NAME];
            fc_h5_shard_name(w, fc_layout_owner(walk.mesh, walk.placements, walk.coordinate, tensor->owner_offset),
                             file);
            fc_h5_mapping mapping = {file, offsets, sizes, NULL};
            rc = fc_h5_out_map(out, list, t->ndim, t->shape, &mapping, source, err);
            covered += volume;
        }
        if (rc != FC_OK) {
            return rc;
        }
    } while (next_box(&walk));
    /* What no mapping covers would read as zeros without a word. */
    if (covered != fc_box_volume(&whole)) {
        return fc_fail(err, FC_EUNSUPPORTED, "%s: the boxes of the ranks hold %lld of its %lld elements", out->path,
                       (long long)covered, (long long)fc_box_volume(&whole));
    }
    return FC_OK;
}

/* An object is whole in the file of rank 0. */
static fc_code map_object(const fc_h5_writer *w, fc_h5_out *out, hid_t list, const fc_tensor *object,
                          const char *source, fc_error *err) {
    const int64_t origin = 0;
    char file[FC_H5_SHARD_NAME];
    fc_h5_shard_name(w, 0, file);
    fc_h5_mapping mapping = {file, &origin, object->shape, NULL};
    return fc_h5_out_map(out, list, 1, object->shape, &mapping, source, err);
}

static fc_code add_virtual(fc_h5_writer *w, fc_h5_out *out, uint32_t index, hid_t *id, fc_error *err) {
    const fc_target_tensor *tensor = &w->target->tensors[index];
    const fc_tensor *t = tensor->source;
    uint32_t node = w->tree.leaves[index];
    hid_t list = H5I_INVALID_HID;
    fc_arena *scratch = fc_arena_new();
    const char *source = scratch ? fc_h5_tree_path(&w->tree, node, scratch) : NULL;
    fc_code rc = source ? fc_h5_out_mappings(out, &list, err) : fc_fail(err, FC_ENOMEM, "out of memory");
    if (rc == FC_OK) {
        rc = t->object ? map_object(w, out, list, t, source, err) : map_boxes(w, out, list, tensor, source, err);
    }
    rc = rc == FC_OK ? fc_h5_out_virtual(out, node, tensor->dtype, t->ndim, t->shape, list, id, err) : rc;
    if (list >= 0) {
        H5Pclose(list);
    }
    fc_arena_free(scratch);
    return rc;
}

static fc_code add_value(fc_h5_writer *w, fc_h5_out *out, uint32_t index, uint64_t crc64, fc_error *err) {
    const fc_target_tensor *tensor = &w->target->tensors[index];
    const fc_tensor *t = tensor->source;
    const fc_box whole = {t->ndim, t->shape, t->shape};
    hid_t id = H5I_INVALID_HID;
    uint64_t none;
    fc_code rc = fc_box_volume(&whole) > 0
                     ? add_virtual(w, out, index, &id, err)
                     : fc_h5_out_stored(out, w->tree.leaves[index], tensor->dtype, t->ndim, t->shape, &id, &none, err);
    rc = rc == FC_OK ? fc_h5_value_attributes(w, out, id, tensor, err) : rc;
    rc = rc == FC_OK ? fc_h5_out_crc(out, id, "crc64", crc64, err) : rc;
    if (id >= 0) {
        H5Dclose(id);
    }
    return rc == FC_OK ? rc : fc_context(err, rc, "tensor \"%s\"", tensor->name);
}

fc_code fc_h5_write_index(fc_h5_writer *w, const uint64_t *digests, fc_error *err) {
    fc_h5_estimate estimate = {0};
    fc_h5_out out;
    const char *path = NULL;
    fc_code rc = fc_h5_staged_path(w, "index.h5", &path, err);
    for (uint32_t i = 0; i < w->target->ntensors; i++) {
        fc_h5_estimate_value(w, &estimate, i, count_boxes(w->target->mesh, &w->target->tensors[i]));
    }
    rc = rc == FC_OK ? fc_h5_out_open(&out, &w->tree, path, &estimate, err) : rc;
    if (rc != FC_OK) {
        return rc;
    }
    rc = fc_h5_root_attributes(w, &out, -1, err);
    rc = rc == FC_OK ? fc_h5_out_text(&out, out.file, "missing_shards_read_as", absent_values, err) : rc;
    for (uint32_t i = 0; rc == FC_OK && i < w->target->ntensors; i++) {
        rc = add_value(w, &out, w->tree.order[i], digests[w->tree.order[i]], err);
    }
    rc = fc_h5_out_close(&out, rc, err);
    return rc == FC_OK ? fc_h5_out_finish_file(&out, NULL, 0, err) : rc;
}
