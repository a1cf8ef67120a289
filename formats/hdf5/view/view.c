/*
 * Writes a view: turns the plan of view_plan.c into an HDF5 file of external and virtual datasets over the files of the
 * source. Only objects, and small tensors that cannot be viewed, are copied into it.
 */
#include "hdf5/view/view.h"

#include "base/checked.h"
#include "fsdpckpt/digest.h"
#include "fsdpckpt/io.h"
#include "fsdpckpt/plan.h"
#include "fsdpckpt/read.h"
#include "fsdpckpt/try.h"
#include "hdf5/h5.h"
#include "hdf5/writer/groups.h"
#include "hdf5/writer/writer.h"
#include "io/file.h"
#include "net/remote.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* A view that is being written. The sources of its virtual datasets are in a group whose name no key can have. */
typedef struct view {
    const fc_target *target;
    fc_h5_writer *w;
    fc_arena *arena;
    fc_h5_viewed *values; /* one per tensor */
    const char **names;   /* one per file of the source: its name relative to the view's directory */
    uint32_t next_piece;  /* node of the next source dataset */
    fc_view_report *report;
    const char *path; /* the path of the view while it is written */
    fc_h5_image image;
    fc_h5_groups groups;
    fc_h5_list list;
} view;

/* ---- names relative to the view ---- */

/* @return `path` relative to `directory`; both are absolute and without links. */
static const char *relative_to(const char *directory, const char *path, fc_arena *arena) {
    size_t common = 0, ups = 0;
    for (size_t i = 0;; i++) {
        bool ends_d = directory[i] == '\0' || directory[i] == '/', ends_p = path[i] == '/';
        if (ends_d && ends_p) {
            common = i;
        }
        if (directory[i] == '\0' || directory[i] != path[i]) {
            break;
        }
    }
    for (const char *s = directory + common; *s; s++) {
        ups += *s == '/' && s[1] != '\0';
    }
    const char *rest = path + common + (path[common] == '/');
    char *out = fc_arena_alloc(arena, 3 * ups + strlen(rest) + 1);
    for (size_t i = 0; out && i < ups; i++) {
        strcpy(out + 3 * i, "../");
    }
    if (out) {
        strcpy(out + 3 * ups, rest);
    }
    return out;
}

/* @return the directory of the target, which contains the staging directory: the view is staged in STAGING/new/. */
static char *directory_of(const char *staged) {
    char *copy = strdup(staged), *real = NULL;
    for (int level = 0; copy && level < 3; level++) {
        char *slash = strrchr(copy, '/');
        if (slash) {
            slash[slash == copy] = '\0';
        } else {
            strcpy(copy, "."); /* fits: a name has at least one character */
        }
    }
    if (copy) {
        real = realpath(copy, NULL);
    }
    free(copy);
    return real;
}

static fc_code name_files(view *v, fc_error *err) {
    const fc_checkpoint *source = v->target->source;
    char *directory = directory_of(v->path);
    v->names = fc_arena_calloc(v->arena, source->nfiles, sizeof *v->names);
    fc_code rc = directory && v->names ? FC_OK : fc_no_memory(err, v->target->source->path);
    for (size_t i = 0; i < source->nfiles && rc == FC_OK; i++) {
        char *path = realpath(source->files[i].path, NULL);
        if (!path) {
            continue; /* a file without tensors may be missing; a tensor that uses a missing one is refused below */
        }
        v->names[i] = relative_to(directory, path, v->arena);
        rc = v->names[i] ? FC_OK : fc_no_memory(err, v->target->source->path);
        free(path);
    }
    free(directory);
    return rc;
}

static fc_code name_segments(const view *v, const fc_h5_viewed *value, fc_error *err) {
    for (size_t b = 0; b < value->nbases; b++) {
        const fc_h5_base *base = &value->bases[b];
        for (size_t s = 0; s < base->nsegments; s++) {
            base->segments[s].file = v->names[base->files[s]];
            if (!base->segments[s].file) {
                return fc_fail(err, FC_EIO, "%s: cannot be found", v->target->source->files[base->files[s]].path);
            }
        }
    }
    return FC_OK;
}

/* ---- the tree, with the source datasets ---- */

static fc_code add_piece_nodes(view *v, size_t pieces, fc_error *err) {
    fc_h5_tree *tree = &v->w->tree;
    size_t total;
    if (pieces == 0) {
        return FC_OK;
    }
    if (!fc_add_size(tree->count, pieces + 1, &total) || total >= UINT32_MAX / 4) {
        return fc_fail(err, FC_EUNSUPPORTED,
                       "%s: the view would have %zu source datasets, which is more than an HDF5 file can have",
                       v->target->source->path, pieces);
    }
    fc_h5_node *nodes = fc_arena_calloc(v->arena, total, sizeof *nodes);
    FC_NEED(nodes, err, v->target->source->path);
    memcpy(nodes, tree->nodes, tree->count * sizeof *nodes);
    uint32_t group = (uint32_t)tree->count;
    nodes[group] = (fc_h5_node){.link = FC_H5_VIEW_PIECES, .depth = 1};
    for (uint32_t i = 0; i < pieces; i++) {
        const char *link = fc_arena_printf(v->arena, "%u", i);
        nodes[group + 1 + i] = (fc_h5_node){.link = link, .parent = group, .depth = 2, .is_value = true};
        FC_NEED(link, err, v->target->source->path);
    }
    tree->nodes = nodes;
    tree->count = total;
    tree->depth = tree->depth > 2 ? tree->depth : 2;
    v->next_piece = group + 1;
    return FC_OK;
}

static fc_code count_up(view *v, fc_error *err) {
    fc_view_report *r = v->report;
    for (uint32_t i = 0; i < v->target->ntensors; i++) {
        const fc_h5_viewed *value = &v->values[i];
        const fc_tensor *t = v->target->tensors[i].source;
        const fc_box whole = {t->ndim, t->shape, t->shape};
        uint64_t bytes = (uint64_t)fc_box_volume(&whole) * fc_dtype_size(t->dtype);
        bool copied = value->kind == FC_H5_VIEW_COPIED;
        r->external += value->kind == FC_H5_VIEW_EXTERNAL;
        r->assembled += value->kind == FC_H5_VIEW_ASSEMBLED;
        r->pieces += value->kind == FC_H5_VIEW_ASSEMBLED ? value->nbases : 0;
        r->copied += copied && !t->object;
        if (!fc_add_u64(*(copied ? &r->copied_bytes : &r->viewed_bytes), bytes,
                        copied ? &r->copied_bytes : &r->viewed_bytes)) {
            return fc_fail(err, FC_ECORRUPT, "%s: the sizes of its tensors overflow", v->target->source->path);
        }
    }
    return FC_OK;
}

/* ---- datasets ---- */

static fc_code map_patches(view *v, uint32_t index, uint32_t first, fc_error *err) {
    const fc_tensor *t = v->target->tensors[index].source;
    const fc_h5_viewed *value = &v->values[index];
    fc_arena *scratch = fc_arena_new();
    fc_code rc = FC_OK;
    fc_h5_list_begin(&v->list);
    for (size_t i = 0; i < value->npatches; i++) {
        const fc_h5_view_box *patch = &value->patches[i];
        const char *source = scratch ? fc_h5_tree_path(&v->w->tree, first + (uint32_t)patch->base, scratch) : NULL;
        FC_TRY_GOTO(source ? FC_OK : fc_no_memory(err, v->target->source->path), rc, out);
        fc_h5_list_add(&v->list, ".", source, patch->whole ? NULL : &patch->run, t->ndim, patch->offsets, patch->sizes);
    }
    const fc_h5_heap_id list = fc_h5_list_end(&v->list, &v->image);
    fc_h5_image_virtual(&v->image, t->dtype, &list);
out:
    fc_arena_free(scratch);
    return rc;
}

/* Adds the digest that the source records. None is computed, because no data is read. */
static fc_code add_digest(const view *v, fc_h5_holder *holder, const fc_tensor *t, fc_error *err) {
    fc_digest digest;
    FC_TRY(fc_checkpoint_digest(v->target->source, t, FC_WHOLE_TENSOR, &digest, err));
    if (digest.kind == FC_DIGEST_CRC64) {
        fc_h5_set_number(holder, FC_H5_A_CRC64, digest.value);
    }
    return FC_OK;
}

/* Where the bytes of a value are. @param names of the files of an external dataset, in the image by now. */
static fc_code add_storage(view *v, uint32_t index, size_t names, fc_error *err) {
    fc_h5_viewed *value = &v->values[index];
    const fc_tensor *t = v->target->tensors[index].source;
    const fc_box whole = {t->ndim, t->shape, t->shape};
    const uint32_t first = v->next_piece;
    switch (value->kind) {
    case FC_H5_VIEW_EXTERNAL:
        fc_h5_image_external(&v->image, names, value->bases->segments, value->bases->nsegments);
        return FC_OK;
    case FC_H5_VIEW_ASSEMBLED:
        v->next_piece += (uint32_t)value->nbases;
        return map_patches(v, index, first, err);
    default:
        value->address = fc_h5_image_contiguous(&v->image, (uint64_t)fc_box_volume(&whole) * fc_dtype_size(t->dtype));
        return FC_OK;
    }
}

static fc_code add_view_value(view *v, uint32_t index, fc_error *err) {
    const fc_target_tensor *tensor = &v->target->tensors[index];
    const fc_h5_viewed *value = &v->values[index];
    const fc_tensor *t = tensor->source;
    fc_h5_holder holder = {.image = &v->image, .messages = &v->image.objects};
    const size_t names = value->kind == FC_H5_VIEW_EXTERNAL
                             ? fc_h5_image_add_names(&v->image, value->bases->segments, value->bases->nsegments)
                             : 0;
    const size_t start = fc_h5_object_begin(&v->image);
    fc_code rc;
    FC_TRY_GOTO(fc_h5_image_shape(&v->image, t->dtype, t->ndim, t->shape, err), rc, out);
    FC_TRY_GOTO(add_storage(v, index, names, err), rc, out);
    FC_TRY_GOTO(fc_h5_value_attributes(v->w, &holder, tensor, err), rc, out);
    FC_TRY_GOTO(add_digest(v, &holder, t, err), rc, out);
    fc_h5_object_end(&v->image, start);
    v->groups.made[v->w->tree.leaves[index]] = start + 1;
out:
    return rc == FC_OK ? rc : fc_context(err, rc, "tensor \"%s\"", tensor->name);
}

static fc_code add_pieces(view *v, uint32_t index, fc_error *err) {
    const fc_tensor *t = v->target->tensors[index].source;
    const fc_h5_viewed *value = &v->values[index];
    for (size_t b = 0; value->kind == FC_H5_VIEW_ASSEMBLED && b < value->nbases; b++) {
        const fc_h5_base *base = &value->bases[b];
        const size_t names = fc_h5_image_add_names(&v->image, base->segments, base->nsegments);
        const size_t start = fc_h5_object_begin(&v->image);
        FC_TRY(fc_h5_image_shape(&v->image, t->dtype, base->ndim, base->shape, err));
        fc_h5_image_external(&v->image, names, base->segments, base->nsegments);
        fc_h5_object_end(&v->image, start);
        v->groups.made[v->next_piece++] = start + 1;
    }
    return FC_OK;
}

static fc_code add_values(view *v, fc_error *err) {
    const uint32_t *order = v->w->tree.order, first = v->next_piece;
    for (size_t i = 0; i < v->target->ntensors; i++) {
        FC_TRY(name_segments(v, &v->values[order[i]], err));
        FC_TRY(add_view_value(v, order[i], err));
    }
    v->next_piece = first;
    for (size_t i = 0; i < v->target->ntensors; i++) {
        FC_TRY(add_pieces(v, order[i], err));
    }
    return FC_OK;
}

static fc_code add_root(view *v, fc_error *err) {
    fc_h5_buffer root = {NULL, 0, 0, false};
    fc_h5_holder holder = {.image = &v->image, .messages = &root};
    v->w->layout = FC_H5_VIEW_LAYOUT;
    fc_h5_root_attributes(v->w, &holder, -1);
    fc_code rc;
    FC_TRY_GOTO(fc_h5_groups_find(&v->groups, &v->image, err), rc, out);
    fc_h5_image_close_heap(&v->image);
    rc = fc_h5_groups_make(&v->groups, &v->image, &root, holder.last, err);
out:
    free(root.data);
    return rc;
}

static fc_code write_headers(view *v, fc_error *err) {
    fc_code rc;
    fc_h5_image_open(&v->image, v->path);
    FC_TRY_GOTO(fc_h5_groups_new(&v->w->tree, v->path, &v->groups, err), rc, out);
    FC_TRY_GOTO(add_values(v, err), rc, out);
    FC_TRY_GOTO(add_root(v, err), rc, out);
    FC_TRY_GOTO(fc_h5_image_lay_out(&v->image, err), rc, out);
    FC_TRY_GOTO(fc_h5_image_create(&v->image, err), rc, out);
    rc = fc_h5_image_write(&v->image, NULL, err);
    for (size_t i = 0; i < v->target->ntensors; i++) {
        fc_h5_viewed *value = &v->values[i];
        if (value->kind == FC_H5_VIEW_COPIED && value->address != SIZE_MAX) {
            value->offset = fc_load_little(v->image.objects.data + value->address, 8);
        }
    }
out:
    fc_h5_image_free(&v->image);
    fc_h5_groups_free(&v->groups);
    fc_h5_list_free(&v->list);
    return rc;
}

/* ---- copied values ---- */

/* A value that is being copied into the view. */
typedef struct copying {
    const char *path;
    int fd;
    uint64_t offset;
} copying;

static fc_code write_bytes(void *context, const void *bytes, size_t size, fc_error *err) {
    copying *c = context;
    fc_code rc = fc_pwrite_full(c->fd, bytes, size, c->offset, c->path, err);
    c->offset += size;
    return rc;
}

static fc_code copy_value(const view *v, int fd, const fc_tensor *t, uint64_t offset, fc_error *err) {
    const int64_t origin[FC_MAX_DIMS] = {0};
    const fc_box whole = {t->ndim, origin, t->shape};
    copying c = {v->path, fd, offset};
    return fc_read_stream(v->target->source, t, &whole, t->dtype, write_bytes, &c, err);
}

static fc_code copy_values(const view *v, fc_error *err) {
    int fd = open(v->path, O_WRONLY | O_CLOEXEC);
    fc_code rc = fd < 0 ? fc_fail_errno(err, errno, "%s: cannot be opened", v->path) : FC_OK;
    for (size_t i = 0; i < v->target->ntensors && rc == FC_OK; i++) {
        if (v->values[i].kind == FC_H5_VIEW_COPIED) {
            rc = copy_value(v, fd, v->target->tensors[i].source, v->values[i].offset, err);
        }
    }
    if (fd >= 0 && close(fd) != 0 && rc == FC_OK) {
        rc = fc_fail_errno(err, errno, "%s: cannot be written", v->path);
    }
    return rc;
}

static fc_code write_view(view *v, fc_error *err) {
    fc_writer writer;
    FC_TRY(fc_h5_create(v->target, v->path, &writer, err));
    v->w = writer.state;
    fc_code rc;
    FC_TRY_GOTO(count_up(v, err), rc, out);
    FC_TRY_GOTO(add_piece_nodes(v, v->report->pieces, err), rc, out);
    FC_TRY_GOTO(name_files(v, err), rc, out);
    FC_TRY_GOTO(write_headers(v, err), rc, out);
    rc = copy_values(v, err);
out:
    fc_h5_destroy(&writer);
    return rc;
}

static fc_code commit_view(view *v, const char *path, const fc_view_options *options, fc_error *err) {
    const fc_commit_options how = {.path = path,
                                   .force = options->force,
                                   .is_own_file = fc_is_own_file,
                                   .forbidden = fc_checkpoint_forbidden(v->target->source),
                                   .reporter = options->reporter};
    fc_commit *commit = NULL;
    FC_TRY(fc_commit_begin(&how, &commit, err));
    v->path = fc_commit_path(commit);
    fc_code rc = write_view(v, err);
    if (rc != FC_OK) {
        fc_commit_abort(commit);
        return rc;
    }
    return fc_commit_finish(commit, err);
}

fc_code fc_view(const fc_checkpoint *source, const char *path, const fc_view_options *options, fc_view_report *report,
                fc_error *err) {
    static const fc_mesh whole;
    fc_selection selection = {.mesh = &whole,
                              .include = options->selection.include,
                              .exclude = options->selection.exclude,
                              .strip_prefix = options->selection.strip_prefix};
    fc_target target;
    memset(report, 0, sizeof *report);
    if (source->format->layout_only) {
        return fc_fail(err, FC_EUSAGE, "%s: a schema has no data to view", source->path);
    }
    if (path && fc_is_remote(path)) {
        return fc_fail(err, FC_EUNSUPPORTED,
                       "%s: a view in a bucket cannot refer to files: write it on this machine, and upload it", path);
    }
    for (size_t i = 0; i < source->nfiles; i++) {
        if (fc_is_remote(source->files[i].path)) {
            return fc_fail(err, FC_EUNSUPPORTED,
                           "%s: a view refers to files, and this is on a server: download it first",
                           source->files[i].path);
        }
    }
    /* A view must not replace its own source. */
    FC_TRY(fc_checkpoint_spare(source, path, false, err));
    view v = {.target = &target, .arena = fc_arena_new(), .report = report};
    fc_code rc;
    FC_TRY_GOTO(v.arena ? fc_target_new(source, &selection, v.arena, &target, &report->selected, err)
                        : fc_no_memory(err, NULL),
                rc, out);
    v.values = fc_arena_calloc(v.arena, target.ntensors, sizeof *v.values);
    FC_TRY_GOTO(v.values ? fc_h5_view_plan(&target, v.arena, v.values, err) : fc_no_memory(err, v.target->source->path),
                rc, out);
    rc = commit_view(&v, path, options, err);
out:
    fc_arena_free(v.arena);
    return rc;
}
