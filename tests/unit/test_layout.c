/*
 * Layouts: meshes from sizes, the placements of a tensor, and which rank stores a replicated box.
 */
#include "fsdpckpt/layout.h"
#include "fsdpckpt/replica_owner.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static fc_mesh mesh_of(int64_t replicas, int64_t dp, int64_t tp) {
    fc_mesh mesh;
    fc_layout_spec spec = {replicas, dp, tp};
    assert_int_equal(fc_layout_mesh(&spec, &mesh, NULL), FC_OK);
    return mesh;
}

static void mesh_has_the_given_dimensions(void **state) {
    (void)state;
    fc_mesh mesh = mesh_of(2, 3, 4);
    assert_int_equal(mesh.ndim, 3);
    assert_int_equal(fc_mesh_ranks(&mesh), 24);
    assert_string_equal(mesh.names[0], "replicate");
    assert_string_equal(mesh.names[1], "dp");
    assert_string_equal(mesh.names[2], "tp");
    mesh = mesh_of(0, 1, 0);
    assert_int_equal(mesh.ndim, 1);
    assert_string_equal(mesh.names[0], "dp");
}

static void bad_meshes_are_refused(void **state) {
    (void)state;
    fc_mesh mesh;
    fc_error err;
    assert_int_equal(fc_layout_mesh(&(fc_layout_spec){0, 0, 0}, &mesh, &err), FC_EUSAGE);
    assert_int_equal(err.hint, FC_HINT_LAYOUT);
    assert_int_equal(fc_layout_mesh(&(fc_layout_spec){0, -1, 2}, &mesh, &err), FC_EUSAGE);
    assert_string_equal(err.message, "mesh dimension dp has -1 ranks; it needs at least 1");
    assert_int_equal(fc_layout_mesh(&(fc_layout_spec){0, 1024, 1025}, &mesh, &err), FC_EUSAGE);
    assert_int_equal(fc_layout_mesh(&(fc_layout_spec){INT64_MAX, INT64_MAX, 2}, &mesh, &err), FC_EUSAGE);
    assert_int_equal(fc_layout_mesh(&(fc_layout_spec){0, 1024, 1024}, &mesh, &err), FC_OK);
}

static void expect(const fc_mesh *mesh, int ndim, int tp_dim, const char *want) {
    fc_placement placements[FC_MAX_MESH_DIMS];
    char text[128];
    fc_layout_placements(mesh, ndim, tp_dim, placements);
    fc_placements_format(mesh->ndim, placements, text, sizeof text);
    assert_string_equal(text, want);
}

static void placements_are_those_of_fully_shard(void **state) {
    (void)state;
    fc_mesh two = mesh_of(0, 4, 2), three = mesh_of(2, 2, 2), dp = mesh_of(0, 4, 0), tp = mesh_of(0, 0, 4);
    expect(&two, 2, 0, "[_StridedShard(0, 2), Shard(0)]");
    expect(&two, 2, 1, "[Shard(0), Shard(1)]");
    expect(&two, 2, -1, "[Shard(0), Replicate()]");
    expect(&two, 0, -1, "[Replicate(), Replicate()]");
    expect(&three, 2, 0, "[Replicate(), _StridedShard(0, 2), Shard(0)]");
    expect(&dp, 1, 0, "[Shard(0)]");
    expect(&tp, 2, 1, "[Shard(1)]");
    expect(&tp, 2, -1, "[Replicate()]");
    fc_mesh one = mesh_of(0, 4, 1);
    expect(&one, 2, 0, "[Shard(0), Shard(0)]");
}

static void owner_is_one_of_the_holders(void **state) {
    (void)state;
    fc_mesh mesh = mesh_of(2, 3, 2);
    fc_placement p[3];
    fc_layout_placements(&mesh, 2, -1, p); /* replicated over replicate and tp: each of the 3 boxes has 4 holders */
    static const int64_t holders[4] = {2, 3, 8, 9};
    for (int64_t rank = 0; rank < 12; rank++) {
        int64_t coordinate[3];
        fc_mesh_coordinate(&mesh, rank, coordinate);
        for (uint32_t o = 0; o < 9; o++) {
            int64_t owner = fc_replica_owner(&mesh, p, coordinate, o);
            assert_int_equal(owner, holders[o % 4] + 2 * (coordinate[1] - 1));
        }
    }
    fc_layout_placements(&mesh, 2, 1, p);
    assert_int_equal(fc_replica_owner(&mesh, p, (int64_t[]){1, 2, 1}, 0), 5);
    assert_int_equal(fc_replica_owner(&mesh, p, (int64_t[]){0, 2, 1}, 1), 11);
}

/* Adds up the bytes that each rank stores, from the boxes that it owns. */
static void loads_of(const fc_mesh *mesh, size_t count, const uint64_t *bytes, const fc_placement *placements,
                     const uint32_t *offsets, uint64_t *loads) {
    int64_t ranks = fc_mesh_ranks(mesh);
    for (size_t i = 0; i < count; i++) {
        const fc_placement *p = placements + i * (size_t)mesh->ndim;
        uint64_t boxes = 1;
        for (int m = 0; m < mesh->ndim; m++) {
            boxes *= p[m].kind == FC_REPLICATE ? 1 : (uint64_t)mesh->sizes[m];
        }
        for (int64_t rank = 0; rank < ranks; rank++) {
            int64_t coordinate[FC_MAX_MESH_DIMS];
            fc_mesh_coordinate(mesh, rank, coordinate);
            loads[rank] += fc_replica_owner(mesh, p, coordinate, offsets[i]) == rank ? bytes[i] / boxes : 0;
        }
    }
}

static void spread_is_even(void **state) {
    (void)state;
    enum { COUNT = 60 };
    fc_mesh mesh = mesh_of(2, 2, 2);
    fc_placement p[COUNT * 3];
    uint64_t bytes[COUNT], loads[8] = {0}, total = 0, largest = 0;
    uint32_t offsets[COUNT], again[COUNT];
    for (size_t i = 0; i < COUNT; i++) {
        fc_layout_placements(&mesh, i % 5 == 0 ? 0 : 2, (int)(i % 3) - 1, p + i * 3);
        bytes[i] = i % 5 == 0 ? 8 : 1024 * (1 + i * 7 % 13);
        total += bytes[i];
        largest = bytes[i] > largest ? bytes[i] : largest;
    }
    assert_int_equal(fc_spread_owners(&mesh, COUNT, bytes, p, offsets, NULL), FC_OK);
    assert_int_equal(fc_spread_owners(&mesh, COUNT, bytes, p, again, NULL), FC_OK);
    assert_memory_equal(offsets, again, sizeof offsets);
    loads_of(&mesh, COUNT, bytes, p, offsets, loads);
    uint64_t stored = 0;
    for (int r = 0; r < 8; r++) {
        assert_true(loads[r] <= total / 8 + largest);
        assert_true(loads[r] + largest >= total / 8);
        stored += loads[r];
    }
    assert_int_equal(stored, total);
}

static void ties_go_to_the_lowest_rank(void **state) {
    (void)state;
    fc_mesh mesh = mesh_of(4, 0, 0);
    fc_placement p[6] = {{FC_REPLICATE, 0, 0}};
    const uint64_t bytes[6] = {10, 10, 5, 5, 5, UINT64_MAX};
    uint32_t offsets[6];
    assert_int_equal(fc_spread_owners(&mesh, 6, bytes, p, offsets, NULL), FC_OK);
    assert_memory_equal(offsets, ((uint32_t[]){0, 1, 2, 3, 2, 3}), sizeof offsets);
    assert_int_equal(fc_spread_owners(&mesh, 0, NULL, NULL, NULL, NULL), FC_OK);
}

static int replicated_along(const fc_mesh *mesh, const fc_placement *p) {
    int n = 0;
    for (int m = 0; m < mesh->ndim; m++) {
        n += p[m].kind == FC_REPLICATE;
    }
    return n;
}

/* Spreads as the header documents, rank by rank: sets with fewer replicated dimensions first; then the rank with the
   smallest maximum, and the lowest of these. */
static void spread_slowly(const fc_mesh *mesh, size_t count, const uint64_t *bytes, const fc_placement *placements,
                          uint32_t *offsets) {
    uint64_t loads[64] = {0};
    int64_t ranks = fc_mesh_ranks(mesh), coordinate[FC_MAX_MESH_DIMS];
    for (int n = 0; n <= mesh->ndim; n++) {
        for (size_t i = 0; i < count; i++) {
            const fc_placement *p = placements + i * (size_t)mesh->ndim;
            uint64_t holders = 1, peaks[64] = {0};
            for (int m = 0; m < mesh->ndim; m++) {
                holders *= p[m].kind == FC_REPLICATE ? (uint64_t)mesh->sizes[m] : 1;
            }
            if (replicated_along(mesh, p) != n) {
                continue;
            }
            for (uint32_t h = 0; h < holders; h++) {
                for (int64_t rank = 0; rank < ranks; rank++) {
                    fc_mesh_coordinate(mesh, rank, coordinate);
                    if (fc_replica_owner(mesh, p, coordinate, h) == rank && loads[rank] > peaks[h]) {
                        peaks[h] = loads[rank];
                    }
                }
                offsets[i] = h == 0 || peaks[h] < peaks[offsets[i]] ? h : offsets[i];
            }
            uint64_t boxes = (uint64_t)ranks / holders;
            for (int64_t rank = 0; rank < ranks; rank++) {
                fc_mesh_coordinate(mesh, rank, coordinate);
                loads[rank] +=
                    fc_replica_owner(mesh, p, coordinate, offsets[i]) == rank ? (bytes[i] + boxes - 1) / boxes : 0;
            }
        }
    }
}

static void spread_is_as_documented(void **state) {
    (void)state;
    enum { COUNT = 80 };
    srand(4);
    for (int round = 0; round < 60; round++) {
        fc_mesh mesh = mesh_of(1 + rand() % 4, rand() % 4, rand() % 4);
        fc_placement p[COUNT * 3];
        uint64_t bytes[COUNT];
        uint32_t fast[COUNT], slow[COUNT];
        size_t n = 0;
        for (; n < COUNT; n++) {
            int ndim = rand() % 3;
            fc_layout_placements(&mesh, ndim, ndim ? rand() % 3 - 1 : -1, p + n * (size_t)mesh.ndim);
            bytes[n] = (uint64_t)(rand() % 3 ? rand() % 1000 : 0);
        }
        assert_int_equal(fc_spread_owners(&mesh, n, bytes, p, fast, NULL), FC_OK);
        spread_slowly(&mesh, n, bytes, p, slow);
        assert_memory_equal(fast, slow, sizeof fast);
    }
}

/* 100,000 tensors, a third of them scalars, on 131,072 ranks. Visiting every rank for every tensor would be slow. */
static void spread_over_many_ranks(void **state) {
    (void)state;
    enum { COUNT = 100000 };
    fc_mesh mesh = mesh_of(16, 1024, 8);
    fc_placement *p = calloc(COUNT * 3, sizeof *p);
    uint64_t *bytes = calloc(COUNT, sizeof *bytes);
    uint32_t *offsets = calloc(COUNT, sizeof *offsets);
    assert_true(p && bytes && offsets);
    uint64_t seen[16] = {0}, total = 0;
    for (size_t i = 0; i < COUNT; i++) {
        fc_layout_placements(&mesh, i % 3 == 0 ? 0 : 2, i % 3 == 1 ? 0 : -1, p + i * 3);
        bytes[i] = i % 3 == 0 ? 4 : 1 << 20;
    }
    assert_int_equal(fc_spread_owners(&mesh, COUNT, bytes, p, offsets, NULL), FC_OK);
    for (size_t i = 1; i < COUNT; i += 3) {
        seen[offsets[i]] += bytes[i];
        total += bytes[i];
    }
    for (int r = 0; r < 16; r++) {
        assert_in_range(seen[r], total / 16 - (1 << 20), total / 16 + (1 << 20));
    }
    free(p);
    free(bytes);
    free(offsets);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(mesh_has_the_given_dimensions),
        cmocka_unit_test(bad_meshes_are_refused),
        cmocka_unit_test(placements_are_those_of_fully_shard),
        cmocka_unit_test(owner_is_one_of_the_holders),
        cmocka_unit_test(spread_is_even),
        cmocka_unit_test(spread_is_as_documented),
        cmocka_unit_test(spread_over_many_ranks),
        cmocka_unit_test(ties_go_to_the_lowest_rank),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
