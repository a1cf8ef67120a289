/*
 * Opens a directory of shard files with index.h5 as one checkpoint (docs/HDF5_SCHEMA.md).
 *
 * index.h5 lists the tensors, their global shapes, the mesh and the placements; the shard files contain the boxes.
 * Every box must be the one that the placements give. The planner checks later whether the boxes cover each tensor.
 * With headers_only, the shard files are not accessed and the boxes are computed. Foreign attributes are taken only
 * from index.h5.
 */
#include "checkpoint/path.h"
#include "hdf5/h5.h"
#include "hdf5/reader.h"
#include "hdf5/schema.h"
#include "hdf5/shard_files.h"
#include "hdf5/tables.h"

#include "base/checked.h"
#include "checkpoint/identity.h"
#include "fsdpckpt/order.h"
#include "fsdpckpt/try.h"
#include "io/path.h"
#include "sharding/recorded.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { MAX_RANKS = 1 << 20, MAX_COMPUTED_BOXES = 1 << 26 };

/* The state while the files are read. */
typedef struct sharded_reader {
    fc_checkpoint *checkpoint;
    const char *directory;
    int64_t ranks;
    fc_tensor *tensors;
    fc_h5_chunks *chunks;           /* one list per tensor */
    const fc_h5_dataset **datasets; /* the datasets of index.h5, one per tensor */
    size_t count;
    size_t *by_path;       /* indexes of tensors, sorted by the paths of their datasets */
    fc_progress *progress; /* may be NULL */
} sharded_reader;

/* ---- the mesh ---- */

static fc_code read_mesh(const fc_h5_root *root, const char *path, fc_mesh *mesh, fc_error *err) {
    int64_t ranks = 1;
    const char *names = root->mesh_names;
    bool ok = root->nmesh >= 1 && names != NULL;
    *mesh = (fc_mesh){.ndim = ok ? (int)root->nmesh : 0};
    for (int i = 0; ok && i < mesh->ndim; i++) {
        size_t len = strcspn(names, "\n");
        bool last = i == mesh->ndim - 1;
        ok = len > 0 && len < sizeof mesh->names[i] && (names[len] == '\0') == last && root->mesh_shape[i] >= 1 &&
             fc_mul_i64(ranks, root->mesh_shape[i], &ranks) && ranks <= MAX_RANKS;
        if (ok) {
            memcpy(mesh->names[i], names, len);
            mesh->sizes[i] = root->mesh_shape[i];
            names += len + !last;
        }
    }
    if (!ok || ranks != root->world_size) {
        return fc_fail(err, FC_ECORRUPT,
                       "%s: the attributes mesh_shape, mesh_names and world_size are missing or disagree", path);
    }
    return FC_OK;
}

static fc_code check_schema(const fc_h5_root *root, const char *path, fc_error *err) {
    if (root->schema >= 1 && root->schema <= FC_H5_SCHEMA) {
        return FC_OK;
    }
    return root->schema == 0
               ? fc_fail(err, FC_ECORRUPT, "%s: not written by fsdpckpt (no attribute fsdpckpt_schema)", path)
               : fc_fail(err, FC_EUNSUPPORTED,
                         "%s: written with schema %lld; this fsdpckpt reads schemas 1 to %d: use a newer one", path,
                         (long long)root->schema, FC_H5_SCHEMA);
}

/* ---- index.h5 ---- */

static fc_code read_placements(sharded_reader *o, const fc_h5_dataset *d, fc_tensor *tensor, fc_error *err) {
    int n = o->checkpoint->mesh.ndim;
    fc_placement *placements = fc_arena_calloc(o->checkpoint->arena, (size_t)n, sizeof *placements);
    FC_NEED(placements, err, o->checkpoint->path);
    if (!d->placements || !fc_placements_parse(d->placements, n, placements)) {
        return fc_fail(err, FC_ECORRUPT, "%s: dataset /%s: the attribute placements is missing or damaged",
                       o->checkpoint->files[0].path, d->path);
    }
    tensor->placements = placements;
    return FC_OK;
}

static int compare_paths(const void *a, const void *b, void *context) {
    const sharded_reader *o = context;
    return strcmp(o->datasets[*(const size_t *)a]->path, o->datasets[*(const size_t *)b]->path);
}

static fc_code add_index_entry(sharded_reader *o, const fc_h5_dataset *d, fc_tensor *tensor, fc_error *err) {
    const char *path = o->checkpoint->files[0].path;
    if (d->kind == FC_H5_UNREADABLE) {
        return fc_fail(err, d->code, "%s: dataset /%s: %s", path, d->path, d->message);
    }
    FC_TRY(fc_h5_name_tensor(o->checkpoint->arena, d, true, path, tensor, err));
    FC_TRY(fc_h5_check_dtype(d, path, err));
    FC_TRY(fc_h5_fill_tensor(o->checkpoint, d, tensor, err));
    return d->kind == FC_H5_TENSOR ? read_placements(o, d, tensor, err) : FC_OK;
}

static fc_code read_index(void *context, size_t number, const fc_h5_file *file, fc_error *err) {
    sharded_reader *o = context;
    fc_checkpoint *checkpoint = o->checkpoint;
    fc_arena *arena = checkpoint->arena;
    const char *path = checkpoint->files[0].path;
    size_t extra = file->nattributes > 0;
    (void)number;
    FC_TRY(check_schema(&file->root, path, err));
    FC_TRY(read_mesh(&file->root, path, &checkpoint->mesh, err));
    checkpoint->note = fc_h5_missing_note(file->missing);
    checkpoint->whole = !extra;
    o->ranks = file->root.world_size;
    o->count = file->ndatasets;
    o->tensors = fc_arena_calloc(arena, o->count + extra, sizeof *o->tensors);
    o->chunks = fc_arena_calloc(arena, o->count, sizeof *o->chunks);
    o->datasets = fc_arena_calloc(arena, o->count, sizeof *o->datasets);
    o->by_path = fc_arena_calloc(arena, o->count, sizeof *o->by_path);
    FC_NEED(o->tensors && o->chunks && o->datasets && o->by_path, err, o->checkpoint->path);
    for (size_t i = 0; i < o->count; i++) {
        o->chunks[i].arena = arena;
        o->datasets[i] = &file->datasets[i];
        o->by_path[i] = i;
        FC_TRY(add_index_entry(o, &file->datasets[i], &o->tensors[i], err));
    }
    fc_sort_items_by(o->by_path, o->count, sizeof *o->by_path, compare_paths, o);
    if (extra) {
        FC_TRY(fc_h5_add_attributes(checkpoint, file, &o->tensors[o->count], err));
    }
    checkpoint->tensors = o->tensors;
    checkpoint->ntensors = o->count + extra;
    checkpoint->producer = file->root.producer;
    return fc_h5_check_names(arena, o->tensors, o->count + extra, extra != 0, path, err);
}

/* ---- shard files ---- */

/* @return the index of the tensor whose dataset has `path`, or `count`. */
static size_t find_path(const sharded_reader *o, const char *path) {
    size_t low = 0, high = o->count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        int order = strcmp(o->datasets[o->by_path[middle]]->path, path);
        if (order == 0) {
            return o->by_path[middle];
        }
        if (order < 0) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return o->count;
}

static bool same_numbers(int n, const int64_t *a, const int64_t *b) {
    return n == 0 || memcmp(a, b, (size_t)n * sizeof *a) == 0;
}

/* Checks that the dataset is the box that the placements give this rank. */
static fc_code check_box(const sharded_reader *o, const fc_tensor *tensor, const fc_h5_dataset *d, int64_t rank,
                         const char *path, fc_error *err) {
    int64_t coordinate[FC_MAX_MESH_DIMS], offsets[FC_MAX_DIMS], sizes[FC_MAX_DIMS];
    if (d->dtype != tensor->dtype || d->ndim != tensor->ndim) {
        return fc_fail(err, FC_ECORRUPT, "%s: dataset /%s is %s with %d dimensions, but in index.h5 it is %s with %d",
                       path, d->path, fc_dtype_get(d->dtype)->torch_name, d->ndim,
                       fc_dtype_get(tensor->dtype)->torch_name, tensor->ndim);
    }
    if (d->nglobal_shape != d->ndim || d->noffsets != d->ndim ||
        !same_numbers(d->ndim, d->global_shape, tensor->shape)) {
        return fc_fail(err, FC_ECORRUPT,
                       "%s: dataset /%s: the attributes global_shape and offsets are missing or disagree with index.h5",
                       path, d->path);
    }
    fc_mesh_coordinate(&o->checkpoint->mesh, rank, coordinate);
    FC_TRY_CONTEXT(fc_local_box(tensor->ndim, tensor->shape, &o->checkpoint->mesh, tensor->placements, coordinate,
                                offsets, sizes, err),
                   err, "%s: dataset /%s", path, d->path);
    const fc_box box = {d->ndim, offsets, sizes};
    bool empty = fc_box_volume(&box) == 0;
    if (!same_numbers(d->ndim, d->shape, sizes) || (!empty && !same_numbers(d->ndim, d->offsets, offsets))) {
        return fc_fail(err, FC_ECORRUPT,
                       "%s: dataset /%s: its shape and offsets are not those that the placements give rank %lld", path,
                       d->path, (long long)rank);
    }
    return FC_OK;
}

static fc_code add_shard_dataset(sharded_reader *o, fc_h5_dataset *d, int64_t rank, const char *path, fc_error *err) {
    size_t i = find_path(o, d->path);
    if (i == o->count) {
        return fc_fail(err, FC_ECORRUPT, "%s: dataset /%s is not in index.h5", path, d->path);
    }
    fc_tensor *tensor = &o->tensors[i];
    bool is_object = d->kind == FC_H5_OBJECT;
    if (d->kind != FC_H5_UNREADABLE) {
        if (is_object != (tensor->object != NULL) || (is_object && d->shape[0] != tensor->shape[0])) {
            return fc_fail(err, FC_ECORRUPT, "%s: dataset /%s and index.h5 disagree about the object", path, d->path);
        }
        FC_TRY(is_object ? FC_OK : check_box(o, tensor, d, rank, path, err));
        bool copy = d->owner >= 0;
        if (copy != (d->where == FC_H5_ELSEWHERE) || (copy && (d->owner >= o->ranks || d->owner == rank))) {
            return fc_fail(err, FC_ECORRUPT, "%s: dataset /%s: the attribute owner does not match its storage", path,
                           d->path);
        }
        if (copy) {
            return FC_OK; /* the owner's file stores it */
        }
    } else {
        return fc_fail(err, d->code, "%s: dataset /%s: %s", path, d->path, d->message);
    }
    if (is_object) {
        tensor->detail = d;
    }
    return fc_h5_add_chunks(o->checkpoint, d, (uint32_t)rank + 1, is_object ? NULL : d->offsets, (uint32_t)rank,
                            &o->chunks[i], err);
}

/* Checks that the file is the shard of `rank` of this checkpoint, by the attributes of its root. */
static fc_code check_root(const sharded_reader *o, int64_t rank, const fc_h5_file *file, fc_error *err) {
    const char *path = o->checkpoint->files[rank + 1].path;
    fc_mesh mesh;
    FC_TRY(check_schema(&file->root, path, err));
    FC_TRY(read_mesh(&file->root, path, &mesh, err));
    if (!fc_mesh_equal(&mesh, &o->checkpoint->mesh)) {
        return fc_fail(err, FC_ECORRUPT,
                       "%s: its mesh differs from that of index.h5: files of two checkpoints are mixed here", path);
    }
    if (file->root.rank != rank) {
        return fc_fail(err, FC_ECORRUPT, "%s: it contains the shard of rank %lld: the file was renamed or replaced",
                       path, (long long)file->root.rank);
    }
    return FC_OK;
}

static fc_code read_shard(void *context, size_t number, const fc_h5_file *file, fc_error *err) {
    sharded_reader *o = context;
    int64_t rank = (int64_t)number;
    const char *path = o->checkpoint->files[number + 1].path;
    FC_TRY(check_root(o, rank, file, err));
    o->checkpoint->whole &= file->nattributes == 0; /* those of shard files are not read */
    for (size_t i = 0; i < file->ndatasets; i++) {
        FC_TRY(add_shard_dataset(o, &file->datasets[i], rank, path, err));
    }
    return fc_progress_count(o->progress, 1, err);
}

static fc_code only_schema(void *context, size_t number, const fc_h5_file *file, fc_error *err) {
    const char *const *path = context;
    return check_schema(&file->root, path[number], err);
}

fc_code fc_h5_check_header(const fc_checkpoint *checkpoint, size_t index, fc_error *err) {
    const char *path = checkpoint->files[index].path;
    return fc_h5_scan_files(checkpoint->arena, &path, 1, 0, false, only_schema, &path, err);
}

static fc_h5_server *server_of(const sharded_reader *o) {
    const fc_h5_state *state = o->checkpoint->state;
    return state->server;
}

static fc_code read_shards(sharded_reader *o, fc_error *err) {
    fc_checkpoint *checkpoint = o->checkpoint;
    size_t n = (size_t)o->ranks;
    const char **paths = calloc(n, sizeof *paths);
    FC_NEED(paths, err, o->checkpoint->path);
    for (size_t i = 0; i < n; i++) {
        paths[i] = checkpoint->files[i + 1].path;
    }
    fc_progress_begin(o->progress, FC_PHASE_OPENING, FC_COUNTED_FILES, n);
    fc_code rc = fc_h5_scan_files_by(server_of(o), checkpoint->arena, paths, n, o->count, false, read_shard, o, err);
    free(paths);
    FC_TRY(rc);
    for (size_t i = 0; i < o->count; i++) {
        int64_t numel = 0;
        fc_tensor *tensor = &o->tensors[i];
        tensor->chunks = o->chunks[i].items;
        tensor->nchunks = o->chunks[i].count;
        if (tensor->nchunks == 0 && fc_numel(tensor->ndim, tensor->shape, &numel) && numel > 0) {
            return fc_fail(err, FC_ECORRUPT, "%s: dataset /%s is not stored in any shard file",
                           checkpoint->files[0].path, o->datasets[i]->path);
        }
    }
    return FC_OK;
}

/* ---- headers only ---- */

/* Computes the boxes from the mesh and the placements. Replicas count once, for their lowest rank. */
static fc_code compute_boxes(sharded_reader *o, size_t i, fc_error *err) {
    fc_tensor *tensor = &o->tensors[i];
    const fc_mesh *mesh = &o->checkpoint->mesh;
    for (int64_t rank = 0; rank < o->ranks; rank++) {
        int64_t coordinate[FC_MAX_MESH_DIMS];
        fc_mesh_coordinate(mesh, rank, coordinate);
        bool replica = tensor->object && rank > 0;
        for (int m = 0; !tensor->object && m < mesh->ndim; m++) {
            replica |= tensor->placements[m].kind == FC_REPLICATE && coordinate[m] > 0;
        }
        if (replica) {
            continue;
        }
        fc_h5_dataset *local = fc_arena_alloc(o->checkpoint->arena, sizeof *local);
        int64_t *box = fc_arena_calloc(o->checkpoint->arena, 2 * (size_t)tensor->ndim, sizeof *box);
        FC_NEED(local && box, err, o->checkpoint->path);
        *local = *o->datasets[i];
        local->where = local->kind == FC_H5_UNREADABLE ? FC_H5_NOWHERE : FC_H5_ELSEWHERE;
        if (!tensor->object) {
            FC_TRY_CONTEXT(fc_local_box(tensor->ndim, tensor->shape, mesh, tensor->placements, coordinate, box,
                                        box + tensor->ndim, err),
                           err, "%s: dataset /%s", o->checkpoint->files[0].path, local->path);
            local->shape = box + tensor->ndim;
        }
        FC_TRY(fc_h5_add_chunks(o->checkpoint, local, (uint32_t)rank + 1, tensor->object ? NULL : box, (uint32_t)rank,
                                &o->chunks[i], err));
    }
    tensor->chunks = o->chunks[i].items;
    tensor->nchunks = o->chunks[i].count;
    return FC_OK;
}

static fc_code compute_all_boxes(sharded_reader *o, fc_error *err) {
    if (o->count > 0 && (int64_t)(MAX_COMPUTED_BOXES / o->count) < o->ranks) {
        return fc_fail(err, FC_EUNSUPPORTED, "%s: %zu tensors on %lld ranks are too many boxes", o->checkpoint->path,
                       o->count, (long long)o->ranks);
    }
    for (size_t i = 0; i < o->count; i++) {
        FC_TRY(compute_boxes(o, i, err));
    }
    return FC_OK;
}

/* ---- opening ---- */

/* A file that is not the one that index.h5 describes. */
typedef struct stranger {
    const sharded_reader *o;
    int64_t rank;
    bool read; /* out: it has headers */
} stranger;

static fc_code recognise(void *context, size_t number, const fc_h5_file *file, fc_error *err) {
    stranger *s = context;
    (void)number;
    s->read = true;
    return check_root(s->o, s->rank, file, err);
}

/* Reports what the file's own headers say it is, or otherwise its size. */
static fc_code explain_size(const sharded_reader *o, int64_t rank, uint64_t size, fc_error *err) {
    const fc_h5_state *state = o->checkpoint->state;
    const char *path = o->checkpoint->files[rank + 1].path;
    stranger s = {o, rank, false};
    fc_error why;
    const fc_code rc = fc_h5_scan_files(o->checkpoint->arena, &path, 1, 0, false, recognise, &s, &why);
    if (rc != FC_OK && (s.read || rc != FC_ECORRUPT)) {
        return fc_fail(err, rc, "%s", why.message);
    }
    return fc_h5_other_size(path, size, state->files[rank].size, err);
}

/* Checks that the files exist and have the sizes in the tables of index.h5. */
static fc_code compare_sizes(const sharded_reader *o, fc_error *err) {
    const fc_h5_state *state = o->checkpoint->state;
    for (int64_t rank = 0; rank < o->ranks; rank++) {
        const char *path = o->checkpoint->files[rank + 1].path;
        struct stat st;
        if (fc_stat(path, &st) != 0) {
            return errno == ENOENT || errno == ENOTDIR ? fc_fail(err, FC_ECORRUPT, "%s: the file is missing", path)
                                                       : fc_fail_errno(err, errno, "%s: cannot be examined", path);
        }
        if (!S_ISREG(st.st_mode)) {
            return fc_fail(err, FC_ECORRUPT, "%s: not a regular file", path);
        }
        if ((uint64_t)st.st_size != state->files[rank].size) {
            return explain_size(o, rank, (uint64_t)st.st_size, err);
        }
    }
    return FC_OK;
}

static fc_code finish_listed(sharded_reader *o, const fc_open_options *options, fc_error *err) {
    o->checkpoint->whole = true; /* no other program has changed the files */
    o->ranks = fc_mesh_ranks(&o->checkpoint->mesh);
    FC_TRY(fc_h5_name_shards(o->checkpoint, o->directory, o->ranks, err));
    FC_TRY(fc_identities_take(o->checkpoint, options, err));
    if (!options->follow_external) {
        FC_TRY(fc_check_links(o->directory, o->checkpoint->files, o->checkpoint->nfiles, err));
    }
    if (!options->headers_only) {
        FC_TRY(fc_h5_check_directory(o->directory, o->ranks, err));
    }
    return !options->headers_only ? compare_sizes(o, err) : FC_OK;
}

static fc_code finish_walked(sharded_reader *o, const char *path, const fc_open_options *options, fc_error *err) {
    FC_TRY(fc_h5_scan_files_by(server_of(o), o->checkpoint->arena, &path, 1, 0, false, read_index, o, err));
    FC_TRY(fc_h5_name_shards(o->checkpoint, o->directory, o->ranks, err));
    FC_TRY(fc_identities_take(o->checkpoint, options, err));
    if (!options->follow_external) {
        FC_TRY(fc_check_links(o->directory, o->checkpoint->files, o->checkpoint->nfiles, err));
    }
    if (options->headers_only) {
        return compute_all_boxes(o, err);
    }
    FC_TRY(fc_h5_check_directory(o->directory, o->ranks, err));
    return read_shards(o, err);
}

/* @param walk reads all files instead of using the tables. */
static fc_code open_sharded(fc_checkpoint *checkpoint, const char *directory, const fc_open_options *options, bool walk,
                            fc_error *err) {
    sharded_reader o = {.checkpoint = checkpoint, .directory = directory, .progress = options->progress};
    fc_file *index = fc_arena_calloc(checkpoint->arena, 1, sizeof *index);
    bool listed = false;
    if (index) {
        index->name = "index.h5";
        index->path = fc_arena_printf(checkpoint->arena, "%s/index.h5", directory);
    }
    FC_NEED(index && index->path, err, o.checkpoint->path);
    checkpoint->files = index;
    checkpoint->nfiles = 1;
    FC_TRY(fc_identities_take(checkpoint, options, err));
    if (!options->follow_external) {
        FC_TRY(fc_check_links(o.directory, o.checkpoint->files, o.checkpoint->nfiles, err));
    }
    if (fc_access(index->path, F_OK) != 0 && errno == ENOENT) { /* the directory was recognised by a shard file */
        return fc_fail(err, FC_ECORRUPT,
                       "%s: the file is missing; it describes the tensors in the shard files next to it: copy it again",
                       index->path);
    }
    if (!walk) {
        FC_TRY(fc_h5_open_tables(checkpoint, index->path, true, &listed, err));
    }
    return listed ? finish_listed(&o, options, err) : finish_walked(&o, index->path, options, err);
}

fc_code fc_h5_open_sharded(fc_checkpoint *checkpoint, const char *directory, const fc_open_options *options,
                           fc_error *err) {
    return open_sharded(checkpoint, directory, options, false, err);
}

fc_code fc_h5_walk_sharded(fc_checkpoint *checkpoint, const char *directory, fc_error *err) {
    const fc_open_options options = {.follow_external = true}; /* links were already checked when it was opened */
    return open_sharded(checkpoint, directory, &options, true, err);
}
