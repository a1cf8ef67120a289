/*
 * The boxes and metadata of a DTensor on one mesh dimension, and _chunk_tensor with its three kinds of input. Expected
 * texts are printed by torch for the same calls.
 */
#include "fsdpckpt/gather/dtensor_data.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

static void expect_shard(const fc_shard_metadata *shard, const char *want) {
    char text[256];
    assert_int_equal(fc_shard_metadata_format(shard, text, sizeof text), strlen(want));
    assert_string_equal(text, want);
}

static fc_dtensor on_mesh(int64_t rows, int64_t ranks, fc_placement p, int64_t coordinate) {
    fc_dtensor dt;
    fc_mesh mesh = {.ndim = 1, .sizes = {ranks}};
    assert_int_equal(fc_dtensor_init(&dt, 2, (int64_t[]){rows, 6}, &mesh, &p, &coordinate, NULL), FC_OK);
    return dt;
}

static const fc_placement shard0 = {FC_SHARD, 0, 0};
static const fc_placement replicate = {FC_REPLICATE, 0, 0};

/* Floor division, as in torch: the true box of rank 1 of 4 starts at row 3. */
static void boxes_of_a_dtensor(void **state) {
    (void)state;
    int64_t offsets[2], sizes[2];
    fc_dtensor dt = on_mesh(10, 4, shard0, 1);
    assert_int_equal(fc_get_box(&dt, offsets, sizes, NULL), FC_OK);
    assert_memory_equal(offsets, ((int64_t[]){2, 0}), sizeof offsets);
    assert_memory_equal(sizes, ((int64_t[]){3, 6}), sizeof sizes);
    assert_int_equal(fc_get_box_for(&dt, 3, offsets, sizes, NULL), FC_OK);
    assert_memory_equal(offsets, ((int64_t[]){6, 0}), sizeof offsets);
    dt.coordinate[0] = 2;
    assert_int_equal(fc_get_local_box(&dt, offsets, sizes, NULL), FC_OK);
    assert_memory_equal(offsets, ((int64_t[]){4, 0}), sizeof offsets);
    dt = on_mesh(10, 4, replicate, 3);
    assert_int_equal(fc_get_local_box(&dt, offsets, sizes, NULL), FC_OK);
    assert_memory_equal(offsets, ((int64_t[]){0, 0}), sizeof offsets);
    assert_memory_equal(sizes, ((int64_t[]){10, 6}), sizeof sizes);
}

static void even_boxes_are_the_true_ones(void **state) {
    (void)state;
    for (int64_t rank = 0; rank < 4; rank++) {
        int64_t offsets[2], sizes[2], true_offsets[2], true_sizes[2];
        fc_dtensor dt = on_mesh(12, 4, shard0, rank);
        assert_int_equal(fc_get_local_box(&dt, offsets, sizes, NULL), FC_OK);
        assert_int_equal(fc_local_box(2, dt.shape, &dt.mesh, dt.placements, &rank, true_offsets, true_sizes, NULL),
                         FC_OK);
        assert_memory_equal(offsets, true_offsets, sizeof offsets);
        assert_memory_equal(sizes, true_sizes, sizeof sizes);
    }
}

static void only_one_mesh_dimension(void **state) {
    (void)state;
    int64_t offsets[2], sizes[2];
    fc_error err;
    fc_dtensor dt = on_mesh(10, 4, shard0, 1);
    dt.mesh.ndim = 2;
    assert_int_equal(fc_get_box(&dt, offsets, sizes, &err), FC_EUNSUPPORTED);
    assert_non_null(strstr(err.message, "only 1D DeviceMeshes are supported"));
    dt = on_mesh(10, 4, shard0, 1);
    dt.shape[0] = INT64_MAX;
    assert_int_equal(fc_get_box_for(&dt, 100, offsets, sizes, &err), FC_EUNSUPPORTED);
}

static void metadata_of_a_dtensor(void **state) {
    (void)state;
    fc_arena *arena = fc_arena_new();
    fc_dtensor dt = on_mesh(10, 8, shard0, 1);
    fc_shard_metadata shard;
    fc_sharded_tensor_metadata md;
    assert_int_equal(fc_create_shard_md_from_dt(&dt, 1, arena, &shard, NULL), FC_OK);
    expect_shard(&shard, "ShardMetadata(shard_offsets=[1, 0], shard_sizes=[2, 6], placement=rank:1/cpu)");
    dt.device = (fc_torch_device){"cuda", 3};
    assert_int_equal(fc_create_sharded_tensor_md_from_dt(&dt, 1, 8, arena, &md, NULL), FC_OK);
    assert_int_equal(md.nshards, 8);
    expect_shard(&md.shards[0], "ShardMetadata(shard_offsets=[0, 0], shard_sizes=[2, 6], placement=rank:1/cuda:3)");
    expect_shard(&md.shards[7], "ShardMetadata(shard_offsets=[7, 0], shard_sizes=[2, 6], placement=rank:0/cuda:3)");
    assert_int_equal(fc_create_sharded_tensor_md_from_dt(&dt, 0, 8, arena, &md, NULL), FC_OK);
    assert_int_equal(md.shards[0].placement.rank, 0);
    assert_int_equal(md.shards[1].placement.rank, 1); /* the scapegoat of rank 0 */
    dt = on_mesh(10, 8, replicate, 5);
    assert_int_equal(fc_create_sharded_tensor_md_from_dt(&dt, 5, 8, arena, &md, NULL), FC_OK);
    assert_int_equal(md.nshards, 1);
    expect_shard(&md.shards[0], "ShardMetadata(shard_offsets=[0, 0], shard_sizes=[10, 6], placement=rank:5/cpu)");
    fc_arena_free(arena);
}

static fc_code chunk_plain(int ndim, const int64_t *shape, int64_t rank, const fc_process_group *group, fc_arena *arena,
                           fc_chunk_result *out, fc_error *err) {
    fc_chunk_source source = {.kind = FC_CHUNK_PLAIN, .ndim = ndim, .shape = shape, .dtype = FC_BF16};
    source.device = group->device;
    return fc_chunk_tensor(&source, rank, group->size, 4, 1, group, arena, out, err);
}

static void plain_tensors(void **state) {
    (void)state;
    fc_arena *arena = fc_arena_new();
    fc_process_group group = {.rank = 1, .size = 8, .device = {"cpu", -1}};
    fc_chunk_result r;
    assert_int_equal(chunk_plain(2, (int64_t[]){10, 3}, 1, &group, arena, &r, NULL), FC_OK);
    assert_false(r.has_outer);
    assert_int_equal(r.inner.metadata.nshards, 5); /* ceil(10 / 8) = 2 rows each */
    assert_int_equal(r.inner.metadata.properties.dtype, FC_BF16);
    expect_shard(&r.inner.metadata.shards[4],
                 "ShardMetadata(shard_offsets=[8, 0], shard_sizes=[2, 3], placement=rank:4/cpu)");
    expect_shard(&r.inner.local, "ShardMetadata(shard_offsets=[2, 0], shard_sizes=[2, 3], placement=rank:1/cpu)");
    assert_int_equal(fc_check_tensor(r.inner.metadata.shards, 5, 2, (int64_t[]){10, 3}, NULL), FC_OK);
    assert_int_equal(chunk_plain(2, (int64_t[]){10, 3}, 5, &group, arena, &r, NULL), FC_OK);
    assert_false(r.inner.has_local);
    assert_int_equal(chunk_plain(2, (int64_t[]){0, 3}, 7, &group, arena, &r, NULL), FC_OK);
    assert_int_equal(r.inner.metadata.nshards, 8);
    expect_shard(&r.inner.local, "ShardMetadata(shard_offsets=[0, 0], shard_sizes=[0, 3], placement=rank:7/cpu)");
    fc_arena_free(arena);
}

static void devices_are_numbered_by_node(void **state) {
    (void)state;
    fc_arena *arena = fc_arena_new();
    const int64_t global[3] = {1, 6, 11};
    fc_process_group group = {.rank = 1, .size = 3, .global_ranks = global, .device = {"cuda", -1}};
    fc_chunk_result r;
    assert_int_equal(chunk_plain(1, (int64_t[]){7}, 2, &group, arena, &r, NULL), FC_OK);
    expect_shard(&r.inner.metadata.shards[1],
                 "ShardMetadata(shard_offsets=[3], shard_sizes=[3], placement=rank:6/cuda:2)");
    expect_shard(&r.inner.metadata.shards[2],
                 "ShardMetadata(shard_offsets=[6], shard_sizes=[1], placement=rank:11/cuda:3)");
    fc_arena_free(arena);
}

static void bad_calls_are_refused(void **state) {
    (void)state;
    fc_arena *arena = fc_arena_new();
    fc_process_group group = {.rank = 1, .size = 8, .device = {"cpu", -1}};
    fc_chunk_result r;
    fc_error err;
    assert_int_equal(chunk_plain(0, NULL, 1, &group, arena, &r, &err), FC_EUSAGE);
    assert_string_equal(err.message, "chunk expects at least a 1-dimensional tensor");
    assert_int_equal(chunk_plain(1, (int64_t[]){4}, 8, &group, arena, &r, &err), FC_EUSAGE);
    fc_chunk_source source = {.kind = FC_CHUNK_SHARDED, .nlocal_shards = 2};
    assert_int_equal(fc_chunk_tensor(&source, 0, 2, 4, 1, &group, arena, &r, &err), FC_EUSAGE);
    assert_non_null(strstr(err.message, "2 local shards"));
    fc_arena_free(arena);
}

static void sharded_tensor(void **state) {
    (void)state;
    fc_arena *arena = fc_arena_new();
    fc_process_group group = {.rank = 0, .size = 2, .device = {"cpu", -1}};
    fc_torch_device cpu = {"cpu", -1};
    fc_shard_metadata shards[2] = {
        {{2, (int64_t[]){0, 0}, (int64_t[]){4, 6}}, true, fc_remote_device_of_rank(0, &cpu)},
        {{2, (int64_t[]){4, 0}, (int64_t[]){3, 6}}, true, fc_remote_device_of_rank(1, &cpu)}};
    fc_sharded_tensor_metadata md = {2, (int64_t[]){7, 6}, shards, 2, {FC_F16, true, false}};
    fc_chunk_source source = {
        .kind = FC_CHUNK_SHARDED, .device = cpu, .sharded = &md, .local_shards = &shards[1], .nlocal_shards = 1};
    fc_chunk_result r;
    assert_int_equal(fc_chunk_tensor(&source, 0, 2, 4, 1, &group, arena, &r, NULL), FC_OK);
    assert_true(r.has_outer);
    assert_false(r.outer.metadata.properties.requires_grad);
    assert_true(md.properties.requires_grad);
    expect_shard(&r.outer.local, "ShardMetadata(shard_offsets=[4, 0], shard_sizes=[3, 6], placement=rank:1/cpu)");
    expect_shard(&r.inner.local, "ShardMetadata(shard_offsets=[0, 0], shard_sizes=[2, 6], placement=rank:0/cpu)");
    assert_int_equal(r.inner.metadata.shape[0], 3);
    fc_arena_free(arena);
}

static void dtensor(void **state) {
    (void)state;
    fc_arena *arena = fc_arena_new();
    fc_process_group group = {.rank = 1, .size = 8, .device = {"cpu", -1}};
    fc_dtensor dt = on_mesh(16, 8, shard0, 1);
    fc_chunk_source source = {.kind = FC_CHUNK_DTENSOR, .dtensor = &dt, .dtensor_group = &group};
    fc_chunk_result r;
    fc_error err;
    assert_int_equal(fc_chunk_tensor(&source, 1, 8, 4, 1, &group, arena, &r, &err), FC_OK);
    expect_shard(&r.outer.local, "ShardMetadata(shard_offsets=[2, 0], shard_sizes=[2, 6], placement=rank:1/cpu)");
    expect_shard(&r.outer.metadata.shards[1],
                 "ShardMetadata(shard_offsets=[2, 0], shard_sizes=[2, 6], placement=rank:0/cpu)");
    assert_int_equal(r.inner.metadata.nshards, 2);
    expect_shard(&r.inner.local, "ShardMetadata(shard_offsets=[1, 0], shard_sizes=[1, 6], placement=rank:1/cpu)");
    /* torch numbers devices by what the accelerator reports, not by the argument. */
    fc_process_group cuda = {.rank = 1, .size = 8, .device = {"cuda", -1}};
    assert_int_equal(fc_chunk_tensor(&source, 1, 8, 4, 1, &cuda, arena, &r, &err), FC_OK);
    assert_int_equal(r.inner.metadata.shards[1].placement.device.index, 0);
    dt = on_mesh(10, 8, shard0, 1);
    assert_int_equal(fc_chunk_tensor(&source, 1, 8, 4, 1, &group, arena, &r, &err), FC_ECORRUPT);
    assert_non_null(strstr(err.message, "the DTensor is not sharded evenly: shards 0 "));
    fc_arena_free(arena);
}

/* 10 rows over 4 ranks: 3, 3, 3 and 1, each with its data; over 8 ranks two have none. */
static void data_of_the_chunks(void **state) {
    (void)state;
    fc_device *cpu;
    float values[10][2];
    for (int i = 0; i < 20; i++) {
        values[i / 2][i % 2] = (float)i;
    }
    assert_int_equal(fc_device_cpu(&cpu, NULL), FC_OK);
    fc_fsdp_tensor plain = {.is_dtensor = false};
    assert_int_equal(fc_array_over(cpu, FC_F32, 2, (int64_t[]){10, 2}, values, &plain.local, NULL), FC_OK);
    fc_chunk_input input = {.tensor = &plain, .torch_device = {"cpu", -1}};
    for (int64_t ranks = 4; ranks <= 8; ranks += 4) {
        int64_t full = fc_get_split_size(10, ranks), rows = 0;
        for (int64_t rank = 0; rank < ranks; rank++) {
            fc_arena *arena = fc_arena_new();
            fc_process_group group = {.rank = rank, .size = ranks, .device = {"cpu", -1}};
            fc_sharded_tensor *t;
            assert_int_equal(fc_chunk_tensor_data(&input, rank, ranks, 1, 1, &group, NULL, arena, &t, NULL), FC_OK);
            assert_int_equal(t->nshards, rank * full < 10);
            if (t->nshards > 0) {
                const fc_array *chunk = &t->shards[0].tensor;
                assert_int_equal(chunk->sizes[0], fc_get_chunked_dim_size(10, full, rank));
                assert_memory_equal(chunk->data, values[rank * full], fc_array_bytes(chunk));
                assert_ptr_not_equal(chunk->data, values[rank * full]); /* a copy */
                rows += chunk->sizes[0];
            }
            fc_sharded_tensor_free(t);
            fc_arena_free(arena);
        }
        assert_int_equal(rows, 10);
    }
    cpu->destroy(cpu);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(boxes_of_a_dtensor),
        cmocka_unit_test(even_boxes_are_the_true_ones),
        cmocka_unit_test(only_one_mesh_dimension),
        cmocka_unit_test(metadata_of_a_dtensor),
        cmocka_unit_test(plain_tensors),
        cmocka_unit_test(devices_are_numbered_by_node),
        cmocka_unit_test(bad_calls_are_refused),
        cmocka_unit_test(sharded_tensor),
        cmocka_unit_test(dtensor),
        cmocka_unit_test(data_of_the_chunks),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
