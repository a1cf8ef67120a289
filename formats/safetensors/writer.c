/*
 * Writes safetensors: one file, several files of limited size with a Hugging Face index, or one shard file per rank for
 * torch's HuggingFaceStorageReader. This file writes only headers; the engine writes the data.
 */
#include "base/checked.h"
#include "fsdpckpt/try.h"
#include "io/file.h"
#include "io/path.h"
#include "safetensors/header_digest.h"
#include "safetensors/header_out.h"
#include "safetensors/kept.h"
#include "safetensors/safetensors.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct writer_state {
    fc_st_common common;
    const fc_target *target;
    char *staging;
    uint32_t *file_of; /* the number of each target tensor's file, from 1 */
    uint32_t nfiles;   /* number of files of a target that is not sharded */
    /* The file that was reserved last: */
    char *path;
    uint32_t file;      /* its number, from 1 */
    uint64_t digests;   /* offset of the tensors' digests; 0 if there are none */
    uint64_t digest;    /* offset of the header's digest */
    char *header;       /* its header, in which the digests are zeros */
    size_t header_size; /* bytes */
    uint32_t *order;    /* its items in the order of their data */
    size_t count;
} writer_state;

/* ---- the number of files ---- */

/* Returns how many tensors from `first` on go into one file: as many as fit and belong there, but at least one. Objects
   do not count, because the header holds them. */
static size_t count_fitting(const fc_target *target, size_t first) {
    uint64_t bytes = 0;
    size_t tensors = 0, i = first;
    for (; i < target->ntensors; i++) {
        const fc_target_tensor *t = &target->tensors[i];
        int64_t elements = 0;
        uint64_t more = 0;
        if (t->source->object) {
            continue;
        }
        bool known = fc_numel(t->source->ndim, t->source->shape, &elements) &&
                     fc_mul_u64((uint64_t)elements, fc_dtype_size(t->dtype), &more) && fc_add_u64(bytes, more, &bytes);
        const bool fits = known && bytes <= target->max_file_bytes && t->file == target->tensors[first].file;
        if (tensors > 0 && !fits) {
            break;
        }
        tensors++;
    }
    return i - first;
}

static bool is_split(const fc_target *target) {
    return target->mesh->ndim == 0 && target->max_file_bytes > 0;
}

static uint32_t count_full_files(const fc_target *target) {
    uint32_t n = 0;
    if (!is_split(target)) {
        return 1;
    }
    for (size_t first = 0; first < target->ntensors; first += count_fitting(target, first)) {
        n++;
    }
    return n ? n : 1;
}

bool fc_st_is_directory(const fc_target *target) {
    return target->mesh->ndim > 0 || is_split(target);
}

size_t fc_st_count_files(const fc_target *target) {
    return target->mesh->ndim > 0 ? (size_t)fc_mesh_ranks(target->mesh) : count_full_files(target);
}

const char *fc_st_index(const fc_target *target) {
    return target->mesh->ndim == 0 && count_full_files(target) > 1 ? ST_INDEX_NAME : NULL;
}

size_t fc_st_split(fc_writer *writer, const fc_target_file *file, size_t first) {
    const writer_state *w = writer->state;
    return is_split(w->target) ? count_fitting(w->target, file->items[first].tensor) : file->nitems;
}

/* ---- create ---- */

/* `t` is a JSON object. Its members become members of `__metadata__`, whose values are strings. */
static fc_code add_foreign(writer_state *w, const fc_target_tensor *t, fc_error *err) {
    unsigned char *bytes;
    size_t size;
    json_error_t at;
    const char *key;
    json_t *value;
    fc_code rc = FC_OK;
    FC_TRY(fc_st_read_object(w->target, t, &bytes, &size, err));
    json_t *root = json_loadb((const char *)bytes, size, JSON_REJECT_DUPLICATES, &at);
    free(bytes);
    if (!json_is_object(root)) {
        json_decref(root);
        return fc_fail(err, FC_ECORRUPT, "%s: object %.256s: its encoding is %s, but it is not a JSON object",
                       w->target->source->path, t->name, ST_METADATA_ENCODING);
    }
    json_object_foreach(root, key, value) {
        char *text = json_is_string(value) ? NULL : json_dumps(value, JSON_COMPACT | JSON_SORT_KEYS | JSON_ENCODE_ANY);
        json_t *member = json_is_string(value) ? json_incref(value) : text ? json_string(text) : NULL;
        bool good = json_object_set_new(w->common.foreign, key, member) == 0;
        free(text);
        rc = good ? rc : fc_no_memory(err, w->target->source->path);
    }
    json_decref(root);
    return rc;
}

static fc_code gather_foreign(writer_state *w, fc_error *err) {
    for (size_t i = 0; i < w->target->ntensors; i++) {
        const fc_target_tensor *t = &w->target->tensors[i];
        if (t->source->object && strcmp(t->source->object->encoding, ST_METADATA_ENCODING) == 0) {
            FC_TRY(add_foreign(w, t, err));
        }
    }
    return FC_OK;
}

fc_code fc_st_create(const fc_target *target, const char *staging, fc_writer *writer, fc_error *err) {
    writer_state *w = calloc(1, sizeof *w);
    writer->state = w;
    if (w) {
        w->target = target;
        w->staging = strdup(staging);
        w->common = (fc_st_common){.target = target, .foreign = json_object()};
        w->file_of = calloc(target->ntensors + 1, sizeof *w->file_of);
        w->nfiles = count_full_files(target);
    }
    FC_NEED(w && w->staging && w->common.foreign && w->file_of, err, staging);
    return gather_foreign(w, err);
}

void fc_st_destroy(fc_writer *writer) {
    writer_state *w = writer->state;
    if (w) {
        json_decref(w->common.foreign);
        free(w->staging);
        free(w->path);
        free(w->header);
        free(w->file_of);
        free(w->order);
        free(w);
        writer->state = NULL;
    }
}

/* ---- one file ---- */

/* The name of file `number` of a target that is a directory but not sharded. */
static void full_name(const writer_state *w, uint32_t number, char *name, size_t size) {
    if (w->nfiles == 1) {
        snprintf(name, size, "model%s", ST_EXTENSION);
    } else {
        snprintf(name, size, "model-%05u-of-%05u%s", number, w->nfiles, ST_EXTENSION);
    }
}

static fc_code set_path(writer_state *w, const fc_target_file *file, fc_error *err) {
    char name[80];
    free(w->path);
    if (!fc_st_is_directory(w->target)) {
        w->path = strdup(w->staging);
    } else {
        if (w->target->mesh->ndim > 0) { /* torch counts ranks from 1, and each rank has one file */
            snprintf(name, sizeof name, "shard-%05u-model-00001-of-00001%s", file->rank + 1, ST_EXTENSION);
        } else {
            full_name(w, w->file, name, sizeof name);
        }
        if (asprintf(&w->path, "%s/%s", w->staging, name) < 0) {
            w->path = NULL;
        }
    }
    return w->path ? FC_OK : fc_no_memory(err, w->staging);
}

static fc_code write_header(const char *path, const fc_st_header_out *header, fc_error *err) {
    uint64_t size;
    if (!fc_add_u64(header->size, header->data, &size) || size > INT64_MAX) {
        return fc_fail(err, FC_ECORRUPT, "%s: the sizes of its tensors overflow", path);
    }
    int fd = fc_open(path, O_WRONLY | O_CREAT | O_EXCL, 0666);
    if (fd < 0) {
        return fc_fail_errno(err, errno, "%s: the file cannot be created", path);
    }
    fc_code rc;
    FC_TRY_GOTO(fc_pwrite_full(fd, header->text, header->size, 0, path, err), rc, out);
    if (ftruncate(fd, (off_t)size) != 0) {
        rc = fc_fail_errno(err, errno, "%s: the file cannot be extended to %" PRIu64 " bytes", path, size);
    }
out:
    return fc_close_written(fd, rc, path, err);
}

fc_code fc_st_reserve(fc_writer *writer, fc_target_file *file, fc_error *err) {
    writer_state *w = writer->state;
    fc_st_header_out header;
    w->file++;
    for (size_t i = 0; i < file->nitems; i++) {
        w->file_of[file->items[i].tensor] = w->file;
    }
    FC_TRY(set_path(w, file, err));
    file->path = w->path;
    fc_code rc;
    FC_TRY_GOTO(fc_st_header_make(&w->common, file, file->rank == 0, &header, err), rc, out);
    FC_TRY_GOTO(write_header(w->path, &header, err), rc, out);
out:
    free(w->order);
    w->order = header.order;
    w->count = header.count;
    w->digests = header.digests;
    w->digest = header.digest;
    free(w->header);
    w->header = header.text;
    w->header_size = header.size;
    header.order = NULL;
    header.text = NULL;
    fc_st_header_out_free(&header);
    return rc;
}

/* Writes the digests of the tensors and then that of the header, which covers them. */
fc_code fc_st_finish_file(fc_writer *writer, const fc_target_file *file, fc_error *err) {
    const writer_state *w = writer->state;
    int fd = fc_open(file->path, O_WRONLY, 0);
    if (fd < 0) {
        return fc_fail_errno(err, errno, "%s: the file cannot be reopened", file->path);
    }
    char *digests = w->header + w->digests;
    for (size_t i = 0; w->digests && i < w->count; i++) {
        fc_st_digits(file->items[w->order[i]].crc64, digests + i * ST_DIGITS);
    }
    fc_st_digits(fc_st_digest_of(w->header, w->header_size, w->digest), w->header + w->digest);
    fc_code rc = FC_OK;
    if (w->digests) {
        FC_TRY_GOTO(fc_pwrite_full(fd, digests, w->count * ST_DIGITS, w->digests, file->path, err), rc, out);
    }
    FC_TRY_GOTO(fc_pwrite_full(fd, w->header + w->digest, ST_DIGITS, w->digest, file->path, err), rc, out);
out:
    return fc_close_written(fd, rc, file->path, err);
}

/* ---- the index ---- */

/* Builds the index as huggingface_hub writes it. @return malloc'ed text; NULL when out of memory. */
static char *index_text(const writer_state *w) {
    json_t *map = json_object(), *metadata = json_object();
    const json_t *kept = json_object_get(w->common.foreign, ST_INDEX_METADATA);
    json_error_t at;
    uint64_t total = 0;
    bool good = map && metadata;
    json_t *more = kept ? json_loads(json_string_value(kept), JSON_REJECT_DUPLICATES, &at) : NULL;
    if (good && json_is_object(more)) {
        good = json_object_update(metadata, more) == 0;
    }
    json_decref(more);
    for (size_t i = 0; good && i < w->target->ntensors; i++) {
        const fc_target_tensor *t = &w->target->tensors[i];
        int64_t elements = 0;
        char name[80];
        if (!t->source->object) {
            full_name(w, w->file_of[i], name, sizeof name);
            fc_numel(t->source->ndim, t->source->shape, &elements);
            total += (uint64_t)elements * fc_dtype_size(t->dtype);
            good = json_object_set_new(map, t->name, json_string(name)) == 0;
        }
    }
    good = good && json_object_set_new(metadata, "total_size", json_integer((json_int_t)total)) == 0;
    json_t *root = good ? json_pack("{s:O, s:O}", "metadata", metadata, "weight_map", map) : NULL;
    char *text = root ? json_dumps(root, JSON_INDENT(2) | JSON_SORT_KEYS) : NULL;
    json_decref(root);
    json_decref(map);
    json_decref(metadata);
    return text;
}

fc_code fc_st_finish(fc_writer *writer, const uint64_t *digests, fc_error *err) {
    const writer_state *w = writer->state;
    fc_st_header_out index = {0};
    char *path = NULL;
    (void)digests;
    if (!is_split(w->target) || w->nfiles == 1) {
        return FC_OK;
    }
    char *text = index_text(w);
    if (!text || asprintf(&index.text, "%s\n", text) < 0 || asprintf(&path, "%s/%s", w->staging, ST_INDEX_NAME) < 0) {
        free(text);
        return fc_no_memory(err, w->staging);
    }
    index.size = strlen(index.text);
    fc_code rc = write_header(path, &index, err);
    fc_st_header_out_free(&index);
    free(text);
    free(path);
    return rc;
}
