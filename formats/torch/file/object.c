/*
 * Values of a `.pt` file that are not tensors. In every format, the bytes of an object are a torch.save archive of that
 * value alone. In a `.pt` file the value is only a few opcodes of the one pickle, so the archive is made: its pickle
 * when the file is opened, the rest when its bytes are read. Tensors within the value (in a set, or in an object of an
 * unknown class) are copied into the archive.
 */
#include "torch/file/file.h"
#include "torch/object/kept.h"
#include "torch/object/sparse.h"
#include "torch/pickle/copy.h"

#include "base/checked.h"
#include "base/crc.h"
#include "fsdpckpt/try.h"
#include "io/file.h"
#include "torch/zip/write.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MAX_INSIDE = 64 << 20 /* the most bytes of tensors in one object, because its archive is made in memory */ };

static const fc_object torch_save_object = {.encoding = "torch.save"};
static const char folder[] = "archive";

/* Lays out the archive. Its data records are in the order of object->storages. */
static fc_code lay_out_archive(const torch_object *object, fc_torch_zip *zip, fc_error *err) {
    uint64_t offset;
    FC_TRY(fc_torch_zip_begin(zip, folder, object->pickle, object->size, err));
    for (size_t i = 0; i < object->nstorages; i++) {
        FC_TRY(fc_torch_zip_add_data(zip, object->storages[i].size, &offset, err));
    }
    return fc_torch_zip_end(zip, err);
}

static fc_code find_storages(const torch_file *f, const fc_pickle_copy *copy, fc_arena *arena, torch_object *object,
                             fc_error *err) {
    uint64_t total = 0;
    object->nstorages = copy->nstorages;
    object->storages = fc_arena_calloc(arena, copy->nstorages, sizeof *object->storages);
    FC_NEED(object->storages, err, NULL);
    if (f->swap && copy->nstorages > 0) {
        return fc_fail(err, FC_EUNSUPPORTED, "it contains a tensor, and the file is big-endian");
    }
    for (size_t i = 0; i < copy->nstorages; i++) {
        fc_torch_tensor t = {0};
        FC_TRY(fc_torch_storage_decode(f->p, copy->storages[i], &t, err));
        FC_TRY(fc_torch_file_storage(f, &t, &object->storages[i], err));
        if (!fc_add_u64(total, object->storages[i].size, &total) || total > MAX_INSIDE) {
            return fc_fail(err, FC_EUNSUPPORTED,
                           "it contains more than %d bytes of tensors within a value that is not a dict, list or tuple",
                           MAX_INSIDE);
        }
    }
    return FC_OK;
}

/* Copies the pickle of the value, and lays out the archive of it and its storages. */
static fc_code make_archive(const torch_file *f, fc_pv v, fc_pickle_copy *copy, fc_torch_zip *zip, fc_arena *arena,
                            torch_object *object, fc_error *err) {
    fc_torch_pickler *w = copy->w;
    FC_TRY(fc_pickle_copy_value(copy, v, err));
    FC_TRY(fc_torch_pickle_end(w, err));
    FC_TRY(fc_torch_unfold(f, w->size, err));
    FC_TRY(find_storages(f, copy, arena, object, err));
    object->pickle = fc_arena_copy(arena, w->bytes, w->size, 1);
    FC_NEED(object->pickle, err, NULL);
    object->size = w->size;
    FC_TRY(lay_out_archive(object, zip, err));
    object->length = zip->length;
    return FC_OK;
}

/* Finds an object of another format, or what a sparse tensor is apart from its parts. */
static fc_code find_kept(const torch_file *f, fc_pv v, fc_arena *arena, fc_torch_kept *kept, fc_error *err) {
    fc_torch_sparse sparse;
    uint64_t spent;
    FC_TRY(fc_torch_find_kept(f->p, v, arena, kept, &spent, err));
    FC_TRY(fc_torch_unfold(f, spent + 1, err));
    if (!kept->encoding && fc_torch_sparse_decode(f->p, v, &sparse, NULL) == FC_OK) {
        const char *text = fc_torch_sparse_text(&sparse, arena);
        FC_NEED(text, err, NULL);
        *kept = (fc_torch_kept){FC_TORCH_SPARSE, (const unsigned char *)text, strlen(text), NULL};
    }
    return FC_OK;
}

/* Keeps the bytes of an object of another format. */
static fc_code keep_bytes(const fc_torch_kept *kept, fc_arena *arena, torch_object *object, fc_error *err) {
    object->encoding = kept->encoding;
    object->json = kept->json;
    object->pickle = fc_arena_copy(arena, kept->bytes, kept->size, 1);
    FC_NEED(object->pickle, err, NULL);
    object->size = kept->size;
    object->length = kept->size;
    return FC_OK;
}

fc_code fc_torch_object_new(const torch_file *f, fc_pv v, fc_arena *arena, torch_object **out, fc_error *err) {
    fc_torch_pickler w;
    fc_torch_zip zip = {0};
    fc_pickle_copy copy = {.p = f->p, .w = &w};
    fc_torch_kept kept;
    torch_object *object = *out = fc_arena_calloc(arena, 1, sizeof *object);
    FC_NEED(object, err, NULL);
    FC_TRY(find_kept(f, v, arena, &kept, err));
    if (kept.encoding) {
        return keep_bytes(&kept, arena, object, err);
    }
    fc_torch_pickle_begin(&w, 2);
    fc_code rc = make_archive(f, v, &copy, &zip, arena, object, err);
    fc_torch_zip_free(&zip);
    fc_pickle_copy_free(&copy);
    fc_torch_pickle_free(&w);
    return rc;
}

static fc_code make_tensor(const fc_object *object, const void *detail, int64_t length, uint32_t file, fc_arena *arena,
                           fc_tensor *t, fc_error *err) {
    int64_t *dims = fc_arena_calloc(arena, 3, sizeof *dims);
    fc_chunk *chunk = fc_arena_calloc(arena, 1, sizeof *chunk);
    FC_NEED(dims && chunk, err, NULL);
    dims[0] = dims[2] = length; /* shape; offset 0, size */
    *chunk = (fc_chunk){.dims = dims + 1, .place = {.kind = FC_PLACE_FILE, .file = file}, .rank = FC_NO_RANK};
    t->dtype = FC_OPAQUE;
    t->ndim = 1;
    t->shape = dims;
    t->chunks = chunk;
    t->nchunks = 1;
    t->object = object;
    t->detail = detail;
    return FC_OK;
}

fc_code fc_torch_object_tensor(const torch_object *object, uint32_t file, fc_arena *arena, fc_tensor *t,
                               fc_error *err) {
    fc_object *kept = object->encoding ? fc_arena_calloc(arena, 1, sizeof *kept) : NULL;
    if (object->encoding) {
        FC_NEED(kept, err, NULL);
        kept->encoding = object->encoding;
    }
    FC_TRY(make_tensor(kept ? kept : &torch_save_object, object, (int64_t)object->length, file, arena, t, err));
    t->nchunks = object->length > 0;
    return FC_OK;
}

fc_code fc_torch_refused_tensor(const char *reason, fc_hint hint, uint32_t file, fc_arena *arena, fc_tensor *t,
                                fc_error *err) {
    fc_object *object = fc_arena_calloc(arena, 1, sizeof *object);
    const char *copy = fc_arena_strndup(arena, reason, strlen(reason));
    FC_NEED(object && copy, err, NULL);
    *object = (fc_object){.encoding = torch_save_object.encoding, .refusal = copy, .hint = hint};
    return make_tensor(object, NULL, 1, file, arena, t, err); /* not empty, so that reading it reports the reason */
}

static fc_code read_stored(int fd, const char *path, const torch_record *record, unsigned char *out, fc_error *err) {
    FC_TRY(fc_pread_full(fd, out, (size_t)record->size, record->offset, path, err));
    if (record->crc != 0 && fc_crc32(0, out, (size_t)record->size) != record->crc) {
        return fc_fail(err, FC_ECORRUPT, "%s: offset %" PRIu64 ": damaged: its CRC-32 does not match", path,
                       record->offset);
    }
    return FC_OK;
}

static fc_code read_deflated(int fd, const char *path, uint64_t size, const torch_record *record, unsigned char *out,
                             fc_error *err) {
    unsigned char *bytes = NULL;
    fc_zip zip = {.path = path, .fd = fd, .length = size};
    const fc_zip_entry entry = {.name = "of a tensor",
                                .data = record->offset,
                                .stored = record->stored,
                                .size = record->size,
                                .crc = record->crc,
                                .method = record->method};
    fc_code rc;
    FC_TRY_GOTO(fc_zip_read(&zip, &entry, &bytes, err), rc, out);
    memcpy(out, bytes, (size_t)record->size);
out:
    free(bytes);
    fc_zip_close(&zip);
    return rc;
}

/* Reads a record into `out`, and inflates it if necessary. */
static fc_code read_record(const fc_checkpoint *checkpoint, const torch_record *record, unsigned char *out,
                           fc_error *err) {
    const char *path = checkpoint->files[record->file].path;
    int fd;
    uint64_t size;
    FC_TRY(fc_open_input(path, &fd, &size, err));
    fc_code rc = record->method == FC_ZIP_STORED ? read_stored(fd, path, record, out, err)
                                                 : read_deflated(fd, path, size, record, out, err);
    close(fd);
    return rc;
}

static fc_code read_object(const fc_checkpoint *checkpoint, const torch_object *object, unsigned char *bytes,
                           fc_error *err) {
    fc_torch_zip zip = {0};
    fc_code rc;
    FC_TRY_GOTO(lay_out_archive(object, &zip, err), rc, out);
    for (size_t i = 0; i < object->nstorages; i++) {
        const torch_record *record = &object->storages[i];
        unsigned char *at = bytes + zip.records[zip.first_data + i].data;
        FC_TRY_GOTO(read_record(checkpoint, record, at, err), rc, out);
        fc_torch_zip_set_crc32(&zip, i, fc_crc32(0, at, (size_t)record->size));
    }
    rc = fc_torch_zip_write_memory(&zip, bytes, err);
out:
    fc_torch_zip_free(&zip);
    return rc;
}

fc_code fc_torch_read(const fc_checkpoint *checkpoint, const fc_tensor *tensor, size_t index, void *buf,
                      fc_error *err) {
    const torch_extent *extent = tensor->chunks[index].data;
    fc_code rc = tensor->object ? read_object(checkpoint, tensor->detail, buf, err)
                                : read_record(checkpoint, &extent->record, buf, err);
    return rc == FC_OK ? rc : fc_context(err, rc, "%s %.256s", tensor->object ? "object" : "tensor", tensor->name);
}

/* The JSON of an object of another format: its bytes, unless nothing decodes them. */
static fc_code json_of_kept(const torch_object *object, fc_arena *arena, const char **json, fc_error *err) {
    *json = object->json ? object->json : fc_arena_strndup(arena, (const char *)object->pickle, object->size);
    FC_NEED(*json, err, NULL);
    return FC_OK;
}

static fc_code json_of(const fc_checkpoint *checkpoint, const torch_object *object, fc_arena *arena, const char **json,
                       fc_error *err) {
    fc_pickle *p = NULL;
    if (object->encoding) {
        return json_of_kept(object, arena, json, err);
    }
    fc_pickle_source source = {checkpoint->path, 0, object->size, -1, object->pickle};
    FC_TRY(fc_pickle_load(&source, FC_PICKLE_ITEM, &p, err));
    fc_code rc = fc_torch_json_root(p, object->size, arena, json, err);
    fc_pickle_free(p);
    return rc;
}

fc_code fc_torch_object_json(const fc_checkpoint *checkpoint, const fc_tensor *tensor, fc_arena *arena,
                             const char **json, fc_error *err) {
    FC_TRY_CONTEXT(json_of(checkpoint, tensor->detail, arena, json, err), err, "object %.256s", tensor->name);
    return FC_OK;
}
