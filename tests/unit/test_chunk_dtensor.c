/*
 * _chunk_dtensor: the placements and local box of a plain tensor and of a TP DTensor on (dp, tp) and (replicate, dp,
 * tp). The local sizes are those torch gives for the same calls.
 */
#include "fsdpckpt/dtensor.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

static const fc_mesh two = {.ndim = 2, .sizes = {4, 2}};
static const fc_mesh three = {.ndim = 3, .sizes = {2, 4, 2}};

static fc_dtensor tp_tensor(fc_placement p, int64_t rows, int64_t coordinate) {
    fc_dtensor dt;
    fc_mesh mesh = {.ndim = 1, .sizes = {2}};
    assert_int_equal(fc_dtensor_init(&dt, 2, (int64_t[]){rows, 6}, &mesh, &p, &coordinate, NULL), FC_OK);
    dt.dtype = FC_BF16;
    return dt;
}

/* Chunks `tp`, or a plain tensor of 10 × 6, for `rank` of `mesh` and compares placements and box. */
static void expect(const fc_dtensor *tp, const fc_mesh *mesh, int64_t rank, const char *placements,
                   const int64_t *box) {
    fc_dtensor out;
    char text[128];
    int64_t coordinate[FC_MAX_MESH_DIMS], offsets[2];
    fc_mesh_coordinate(mesh, rank, coordinate);
    assert_int_equal(fc_chunk_dtensor(2, (int64_t[]){10, 6}, tp, mesh, coordinate, &out, offsets, NULL), FC_OK);
    fc_placements_format(mesh->ndim, out.placements, text, sizeof text);
    assert_string_equal(text, placements);
    assert_int_equal(out.dtype, tp ? FC_BF16 : FC_F32);
    assert_memory_equal(offsets, box, sizeof offsets);
    assert_memory_equal(out.local_sizes, box + 2, 2 * sizeof *box);
}

static void plain_tensor(void **state) {
    (void)state;
    expect(NULL, &two, 1, "[Shard(0), Replicate()]", (int64_t[]){0, 0, 3, 6});
    expect(NULL, &two, 7, "[Shard(0), Replicate()]", (int64_t[]){9, 0, 1, 6});
    /* torch cuts along the first mesh dimension, whatever it is for. */
    expect(NULL, &three, 15, "[Shard(0), Replicate(), Replicate()]", (int64_t[]){5, 0, 5, 6});
}

static void tp_tensor_keeps_its_placement(void **state) {
    (void)state;
    fc_dtensor rows = tp_tensor((fc_placement){FC_SHARD, 0, 0}, 10, 1);
    fc_dtensor columns = tp_tensor((fc_placement){FC_SHARD, 1, 0}, 10, 1);
    fc_dtensor whole = tp_tensor((fc_placement){FC_REPLICATE, 0, 0}, 10, 1);
    expect(&rows, &two, 1, "[Shard(0), Shard(0)]", (int64_t[]){2, 0, 1, 6});
    expect(&columns, &two, 1, "[Shard(0), Shard(1)]", (int64_t[]){0, 3, 3, 3});
    expect(&whole, &two, 1, "[Shard(0), Replicate()]", (int64_t[]){0, 0, 3, 6});
    expect(&columns, &three, 11, "[Replicate(), Shard(0), Shard(1)]", (int64_t[]){3, 3, 3, 3});
}

/* 9 rows over 2 TP ranks are 5 and 4; DTensor.from_local makes 10 or 8 of them. */
static void uneven_tp_infers_the_shape_from_the_local_one(void **state) {
    (void)state;
    fc_dtensor out, tp = tp_tensor((fc_placement){FC_SHARD, 0, 0}, 9, 1);
    int64_t offsets[2];
    assert_int_equal(fc_chunk_dtensor(0, NULL, &tp, &two, (int64_t[]){0, 1}, &out, offsets, NULL), FC_OK);
    assert_int_equal(out.shape[0], 8);
    tp = tp_tensor((fc_placement){FC_SHARD, 0, 0}, 9, 0);
    assert_int_equal(fc_chunk_dtensor(0, NULL, &tp, &two, (int64_t[]){0, 1}, &out, offsets, NULL), FC_OK);
    assert_int_equal(out.shape[0], 10);
}

static void errors_have_torchs_wording(void **state) {
    (void)state;
    fc_dtensor out;
    fc_error err;
    int64_t offsets[2], coordinate[2] = {0, 0};
    const int64_t shape[] = {10, 6};
    assert_int_equal(fc_chunk_dtensor(2, shape, NULL, NULL, coordinate, &out, offsets, &err), FC_EUSAGE);
    assert_string_equal(err.message, "No parent device_mesh is found for FSDP device_mesh.");
    fc_mesh one = {.ndim = 1, .sizes = {8}};
    assert_int_equal(fc_chunk_dtensor(2, shape, NULL, &one, coordinate, &out, offsets, &err), FC_EUSAGE);
    assert_string_equal(err.message, "Found parent device_mesh of ndim=1, but meshes must be at least 2D.");
    fc_dtensor tp = tp_tensor((fc_placement){FC_REPLICATE, 0, 0}, 10, 0);
    tp.placements[0].kind = FC_PARTIAL;
    assert_int_equal(fc_chunk_dtensor(0, NULL, &tp, &two, coordinate, &out, offsets, &err), FC_EUNSUPPORTED);
    tp.placements[0] = (fc_placement){FC_SHARD, 2, 0};
    assert_int_equal(fc_chunk_dtensor(0, NULL, &tp, &two, coordinate, &out, offsets, &err), FC_EUSAGE);
    /* A scalar cannot be cut: Shard(0) of nothing. */
    assert_int_equal(fc_chunk_dtensor(0, NULL, NULL, &two, coordinate, &out, offsets, &err), FC_EUSAGE);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(plain_tensor),
        cmocka_unit_test(tp_tensor_keeps_its_placement),
        cmocka_unit_test(uneven_tp_infers_the_shape_from_the_local_one),
        cmocka_unit_test(errors_have_torchs_wording),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
