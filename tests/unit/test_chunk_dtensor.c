/*
 * _chunk_dtensor: the placements and local box of a plain tensor and of a TP DTensor on (dp, tp) and (replicate, dp,
 * tp). The expected local sizes are those of torch for the same calls.
 */
#include "fsdpckpt/gather/dtensor_data.h"

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
    /* torch cuts along the first mesh dimension, regardless of its name. */
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

/* 9 rows over 2 TP ranks are 5 and 4; DTensor.from_local infers 10 or 8 from them. */
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
    /* A scalar has no dimension 0, so Shard(0) fails. */
    assert_int_equal(fc_chunk_dtensor(0, NULL, NULL, &two, coordinate, &out, offsets, &err), FC_EUSAGE);
}

/* The elements of an 8 × 6 tensor that a rank of (replicate, dp, tp) holds if TP cuts `dim` (-1: a plain tensor). */
static fc_code chunk_data(fc_comm *comm, void *context, fc_error *err) {
    const int dim = *(const int *)context;
    const fc_mesh sizes = {.ndim = 3, .sizes = {2, 2, 2}};
    const int64_t shape[] = {8, 6};
    int64_t offsets[2], values[48];
    fc_device_mesh mesh, dp, tp;
    fc_fsdp_tensor t = {.is_dtensor = false}, out = {.is_dtensor = false};
    fc_array part;
    for (int64_t i = 0; i < 48; i++) {
        values[i] = i;
    }
    fc_placement p = {FC_SHARD, dim, 0};
    fc_code rc = fc_device_mesh_new(comm, &sizes, &mesh, err);
    rc = rc == FC_OK ? fc_device_mesh_slice(&mesh, 1, &dp, err) : rc;
    rc = rc == FC_OK ? fc_device_mesh_slice(&mesh, 2, &tp, err) : rc;
    rc = rc == FC_OK ? fc_array_over(comm->device, FC_I64, 2, shape, values, &t.local, err) : rc;
    if (rc == FC_OK && dim >= 0) {
        int64_t half = shape[dim] / 2;
        rc = fc_array_narrow(&t.local, dim, half * tp.coordinate[0], half, &part, err);
        rc = rc == FC_OK ? fc_dtensor_from_local(&part, &tp, &p, 2, shape, &t, err) : rc;
    }
    rc = rc == FC_OK ? fc_chunk_dtensor_data(&t, &dp, NULL, &out, err) : rc;
    rc = rc == FC_OK
             ? fc_local_box(2, shape, &sizes, out.spec.placements, mesh.coordinate, offsets, out.spec.local_sizes, err)
             : rc;
    for (int64_t i = 0; rc == FC_OK && i < fc_array_numel(&out.local); i++) {
        int64_t row = offsets[0] + i / out.local.sizes[1], column = offsets[1] + i % out.local.sizes[1];
        if (((const int64_t *)out.local.data)[i] != row * 6 + column || out.local.requires_grad) {
            rc = fc_fail(err, FC_EFOUND, "element %lld is another's", (long long)i);
        }
    }
    fc_placement wanted[] = {{dim < 0 ? FC_SHARD : FC_REPLICATE, 0, 0}, {dim < 0 ? FC_REPLICATE : FC_SHARD, 0, 0}};
    if (rc == FC_OK &&
        (out.spec.placements[0].kind != wanted[0].kind || out.spec.placements[1].kind != wanted[1].kind ||
         fc_array_numel(&out.local) != (dim < 0 ? 24 : 12))) {
        rc = fc_fail(err, FC_EFOUND, "the placements are wrong");
    }
    fc_array_free(&out.local);
    fc_device_mesh_free(&mesh);
    return rc;
}

static void data_of_the_chunks(void **state) {
    (void)state;
    for (int dim = -1; dim < 2; dim++) {
        fc_error err = {FC_OK, ""};
        fc_code rc = fc_device_run_local(8, chunk_data, &dim, &err);
        assert_string_equal(err.message, "");
        assert_int_equal(rc, FC_OK);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(plain_tensor),
        cmocka_unit_test(tp_tensor_keeps_its_placement),
        cmocka_unit_test(uneven_tp_infers_the_shape_from_the_local_one),
        cmocka_unit_test(errors_have_torchs_wording),
        cmocka_unit_test(data_of_the_chunks),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
