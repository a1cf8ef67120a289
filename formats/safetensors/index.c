/*
 * Reads the index of a Hugging Face checkpoint, a JSON file in the directory of the data files:
 * {"metadata": {…}, "weight_map": {name: file}}.
 */
#include "base/grow.h"
#include "checkpoint/path.h"
#include "fsdpckpt/order.h"
#include "fsdpckpt/try.h"
#include "io/file.h"
#include "safetensors/files.h"
#include "safetensors/header.h"
#include "safetensors/json.h"

#include <stdlib.h>
#include <string.h>

typedef struct index_reader {
    fc_arena *arena;
    const char *path;
    fc_st_files *out;
    const char **files; /* malloc'ed: the file name of each entry of out->map */
    size_t count, capacity, files_capacity;
} index_reader;

static fc_code add_mapped(void *context, const char *name, json_t *value, fc_error *err) {
    index_reader *r = context;
    const char *file = json_string_value(value);
    if (!file) {
        return fc_fail(err, FC_ECORRUPT, "%s: weight_map: tensor %.256s: its file name is not a string", r->path, name);
    }
    if (!fc_path_is_safe(file)) {
        return fc_fail(err, FC_ECORRUPT,
                       "%s: tensor %.256s: the file name %.128s leads out of the checkpoint: the index may be hostile",
                       r->path, name, file);
    }
    FC_NEED(fc_grow(&r->out->map, &r->capacity, r->count + 1, sizeof *r->out->map) &&
                fc_grow(&r->files, &r->files_capacity, r->count + 1, sizeof *r->files),
            err, r->path);
    r->out->map[r->count].name = fc_arena_strndup(r->arena, name, strlen(name));
    /* Most tensors are in the same file as the one before. */
    bool same = r->count > 0 && strcmp(r->files[r->count - 1], file) == 0;
    r->files[r->count] = same ? r->files[r->count - 1] : fc_arena_strndup(r->arena, file, strlen(file));
    bool good = r->out->map[r->count].name && r->files[r->count];
    r->count++;
    return good ? FC_OK : fc_no_memory(err, r->path);
}

/* Lists each file once, sorted by name, and the index last. */
static fc_code list_files(index_reader *r, fc_error *err) {
    fc_st_files *out = r->out;
    const char **names = calloc(r->count + 1, sizeof *names);
    size_t n = 0;
    FC_NEED(names, err, r->path);
    if (r->count > 0) {
        memcpy(names, r->files, r->count * sizeof *names);
    }
    fc_sort_texts(names, r->count);
    for (size_t i = 0; i < r->count; i++) {
        if (n == 0 || strcmp(names[n - 1], names[i]) != 0) {
            names[n++] = names[i];
        }
    }
    fc_file *files = fc_arena_calloc(r->arena, n + 1, sizeof *files);
    bool good = files != NULL && n < UINT32_MAX;
    for (size_t i = 0; good && i < n; i++) {
        good = fc_file_in(r->arena, out->directory, names[i], &files[i]);
    }
    for (size_t i = 0; good && i < r->count; i++) {
        out->map[i].file = (uint32_t)fc_find_text(names, n, r->files[i]);
    }
    free(names);
    FC_NEED(good, err, r->path);
    const char *slash = strrchr(r->path, '/');
    files[n] = (fc_file){r->path, slash ? slash + 1 : r->path};
    out->files = files;
    out->nfiles = n;
    out->index = &files[n];
    return FC_OK;
}

static fc_code sort_map(const index_reader *r, fc_error *err) {
    fc_st_files *out = r->out;
    fc_sort_items(out->map, r->count, sizeof *out->map, fc_order_texts);
    for (size_t i = 1; i < r->count; i++) {
        if (strcmp(out->map[i - 1].name, out->map[i].name) == 0) {
            return fc_fail(err, FC_ECORRUPT, "%s: weight_map: the name %.256s appears twice", r->path,
                           out->map[i].name);
        }
    }
    out->nmap = r->count;
    return FC_OK;
}

/* The members that follow from the sizes of the tensors are not kept. */
static fc_code keep_metadata(const index_reader *r, json_t *value, fc_error *err) {
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

static fc_code read_member(index_reader *r, fc_st_json *json, const char *key, bool *mapped, fc_error *err) {
    if (strcmp(key, "weight_map") == 0) {
        if (*mapped) {
            return fc_st_json_fail(json, json->at, "weight_map appears twice", err);
        }
        *mapped = true;
        return fc_st_json_object(json, add_mapped, r, err);
    }
    json_t *value = NULL;
    FC_TRY(fc_st_json_value(json, &value, err));
    fc_code rc = strcmp(key, "metadata") == 0 ? keep_metadata(r, value, err) : FC_OK;
    json_decref(value);
    return rc;
}

static fc_code parse(index_reader *r, fc_st_json *json, fc_error *err) {
    bool mapped = false;
    FC_TRY(fc_st_json_enter(json, err));
    for (bool first = true;; first = false) {
        json_t *key = NULL;
        FC_TRY(fc_st_json_key(json, first, &key, err));
        if (!key) {
            break;
        }
        fc_code rc = read_member(r, json, json_string_value(key), &mapped, err);
        json_decref(key);
        FC_TRY(rc);
    }
    FC_TRY(fc_st_json_end(json, err));
    return r->count > 0 || (mapped && r->out->may_be_empty)
               ? FC_OK
               : fc_fail(err, FC_ECORRUPT, "%s: the weight_map is missing or empty", r->path);
}

fc_code fc_st_index_read(fc_arena *arena, const char *path, fc_st_files *out, fc_error *err) {
    index_reader r = {.arena = arena, .path = path, .out = out};
    char *text = NULL;
    size_t size = 0;
    fc_code rc;
    out->kind = ST_INDEX;
    FC_TRY_GOTO(fc_read_whole(path, "an index of a checkpoint", ST_MAX_HEADER, &text, &size, err), rc, out);
    fc_st_json json = {.text = text, .size = size, .path = path};
    FC_TRY_GOTO(parse(&r, &json, err), rc, out);
    FC_TRY_GOTO(list_files(&r, err), rc, out);
    rc = sort_map(&r, err);
out:
    free(text);
    free(r.files);
    return rc;
}

void fc_st_files_free(fc_st_files *files) {
    free(files->map);
    files->map = NULL;
}
