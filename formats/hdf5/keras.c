/*
 * Opens what Keras saves around HDF5 files: see keras.h.
 *
 * The index is {"metadata": {…}, "weight_map": {group: file, or a list of files}}. Each file has the datasets of some
 * groups, and the attributes of all groups that it has; together they are what one `.weights.h5` would be.
 */
#include "hdf5/keras.h"

#include "base/crc.h"
#include "base/file_name.h"
#include "base/grow.h"
#include "base/name_table.h"
#include "base/text.h"
#include "checkpoint/identity.h"
#include "checkpoint/path.h"
#include "fsdpckpt/order.h"
#include "fsdpckpt/try.h"
#include "hdf5/reader.h"
#include "io/directory.h"
#include "io/file.h"
#include "net/remote.h"
#include "torch/zip/zip.h"
#include "verify/report.h"

#include <jansson.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MOST_INDEX = 8 << 20, MOST_MEMBER = 64 << 20 };

static const char index_end[] = ".weights.json", weights[] = "model.weights.h5";

bool fc_keras_is_index(const fc_probe *probe) {
    static const char member[] = "\"weight_map\"";
    return fc_ends_with(probe->path, index_end) && memmem(probe->head, probe->head_size, member, sizeof member - 1);
}

bool fc_keras_is_archive(const fc_probe *probe) {
    enum { NAME_SIZE = 26, NAME = 30 };
    static const char *const first[] = {"metadata.json", "config.json"};
    bool is = false;
    for (size_t i = 0; i < sizeof first / sizeof *first; i++) {
        const size_t n = strlen(first[i]);
        is |= probe->head_size >= NAME + n && memcmp(probe->head, "PK\3\4", 4) == 0 && probe->head[NAME_SIZE] == n &&
              probe->head[NAME_SIZE + 1] == 0 && memcmp(probe->head + NAME, first[i], n) == 0;
    }
    return is;
}

/* ---- joining files ---- */

/* The checkpoint under construction. */
typedef struct joining {
    fc_checkpoint *checkpoint;
    fc_tensor *tensors;
    size_t count, capacity;
    fc_h5_file attributes;  /* only its attributes are used */
    fc_name_table *groups;  /* with attributes */
    fc_name_table *paths;   /* of all datasets */
    fc_name_table *members; /* the groups with datasets of each file, as children of its number plus 1 */
    const fc_open_options *options;
    uint64_t base; /* of the HDF5 file in its file */
} joining;

static fc_code new_tensor(joining *j, fc_tensor **out, fc_error *err) {
    FC_NEED(fc_arena_grow(j->checkpoint->arena, &j->tensors, &j->capacity, j->count, j->count + 1, sizeof *j->tensors),
            err, j->checkpoint->path);
    *out = &j->tensors[j->count++];
    **out = (fc_tensor){0};
    return FC_OK;
}

/* Adds the attributes of groups that no earlier file had. */
static fc_code add_attributes(joining *j, const fc_h5_file *file, fc_error *err) {
    fc_h5_file *all = &j->attributes;
    for (size_t i = 0; i < file->nattributes; i++) {
        const fc_h5_attributes *a = &file->attributes[i];
        const size_t number = fc_name_table_put(j->groups, a->path, strlen(a->path), all->nattributes);
        if (number != FC_NO_NAME && number < all->nattributes) {
            continue;
        }
        FC_NEED(number != FC_NO_NAME && fc_arena_grow(j->checkpoint->arena, &all->attributes, &all->attributes_cap,
                                                      all->nattributes, all->nattributes + 1, sizeof *a),
                err, j->checkpoint->path);
        all->attributes[all->nattributes++] = *a;
    }
    return FC_OK;
}

/* Moves the places of a dataset from the HDF5 file to the file around it. */
static void shift(fc_h5_dataset *d, uint64_t base) {
    d->offset += base;
    for (size_t i = 0; i < d->nchunks; i++) {
        d->chunks[i].offset += base;
    }
}

static fc_code add_file(void *context, size_t index, const fc_h5_file *file, fc_error *err) {
    joining *j = context;
    const char *path = j->checkpoint->files[index].path;
    if (file->root.schema != 0) {
        return fc_fail(err, FC_EUNSUPPORTED, "%s: fsdpckpt wrote it, and not Keras: give the path of that file", path);
    }
    for (size_t i = 0; i < file->ndatasets; i++) {
        fc_tensor *tensor = NULL;
        fc_h5_dataset *d = &file->datasets[i];
        const size_t number = fc_name_table_put(j->paths, d->path, strlen(d->path), j->count);
        FC_NEED(number != FC_NO_NAME, err, path);
        if (number != j->count) {
            return fc_fail(err, FC_ECORRUPT, "%s: dataset /%s is in another file of the index, too", path, d->path);
        }
        const char *slash = strrchr(d->path, '/');
        FC_NEED(fc_name_table_put_child(j->members, index + 1, d->path, slash ? (size_t)(slash - d->path) : 0, 0) !=
                    FC_NO_NAME,
                err, path);
        FC_TRY(new_tensor(j, &tensor, err));
        shift(d, j->base);
        FC_TRY(fc_h5_add_dataset(j->checkpoint, d, (uint32_t)index, false, tensor, err));
    }
    for (size_t i = 0; i < file->nothers; i++) {
        FC_TRY(fc_identities_add_header(j->checkpoint, file->others[i], j->options, err));
    }
    j->checkpoint->note = fc_h5_missing_note(file->missing);
    return add_attributes(j, file, err);
}

static fc_code begin(joining *j, fc_checkpoint *checkpoint, const fc_open_options *options, fc_error *err) {
    fc_arena *arena = checkpoint->arena;
    *j = (joining){.checkpoint = checkpoint,
                   .groups = fc_name_table_new(arena, 64),
                   .paths = fc_name_table_new(arena, 64),
                   .members = fc_name_table_new(arena, 64),
                   .options = options};
    return j->groups && j->paths && j->members ? FC_OK : fc_no_memory(err, checkpoint->path);
}

static fc_code end(joining *j, fc_error *err) {
    fc_checkpoint *checkpoint = j->checkpoint;
    if (j->attributes.nattributes > 0) {
        fc_tensor *tensor = NULL;
        FC_TRY(new_tensor(j, &tensor, err));
        FC_TRY(fc_h5_add_attributes(checkpoint, &j->attributes, tensor, err));
    }
    checkpoint->tensors = j->tensors;
    checkpoint->ntensors = j->count;
    checkpoint->producer = "Keras";
    return fc_h5_check_names(checkpoint->arena, j->tensors, j->count, true, checkpoint->path, err);
}

/* ---- the index ---- */

/* The files that the index names, sorted. */
typedef struct listed {
    fc_checkpoint *checkpoint;
    const char **names;
    size_t count, capacity;
    const char *directory;
    const fc_name_table *members; /* of joining */
} listed;

/* Calls `visit` for each file of a group. */
typedef fc_code (*visit_fn)(listed *l, const char *group, const char *file, fc_error *err);

static fc_code each_file(listed *l, const json_t *map, visit_fn visit, fc_error *err) {
    const char *path = l->checkpoint->path, *group;
    json_t *value;
    json_object_foreach((json_t *)map, group, value) {
        const size_t n = json_is_array(value) ? json_array_size(value) : 1;
        for (size_t i = 0; i < n; i++) {
            const char *file = json_string_value(json_is_array(value) ? json_array_get(value, i) : value);
            if (!file) {
                return fc_fail(err, FC_ECORRUPT, "%s: weight_map: group %.256s: its file name is not a string", path,
                               group);
            }
            FC_TRY(visit(l, group, file, err));
        }
    }
    return FC_OK;
}

static fc_code add_name(listed *l, const char *group, const char *file, fc_error *err) {
    fc_arena *arena = l->checkpoint->arena;
    if (strchr(file, '/') || !fc_path_is_safe(file) || !fc_ends_with(file, ".weights.h5")) {
        return fc_fail(err, FC_ECORRUPT,
                       "%s: group %.256s: %.128s is not a .weights.h5 file next to the index: the index may be hostile",
                       l->checkpoint->path, group, file);
    }
    if (l->count > 0 && strcmp(l->names[l->count - 1], file) == 0) {
        return FC_OK;
    }
    FC_NEED(fc_arena_grow(arena, &l->names, &l->capacity, l->count, l->count + 1, sizeof *l->names), err,
            l->checkpoint->path);
    l->names[l->count] = fc_arena_strndup(arena, file, strlen(file));
    return l->names[l->count++] ? FC_OK : fc_no_memory(err, l->checkpoint->path);
}

/* Makes the files of the checkpoint, each of which must exist. */
/* A web server does not list its folders, so there the file is asked for. */
static bool is_there(const char *path, fc_error *err) {
    fc_remote_info info;
    return fc_is_remote(path) ? fc_remote_stat(path, true, &info, err) == FC_OK && info.found
                              : fc_path_exists(path, NULL, err);
}

static fc_code list_files(listed *l, fc_error *err) {
    fc_checkpoint *checkpoint = l->checkpoint;
    size_t n = 0;
    fc_sort_texts(l->names, l->count);
    for (size_t i = 0; i < l->count; i++) {
        if (n == 0 || strcmp(l->names[n - 1], l->names[i]) != 0) {
            l->names[n++] = l->names[i];
        }
    }
    l->count = n;
    fc_file *files = fc_arena_calloc(checkpoint->arena, n, sizeof *files);
    FC_NEED(files && n < UINT32_MAX, err, checkpoint->path);
    for (size_t i = 0; i < n; i++) {
        FC_NEED(fc_file_in(checkpoint->arena, l->directory, l->names[i], &files[i]), err, checkpoint->path);
        if (!is_there(files[i].path, err)) {
            return err->code != FC_OK ? err->code
                                      : fc_fail(err, FC_ECORRUPT, "%s: the index names %s, which is missing",
                                                checkpoint->path, files[i].path);
        }
    }
    checkpoint->files = files;
    checkpoint->nfiles = n;
    return FC_OK;
}

/* Checks that a file has a dataset of the group. Names of groups begin with "/". */
static fc_code check_group(listed *l, const char *group, const char *file, fc_error *err) {
    const size_t number = fc_find_text(l->names, l->count, file);
    const char *path = group + (group[0] == '/');
    return fc_name_table_find_child(l->members, number + 1, path, strlen(path)) != FC_NO_NAME
               ? FC_OK
               : fc_fail(err, FC_ECORRUPT, "%s: the index says that group %.256s is in %.128s, but it is not",
                         l->checkpoint->path, group, file);
}

static fc_code open_listed(listed *l, const json_t *map, const fc_open_options *options, fc_error *err) {
    fc_checkpoint *checkpoint = l->checkpoint;
    const fc_h5_state *state = checkpoint->state;
    joining j;
    FC_TRY(each_file(l, map, add_name, err));
    FC_TRY(list_files(l, err));
    if (!options->follow_external) {
        FC_TRY(fc_check_links(l->directory, checkpoint->files, checkpoint->nfiles, err));
    }
    FC_TRY(fc_identities_take(checkpoint, options, err));
    const char **paths = fc_arena_calloc(checkpoint->arena, l->count, sizeof *paths);
    FC_NEED(paths, err, checkpoint->path);
    for (size_t i = 0; i < l->count; i++) {
        paths[i] = checkpoint->files[i].path;
    }
    FC_TRY(begin(&j, checkpoint, options, err));
    FC_TRY(fc_h5_scan_files_by(state->server, checkpoint->arena, paths, l->count, 0, state->follow_external, add_file,
                               &j, err));
    FC_TRY(end(&j, err));
    l->members = j.members;
    return each_file(l, map, check_group, err);
}

fc_code fc_keras_open_index(fc_checkpoint *checkpoint, const fc_open_options *options, fc_error *err) {
    const char *path = checkpoint->path, *name = fc_base_name(path);
    listed l = {.checkpoint = checkpoint};
    char *text = NULL;
    size_t size = 0;
    json_error_t wrong;
    json_t *index = NULL;
    fc_code rc;
    l.directory = name == path ? "." : fc_arena_strndup(checkpoint->arena, path, (size_t)(name - path));
    FC_NEED(l.directory, err, path);
    FC_TRY_GOTO(fc_identities_add_header(checkpoint, path, options, err), rc, out);
    FC_TRY_GOTO(fc_read_whole(path, "an index of Keras", MOST_INDEX, &text, &size, err), rc, out);
    index = json_loadb(text, size, JSON_REJECT_DUPLICATES, &wrong);
    const json_t *map = json_object_get(index, "weight_map");
    FC_TRY_GOTO(json_object_size(map) > 0
                    ? FC_OK
                    : fc_fail(err, FC_ECORRUPT, "%s: %s", path,
                              index ? "the weight_map is missing or empty" : "it is damaged: not JSON"),
                rc, out);
    rc = open_listed(&l, map, options, err);
out:
    json_decref(index);
    free(text);
    return rc;
}

/* ---- the archive ---- */

/* Keeps a member of JSON text as an object. */
static fc_code add_text(joining *j, fc_zip *zip, const fc_zip_entry *entry, fc_error *err) {
    fc_arena *arena = j->checkpoint->arena;
    fc_tensor *tensor = NULL;
    unsigned char *bytes = NULL;
    if (entry->size > MOST_MEMBER) {
        return fc_fail(err, FC_EUNSUPPORTED, "%s: %s is too large: unzip it, and use its %s", zip->path, entry->name,
                       weights);
    }
    FC_TRY(fc_zip_read(zip, entry, &bytes, err));
    const bool is_json = fc_is_json((const char *)bytes, entry->size);
    const char *copy = is_json ? fc_arena_strndup(arena, (const char *)bytes, entry->size) : NULL;
    const char *path = fc_arena_printf(arena, "@%s", entry->name);
    free(bytes);
    if (!is_json) {
        return fc_fail(err, FC_ECORRUPT, "%s: offset %llu: %s is damaged: not JSON", zip->path,
                       (unsigned long long)entry->data, entry->name);
    }
    FC_NEED(copy && path, err, zip->path);
    FC_TRY(new_tensor(j, &tensor, err));
    return fc_h5_add_text(j->checkpoint, path, (fc_h5_bytes){(const unsigned char *)copy, entry->size}, tensor, err);
}

/* Finds the HDF5 file, and keeps config.json and metadata.json. */
static fc_code read_members(joining *j, fc_zip *zip, fc_h5_state *state, fc_error *err) {
    const fc_zip_entry *entry = fc_zip_find(zip, weights);
    for (size_t i = 0; i < zip->nentries; i++) {
        const char *name = zip->entries[i].name;
        if (strcmp(name, "config.json") != 0 && strcmp(name, "metadata.json") != 0 && strcmp(name, weights) != 0) {
            return fc_fail(err, FC_EUNSUPPORTED, "%s: a Keras model with %.128s, which is no tensor: unzip it%s",
                           zip->path, name, entry ? ", and use its model.weights.h5" : "");
        }
    }
    if (!entry) {
        return fc_fail(err, FC_ECORRUPT, "%s: a Keras model without %s", zip->path, weights);
    }
    if (entry->method != FC_ZIP_STORED) {
        return fc_fail(err, FC_EUNSUPPORTED,
                       "%s: offset %llu: %s is compressed in the archive: unzip it, and use that file", zip->path,
                       (unsigned long long)entry->data, weights);
    }
    state->span = (fc_h5_span){entry->data, entry->size};
    state->span_crc = entry->crc;
    for (size_t i = 0; i < zip->nentries; i++) {
        FC_TRY(&zip->entries[i] == entry ? FC_OK : add_text(j, zip, &zip->entries[i], err));
    }
    return FC_OK;
}

fc_code fc_keras_open_archive(fc_checkpoint *checkpoint, const fc_open_options *options, fc_error *err) {
    fc_h5_state *state = checkpoint->state;
    fc_file *file = fc_arena_calloc(checkpoint->arena, 1, sizeof *file);
    fc_zip zip = {0};
    joining j;
    int fd = -1;
    uint64_t size;
    fc_code rc;
    FC_NEED(file, err, checkpoint->path);
    *file = (fc_file){checkpoint->path, fc_base_name(checkpoint->path)};
    checkpoint->files = file;
    checkpoint->nfiles = 1;
    FC_TRY(fc_identities_take(checkpoint, options, err));
    FC_TRY(begin(&j, checkpoint, options, err));
    FC_TRY(fc_open_input(checkpoint->path, &fd, &size, err));
    FC_TRY_GOTO(fc_zip_open(fd, checkpoint->path, 0, size, &zip, err), rc, out);
    rc = read_members(&j, &zip, state, err);
    j.base = state->span.offset;
out:
    fc_zip_close(&zip);
    close(fd);
    FC_TRY(rc);
    FC_TRY(fc_h5_scan_span(state->server, checkpoint->arena, checkpoint->path, &state->span, state->follow_external,
                           add_file, &j, err));
    return end(&j, err);
}

/* Computes the CRC-32 of a range. */
static fc_code range_crc(int fd, const char *path, const fc_h5_span *span, uint32_t *crc, fc_error *err) {
    enum { BLOCK = 1 << 20 };
    fc_code rc = FC_OK;
    unsigned char *block = malloc(BLOCK);
    FC_NEED(block, err, path);
    *crc = 0;
    for (uint64_t done = 0; done < span->length && rc == FC_OK; done += BLOCK) {
        const uint64_t left = span->length - done;
        const size_t n = left < BLOCK ? (size_t)left : BLOCK;
        rc = fc_pread_full(fd, block, n, span->offset + done, path, err);
        *crc = rc == FC_OK ? fc_crc32(*crc, block, n) : 0;
    }
    free(block);
    return rc;
}

fc_code fc_keras_verify(const fc_checkpoint *checkpoint, struct fc_findings *findings, struct fc_verify_report *report,
                        fc_error *err) {
    const fc_h5_state *state = checkpoint->state;
    uint32_t crc = 0;
    int fd;
    if (state->span.length == 0) {
        return FC_OK;
    }
    FC_TRY(fc_identity_open(checkpoint, 0, &fd, err));
    const char *path = checkpoint->files[0].path;
    const fc_code rc = range_crc(fd, path, &state->span, &crc, err);
    close(fd);
    FC_TRY(rc);
    if (crc != state->span_crc) {
        const fc_defect place = {.file = checkpoint->files[0].name, .has_offset = true, .offset = state->span.offset};
        fc_report_defect(findings, &place,
                         "%s: offset %llu: %s is damaged: its CRC-32 is %08x, but %08x is recorded; copy it again",
                         path, (unsigned long long)state->span.offset, weights, crc, state->span_crc);
    }
    report->headers_digested++;
    return FC_OK;
}
