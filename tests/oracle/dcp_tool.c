/*
 * Prints what the library finds in a checkpoint as one JSON object a line: a header, then every tensor and object
 * with its path, chunks and extents. dcp_extents.py compares it with what torch says.
 *
 *     dcp_tool [--headers-only] CHECKPOINT       the manifest
 *     dcp_tool --open-only CHECKPOINT            opens it, prints the number of tensors and chunks
 */
#include "fsdpckpt/checkpoint.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static json_t *numbers(const int64_t *values, int n) {
    json_t *list = json_array();
    for (int i = 0; i < n; i++) {
        json_array_append_new(list, json_integer(values[i]));
    }
    return list;
}

static fc_code chunk_json(const fc_checkpoint *c, const fc_tensor *t, size_t i, bool extents, json_t **out,
                          fc_error *err) {
    const fc_chunk *chunk = &t->chunks[i];
    *out = json_pack("{s:o, s:o, s:s, s:I}", "offsets", numbers(chunk->dims, t->ndim), "sizes",
                     numbers(chunk->dims + t->ndim, t->ndim), "file", c->files[chunk->place.file].name, "rank",
                     (json_int_t)(int32_t)chunk->rank);
    fc_extent e;
    if (!extents) {
        return FC_OK;
    }
    fc_code rc = fc_checkpoint_extent(c, t, i, &e, err);
    if (rc == FC_OK) {
        json_object_set_new(*out, "offset", json_integer((json_int_t)e.offset));
        json_object_set_new(*out, "length", json_integer((json_int_t)e.length));
        json_object_set_new(*out, "first", json_integer((json_int_t)e.first));
        json_object_set_new(*out, "swap", json_boolean(e.swap));
        json_object_set_new(*out, "negate", json_boolean(e.negate));
        json_object_set_new(*out, "conjugate", json_boolean(e.conjugate));
        json_object_set_new(*out, "strides", numbers(e.strides, t->ndim));
    }
    return rc;
}

static fc_code tensor_json(const fc_checkpoint *c, const fc_tensor *t, bool extents, json_t *out, fc_error *err) {
    json_t *path = json_array(), *chunks = json_array();
    for (size_t i = 0; i < t->path.count; i++) {
        const fc_path_element *e = &t->path.elements[i];
        json_array_append_new(path, e->is_index ? json_integer(atoll(e->key)) : json_string(e->key));
    }
    json_object_set_new(out, "name", json_string(t->name));
    json_object_set_new(out, "dtype", json_string(fc_dtype_get(t->dtype)->torch_name));
    json_object_set_new(out, "shape", numbers(t->shape, t->ndim));
    json_object_set_new(out, "path", path);
    json_object_set_new(out, "chunks", chunks);
    fc_code rc = FC_OK;
    for (size_t i = 0; i < t->nchunks && rc == FC_OK; i++) {
        json_t *chunk;
        rc = chunk_json(c, t, i, extents, &chunk, err);
        json_array_append_new(chunks, chunk);
    }
    if (rc == FC_OK && t->object && extents) {
        const char *text;
        fc_arena *arena = fc_arena_new();
        rc = fc_checkpoint_object_json(c, t, arena, &text, err);
        if (rc == FC_OK) {
            json_object_set_new(out, "json", json_loads(text, JSON_DECODE_ANY, NULL));
        }
        fc_arena_free(arena);
    }
    return rc;
}

int main(int argc, char **argv) {
    fc_open_options options = {false, false};
    bool open_only = false;
    fc_checkpoint *c;
    fc_error err;
    for (; argc > 2; argc--, argv++) {
        options.headers_only = options.headers_only || strcmp(argv[1], "--headers-only") == 0;
        open_only = open_only || strcmp(argv[1], "--open-only") == 0;
    }
    if (argc != 2 || fc_checkpoint_open(argv[1], &options, &c, &err) != FC_OK) {
        fprintf(stderr, "%s\n", argc == 2 ? err.message : "usage: dcp_tool [OPTION] CHECKPOINT");
        return argc == 2 ? fc_exit_status(err.code) : 2;
    }
    size_t nchunks = 0;
    int status = 0;
    for (size_t i = 0; i < c->ntensors; i++) {
        nchunks += c->tensors[i].nchunks;
    }
    printf("{\"tensors\": %zu, \"chunks\": %zu, \"files\": %zu, \"format\": \"%s\"}\n", c->ntensors, nchunks, c->nfiles,
           c->producer ? c->producer : "");
    for (size_t i = 0; i < c->ntensors && !open_only; i++) {
        json_t *line = json_object();
        fc_code rc = tensor_json(c, &c->tensors[i], !options.headers_only, line, &err);
        if (rc != FC_OK) {
            json_object_set_new(line, "error", json_string(err.message));
            status = fc_exit_status(rc);
        }
        char *text = json_dumps(line, JSON_COMPACT);
        puts(text);
        free(text);
        json_decref(line);
    }
    fc_checkpoint_close(c);
    return status;
}
