/*
 * dtensor_tool: for each case of a JSON array on stdin cuts a tensor of 0, 1, 2 … (int32) as FSDP over TP does, with
 * ranks as threads, and prints what each rank holds; dtensor_data.py compares it with torch.
 *   {"mesh": [...], "shape": [...], "tp": "Shard(0)" | "Replicate()" | null, "placements": text | null}
 * With "placements" the tensor lies so on the whole mesh and is all-gathered only. The answer has for each rank:
 * "chunked" and its "placements", "gathered", "chunk_tensor" (null: no shard) and "loaded" (number of shards).
 */
#include "fsdpckpt/gather/dtensor_data.h"
#include "sharding/recorded.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_RANKS = 16 };

typedef struct test_case {
    fc_mesh mesh;
    int ndim;
    int64_t shape[FC_MAX_DIMS];
    bool has_tp, has_placements;
    fc_placement tp, placements[FC_MAX_MESH_DIMS];
    json_t *results[MOST_RANKS];
} test_case;

static void read_case(const json_t *in, test_case *c) {
    const json_t *mesh = json_object_get(in, "mesh"), *shape = json_object_get(in, "shape");
    const char *tp = json_string_value(json_object_get(in, "tp"));
    const char *placements = json_string_value(json_object_get(in, "placements"));
    char text[64];
    memset(c, 0, sizeof *c);
    c->mesh.ndim = (int)json_array_size(mesh);
    for (int i = 0; i < c->mesh.ndim; i++) {
        c->mesh.sizes[i] = json_integer_value(json_array_get(mesh, (size_t)i));
    }
    c->ndim = (int)json_array_size(shape);
    for (int i = 0; i < c->ndim; i++) {
        c->shape[i] = json_integer_value(json_array_get(shape, (size_t)i));
    }
    if (tp) {
        snprintf(text, sizeof text, "[%s]", tp);
        c->has_tp = fc_placements_parse(text, 1, &c->tp);
    }
    c->has_placements = placements && fc_placements_parse(placements, c->mesh.ndim, c->placements);
}

static json_t *numbers(const fc_array *array) {
    json_t *list = json_array();
    fc_array dense;
    if (fc_array_clone(array, NULL, &dense, NULL) != FC_OK) {
        abort();
    }
    for (int64_t i = 0; i < fc_array_numel(&dense); i++) {
        json_array_append_new(list, json_integer(((const int32_t *)dense.data)[i]));
    }
    fc_array_free(&dense);
    return list;
}

/* The whole tensor, and the part of it that `placements` give this rank of `mesh`. */
static fc_code make(const test_case *c, const fc_device_mesh *mesh, const fc_placement *placements, fc_device *device,
                    fc_fsdp_tensor *out, fc_error *err) {
    fc_array whole;
    int64_t offsets[FC_MAX_DIMS], sizes[FC_MAX_DIMS];
    fc_code rc = fc_array_new(device, FC_I32, c->ndim, c->shape, &whole, err);
    for (int64_t i = 0; rc == FC_OK && i < fc_array_numel(&whole); i++) {
        ((int32_t *)whole.data)[i] = (int32_t)i;
    }
    if (rc == FC_OK && !placements) {
        memset(out, 0, sizeof *out);
        out->local = whole;
        return FC_OK;
    }
    fc_array view = whole, part = {0};
    rc = rc == FC_OK ? fc_local_box(c->ndim, c->shape, &mesh->mesh, placements, mesh->coordinate, offsets, sizes, err)
                     : rc;
    for (int d = 0; rc == FC_OK && d < c->ndim; d++) {
        rc = fc_array_narrow(&view, d, sizes[d] ? offsets[d] : 0, sizes[d], &view, err);
    }
    rc = rc == FC_OK ? fc_array_clone(&view, NULL, &part, err) : rc;
    rc = rc == FC_OK ? fc_dtensor_from_local(&part, mesh, placements, c->ndim, c->shape, out, err) : rc;
    out->local.memory = part.memory;
    fc_array_free(&whole);
    return rc;
}

static fc_code gather(const fc_fsdp_tensor *t, const fc_device_mesh *mesh, json_t *result, fc_error *err) {
    fc_array whole = {0};
    fc_code rc = fc_all_gather_dtensor(t, mesh, NULL, &whole, err);
    if (rc == FC_OK) {
        json_object_set_new(result, "gathered", numbers(&whole));
    }
    fc_array_free(&whole);
    return rc;
}

static fc_code chunk(const fc_fsdp_tensor *t, const fc_device_mesh *dp, json_t *result, fc_error *err) {
    fc_fsdp_tensor chunked = {0};
    char text[256];
    fc_code rc = fc_chunk_dtensor_data(t, dp, NULL, &chunked, err);
    if (rc == FC_OK) {
        fc_placements_format(chunked.mesh->mesh.ndim, chunked.spec.placements, text, sizeof text);
        json_object_set_new(result, "placements", json_string(text));
        json_object_set_new(result, "chunked", numbers(&chunked.local));
        rc = gather(&chunked, chunked.mesh, result, err);
    }
    fc_array_free(&chunked.local);
    return rc;
}

static fc_code chunk_tensor(const fc_fsdp_tensor *t, const fc_device_mesh *dp, json_t *result, fc_error *err) {
    fc_arena *arena = fc_arena_new();
    fc_sharded_tensor *made = NULL;
    const fc_sharded_tensor *loaded;
    const fc_local_shard *shards;
    size_t count;
    fc_process_group group = {dp->groups[0]->rank, dp->groups[0]->size, NULL, {"cpu", -1}};
    fc_chunk_input input = {.tensor = t, .torch_device = {"cpu", -1}};
    fc_code rc = fc_chunk_tensor_data(&input, group.rank, group.size, 1, 1, &group, NULL, arena, &made, err);
    if (rc == FC_OK) {
        fc_pre_load_state_dict_transform(made, &loaded, &shards, &count);
        json_object_set_new(result, "loaded", json_integer((json_int_t)count));
        json_object_set_new(result, "chunk_tensor", count ? numbers(&shards[0].tensor) : json_null());
    }
    fc_sharded_tensor_free(made);
    fc_arena_free(arena);
    return rc;
}

static fc_code run_rank(fc_comm *comm, void *context, fc_error *err) {
    test_case *c = context;
    fc_device_mesh mesh, tp, dp;
    fc_fsdp_tensor tensor = {0};
    json_t *result = json_object();
    c->results[comm->rank] = result;
    fc_code rc = fc_device_mesh_new(comm, &c->mesh, &mesh, err);
    rc = rc == FC_OK ? fc_device_mesh_slice(&mesh, c->mesh.ndim - 1, &tp, err) : rc;
    rc = rc == FC_OK ? fc_device_mesh_slice(&mesh, c->mesh.ndim - 2, &dp, err) : rc;
    if (rc == FC_OK && c->has_placements) {
        rc = make(c, &mesh, c->placements, comm->device, &tensor, err);
        rc = rc == FC_OK ? gather(&tensor, &mesh, result, err) : rc;
    } else if (rc == FC_OK) {
        rc = make(c, &tp, c->has_tp ? &c->tp : NULL, comm->device, &tensor, err);
        rc = rc == FC_OK ? chunk(&tensor, &dp, result, err) : rc;
        rc = rc == FC_OK && c->ndim > 0 ? chunk_tensor(&tensor, &dp, result, err) : rc;
    }
    fc_array_free(&tensor.local);
    fc_device_mesh_free(&mesh);
    return rc;
}

int main(void) {
    json_error_t problem;
    json_t *cases = json_loadf(stdin, 0, &problem), *out = json_array(), *in;
    size_t i;
    if (!cases) {
        fprintf(stderr, "dtensor_tool: %s\n", problem.text);
        return 2;
    }
    json_object_seed(0);
    json_array_foreach(cases, i, in) {
        test_case c;
        fc_error err = {FC_OK, ""};
        json_t *ranks = json_array();
        read_case(in, &c);
        int world = (int)fc_mesh_ranks(&c.mesh);
        fc_code rc = world <= MOST_RANKS ? fc_device_run_local(world, run_rank, &c, &err) : FC_EUSAGE;
        for (int r = 0; r < world && r < MOST_RANKS; r++) {
            json_array_append_new(ranks, c.results[r] ? c.results[r] : json_null());
        }
        json_array_append_new(out, json_pack("{s:i,s:s,s:o}", "code", (int)rc, "error", err.message, "ranks", ranks));
    }
    json_dumpf(out, stdout, JSON_COMPACT);
    json_decref(out);
    json_decref(cases);
    return 0;
}
