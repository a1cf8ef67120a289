/*
 * lib/plan/coverage.c: compares the proof of exact cover with brute force, and tests its messages and the search.
 */
#include "fsdpckpt/plan.h"
#include "plan/coverage.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

enum { MOST = 64, DIMS = 4 };

/* A tensor whose chunks a test fills in. */
typedef struct fixture {
    fc_tensor tensor;
    int64_t shape[DIMS];
    int64_t dims[MOST][2 * DIMS];
    fc_chunk chunks[MOST];
} fixture;

static void start(fixture *f, int ndim, const int64_t *shape) {
    memset(f, 0, sizeof *f);
    memcpy(f->shape, shape, (size_t)ndim * sizeof *shape);
    f->tensor = (fc_tensor){.name = "w", .dtype = FC_F32, .ndim = ndim, .shape = f->shape, .chunks = f->chunks};
}

static void add(fixture *f, const int64_t *offsets, const int64_t *sizes) {
    size_t i = f->tensor.nchunks++;
    assert_true(i < MOST);
    for (int d = 0; d < f->tensor.ndim; d++) {
        f->dims[i][d] = offsets[d];
        f->dims[i][f->tensor.ndim + d] = sizes[d];
    }
    f->chunks[i].dims = f->dims[i];
    f->chunks[i].place = (fc_place){.kind = FC_PLACE_FILE, .file = (uint32_t)i};
}

static void add_2d(fixture *f, int64_t row, int64_t column, int64_t rows, int64_t columns) {
    add(f, (int64_t[]){row, column}, (int64_t[]){rows, columns});
}

static void assert_fails(const fixture *f, const char *message) {
    fc_coverage *coverage;
    fc_error err;
    assert_int_equal(fc_coverage_new(&f->tensor, &coverage, &err), FC_ECORRUPT);
    assert_null(coverage);
    assert_string_equal(err.message, message);
}

static void hole_is_named(void **state) {
    (void)state;
    fixture f;
    start(&f, 2, (int64_t[]){8, 6});
    add_2d(&f, 0, 0, 4, 6);
    add_2d(&f, 4, 0, 2, 3);
    add_2d(&f, 6, 0, 2, 6);
    assert_fails(&f, "tensor w: elements [4:6, 3:6] are in no chunk (42 of 48 elements covered): a shard is missing or "
                     "the metadata is damaged");
}

static void tensor_without_chunks_is_refused(void **state) {
    (void)state;
    fixture f;
    start(&f, 2, (int64_t[]){8, 6});
    assert_fails(&f, "tensor w: elements [0:8, 0:6] are in no chunk (0 of 48 elements covered): a shard is missing or "
                     "the metadata is damaged");
    start(&f, 0, (int64_t[]){0});
    assert_fails(&f, "tensor w: elements [] are in no chunk (0 of 1 elements covered): a shard is missing or the "
                     "metadata is damaged");
}

static void overlap_is_named(void **state) {
    (void)state;
    fixture f;
    start(&f, 2, (int64_t[]){8, 6});
    add_2d(&f, 0, 0, 5, 6);
    add_2d(&f, 4, 0, 4, 6);
    assert_fails(&f, "tensor w: chunk 0 at [0:5, 0:6] and chunk 1 at [4:8, 0:6] overlap");
    fc_file files[2] = {{"ckpt/a.distcp", "a.distcp"}, {"ckpt/b.distcp", "b.distcp"}};
    fc_checkpoint checkpoint = {.files = files, .nfiles = 2};
    fc_coverage *coverage;
    fc_error err;
    assert_int_equal(fc_coverage_within(&checkpoint, &f.tensor, NULL, &coverage, &err), FC_ECORRUPT);
    assert_string_equal(err.message, "tensor w: chunk 0 at [0:5, 0:6] (file a.distcp) and chunk 1 at [4:8, 0:6] (file "
                                     "b.distcp) overlap");
}

/* The total volume is right, but one element is covered twice and another never. */
static void overlap_that_hides_a_hole(void **state) {
    (void)state;
    fixture f;
    start(&f, 2, (int64_t[]){4, 4});
    add_2d(&f, 0, 0, 2, 4);
    add_2d(&f, 1, 0, 2, 4);
    assert_fails(&f, "tensor w: chunk 0 at [0:2, 0:4] and chunk 1 at [1:3, 0:4] overlap");
    start(&f, 1, (int64_t[]){8});
    add(&f, (int64_t[]){1}, (int64_t[]){4});
    add(&f, (int64_t[]){4}, (int64_t[]){4});
    assert_fails(&f, "tensor w: elements [0:1] are in no chunk and others in several: the metadata is damaged");
}

static void chunk_outside_the_tensor_is_refused(void **state) {
    (void)state;
    fixture f;
    start(&f, 1, (int64_t[]){8});
    add(&f, (int64_t[]){0}, (int64_t[]){9});
    assert_fails(&f, "tensor w: chunk 0 at [0:9] is outside the tensor");
    start(&f, 1, (int64_t[]){8});
    add(&f, (int64_t[]){INT64_MAX - 1}, (int64_t[]){8});
    fc_coverage *coverage;
    assert_int_equal(fc_coverage_new(&f.tensor, &coverage, NULL), FC_ECORRUPT);
}

static fc_code collect(void *context, const fc_overlap *overlap, fc_error *err) {
    (void)err;
    size_t *list = context;
    list[++list[0]] = overlap->chunk;
    return FC_OK;
}

static void replicas_are_kept_once(void **state) {
    (void)state;
    fixture f;
    start(&f, 1, (int64_t[]){8});
    add(&f, (int64_t[]){4}, (int64_t[]){4});
    add(&f, (int64_t[]){0}, (int64_t[]){4});
    add(&f, (int64_t[]){4}, (int64_t[]){4});
    add(&f, (int64_t[]){0}, (int64_t[]){4});
    fc_coverage *coverage;
    fc_error err;
    assert_int_equal(fc_coverage_new(&f.tensor, &coverage, &err), FC_OK);
    size_t found[8] = {0};
    fc_box all = {1, (int64_t[]){0}, f.shape};
    assert_int_equal(fc_coverage_visit(coverage, &all, collect, found, &err), FC_OK);
    assert_int_equal(found[0], 2);
    assert_int_equal(found[1], 1);
    assert_int_equal(found[2], 0);
    fc_coverage_free(coverage);
}

static void scalars_and_empty_tensors(void **state) {
    (void)state;
    fixture f;
    fc_coverage *coverage;
    fc_error err;
    start(&f, 0, (int64_t[]){0});
    add(&f, NULL, NULL);
    assert_int_equal(fc_coverage_new(&f.tensor, &coverage, &err), FC_OK);
    size_t found[8] = {0};
    fc_box scalar = {0, NULL, NULL};
    assert_int_equal(fc_coverage_visit(coverage, &scalar, collect, found, &err), FC_OK);
    assert_int_equal(found[0], 1);
    fc_coverage_free(coverage);
    start(&f, 3, (int64_t[]){4, 0, 7});
    assert_int_equal(fc_coverage_new(&f.tensor, &coverage, &err), FC_OK);
    fc_coverage_free(coverage);
}

static fc_code stop_at_once(void *context, const fc_overlap *overlap, fc_error *err) {
    (void)context, (void)overlap;
    return fc_fail(err, FC_EINTERRUPTED, "stop");
}

static void visit_returns_the_callers_code(void **state) {
    (void)state;
    fixture f;
    start(&f, 1, (int64_t[]){8});
    add(&f, (int64_t[]){0}, (int64_t[]){8});
    fc_coverage *coverage;
    fc_error err;
    assert_int_equal(fc_coverage_new(&f.tensor, &coverage, &err), FC_OK);
    fc_box all = {1, (int64_t[]){0}, f.shape};
    assert_int_equal(fc_coverage_visit(coverage, &all, stop_at_once, NULL, &err), FC_EINTERRUPTED);
    fc_coverage_free(coverage);
}

/* Brute force: counts how often each element of the region is covered. Equal boxes count once. */
enum { SIDE = 6, ELEMENTS = SIDE * SIDE * SIDE };

static bool holds(const fixture *f, size_t chunk, const int64_t *point) {
    for (int d = 0; d < f->tensor.ndim; d++) {
        const int64_t *dims = f->dims[chunk];
        if (point[d] < dims[d] || point[d] >= dims[d] + dims[f->tensor.ndim + d]) {
            return false;
        }
    }
    return true;
}

static bool is_replica(const fixture *f, size_t chunk) {
    for (size_t i = 0; i < chunk; i++) {
        if (memcmp(f->dims[i], f->dims[chunk], 2 * (size_t)f->tensor.ndim * sizeof(int64_t)) == 0) {
            return true;
        }
    }
    return false;
}

static bool exactly_once(const fixture *f, const fc_box *region) {
    int ndim = f->tensor.ndim;
    int64_t point[DIMS];
    for (int64_t n = 0; n < fc_box_volume(region); n++) {
        int64_t rest = n;
        for (int d = ndim - 1; d >= 0; d--) {
            point[d] = region->offsets[d] + rest % region->sizes[d];
            rest /= region->sizes[d];
        }
        int times = 0;
        for (size_t c = 0; c < f->tensor.nchunks; c++) {
            times += holds(f, c, point) && !is_replica(f, c);
        }
        if (times != 1) {
            return false;
        }
    }
    return true;
}

/* Cuts the tensor at random into boxes (k-d tree), so that most of the cases are true partitions. */
static void cut(fixture *f, int64_t *offsets, int64_t *sizes, int depth) {
    int d = f->tensor.ndim ? rand() % f->tensor.ndim : 0;
    if (depth == 0 || f->tensor.ndim == 0 || sizes[d] < 2) {
        add(f, offsets, sizes);
        return;
    }
    int64_t size = sizes[d], offset = offsets[d], at = 1 + rand() % (size - 1);
    sizes[d] = at;
    cut(f, offsets, sizes, depth - 1);
    offsets[d] = offset + at;
    sizes[d] = size - at;
    cut(f, offsets, sizes, depth - 1);
    offsets[d] = offset;
    sizes[d] = size;
}

/* Drops, shifts, resizes or repeats a chunk of a partition, or leaves it alone. */
static void damage(fixture *f) {
    int ndim = f->tensor.ndim;
    size_t i = (size_t)rand() % f->tensor.nchunks;
    int d = ndim ? rand() % ndim : 0;
    switch (rand() % 8) {
    case 0:
        f->tensor.nchunks--;
        memcpy(f->dims[i], f->dims[f->tensor.nchunks], sizeof f->dims[i]);
        break;
    case 1:
        if (ndim && f->dims[i][d] > 0) {
            f->dims[i][d]--;
        }
        break;
    case 2:
        if (ndim && f->dims[i][ndim + d] > 1) {
            f->dims[i][ndim + d]--;
        }
        break;
    case 3:
        add(f, f->dims[i], f->dims[i] + ndim);
        break;
    default:
        break;
    }
}

typedef struct tally {
    const fixture *f;
    int times[ELEMENTS];
} tally;

static fc_code count_overlap(void *context, const fc_overlap *overlap, fc_error *err) {
    (void)err;
    tally *t = context;
    int ndim = t->f->tensor.ndim;
    fc_box box = {ndim, overlap->offsets, overlap->sizes};
    for (int64_t n = 0; n < fc_box_volume(&box); n++) {
        int64_t rest = n, at = 0, scale = 1;
        for (int d = ndim - 1; d >= 0; d--) {
            at += (overlap->offsets[d] + rest % overlap->sizes[d]) * scale;
            scale *= SIDE;
            rest /= overlap->sizes[d];
        }
        t->times[at]++;
    }
    return FC_OK;
}

/* Every element of a random box in the region is visited exactly once, and no other element. */
static void check_visit(const fixture *f, const fc_coverage *coverage, const fc_box *box) {
    tally t = {.f = f};
    fc_error err;
    assert_int_equal(fc_coverage_visit(coverage, box, count_overlap, &t, &err), FC_OK);
    int64_t sum = 0;
    for (int i = 0; i < ELEMENTS; i++) {
        assert_in_range(t.times[i], 0, 1);
        sum += t.times[i];
    }
    assert_int_equal(sum, fc_box_volume(box));
}

static void random_part(int ndim, const fc_box *of, int64_t *offsets, int64_t *sizes) {
    for (int d = 0; d < ndim; d++) {
        int64_t a = rand() % of->sizes[d], b = rand() % of->sizes[d];
        offsets[d] = of->offsets[d] + (a < b ? a : b);
        sizes[d] = (a < b ? b - a : a - b) + 1;
    }
}

static void random_chunks_against_brute_force(void **state) {
    (void)state;
    srand(2);
    int good = 0, bad = 0;
    for (int i = 0; i < 20000; i++) {
        fixture f;
        int ndim = rand() % 4;
        int64_t shape[DIMS], offsets[DIMS] = {0};
        for (int d = 0; d < ndim; d++) {
            shape[d] = 1 + rand() % SIDE;
        }
        start(&f, ndim, shape);
        cut(&f, offsets, shape, rand() % 5);
        for (int n = rand() % 3; n > 0 && f.tensor.nchunks > 0; n--) {
            damage(&f);
        }
        fc_box whole = {ndim, offsets, f.shape}, region = whole;
        int64_t part_offsets[DIMS], part_sizes[DIMS];
        if (rand() % 2) {
            random_part(ndim, &whole, part_offsets, part_sizes);
            region = (fc_box){ndim, part_offsets, part_sizes};
        }
        fc_coverage *coverage, *list = NULL;
        fc_error err;
        fc_code rc;
        if (i % 2) { /* the same through a list of all chunks */
            rc = fc_coverage_list(NULL, &f.tensor, &list, &err);
            rc = rc == FC_OK ? fc_coverage_part(list, &region, &coverage, &err) : rc;
            fc_coverage_free(list);
        } else {
            rc = fc_coverage_within(NULL, &f.tensor, &region, &coverage, &err);
        }
        assert_int_equal(rc == FC_OK, exactly_once(&f, &region));
        if (rc == FC_OK) {
            int64_t box_offsets[DIMS], box_sizes[DIMS];
            random_part(ndim, &region, box_offsets, box_sizes);
            fc_box box = {ndim, box_offsets, box_sizes};
            check_visit(&f, coverage, &box);
            check_visit(&f, coverage, &region);
            fc_coverage_free(coverage);
            good++;
        } else {
            bad++;
        }
    }
    assert_true(good > 5000 && bad > 2000);
}

/* No straight cut divides a pinwheel, and the hole in its middle is one element. */
static void pinwheel(void **state) {
    (void)state;
    fixture f;
    start(&f, 2, (int64_t[]){3, 3});
    add_2d(&f, 0, 0, 1, 2);
    add_2d(&f, 0, 2, 2, 1);
    add_2d(&f, 2, 1, 1, 2);
    add_2d(&f, 1, 0, 2, 1);
    assert_fails(&f, "tensor w: elements [1:2, 1:2] are in no chunk (8 of 9 elements covered): a shard is missing or "
                     "the metadata is damaged");
    add_2d(&f, 1, 1, 1, 1);
    fc_coverage *coverage;
    assert_int_equal(fc_coverage_new(&f.tensor, &coverage, NULL), FC_OK);
    fc_coverage_free(coverage);
}

/* One chunk for each dimension, the next in the half that is left: 2^31 corners if all bounds are combined. */
static void cut_along_every_dimension(void **state) {
    (void)state;
    enum { NDIM = 31 };
    int64_t shape[NDIM], dims[NDIM + 1][2 * NDIM];
    fc_chunk chunks[NDIM + 1];
    for (int i = 0; i <= NDIM; i++) {
        for (int d = 0; d < NDIM; d++) {
            shape[d] = 2;
            dims[i][d] = d < i;
            dims[i][NDIM + d] = d <= i ? 1 : 2;
        }
        chunks[i] = (fc_chunk){.dims = dims[i]};
    }
    fc_tensor tensor = {
        .name = "w", .dtype = FC_F32, .ndim = NDIM, .shape = shape, .chunks = chunks, .nchunks = NDIM + 1};
    fc_coverage *coverage;
    fc_error err;
    assert_int_equal(fc_coverage_new(&tensor, &coverage, &err), FC_OK);
    fc_coverage_free(coverage);
    dims[NDIM][0] = 0; /* the last of them, one element, now overlaps the first */
    assert_int_equal(fc_coverage_new(&tensor, &coverage, &err), FC_ECORRUPT);
    assert_non_null(strstr(err.message, "overlap"));
    tensor.nchunks--;
    assert_int_equal(fc_coverage_new(&tensor, &coverage, &err), FC_ECORRUPT);
    assert_non_null(strstr(err.message, "(2147483647 of 2147483648 elements covered)"));
}

/* 16,384 chunks as a grid, columns and rows. Comparing all 134 million pairs would take too long. */
static void large_grids(void **state) {
    (void)state;
    enum { CHUNKS = 16384 };
    static int64_t dims[CHUNKS][4];
    static fc_chunk chunks[CHUNKS];
    for (int across = 1; across <= CHUNKS; across *= 128) {
        int down = CHUNKS / across;
        int64_t shape[2] = {down * 3, across * 5};
        fc_tensor tensor = {.name = "w", .dtype = FC_F32, .ndim = 2, .shape = shape, .chunks = chunks};
        tensor.nchunks = CHUNKS;
        for (int i = 0; i < CHUNKS; i++) {
            int at = (int)((int64_t)i * 7919 % CHUNKS); /* not in order */
            memcpy(dims[i], (int64_t[]){at / across * 3, at % across * 5, 3, 5}, sizeof dims[i]);
            chunks[i].dims = dims[i];
        }
        fc_coverage *coverage;
        fc_error err;
        clock_t before = clock();
        assert_int_equal(fc_coverage_new(&tensor, &coverage, &err), FC_OK);
        size_t found[8] = {0};
        for (int i = 0; i < 1000; i++) {
            fc_box box = {2, (int64_t[]){i % down * 3, i % across * 5}, (int64_t[]){1, 1}};
            found[0] = 0;
            assert_int_equal(fc_coverage_visit(coverage, &box, collect, found, &err), FC_OK);
            assert_int_equal(found[0], 1);
        }
        assert_true(clock() - before < 2 * CLOCKS_PER_SEC);
        fc_coverage_free(coverage);
        dims[5][1] += 1;
        dims[5][3] -= 1;
        assert_int_equal(fc_coverage_new(&tensor, &coverage, &err), FC_ECORRUPT);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(hole_is_named),
        cmocka_unit_test(tensor_without_chunks_is_refused),
        cmocka_unit_test(overlap_is_named),
        cmocka_unit_test(overlap_that_hides_a_hole),
        cmocka_unit_test(chunk_outside_the_tensor_is_refused),
        cmocka_unit_test(replicas_are_kept_once),
        cmocka_unit_test(scalars_and_empty_tensors),
        cmocka_unit_test(visit_returns_the_callers_code),
        cmocka_unit_test(random_chunks_against_brute_force),
        cmocka_unit_test(pinwheel),
        cmocka_unit_test(cut_along_every_dimension),
        cmocka_unit_test(large_grids),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
