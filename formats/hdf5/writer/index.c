/*
 * Writes index.h5 after the shard files. It has every whole value as a virtual dataset over the shard files, so that
 * other programs see the full model, and the tables from which fsdpckpt opens the checkpoint.
 */
#include "fsdpckpt/layout.h"
#include "fsdpckpt/replica_owner.h"
#include "hdf5/writer/writer.h"

#include "fsdpckpt/try.h"
#include "hdf5/writer/groups.h"
#include "hdf5/writer/image_map.h"

#include <stdlib.h>

/* An iterator over the distinct boxes of a tensor: walks the mesh dimensions that split it, with the others at 0. */
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

/* index.h5 under construction. */
typedef struct index_writer {
    fc_h5_writer *w;
    const uint64_t *digests;
    fc_h5_image image;
    fc_h5_groups groups;
    fc_h5_list list;
} index_writer;

/* Adds one mapping for each distinct box that is not empty, to the file that stores it. */
static fc_code map_boxes(index_writer *m, const fc_target_tensor *tensor, const char *source, fc_error *err) {
    const fc_tensor *t = tensor->source;
    boxes walk = {.mesh = m->w->target->mesh, .placements = tensor->placements};
    int64_t offsets[FC_MAX_DIMS], sizes[FC_MAX_DIMS], covered = 0;
    const fc_box whole = {t->ndim, t->shape, t->shape}, box = {t->ndim, offsets, sizes};
    do {
        FC_TRY(fc_local_box(t->ndim, t->shape, walk.mesh, walk.placements, walk.coordinate, offsets, sizes, err));
        int64_t volume = fc_box_volume(&box);
        if (volume > 0) {
            char file[FC_H5_SHARD_NAME];
            fc_h5_shard_name(m->w, fc_replica_owner(walk.mesh, walk.placements, walk.coordinate, tensor->owner_offset),
                             file);
            fc_h5_list_add(&m->list, file, source, NULL, t->ndim, offsets, sizes);
            covered += volume;
        }
    } while (next_box(&walk));
    /* Elements that no mapping covers would silently read as the fill value. */
    if (covered != fc_box_volume(&whole)) {
        return fc_fail(err, FC_EUNSUPPORTED, "%s: the boxes of the ranks contain %lld of its %lld elements",
                       m->image.path, (long long)covered, (long long)fc_box_volume(&whole));
    }
    return FC_OK;
}

/* Maps an object, which is whole in the file of rank 0. */
static void map_object(index_writer *m, const fc_tensor *object, const char *source) {
    const int64_t origin = 0;
    char file[FC_H5_SHARD_NAME];
    fc_h5_shard_name(m->w, 0, file);
    fc_h5_list_add(&m->list, file, source, NULL, 1, &origin, object->shape);
}

static fc_code map_value(index_writer *m, uint32_t index, fc_error *err) {
    const fc_target_tensor *tensor = &m->w->target->tensors[index];
    fc_arena *scratch = fc_arena_new();
    const char *source = scratch ? fc_h5_tree_path(&m->w->tree, m->w->tree.leaves[index], scratch) : NULL;
    fc_code rc;
    FC_TRY_GOTO(source ? FC_OK : fc_no_memory(err, m->image.path), rc, out);
    fc_h5_list_begin(&m->list);
    if (tensor->source->object) {
        map_object(m, tensor->source, source);
    } else {
        FC_TRY_GOTO(map_boxes(m, tensor, source, err), rc, out);
    }
    const fc_h5_heap_id list = fc_h5_list_end(&m->list, &m->image);
    fc_h5_image_virtual(&m->image, tensor->dtype, &list);
out:
    fc_arena_free(scratch);
    return rc;
}

static fc_code add_index_value(index_writer *m, uint32_t index, fc_error *err) {
    const fc_h5_writer *w = m->w;
    const fc_target_tensor *tensor = &w->target->tensors[index];
    const fc_tensor *t = tensor->source;
    const fc_box whole = {t->ndim, t->shape, t->shape};
    fc_h5_holder holder = {.image = &m->image, .messages = &m->image.objects};
    const size_t start = fc_h5_object_begin(&m->image);
    fc_code rc;
    FC_TRY_GOTO(fc_h5_image_shape(&m->image, tensor->dtype, t->ndim, t->shape, err), rc, out);
    if (fc_box_volume(&whole) > 0) {
        FC_TRY_GOTO(map_value(m, index, err), rc, out);
    } else {
        fc_h5_image_contiguous(&m->image, 0);
    }
    FC_TRY_GOTO(fc_h5_value_attributes(w, &holder, tensor, err), rc, out);
    fc_h5_set_number(&holder, FC_H5_A_CRC64, m->digests[index]);
    fc_h5_object_end(&m->image, start);
    m->groups.made[w->tree.leaves[index]] = start + 1;
    rc = fc_h5_image_flush_heap(&m->image, err);
out:
    return rc == FC_OK ? rc : fc_context(err, rc, "tensor \"%s\"", tensor->name);
}

fc_code fc_h5_write_index(fc_h5_writer *w, const uint64_t *digests, fc_error *err) {
    index_writer m = {.w = w, .digests = digests};
    const char *path = NULL;
    FC_TRY(fc_h5_staged_path(w, "index.h5", &path, err));
    fc_h5_image_open(&m.image, path);
    fc_code rc;
    FC_TRY_GOTO(fc_h5_groups_new(&w->tree, path, &m.groups, err), rc, out);
    for (uint32_t i = 0; i < w->target->ntensors; i++) {
        FC_TRY_GOTO(add_index_value(&m, w->tree.order[i], err), rc, out);
    }
    FC_TRY_GOTO(fc_h5_make_root(w, &m.image, &m.groups, -1, err), rc, out);
    FC_TRY_GOTO(fc_h5_image_lay_out(&m.image, err), rc, out);
    FC_TRY_GOTO(fc_h5_tables_fill(w, digests, &m.image, err), rc, out);
    rc = fc_h5_image_write(&m.image, NULL, err);
out:
    fc_h5_groups_free(&m.groups);
    fc_h5_list_free(&m.list);
    fc_h5_image_free(&m.image);
    return rc;
}
