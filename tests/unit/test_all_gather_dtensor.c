/*
 * DTensors with data: redistribution in both directions with uneven and empty shards, the transforms of flat
 * parameters, nested ShardedTensors, and refused inputs. tests/oracle/dtensor_data.py compares the results with torch.
 */
#include "deferred_device.h"

#include "fsdpckpt/gather/dtensor_data.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

static const fc_placement whole = {FC_REPLICATE, 0, 0}, rows = {FC_SHARD, 0, 0}, columns = {FC_SHARD, 1, 0};

static void run(int size, fc_code (*work)(fc_comm *, void *, fc_error *), void *context) {
    fc_error err = {FC_OK, ""};
    fc_code rc = fc_device_run_local(size, work, context, &err);
    assert_string_equal(err.message, "");
    assert_int_equal(rc, FC_OK);
}

/* The value of an element is its index in the global tensor. */
static fc_code check_part(const fc_fsdp_tensor *t, fc_error *err) {
    int64_t offsets[FC_MAX_DIMS], sizes[FC_MAX_DIMS];
    const fc_dtensor *s = &t->spec;
    fc_code rc =
        fc_local_box(s->ndim, s->shape, &t->mesh->mesh, s->placements, t->mesh->coordinate, offsets, sizes, err);
    int64_t count = fc_array_numel(&t->local), values[64];
    fc_device *device = t->local.device;
    rc = rc == FC_OK ? device->copy(device, values, t->local.data, fc_array_bytes(&t->local), NULL, err) : rc;
    rc = rc == FC_OK ? device->synchronize(device, NULL, err) : rc;
    for (int64_t i = 0; rc == FC_OK && i < count; i++) {
        int64_t rest = i, wanted = 0, unit = 1;
        for (int d = s->ndim; d-- > 0;) {
            wanted += (offsets[d] + rest % sizes[d]) * unit;
            rest /= sizes[d];
            unit *= s->shape[d];
        }
        if (values[i] != wanted) {
            rc = fc_fail(err, FC_EFOUND, "element %lld is that of %lld", (long long)i, (long long)values[i]);
        }
    }
    return rc;
}

static fc_code make_whole(const fc_device_mesh *mesh, fc_device *device, const int64_t *shape, fc_array *data,
                          fc_fsdp_tensor *out, fc_error *err) {
    fc_placement placements[FC_MAX_MESH_DIMS] = {{FC_REPLICATE, 0, 0}};
    int64_t values[64];
    for (int64_t i = 0; i < 64; i++) {
        values[i] = i;
    }
    fc_code rc = fc_array_new(device, FC_I64, 2, shape, data, err);
    rc = rc == FC_OK ? device->copy(device, data->data, values, fc_array_bytes(data), NULL, err) : rc;
    rc = rc == FC_OK ? device->synchronize(device, NULL, err) : rc;
    return rc == FC_OK ? fc_dtensor_from_local(data, mesh, placements, 2, shape, out, err) : rc;
}

/* Redistributes from every set of placements to every other, on the device of `comm`. */
static fc_code all_ways(fc_comm *comm, void *context, fc_error *err) {
    const int64_t *shape = context;
    const fc_placement one[] = {whole, rows, columns, {FC_STRIDED_SHARD, 0, 2}};
    fc_mesh sizes = {.ndim = 2, .sizes = {3, 2}};
    fc_device_mesh mesh;
    fc_array data = {0};
    fc_fsdp_tensor start, a = {0}, b = {0};
    fc_code rc = fc_device_mesh_new(comm, &sizes, &mesh, err);
    rc = rc == FC_OK ? make_whole(&mesh, comm->device, shape, &data, &start, err) : rc;
    for (int i = 0; rc == FC_OK && i < 16 * 16; i++) {
        fc_placement from[] = {one[i / 64], one[i / 16 % 4]}, to[] = {one[i / 4 % 4], one[i % 4]};
        bool strided[] = {from[0].kind == FC_STRIDED_SHARD, to[0].kind == FC_STRIDED_SHARD};
        /* _StridedShard belongs on the FSDP dimension over a TP dimension that cuts the same one. */
        if (from[1].kind == FC_STRIDED_SHARD || to[1].kind == FC_STRIDED_SHARD ||
            (strided[0] && from[1].kind != FC_SHARD) || (strided[0] && from[1].dim != 0) ||
            (strided[1] && to[1].kind != FC_SHARD) || (strided[1] && to[1].dim != 0)) {
            continue;
        }
        rc = fc_redistribute(&start, from, NULL, &a, err);
        rc = rc == FC_OK ? check_part(&a, err) : rc;
        rc = rc == FC_OK ? fc_redistribute(&a, to, NULL, &b, err) : rc;
        rc = rc == FC_OK ? check_part(&b, err) : rc;
        if (rc != FC_OK) {
            char text[2][96];
            fc_placements_format(2, from, text[0], sizeof text[0]);
            fc_placements_format(2, to, text[1], sizeof text[1]);
            fc_context(err, rc, "%s to %s", text[0], text[1]);
        }
        fc_array_free(&a.local);
        fc_array_free(&b.local);
    }
    fc_array_free(&data);
    fc_device_mesh_free(&mesh);
    return rc;
}

/* The same with memory that the processor cannot access. */
static fc_code all_ways_remote(fc_comm *world, void *context, fc_error *err) {
    deferred_options options = {.seed = 7, .remote = true};
    fc_device *device = NULL;
    fc_comm *comm = NULL;
    fc_code rc = deferred_device_new(&options, &device, err);
    rc = rc == FC_OK ? deferred_comm_new(device, world, &comm, err) : rc;
    rc = rc == FC_OK ? all_ways(comm, context, err) : rc;
    if (comm) {
        comm->free(comm);
    }
    if (device) {
        device->destroy(device);
    }
    return rc;
}

static void redistributes(void **state) {
    (void)state;
    static int64_t shapes[][2] = {{12, 4}, {7, 5}, {1, 3}, {0, 4}, {2, 1}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        run(6, all_ways, shapes[i]);
        run(6, all_ways_remote, shapes[i]);
    }
}

static fc_code wrong_calls(fc_comm *comm, void *context, fc_error *err) {
    fc_mesh sizes = {.ndim = 2, .sizes = {2, 2}}, line = {.ndim = 1, .sizes = {4}};
    fc_device_mesh mesh = {0}, dp, tp, flat = {0};
    fc_array data = {0}, out;
    fc_fsdp_tensor t, made, plain = {0};
    fc_error e = {FC_OK, ""};
    int64_t shape[] = {4, 4};
    fc_placement partial[] = {{FC_PARTIAL, 0, 0}, whole}, cut[] = {rows, whole};
    bool good = true;
    (void)context;
    fc_code rc = fc_device_mesh_new(comm, &sizes, &mesh, err);
    rc = rc == FC_OK ? fc_device_mesh_new(comm, &line, &flat, err) : rc;
    rc = rc == FC_OK ? fc_device_mesh_slice(&mesh, 0, &dp, err) : rc;
    rc = rc == FC_OK ? fc_device_mesh_slice(&mesh, 1, &tp, err) : rc;
    rc = rc == FC_OK ? make_whole(&mesh, comm->device, shape, &data, &t, err) : rc;
    if (rc == FC_OK) {
        plain.local = data;
        good = good && fc_chunk_dtensor_data(&plain, NULL, NULL, &made, &e) == FC_EUSAGE &&
               strcmp(e.message, "No parent device_mesh is found for FSDP device_mesh.") == 0;
        good = good && fc_chunk_dtensor_data(&plain, &flat, NULL, &made, &e) == FC_EUSAGE &&
               strcmp(e.message, "Found parent device_mesh of ndim=1, but meshes must be at least 2D.") == 0;
        good = good && fc_all_gather_dtensor(&t, &dp, NULL, &out, &e) == FC_EUSAGE &&
               strcmp(e.message, "the parent mesh is not the mesh of the DTensor") == 0;
        good = good && fc_all_gather_dtensor(&plain, &mesh, NULL, &out, &e) == FC_EUSAGE;
        good = good && fc_redistribute(&t, partial, NULL, &made, &e) == FC_EUNSUPPORTED &&
               strstr(e.message, "mesh dimension 0 is Partial");
        good = good && fc_redistribute(&plain, cut, NULL, &made, &e) == FC_EUSAGE;
        good = good && fc_dtensor_from_local(&data, &mesh, cut, 2, shape, &made, &e) == FC_EUSAGE &&
               strstr(e.message, "has 4 elements in dimension 0, not 2");
        rc = good ? FC_OK : fc_fail(err, FC_EFOUND, "wrong: %s", e.message);
    }
    fc_array_free(&data);
    fc_device_mesh_free(&mesh);
    fc_device_mesh_free(&flat);
    return rc;
}

static void bad_calls_are_refused(void **state) {
    (void)state;
    run(4, wrong_calls, NULL);
}

static fc_code odd_strided(fc_comm *comm, void *context, fc_error *err) {
    fc_mesh sizes = {.ndim = 2, .sizes = {3, 2}};
    fc_placement to[] = {{FC_STRIDED_SHARD, 0, 1}, rows};
    fc_device_mesh mesh;
    fc_array data = {0};
    fc_fsdp_tensor t, made = {0};
    (void)context;
    fc_code rc = fc_device_mesh_new(comm, &sizes, &mesh, err);
    rc = rc == FC_OK ? make_whole(&mesh, comm->device, (int64_t[]){7, 5}, &data, &t, err) : rc;
    rc = rc == FC_OK ? fc_redistribute(&t, to, NULL, &made, err) : rc;
    fc_array_free(&made.local);
    fc_array_free(&data);
    fc_device_mesh_free(&mesh);
    return rc;
}

static void strided_shards_of_others_are_refused(void **state) {
    (void)state;
    fc_error err = {FC_OK, ""};
    assert_int_equal(fc_device_run_local(6, odd_strided, NULL, &err), FC_EUNSUPPORTED);
    assert_non_null(strstr(err.message, "_StridedShard(0, 1) of 7 rows is not FSDP's over TP, and is not supported"));
}

/* 9 rows over 2 TP ranks are 5 and 4, so the ranks infer 10 and 8 rows, and a gather would hang. */
static fc_code uneven_tp(fc_comm *comm, void *context, fc_error *err) {
    fc_mesh sizes = {.ndim = 2, .sizes = {2, 2}};
    fc_device_mesh mesh = {0}, dp, tp;
    fc_array data = {0};
    fc_fsdp_tensor t, made;
    (void)context;
    fc_code rc = fc_device_mesh_new(comm, &sizes, &mesh, err);
    rc = rc == FC_OK ? fc_device_mesh_slice(&mesh, 0, &dp, err) : rc;
    rc = rc == FC_OK ? fc_device_mesh_slice(&mesh, 1, &tp, err) : rc;
    rc = rc == FC_OK ? fc_array_new(comm->device, FC_F32, 2, (int64_t[]){5 - tp.coordinate[0], 2}, &data, err) : rc;
    rc = rc == FC_OK ? fc_dtensor_from_local(&data, &tp, &rows, 2, (int64_t[]){9, 2}, &t, err) : rc;
    rc = rc == FC_OK ? fc_chunk_dtensor_data(&t, &dp, NULL, &made, err) : rc;
    fc_array_free(&data);
    fc_device_mesh_free(&mesh);
    return rc;
}

static void uneven_tp_is_refused(void **state) {
    (void)state;
    fc_error err = {FC_OK, ""};
    assert_int_equal(fc_device_run_local(4, uneven_tp, NULL, &err), FC_ECORRUPT);
    assert_non_null(strstr(err.message, "the DTensor is not cut evenly: ranks 0 and 1 of mesh dimension 1 infer "
                                        "different shapes"));
}

/* Flattening gives the local tensor as a leaf; unflattening gives a DTensor over the view. */
static fc_code transforms(fc_comm *comm, void *context, fc_error *err) {
    fc_mesh sizes = {.ndim = 1, .sizes = {2}};
    fc_device_mesh mesh = {0};
    float values[6] = {0, 1, 2, 3, 4, 5};
    fc_array data, flat, view;
    fc_fsdp_tensor t, back, plain = {0};
    fc_param_extension extension;
    fc_dtensor_extensions extensions = {.has_compute_stream = true};
    (void)context;
    fc_code rc = fc_device_mesh_new(comm, &sizes, &mesh, err);
    rc = rc == FC_OK ? fc_array_over(comm->device, FC_F32, 2, (int64_t[]){3, 2}, values, &data, err) : rc;
    rc = rc == FC_OK ? fc_dtensor_from_local(&data, &mesh, &columns, 2, (int64_t[]){3, 4}, &t, err) : rc;
    if (rc != FC_OK) {
        fc_device_mesh_free(&mesh);
        return rc;
    }
    fc_pre_flatten_transform(&t, &flat, &extension);
    bool good = extension.is_dtensor && flat.requires_grad && flat.data == values && flat.sizes[1] == 2;
    view = data;
    rc = fc_post_unflatten_transform(&extensions, &view, &extension, NULL, &back, err);
    good = good && back.is_dtensor && back.fsdp_flattened && back.spec.shape[1] == 4 && back.local.data == values &&
           back.spec.placements[0].dim == 1 && back.mesh == &mesh;
    plain.local = data;
    fc_pre_flatten_transform(&plain, &flat, &extension);
    good = good && !extension.is_dtensor && !flat.requires_grad;
    rc = rc == FC_OK ? fc_post_unflatten_transform(&extensions, &view, &extension, NULL, &back, err) : rc;
    good = good && !back.is_dtensor && back.fsdp_flattened;
    fc_device_mesh_free(&mesh);
    return rc != FC_OK || good ? rc : fc_fail(err, FC_EFOUND, "the transforms lose something");
}

static void flatten_and_unflatten(void **state) {
    (void)state;
    run(2, transforms, NULL);
}

/* A ShardedTensor can be chunked once; a second time is refused. */
static fc_code nested(fc_comm *comm, void *context, fc_error *err) {
    fc_arena *arena = fc_arena_new();
    float values[10] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9};
    fc_fsdp_tensor plain = {0};
    fc_process_group group = {comm->rank, comm->size, NULL, {"cpu", -1}};
    fc_chunk_input input = {.tensor = &plain, .torch_device = {"cpu", -1}};
    fc_sharded_tensor *outer = NULL, *both = NULL, *third = NULL;
    const fc_sharded_tensor *inner;
    const fc_local_shard *shards;
    size_t count;
    bool good = false;
    (void)context;
    fc_code rc = fc_array_over(comm->device, FC_F32, 1, (int64_t[]){10}, values, &plain.local, err);
    rc = rc == FC_OK ? fc_chunk_tensor_data(&input, comm->rank, 2, 1, 1, &group, NULL, arena, &outer, err) : rc;
    input = (fc_chunk_input){.sharded = outer, .torch_device = {"cpu", -1}};
    rc = rc == FC_OK ? fc_chunk_tensor_data(&input, comm->rank, 2, 1, 1, &group, NULL, arena, &both, err) : rc;
    if (rc == FC_OK) {
        fc_pre_load_state_dict_transform(outer, &inner, &shards, &count);
        good = inner == outer && count == 1 && shards[0].tensor.sizes[0] == 5;
        fc_pre_load_state_dict_transform(both, &inner, &shards, &count);
        int64_t size = comm->rank == 0 ? 3 : 2;
        good = good && inner == both->shards[0].inner && count == 1 && shards[0].tensor.sizes[0] == size &&
               ((const float *)shards[0].tensor.data)[0] == (float)(comm->rank == 0 ? 0 : 8) &&
               both->metadata.shape[0] == 10 && inner->metadata.shape[0] == 5;
        input.sharded = both;
        good =
            good && fc_chunk_tensor_data(&input, comm->rank, 2, 1, 1, &group, NULL, arena, &third, NULL) == FC_EUSAGE;
        rc = good ? FC_OK : fc_fail(err, FC_EFOUND, "the nested ShardedTensor is wrong");
    }
    fc_sharded_tensor_free(outer);
    fc_sharded_tensor_free(both);
    fc_arena_free(arena);
    return rc;
}

static void nested_sharded_tensors(void **state) {
    (void)state;
    run(2, nested, NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(redistributes),         cmocka_unit_test(bad_calls_are_refused),
        cmocka_unit_test(uneven_tp_is_refused),  cmocka_unit_test(strided_shards_of_others_are_refused),
        cmocka_unit_test(flatten_and_unflatten), cmocka_unit_test(nested_sharded_tensors),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
