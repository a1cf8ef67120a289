/*
 * The index of Hugging Face's format: a JSON file beside the data files, {"metadata": {…}, "weight_map": {name: file}}.
 */
#include "base/grow.h"
#include "fsdpckpt/io.h"
#include "safetensors/files.h"
#include "safetensors/header.h"
#include "safetensors/json.h"

#include <stdlib.h>
#include <string.h>

typedef struct reading {
    fc_arena *arena;
    const char *path;
    st_files *out;
    const char **files; /* malloc'ed: of each mapped name, its file's name */
    size_t count, capacity, files_capacity;
} reading;

static fc_code add(void *context, const char *name, json_t *value, fc_error *err) {
    reading *r = context;
    const char *file = json_string_value(value);
    if (!file) {
        return fc_fail(err, FC_ECORRUPT, "%s: weight_map: tensor %.256s: its file is no text", r->path, name);
    }
    if (!fc_path_is_safe(file)) {
        return fc_fail(err, FC_ECORRUPT,
                       "%s: tensor %.256s: the file name %.128s leads out of the checkpoint: this file may be hostile",
                       r->path, name, file);
    }
    if (!fc_grow(&r->out->map, &r->capacity, r->count + 1, sizeof *r->out->map) ||
        !fc_grow(&r->files, &r->files_capacity, r->count + 1, sizeof *r->files)) {
        return fc_no_memory(err, r->path);
    }
    r->out->map[r->count].name = fc_arena_strndup(r->arena, name, strlen(name));
    /* Most names are in the file of the one before. */
    bool same = r->count > 0 && strcmp(r->files[r->count - 1], file) == 0;
    r->files[r->count] = same ? r->files[r->count - 1] : fc_arena_strndup(r->arena, file, strlen(file));
    bool good = r->out->map[r->count].name && r->files[r->count];
    r->count++;
    return good ? FC_OK : fc_no_memory(err, r->path);
}

static int by_text(const void *a, const void *b) {
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

static int by_mapped(const void *a, const void *b) {
    return strcmp(((const st_mapped *)a)->name, ((const st_mapped *)b)->name);
}

/* The names of the files, each once and sorted, become the list of files; the index is the last of it. */
static fc_code list_files(reading *r, fc_error *err) {
    st_files *out = r->out;
    const char **names = calloc(r->count + 1, sizeof *names);
    size_t n = 0;
    if (!names) {
        return fc_no_memory(err, r->path);
    }
    memcpy(names, r->files, r->count * sizeof *names);
    qsort(names, r->count, sizeof *names, by_text);
    for (size_t i = 0; i < r->count; i++) {
        if (n == 0 || strcmp(names[n - 1], names[i]) != 0) {
            names[n++] = names[i];
        }
    }
    fc_file *files = fc_arena_calloc(r->arena, n + 1, sizeof *files);
    bool good = files != NULL && n < UINT32_MAX;
    for (size_t i = 0; good && i < n; i++) {
        good = fc_st_make_file(r->arena, out->directory, names[i], &files[i]);
    }
    for (size_t i = 0; good && i < r->count; i++) {
        const char **found = bsearch(&r->files[i], names, n, sizeof *names, by_text);
        out->map[i].file = (uint32_t)(found - names);
    }
    free(names);
    if (!good) {
        return fc_no_memory(err, r->path);
    }
    const char *slash = strrchr(r->path, '/');
    files[n] = (fc_file){r->path, slash ? slash + 1 : r->path};
    out->files = files;
    out->nfiles = n;
    out->index = &files[n];
    return FC_OK;
}

static fc_code sort_map(const reading *r, fc_error *err) {
    st_files *out = r->out;
    qsort(out->map, r->count, sizeof *out->map, by_mapped);
    for (size_t i = 1; i < r->count; i++) {
        if (strcmp(out->map[i - 1].name, out->map[i].name) == 0) {
            return fc_fail(err, FC_ECORRUPT, "%s: weight_map: the name %.256s is there twice", r->path,
                           out->map[i].name);
        }
    }
    out->nmap = r->count;
    return FC_OK;
}

/* What the sizes of the tensors do not say already is kept. */
static fc_code keep_metadata(const reading *r, json_t *value, fc_error *err) {
    const json_t *total = json_object_get(value, "total_size");
    r->out->has_total = json_is_integer(total);
    r->out->total = json_integer_value(total);
    json_object_del(value, "total_size");
    json_object_del(value, "total_parameters");
    if (json_object_size(value) == 0) {
        return FC_OK;
    }
    char *text = json_dumps(value, JSON_COMPACT | JSON_SORT_KEYS);
    r->out->index_metadata = text ? fc_arena_strndup(r->arena, text, strlen(text)) : NULL;
    free(text);
    return r->out->index_metadata ? FC_OK : fc_no_memory(err, r->path);
}

static fc_code read_map(reading *r, st_json *json, fc_error *err) {
    fc_code rc = fc_st_json_enter(json, err);
    for (bool first = true; rc == FC_OK; first = false) {
        json_t *key = NULL, *value = NULL;
        rc = fc_st_json_key(json, first, &key, err);
        if (rc == FC_OK && !key) {
            return FC_OK;
        }
        rc = rc == FC_OK ? fc_st_json_value(json, &value, err) : rc;
        rc = rc == FC_OK ? add(r, json_string_value(key), value, err) : rc;
        json_decref(key);
        json_decref(value);
    }
    return rc;
}

static fc_code parse(reading *r, st_json *json, fc_error *err) {
    bool mapped = false;
    fc_code rc = fc_st_json_enter(json, err);
    for (bool first = true; rc == FC_OK; first = false) {
        json_t *key = NULL, *value = NULL;
        rc = fc_st_json_key(json, first, &key, err);
        if (rc != FC_OK || !key) {
            break;
        }
        if (strcmp(json_string_value(key), "weight_map") == 0) {
            rc = mapped ? fc_st_json_fail(json, json->at, "weight_map is there twice", err) : read_map(r, json, err);
            mapped = true;
        } else {
            rc = fc_st_json_value(json, &value, err);
            if (rc == FC_OK && strcmp(json_string_value(key), "metadata") == 0) {
                rc = keep_metadata(r, value, err);
            }
        }
        json_decref(key);
        json_decref(value);
    }
    rc = rc == FC_OK ? fc_st_json_end(json, err) : rc;
    if (rc == FC_OK && r->count == 0) {
        rc = fc_fail(err, FC_ECORRUPT, "%s: it has no weight_map, or an empty one", r->path);
    }
    return rc;
}

fc_code fc_st_index_read(fc_arena *arena, const char *path, st_files *out, fc_error *err) {
    reading r = {.arena = arena, .path = path, .out = out};
    char *text = NULL;
    size_t size = 0;
    out->kind = ST_INDEX;
    fc_code rc = fc_read_whole(path, "an index of a checkpoint", ST_MAX_HEADER, &text, &size, err);
    if (rc == FC_OK) {
        st_json json = {.text = text, .size = size, .path = path};
        rc = parse(&r, &json, err);
    }
    rc = rc == FC_OK ? list_files(&r, err) : rc;
    rc = rc == FC_OK ? sort_map(&r, err) : rc;
    free(text);
    free(r.files);
    return rc;
}
