/*
 * Meshes and local boxes: common layouts, uneven and empty shards, and invalid calls.
 * tests/oracle/boxes.py compares thousands more with torch.
 */
#include "fsdpckpt/mesh.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

static const fc_placement replicate = {FC_REPLICATE, 0, 0};
static const fc_placement shard0 = {FC_SHARD, 0, 0};
static const fc_placement shard1 = {FC_SHARD, 1, 0};

static fc_placement strided(int64_t split_factor) {
    return (fc_placement){FC_STRIDED_SHARD, 0, split_factor};
}

static fc_mesh mesh_of(int ndim, int64_t a, int64_t b, int64_t c) {
    return (fc_mesh){.ndim = ndim, .sizes = {a, b, c}};
}

/* Compares the dimension-0 boxes of all ranks with {offset, size} pairs. */
static void expect_rows(int64_t rows, fc_mesh mesh, const fc_placement *placements, const int64_t (*want)[2]) {
    for (int64_t rank = 0; rank < fc_mesh_ranks(&mesh); rank++) {
        int64_t coordinate[FC_MAX_MESH_DIMS], offsets[2], sizes[2];
        fc_error err;
        fc_mesh_coordinate(&mesh, rank, coordinate);
        assert_int_equal(fc_local_box(2, (int64_t[]){rows, 6}, &mesh, placements, coordinate, offsets, sizes, &err),
                         FC_OK);
        assert_int_equal(offsets[0], want[rank][0]);
        assert_int_equal(sizes[0], want[rank][1]);
        assert_int_equal(offsets[1], 0);
        assert_int_equal(sizes[1], 6);
    }
}

static void ranks_are_row_major(void **state) {
    (void)state;
    fc_mesh mesh = mesh_of(3, 2, 3, 4);
    int64_t coordinate[3];
    assert_int_equal(fc_mesh_ranks(&mesh), 24);
    fc_mesh_coordinate(&mesh, 17, coordinate);
    assert_memory_equal(coordinate, ((int64_t[]){1, 1, 1}), sizeof coordinate);
    for (int64_t rank = 0; rank < 24; rank++) {
        fc_mesh_coordinate(&mesh, rank, coordinate);
        assert_int_equal(fc_mesh_rank(&mesh, coordinate), rank);
    }
    fc_mesh none = {0};
    assert_int_equal(fc_mesh_ranks(&none), 1);
}

static void boxes_are_those_of_torch_chunk(void **state) {
    (void)state;
    int64_t offset, length;
    static const int64_t want[4][2] = {{0, 2}, {2, 2}, {4, 1}, {5, 0}};
    for (int i = 0; i < 4; i++) {
        fc_shard_range(5, 4, i, &offset, &length);
        assert_int_equal(offset, want[i][0]);
        assert_int_equal(length, want[i][1]);
    }
    fc_shard_range(0, 3, 1, &offset, &length);
    assert_int_equal(offset + length, 0);
    fc_shard_range(INT64_MAX, 4, 3, &offset, &length);
    assert_int_equal(offset + length, INT64_MAX);
    fc_shard_range(INT64_MAX - 1, INT64_C(1) << 20, (INT64_C(1) << 20) - 1, &offset, &length);
    assert_true(offset <= INT64_MAX - 1 && length >= 0);
}

static void fsdp_over_colwise_runs_tp_major(void **state) {
    (void)state;
    const fc_placement p[] = {strided(2), shard0};
    const int64_t want[8][2] = {{0, 8}, {32, 8}, {8, 8}, {40, 8}, {16, 8}, {48, 8}, {24, 8}, {56, 8}};
    expect_rows(64, mesh_of(2, 4, 2, 0), p, want);
}

static void hsdp_repeats_the_boxes(void **state) {
    (void)state;
    const fc_placement p[] = {replicate, strided(2), shard0};
    const int64_t want[8][2] = {{0, 2}, {4, 2}, {2, 2}, {6, 1}, {0, 2}, {4, 2}, {2, 2}, {6, 1}};
    expect_rows(7, mesh_of(3, 2, 2, 2), p, want);
}

static void uneven_and_empty(void **state) {
    (void)state;
    const int64_t one[4][2] = {{0, 1}, {1, 1}, {2, 0}, {2, 0}};
    expect_rows(2, mesh_of(1, 4, 0, 0), &shard0, one);
}

/* TP shards first. From left to right, rank (3, 0) would get the last of the 9 rows, and GPT-2's vocabulary no boxes.
 */
static void fsdp_shards_what_tp_left(void **state) {
    (void)state;
    const fc_placement p[] = {strided(2), shard0};
    const int64_t nine[8][2] = {{0, 2}, {5, 1}, {2, 2}, {6, 1}, {4, 1}, {7, 1}, {9, 0}, {8, 1}};
    expect_rows(9, mesh_of(2, 4, 2, 0), p, nine);
    const int64_t want[8][2] = {{0, 6283},     {25129, 6282}, {6283, 6283},  {31411, 6282},
                                {12566, 6283}, {37693, 6282}, {18849, 6280}, {43975, 6282}};
    expect_rows(50257, mesh_of(2, 4, 2, 0), p, want);
}

/* FSDP over EP and TP, which shard one after the other: 5 rows are 3 + 2, and these are (2 + 1) + (1 + 1). */
static void fsdp_over_two_meshes(void **state) {
    (void)state;
    const fc_placement p[] = {strided(4), shard0, shard0};
    const int64_t want[8][2] = {{0, 1}, {2, 1}, {3, 1}, {4, 1}, {1, 1}, {5, 0}, {5, 0}, {5, 0}};
    expect_rows(5, mesh_of(3, 2, 2, 2), p, want);
}

static void two_dimensions(void **state) {
    (void)state;
    fc_mesh mesh = mesh_of(2, 3, 2, 0);
    const fc_placement p[] = {shard0, shard1};
    int64_t offsets[2], sizes[2];
    fc_error err;
    assert_int_equal(fc_local_box(2, (int64_t[]){7, 5}, &mesh, p, (int64_t[]){2, 1}, offsets, sizes, &err), FC_OK);
    assert_memory_equal(offsets, ((int64_t[]){6, 3}), sizeof offsets);
    assert_memory_equal(sizes, ((int64_t[]){1, 2}), sizeof sizes);
    const fc_placement both[] = {replicate, replicate};
    assert_int_equal(fc_local_box(0, NULL, &mesh, both, (int64_t[]){1, 1}, NULL, NULL, &err), FC_OK);
}

static fc_code box_code(fc_placement p, int64_t rows, int64_t coordinate, fc_error *err) {
    fc_mesh mesh = mesh_of(1, 2, 0, 0);
    int64_t offsets[1], sizes[1];
    return fc_local_box(1, &rows, &mesh, &p, &coordinate, offsets, sizes, err);
}

static void bad_calls_are_refused(void **state) {
    (void)state;
    fc_error err;
    assert_int_equal(box_code((fc_placement){FC_PARTIAL, 0, 0}, 8, 0, &err), FC_EUNSUPPORTED);
    assert_non_null(strstr(err.message, "Partial"));
    assert_int_equal(box_code(strided(2), 8, 0, &err), FC_EUNSUPPORTED);
    assert_string_equal(err.message,
                        "placements [_StridedShard(0, 2)] give a rank rows of dimension 0 (size 8) that are "
                        "not contiguous, so it would not hold one box");
    assert_int_equal(box_code(strided(0), 8, 0, &err), FC_EUSAGE);
    assert_int_equal(box_code(strided(1), 8, 0, &err), FC_OK);
    assert_int_equal(box_code(shard1, 8, 0, &err), FC_EUSAGE);
    assert_int_equal(box_code((fc_placement){FC_SHARD, -1, 0}, 8, 0, &err), FC_EUSAGE);
    assert_int_equal(box_code(shard0, 8, 2, &err), FC_EUSAGE);
    /* The time must not depend on a number from a file. */
    assert_int_equal(box_code(strided(INT64_MAX), INT64_MAX, 1, &err), FC_OK);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ranks_are_row_major),
        cmocka_unit_test(boxes_are_those_of_torch_chunk),
        cmocka_unit_test(fsdp_over_colwise_runs_tp_major),
        cmocka_unit_test(hsdp_repeats_the_boxes),
        cmocka_unit_test(uneven_and_empty),
        cmocka_unit_test(fsdp_shards_what_tp_left),
        cmocka_unit_test(fsdp_over_two_meshes),
        cmocka_unit_test(two_dimensions),
        cmocka_unit_test(bad_calls_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
