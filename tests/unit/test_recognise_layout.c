/*
 * lib/plan/recognise_layout.c: inferring the layout of a checkpoint from its chunks. Checkpoints are cut with
 * fc_local_box and fc_layout_placements and recorded as torch's DCP does: a box and a rank per chunk, replicas once, no
 * empty boxes.
 */
#include "fsdpckpt/layout.h"
#include "fsdpckpt/replica_owner.h"
#include "fsdpckpt/sharding.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

enum { TENSORS = 4, MAX_CHUNKS = 64 };

/* Four tensors: TP cuts one by columns and one by rows, but not the vector and the scalar. */
typedef struct sample {
    int64_t shapes[TENSORS][2];
    int64_t dims[TENSORS][MAX_CHUNKS][4];
    fc_chunk chunks[TENSORS][MAX_CHUNKS];
    fc_tensor tensors[TENSORS];
    const fc_tensor *list[TENSORS];
    fc_checkpoint checkpoint;
} sample;

static void cut_tensor(sample *s, size_t i, const fc_mesh *mesh, int tp_dim, uint32_t spread) {
    fc_tensor *t = &s->tensors[i];
    fc_placement placements[3];
    int64_t coordinate[FC_MAX_MESH_DIMS];
    fc_layout_placements(mesh, t->ndim, tp_dim, placements);
    for (int64_t rank = 0; rank < fc_mesh_ranks(mesh); rank++) {
        int64_t *dims = s->dims[i][t->nchunks];
        fc_mesh_coordinate(mesh, rank, coordinate);
        assert_int_equal(fc_local_box(t->ndim, t->shape, mesh, placements, coordinate, dims, dims + t->ndim, NULL),
                         FC_OK);
        const fc_box box = {t->ndim, dims, dims + t->ndim};
        if (fc_box_volume(&box) > 0 && fc_replica_owner(mesh, placements, coordinate, spread) == rank) {
            s->chunks[i][t->nchunks++] = (fc_chunk){.dims = dims, .rank = (uint32_t)rank};
        }
    }
}

static void make(sample *s, const fc_layout_spec *spec, int64_t rows, uint32_t spread) {
    static const int tp_dims[TENSORS] = {0, 1, -1, -1};
    static const int ndims[TENSORS] = {2, 2, 1, 0};
    fc_mesh mesh;
    memset(s, 0, sizeof *s);
    assert_int_equal(fc_layout_mesh(spec, &mesh, NULL), FC_OK);
    for (size_t i = 0; i < TENSORS; i++) {
        fc_tensor *t = &s->tensors[i];
        s->shapes[i][0] = i == 0 ? rows : 12;
        s->shapes[i][1] = 8;
        *t = (fc_tensor){.name = &"abcd"[i], .ndim = ndims[i], .shape = s->shapes[i], .chunks = s->chunks[i]};
        cut_tensor(s, i, &mesh, spec->tp ? tp_dims[i] : -1, spread ? spread + (uint32_t)i : 0);
        s->list[i] = t;
    }
    s->checkpoint = (fc_checkpoint){.path = "ckpt", .tensors = s->tensors, .ntensors = TENSORS};
}

static fc_code find(const sample *s, char *out, size_t size, fc_error *err) {
    fc_mesh mesh;
    fc_placement *placements = NULL;
    fc_arena *arena = fc_arena_new();
    assert_non_null(arena);
    fc_code rc = fc_recognise_layout(&s->checkpoint, TENSORS, s->list, arena, &mesh, &placements, err);
    int used = 0;
    out[0] = '\0';
    for (int m = 0; rc == FC_OK && m < mesh.ndim; m++) {
        used += snprintf(out + used, size - (size_t)used, "%s %lld ", mesh.names[m], (long long)mesh.sizes[m]);
    }
    for (size_t i = 0; placements && i < TENSORS; i++) {
        used += fc_placements_format(mesh.ndim, placements + i * (size_t)mesh.ndim, out + used, (int)size - used);
    }
    fc_arena_free(arena);
    return rc;
}

static void expect(const fc_layout_spec *spec, int64_t rows, const char *expected) {
    sample s;
    char found[512];
    fc_error err = {FC_OK, ""};
    for (uint32_t spread = 1; spread < 4; spread++) { /* any rank may store replicated data */
        make(&s, spec, rows, spread);
        if (find(&s, found, sizeof found, &err) != FC_OK) {
            fail_msg("%s", err.message);
        }
        assert_string_equal(found, expected);
    }
}

static void meshes_are_found(void **state) {
    (void)state;
    expect(&(fc_layout_spec){.dp = 4}, 11, "dp 4 [Shard(0)][Shard(0)][Shard(0)][Replicate()]");
    expect(&(fc_layout_spec){.dp = 4, .tp = 2}, 64,
           "dp 4 tp 2 [_StridedShard(0, 2), Shard(0)][Shard(0), Shard(1)][Shard(0), Replicate()][Replicate(), "
           "Replicate()]");
    expect(&(fc_layout_spec){.dp = 3, .tp = 2}, 11, /* no size divides evenly */
           "dp 3 tp 2 [_StridedShard(0, 2), Shard(0)][Shard(0), Shard(1)][Shard(0), Replicate()][Replicate(), "
           "Replicate()]");
    expect(&(fc_layout_spec){.replicas = 2, .dp = 3, .tp = 2}, 24,
           "replicate 2 dp 3 tp 2 [Replicate(), _StridedShard(0, 2), Shard(0)][Replicate(), Shard(0), Shard(1)]"
           "[Replicate(), Shard(0), Replicate()][Replicate(), Replicate(), Replicate()]");
    expect(&(fc_layout_spec){.tp = 4}, 8, "tp 4 [Shard(0)][Shard(1)][Replicate()][Replicate()]");
}

/* In older torch versions the first HSDP replica stores everything, so the checkpoint looks like FSDP. */
static void replicas_that_stored_nothing_are_forgotten(void **state) {
    (void)state;
    sample s;
    char found[512];
    make(&s, &(fc_layout_spec){.replicas = 2, .dp = 2}, 8, 0);
    assert_int_equal(find(&s, found, sizeof found, NULL), FC_OK);
    assert_string_equal(found, "dp 2 [Shard(0)][Shard(0)][Shard(0)][Replicate()]");
    make(&s, &(fc_layout_spec){.replicas = 2, .dp = 2}, 8, 1);
    assert_int_equal(find(&s, found, sizeof found, NULL), FC_OK);
    assert_string_equal(found, "replicate 2 dp 2 [Replicate(), Shard(0)][Replicate(), Shard(0)][Replicate(), "
                               "Shard(0)][Replicate(), Replicate()]");
}

static void uncut_tensors_are_whole(void **state) {
    (void)state;
    sample s;
    char found[512];
    make(&s, &(fc_layout_spec){.dp = 1}, 8, 0);
    assert_int_equal(find(&s, found, sizeof found, NULL), FC_OK);
    assert_string_equal(found, "");
    make(&s, &(fc_layout_spec){.dp = 4}, 8, 0); /* chunks of another program, without ranks */
    for (size_t i = 0; i < TENSORS; i++) {
        for (size_t c = 0; c < s.tensors[i].nchunks; c++) {
            s.chunks[i][c].rank = FC_NO_RANK;
        }
    }
    assert_int_equal(find(&s, found, sizeof found, NULL), FC_OK);
    assert_string_equal(found, "");
}

static void other_orders_keep_the_boxes(void **state) {
    (void)state;
    sample s;
    char found[512];
    make(&s, &(fc_layout_spec){.dp = 4}, 8, 0);
    for (size_t i = 0; i < TENSORS; i++) { /* the mesh was made from ranks [3, 2, 1, 0] */
        for (size_t c = 0; c < s.tensors[i].nchunks; c++) {
            s.chunks[i][c].rank = 3 - s.chunks[i][c].rank;
        }
    }
    assert_int_equal(find(&s, found, sizeof found, NULL), FC_OK);
    assert_string_equal(found, "dp 4 [Shard(0)][Shard(0)][Shard(0)][Replicate()]");
}

static void tensor_without_a_mesh_is_named(void **state) {
    (void)state;
    sample s;
    char found[512];
    fc_error err;
    make(&s, &(fc_layout_spec){.dp = 2}, 8, 0);
    s.dims[1][0][2] += 1; /* 7 and 5 rows instead of 6 and 6 */
    s.dims[1][1][0] += 1;
    s.dims[1][1][2] -= 1;
    assert_int_equal(find(&s, found, sizeof found, &err), FC_EUNSUPPORTED);
    assert_string_equal(err.message,
                        "ckpt: tensor 'bcd': its 2 chunks are not the shards of a mesh (replicate x dp x tp), so the "
                        "layout cannot be kept");
    assert_int_equal(err.hint, FC_HINT_LAYOUT);
    s.dims[1][1][0] += 1; /* now there is also a hole */
    assert_int_equal(find(&s, found, sizeof found, &err), FC_EUNSUPPORTED);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(meshes_are_found),
        cmocka_unit_test(replicas_that_stored_nothing_are_forgotten),
        cmocka_unit_test(uncut_tensors_are_whole),
        cmocka_unit_test(other_orders_keep_the_boxes),
        cmocka_unit_test(tensor_without_a_mesh_is_named),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
