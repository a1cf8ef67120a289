/*
 * Sharding specs: remote devices, chunk and enumerable specs, overlap and coverage, and rewriting a spec's device.
 */
#include "fsdpckpt/sharded_tensor/sharding_spec.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static fc_remote_device device(const char *text) {
    fc_remote_device d;
    assert_int_equal(fc_remote_device_parse(text, &d, NULL), FC_OK);
    return d;
}

static void expect_shard(const fc_shard_metadata *shard, const char *want) {
    char text[256];
    assert_int_equal(fc_shard_metadata_format(shard, text, sizeof text), strlen(want));
    assert_string_equal(text, want);
}

static void remote_devices(void **state) {
    (void)state;
    static const char *const same[] = {"rank:0/cuda:0", "rank:12/cpu", "trainer0/cpu", "cuda:1", "ps0/cuda:3", "cpu"};
    char text[96];
    for (size_t i = 0; i < sizeof same / sizeof *same; i++) {
        fc_remote_device d = device(same[i]);
        fc_remote_device_format(&d, text, sizeof text);
        assert_string_equal(text, same[i]);
    }
    fc_remote_device d = device("rank:3");
    assert_int_equal(d.rank, 3);
    fc_remote_device_format(&d, text, sizeof text);
    assert_string_equal(text, "rank:3/cpu");
    d = device("trainer0");
    assert_int_equal(d.rank, -1);
    assert_string_equal(d.worker, "trainer0");
}

static void bad_remote_devices(void **state) {
    (void)state;
    static const char *const bad[] = {
        "",           "/cpu",           "rank:0/", "rank:x/cpu", "rank:/cpu",   "a:0/cpu",  "a/cpu/b",
        "rank:0/gpu", "rank:0/cuda:01", "cuda:",   "cuda:1000/", "rank:-1/cpu", "cuda:300", "rank:1:2/cpu"};
    fc_remote_device d;
    fc_error err;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        if (fc_remote_device_parse(bad[i], &d, &err) != FC_EUSAGE) {
            fail_msg("%s was accepted", bad[i]);
        }
    }
    char name[70];
    memset(name, 'w', sizeof name);
    name[64] = '\0';
    assert_int_equal(fc_remote_device_parse(name, &d, &err), FC_EUNSUPPORTED);
    name[63] = '\0';
    assert_int_equal(fc_remote_device_parse(name, &d, &err), FC_OK);
}

static void chunk_sizes(void **state) {
    (void)state;
    assert_int_equal(fc_get_split_size(10, 4), 3);
    assert_int_equal(fc_get_split_size(0, 4), 0);
    assert_int_equal(fc_get_chunked_dim_size(10, 3, 2), 3);
    assert_int_equal(fc_get_chunked_dim_size(10, 3, 3), 1);
    assert_int_equal(fc_get_chunked_dim_size(10, 3, 4), 0);
    assert_int_equal(fc_get_chunked_dim_size(INT64_MAX, INT64_MAX, 2), 0);
}

static const fc_tensor_properties bf16 = {FC_BF16, true, false};

static void chunk_spec_builds_metadata(void **state) {
    (void)state;
    fc_arena *arena = fc_arena_new();
    fc_remote_device devices[4] = {device("rank:0/cuda:0"), device("rank:1/cuda:1"), device("rank:2/cuda:0"),
                                   device("rank:3/cuda:1")};
    fc_sharding_spec spec = {.kind = FC_SPEC_CHUNK, .as.chunk = {-2, devices, 4}};
    const int64_t shape[] = {5, 6};
    fc_sharded_tensor_metadata md;
    fc_error err;
    assert_int_equal(fc_build_metadata(&spec, 2, shape, &bf16, arena, &md, &err), FC_OK);
    assert_int_equal(md.nshards, 4);
    assert_int_equal(md.properties.dtype, FC_BF16);
    expect_shard(&md.shards[1], "ShardMetadata(shard_offsets=[2, 0], shard_sizes=[2, 6], placement=rank:1/cuda:1)");
    expect_shard(&md.shards[2], "ShardMetadata(shard_offsets=[4, 0], shard_sizes=[1, 6], placement=rank:2/cuda:0)");
    /* As in torch, the empty chunk lies beyond the tensor. */
    expect_shard(&md.shards[3], "ShardMetadata(shard_offsets=[6, 0], shard_sizes=[0, 6], placement=rank:3/cuda:1)");
    assert_int_equal(fc_validate_non_overlapping_shards_metadata(md.shards, 4, &err), FC_OK);
    assert_int_equal(fc_check_tensor(md.shards, 4, 2, shape, &err), FC_ECORRUPT);
    assert_int_equal(fc_check_tensor(md.shards, 3, 2, shape, &err), FC_OK);
    spec.as.chunk.dim = 2;
    assert_int_equal(fc_build_metadata(&spec, 2, shape, &bf16, arena, &md, &err), FC_EUSAGE);
    assert_non_null(strstr(err.message, "invalid sharding dim: 2"));
    spec.as.chunk.dim = -3;
    assert_int_equal(fc_build_metadata(&spec, 2, shape, &bf16, arena, &md, &err), FC_EUSAGE);
    assert_int_equal(fc_build_metadata(&spec, 0, NULL, &bf16, arena, &md, &err), FC_EUSAGE);
    spec.as.chunk = (fc_chunk_sharding_spec){0, devices, 0};
    assert_int_equal(fc_build_metadata(&spec, 2, shape, &bf16, arena, &md, &err), FC_EUSAGE);
    fc_arena_free(arena);
}

static fc_shard_metadata shard(int ndim, const int64_t *offsets, const int64_t *sizes) {
    return (fc_shard_metadata){.box = {ndim, offsets, sizes}};
}
#define SHARD2(o0, o1, s0, s1) shard(2, (int64_t[]){o0, o1}, (int64_t[]){s0, s1})

static fc_code check(fc_shard_metadata *shards, size_t count, fc_error *err) {
    fc_enumerable_sharding_spec spec = {shards, count};
    return fc_enumerable_sharding_spec_check(&spec, err);
}

static void overlaps_are_found(void **state) {
    (void)state;
    fc_error err;
    fc_shard_metadata rows[3] = {SHARD2(0, 0, 3, 4), SHARD2(6, 0, 2, 4), SHARD2(2, 0, 3, 4)};
    assert_int_equal(check(rows, 3, &err), FC_ECORRUPT);
    assert_string_equal(err.message,
                        "shards 0 ShardMetadata(shard_offsets=[0, 0], shard_sizes=[3, 4], placement=None) and 2 "
                        "ShardMetadata(shard_offsets=[2, 0], shard_sizes=[3, 4], placement=None) overlap");
    rows[2] = SHARD2(3, 0, 3, 4);
    assert_int_equal(check(rows, 3, &err), FC_OK);
    fc_shard_metadata grid[4] = {SHARD2(0, 0, 2, 3), SHARD2(0, 3, 2, 3), SHARD2(2, 0, 2, 3), SHARD2(2, 3, 2, 3)};
    assert_int_equal(check(grid, 4, &err), FC_OK);
    grid[3] = SHARD2(1, 2, 2, 3);
    assert_int_equal(check(grid, 4, &err), FC_ECORRUPT);
    assert_non_null(strstr(err.message, "and 3 "));
    fc_shard_metadata same[2] = {SHARD2(0, 0, 2, 2), SHARD2(0, 0, 2, 2)};
    assert_int_equal(check(same, 2, &err), FC_ECORRUPT);
    fc_shard_metadata none[2] = {SHARD2(0, 0, 0, 2), SHARD2(0, 0, 0, 2)};
    assert_int_equal(check(none, 2, &err), FC_OK);
}

static void malformed_shards(void **state) {
    (void)state;
    fc_error err;
    fc_shard_metadata mixed[2] = {SHARD2(0, 0, 2, 2), shard(1, (int64_t[]){2}, (int64_t[]){1})};
    assert_int_equal(check(mixed, 2, &err), FC_ECORRUPT);
    assert_non_null(strstr(err.message, "inconsistent ranks for shards: 2 and 1"));
    assert_int_equal(check(mixed, 0, &err), FC_ECORRUPT);
    mixed[0] = SHARD2(0, -1, 2, 2);
    assert_int_equal(check(mixed, 1, &err), FC_ECORRUPT);
    mixed[0] = SHARD2(0, INT64_MAX, 2, 1);
    assert_int_equal(check(mixed, 1, &err), FC_ECORRUPT);
    assert_non_null(strstr(err.message, "shard 0 ShardMetadata("));
}

static void coverage_is_checked(void **state) {
    (void)state;
    fc_arena *arena = fc_arena_new();
    fc_error err;
    fc_sharded_tensor_metadata md;
    fc_shard_metadata rows[2] = {SHARD2(0, 0, 2, 4), SHARD2(2, 0, 2, 4)};
    fc_sharding_spec spec = {.kind = FC_SPEC_ENUMERABLE, .as.enumerable = {rows, 2}};
    assert_int_equal(fc_build_metadata(&spec, 2, (int64_t[]){4, 4}, &bf16, arena, &md, &err), FC_OK);
    assert_int_equal(md.nshards, 2);
    assert_int_equal(fc_build_metadata(&spec, 2, (int64_t[]){5, 4}, &bf16, arena, &md, &err), FC_ECORRUPT);
    assert_string_equal(
        err.message,
        "total volume of shards: 16 does not match tensor volume: 20: the 2 shards do not cover the entire tensor");
    assert_int_equal(fc_build_metadata(&spec, 2, (int64_t[]){3, 4}, &bf16, arena, &md, &err), FC_ECORRUPT);
    assert_non_null(strstr(err.message, "exceeds tensor dim: 3 for shard 1 ShardMetadata("));
    assert_int_equal(fc_build_metadata(&spec, 1, (int64_t[]){4}, &bf16, arena, &md, &err), FC_ECORRUPT);
    assert_string_equal(err.message, "rank of tensor is 1, but shards rank is 2");
    fc_arena_free(arena);
}

/* Ten thousand shards in a grid are checked quickly, and the one wrong shard is found. */
static void many_shards(void **state) {
    (void)state;
    enum { SIDE = 100, COUNT = SIDE * SIDE };
    int64_t(*dims)[4] = calloc(COUNT, sizeof *dims);
    fc_shard_metadata *shards = calloc(COUNT, sizeof *shards);
    assert_true(dims && shards);
    for (size_t i = 0; i < COUNT; i++) {
        dims[i][0] = (int64_t)(i * 37 % COUNT) / SIDE * 4;
        dims[i][1] = (int64_t)(i * 37 % COUNT) % SIDE * 4;
        dims[i][2] = dims[i][3] = 4;
        shards[i] = shard(2, dims[i], dims[i] + 2);
    }
    fc_error err;
    assert_int_equal(check(shards, COUNT, &err), FC_OK);
    assert_int_equal(fc_check_tensor(shards, COUNT, 2, (int64_t[]){400, 400}, &err), FC_OK);
    dims[5000][3] = 5;
    assert_int_equal(check(shards, COUNT, &err), FC_ECORRUPT);
    assert_non_null(strstr(err.message, "5000 ShardMetadata("));
    free(dims);
    free(shards);
}

static void spec_is_rewritten_for_the_tensors_device(void **state) {
    (void)state;
    fc_arena *arena = fc_arena_new();
    fc_remote_device devices[3] = {device("rank:0/cuda:0"), device("rank:1/cuda:1"), device("cuda:1")};
    fc_sharding_spec spec = {.kind = FC_SPEC_CHUNK, .as.chunk = {0, devices, 3}}, out;
    fc_torch_device cpu = {"cpu", -1}, cuda1 = {"cuda", 1};
    assert_int_equal(fc_rewrite_spec_if_needed(&spec, &cuda1, 1, arena, &out, NULL), FC_OK);
    assert_ptr_equal(out.as.chunk.placements, devices);
    assert_int_equal(fc_rewrite_spec_if_needed(&spec, &cpu, 1, arena, &out, NULL), FC_OK);
    char text[96];
    static const char *const want[3] = {"rank:0/cuda:0", "rank:1/cpu", "cuda:1"};
    for (int i = 0; i < 3; i++) {
        fc_remote_device_format(&out.as.chunk.placements[i], text, sizeof text);
        assert_string_equal(text, want[i]);
    }
    fc_remote_device_format(&devices[1], text, sizeof text);
    assert_string_equal(text, "rank:1/cuda:1");
    /* "cuda:1" has no rank, so no rank rewrites it. */
    assert_int_equal(fc_rewrite_spec_if_needed(&spec, &cpu, -1, arena, &out, NULL), FC_OK);
    assert_ptr_equal(out.as.chunk.placements, devices);
    fc_shard_metadata one = SHARD2(0, 0, 1, 1);
    fc_sharding_spec enumerable = {.kind = FC_SPEC_ENUMERABLE, .as.enumerable = {&one, 1}};
    assert_int_equal(fc_rewrite_spec_if_needed(&enumerable, &cpu, 0, arena, &out, NULL), FC_OK);
    assert_ptr_equal(out.as.enumerable.shards, &one);
    fc_arena_free(arena);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(remote_devices),
        cmocka_unit_test(bad_remote_devices),
        cmocka_unit_test(chunk_sizes),
        cmocka_unit_test(chunk_spec_builds_metadata),
        cmocka_unit_test(overlaps_are_found),
        cmocka_unit_test(malformed_shards),
        cmocka_unit_test(coverage_is_checked),
        cmocka_unit_test(many_shards),
        cmocka_unit_test(spec_is_rewritten_for_the_tensors_device),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
