/*
 * Writes HDF5. A target becomes the headers of the full file, or of one file per rank and index.h5, with a reserved
 * extent for each stored tensor. The engine fills the extents afterwards; the writer never touches tensor data.
 * target_file.c makes the files with data, and index.c makes index.h5. docs/HDF5_SCHEMA.md describes the schema.
 */
#include "hdf5/writer/writer.h"

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

fc_code fc_h5_create(const fc_target *target, const char *staging, fc_writer *writer, fc_error *err) {
    writer->state = NULL;
    fc_arena *arena = fc_arena_new();
    fc_h5_writer *w = arena ? fc_arena_calloc(arena, 1, sizeof *w) : NULL;
    if (w) {
        w->target = target;
        w->arena = arena;
        w->ranks = fc_mesh_ranks(target->mesh);
        w->layout = layout_name(target->mesh);
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

const char *fc_h5_index(const fc_target *target) {
    return target->mesh->ndim > 0 ? "index.h5" : NULL;
}

fc_code fc_h5_finish(fc_writer *writer, const uint64_t *digests, fc_error *err) {
    fc_h5_writer *w = writer->state;
    return w->target->mesh->ndim > 0 ? fc_h5_write_index(w, digests, err) : FC_OK;
}

fc_code fc_h5_take_notes(fc_writer *writer, unsigned char **bytes, size_t *size, fc_error *err) {
    fc_h5_writer *w = writer->state;
    fc_notes notes = {NULL, 0, 0};
    const bool taken = fc_h5_written_take(&w->written, &notes);
    *bytes = notes.data;
    *size = notes.size;
    return taken ? FC_OK : fc_no_memory(err, "index.h5");
}

fc_code fc_h5_add_notes(fc_writer *writer, const void *notes, size_t size, fc_error *err) {
    fc_h5_writer *w = writer->state;
    (void)size;
    return fc_h5_written_add(&w->written, notes, err);
}

void fc_h5_destroy(fc_writer *writer) {
    fc_h5_writer *w = writer->state;
    if (w) {
        fc_h5_image_free(&w->image);
        free(w->fields);
        fc_h5_written_free(&w->written);
        fc_arena_free(w->arena);
        writer->state = NULL;
    }
}
