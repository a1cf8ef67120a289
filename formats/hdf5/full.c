/*
 * Opens one HDF5 file, ours or another program's, as a full checkpoint. Every dataset is a tensor or an object. If the
 * file has tables (tables.c), nothing else is read.
 *
 * Attributes of other programs (Keras stores the model's configuration in them) become one object named "@attributes"
 * with the encoding "hdf5.attributes": JSON text {"/path": {"name": value}}. So nothing is lost silently, and a
 * conversion keeps them.
 */
#include "base/text.h"
#include "checkpoint/identity.h"
#include "fsdpckpt/try.h"
#include "hdf5/h5.h"
#include "hdf5/reader.h"
#include "hdf5/schema.h"
#include "io/file.h"

#include <string.h>
#include <unistd.h>

/* Writes all foreign attributes as one JSON object in the arena. */
static fc_code join_attributes(fc_arena *arena, const char *path, const fc_h5_file *file, fc_h5_bytes *out,
                               fc_error *err) {
    fc_text text = {0};
    unsigned char *copy = NULL;
    fc_code rc = FC_OK;
    fc_text_raw(&text, "{");
    for (size_t i = 0; i < file->nattributes; i++) {
        const fc_h5_attributes *a = &file->attributes[i];
        size_t len = strlen(a->path);
        char *key = fc_arena_alloc(arena, len + 2);
        FC_TRY_GOTO(key ? FC_OK : fc_no_memory(err, path), rc, out);
        text.failed |= !fc_is_json((const char *)a->json.data, a->json.size);
        key[0] = '/';
        memcpy(key + 1, a->path, len + 1);
        fc_text_raw(&text, i ? ", " : "");
        fc_text_string(&text, key, len + 1);
        fc_text_raw(&text, ": ");
        fc_text_bytes(&text, a->json.data, a->json.size);
    }
    fc_text_raw(&text, "}");
    FC_TRY_GOTO(
        text.failed && !text.no_memory
            ? fc_fail(err, FC_ECORRUPT, "%s: corrupt HDF5 file: its attributes are invalid or exceed 64 MiB", path)
            : FC_OK,
        rc, out);
    copy = text.failed ? NULL : fc_arena_alloc(arena, text.size);
    FC_TRY_GOTO(copy ? FC_OK : fc_no_memory(err, path), rc, out);
    memcpy(copy, text.data, text.size);
    *out = (fc_h5_bytes){copy, text.size};
out:
    fc_text_free(&text);
    return rc;
}

/* Makes a dataset for JSON text, which is in no dataset of the file. */
static fc_code text_dataset(fc_arena *arena, const char *path, fc_h5_bytes text, fc_h5_dataset **out, fc_error *err) {
    static const unsigned char no_list[1];
    fc_h5_dataset *d = *out = fc_arena_calloc(arena, 1, sizeof *d);
    int64_t *shape = fc_arena_calloc(arena, 1, sizeof *shape);
    FC_NEED(d && shape, err, path);
    d->bytes = text;
    shape[0] = (int64_t)d->bytes.size;
    d->path = path;
    d->lists = (fc_h5_bytes){no_list, 1};
    d->kind = FC_H5_OBJECT;
    d->where = FC_H5_IN_RECORD;
    d->dtype = FC_OPAQUE;
    d->element = 1;
    d->ndim = 1;
    d->shape = shape;
    d->encoding = "hdf5.attributes";
    return FC_OK;
}

fc_code fc_h5_fill_tensor(fc_checkpoint *checkpoint, const fc_h5_dataset *d, fc_tensor *tensor, fc_error *err) {
    tensor->dtype = d->dtype;
    tensor->ndim = d->ndim;
    tensor->shape = d->shape;
    tensor->detail = d;
    if (d->kind != FC_H5_TENSOR) {
        fc_object *object = fc_arena_calloc(checkpoint->arena, 1, sizeof *object);
        FC_NEED(object, err, checkpoint->path);
        object->encoding = d->encoding ? d->encoding : "hdf5";
        object->damaged = d->kind == FC_H5_UNREADABLE && d->code == FC_ECORRUPT;
        tensor->object = object;
    }
    return FC_OK;
}

fc_code fc_h5_check_dtype(const fc_h5_dataset *d, const char *path, fc_error *err) {
    const char *found = fc_dtype_get(d->dtype)->torch_name;
    if (d->kind != FC_H5_TENSOR || !d->dtype_name || strcmp(d->dtype_name, found) == 0) {
        return FC_OK;
    }
    return fc_fail(err, FC_ECORRUPT, "%s: dataset /%s: the attribute dtype says %s, but the HDF5 type is %s", path,
                   d->path, d->dtype_name, found);
}

/*
 * Refuses an object of ours whose attribute `encoding` was changed: its bytes are an archive of torch.save, and its
 * JSON is not that of a foreign dataset, whose bytes can be anything. Only other encodings cost a read.
 */
static fc_code check_encoding(fc_checkpoint *checkpoint, fc_h5_dataset *d, fc_error *err) {
    static const char foreign[] = "{\"$hdf5\"", archive[4] = {'P', 'K', 3, 4};
    const char *path = checkpoint->files[0].path;
    unsigned char head[sizeof archive] = {0};
    uint64_t size;
    int fd;
    if (d->kind != FC_H5_OBJECT || d->where != FC_H5_AT_OFFSET || d->length < sizeof head || !d->encoding || !d->json ||
        strcmp(d->encoding, "torch.save") == 0 || strncmp(d->json, foreign, sizeof foreign - 1) == 0) {
        return FC_OK;
    }
    FC_TRY(fc_open_input(path, &fd, &size, err));
    fc_code rc = fc_pread_full(fd, head, sizeof head, d->offset, path, err);
    close(fd);
    if (rc == FC_OK && memcmp(head, archive, sizeof head) == 0) {
        d->kind = FC_H5_UNREADABLE;
        d->code = FC_ECORRUPT;
        d->message = "its attribute encoding was changed: its bytes are those of torch.save; copy the file again, or "
                     "convert again";
    }
    return rc;
}

fc_code fc_h5_add_dataset(fc_checkpoint *checkpoint, fc_h5_dataset *d, uint32_t file, bool ours, fc_tensor *tensor,
                          fc_error *err) {
    const char *path = checkpoint->files[file].path;
    fc_h5_chunks chunks = {.arena = checkpoint->arena};
    FC_TRY(ours ? fc_h5_check_dtype(d, path, err) : FC_OK);
    FC_TRY(ours ? check_encoding(checkpoint, d, err) : FC_OK);
    fc_code rc;
    FC_TRY_GOTO(fc_h5_add_chunks(checkpoint, d, file, NULL, FC_NO_RANK, &chunks, err), rc, out);
    FC_TRY_GOTO(fc_h5_name_tensor(checkpoint->arena, d, ours, path, tensor, err), rc, out);
out:
    tensor->chunks = chunks.items;
    tensor->nchunks = chunks.count;
    return rc == FC_OK ? fc_h5_fill_tensor(checkpoint, d, tensor, err) : rc;
}

fc_code fc_h5_add_attributes(fc_checkpoint *checkpoint, const fc_h5_file *file, fc_tensor *tensor, fc_error *err) {
    fc_h5_bytes text = {NULL, 0};
    FC_TRY(join_attributes(checkpoint->arena, checkpoint->path, file, &text, err));
    return fc_h5_add_text(checkpoint, "@attributes", text, tensor, err);
}

fc_code fc_h5_add_text(fc_checkpoint *checkpoint, const char *path, fc_h5_bytes text, fc_tensor *tensor,
                       fc_error *err) {
    fc_h5_dataset *d;
    FC_TRY(text_dataset(checkpoint->arena, path, text, &d, err));
    return fc_h5_add_dataset(checkpoint, d, 0, false, tensor, err);
}

/* The checkpoint that is built of one file. */
typedef struct full {
    fc_checkpoint *checkpoint;
    const fc_open_options *options;
} full;

static fc_code build_manifest(void *context, size_t index, const fc_h5_file *file, fc_error *err) {
    const full *f = context;
    fc_checkpoint *checkpoint = f->checkpoint;
    const char *path = checkpoint->path;
    const fc_h5_root *root = &file->root;
    bool ours = root->schema != 0;
    (void)index;
    if (root->schema > FC_H5_SCHEMA) {
        return fc_fail(err, FC_EUNSUPPORTED,
                       "%s: written with schema %lld; this fsdpckpt reads schemas 1 to %d: use a newer one", path,
                       (long long)root->schema, FC_H5_SCHEMA);
    }
    if (ours && root->rank >= 0) {
        return fc_fail(
            err, FC_EUSAGE,
            "%s: this is the shard of rank %lld of %lld; give the path of its directory to open the whole checkpoint",
            path, (long long)root->rank, (long long)root->world_size);
    }
    if (ours && root->world_size >= 0) {
        return fc_fail(err, FC_EUSAGE, "%s: an index of shards must be called index.h5; give the path of its directory",
                       path);
    }
    bool view = ours && root->layout && strcmp(root->layout, FC_H5_VIEW_LAYOUT) == 0;
    if (view && !((fc_h5_state *)checkpoint->state)->follow_external) {
        return fc_advise(
            err,
            fc_fail(err, FC_EUSAGE,
                    "%s: a view: its data is in the files of another checkpoint; give the path of that one", path),
            FC_HINT_FOLLOW_EXTERNAL, NULL);
    }
    size_t count = 0;
    fc_tensor *tensors = fc_arena_calloc(checkpoint->arena, file->ndatasets + 1, sizeof *tensors);
    FC_NEED(tensors, err, path);
    for (size_t i = 0; i < file->ndatasets; i++) {
        if (view && strncmp(file->datasets[i].path, FC_H5_VIEW_PIECES "/", sizeof FC_H5_VIEW_PIECES) == 0) {
            continue; /* the sources of its virtual datasets */
        }
        FC_TRY(fc_h5_add_dataset(checkpoint, &file->datasets[i], 0, ours, &tensors[count++], err));
    }
    if (file->nattributes > 0) {
        FC_TRY(fc_h5_add_attributes(checkpoint, file, &tensors[count++], err));
    }
    checkpoint->tensors = tensors;
    checkpoint->ntensors = count;
    checkpoint->producer = root->producer;
    checkpoint->note = fc_h5_missing_note(file->missing);
    checkpoint->whole = ours && file->nattributes == 0; /* the target would have the others as an object */
    for (size_t i = 0; i < file->nothers; i++) {
        FC_TRY(fc_identities_add_header(checkpoint, file->others[i], f->options, err));
    }
    return fc_h5_check_names(checkpoint->arena, tensors, count, !ours || file->nattributes > 0, path, err);
}

/* @param walk reads the whole file instead of using its tables. */
static fc_code open_full(fc_checkpoint *checkpoint, const fc_open_options *options, bool walk, fc_error *err) {
    fc_h5_state *state = checkpoint->state;
    fc_file *file = fc_arena_calloc(checkpoint->arena, 1, sizeof *file);
    FC_NEED(file, err, checkpoint->path);
    const char *slash = strrchr(checkpoint->path, '/');
    *file = (fc_file){checkpoint->path, slash ? slash + 1 : checkpoint->path};
    checkpoint->files = file;
    checkpoint->nfiles = 1;
    FC_TRY(fc_identities_take(checkpoint, options, err));
    full f = {checkpoint, options};
    bool listed = false;
    if (!walk) {
        FC_TRY(fc_h5_open_tables(checkpoint, checkpoint->path, false, &listed, err));
    }
    if (listed) {
        checkpoint->whole = true; /* no other program has changed the file */
        return FC_OK;
    }
    return fc_h5_scan_files_by(state->server, checkpoint->arena, &checkpoint->path, 1, 0, state->follow_external,
                               build_manifest, &f, err);
}

fc_code fc_h5_open_full(fc_checkpoint *checkpoint, const fc_open_options *options, fc_error *err) {
    return open_full(checkpoint, options, false, err);
}

fc_code fc_h5_walk_full(fc_checkpoint *checkpoint, fc_error *err) {
    const fc_open_options options = {.follow_external = true}; /* links were already checked when it was opened */
    return open_full(checkpoint, &options, true, err);
}
