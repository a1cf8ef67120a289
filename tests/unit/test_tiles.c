/*
 * lib/plan/tiles.c: tiles partition a box in row-major order; each is contiguous, and none exceeds the limit.
 */
#include "fsdpckpt/plan.h"
#include "plan/tiles.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

/* The row-major position of a point within the box. */
static int64_t position(const fc_box *box, const int64_t *point) {
    int64_t at = 0;
    for (int d = 0; d < box->ndim; d++) {
        at = at * box->sizes[d] + (point[d] - box->offsets[d]);
    }
    return at;
}

/* Walks the elements of a tile in its row-major order: they must be start, start + 1, … */
static void check_contiguous(const fc_box *box, const fc_tile *tile) {
    int64_t index[FC_MAX_DIMS] = {0};
    for (int64_t n = 0; n < tile->count; n++) {
        int64_t point[FC_MAX_DIMS];
        for (int d = 0; d < box->ndim; d++) {
            point[d] = tile->offsets[d] + index[d];
            assert_true(point[d] < box->offsets[d] + box->sizes[d]);
        }
        assert_int_equal(position(box, point), tile->start + n);
        for (int d = box->ndim - 1; d >= 0; d--) {
            if (++index[d] < tile->sizes[d]) {
                break;
            }
            index[d] = 0;
        }
    }
}

static void check(const fc_box *box, int64_t limit, int64_t multiple) {
    fc_tiles tiles;
    fc_tile tile;
    int64_t next = 0;
    fc_tiles_begin(&tiles, box, limit, multiple);
    while (fc_tiles_next(&tiles, &tile)) {
        int64_t volume = 1;
        for (int d = 0; d < box->ndim; d++) {
            volume *= tile.sizes[d];
        }
        assert_int_equal(tile.start, next);
        assert_int_equal(tile.count, volume);
        assert_in_range(tile.count, 1, limit < 1 ? 1 : limit);
        check_contiguous(box, &tile);
        next += tile.count;
    }
    assert_int_equal(next, fc_box_volume(box));
    assert_false(fc_tiles_next(&tiles, &tile));
}

/* Walks a box in separate ranges, as several ranks do. */
static void check_ranges(const fc_box *box, int64_t limit, int ranges) {
    int64_t volume = fc_box_volume(box), next = 0;
    for (int r = 0; r < ranges; r++) {
        fc_tiles tiles;
        fc_tile tile;
        fc_tiles_begin(&tiles, box, limit, 1 + rand() % 16);
        int64_t end = r == ranges - 1 ? volume : next + rand() % (volume - next + 1);
        fc_tiles_only(&tiles, next, end);
        while (fc_tiles_next(&tiles, &tile)) {
            assert_int_equal(tile.start, next);
            assert_in_range(tile.count, 1, limit < 1 ? 1 : limit);
            check_contiguous(box, &tile);
            next += tile.count;
        }
        assert_int_equal(next, end);
    }
}

static void random_boxes(void **state) {
    (void)state;
    srand(1);
    for (int i = 0; i < 3000; i++) {
        int64_t offsets[5], sizes[5];
        fc_box box = {rand() % 6, offsets, sizes};
        for (int d = 0; d < box.ndim; d++) {
            offsets[d] = rand() % 9;
            sizes[d] = rand() % 12 == 0 ? 0 : 1 + rand() % 7;
        }
        check(&box, rand() % 60, 1 + rand() % 16);
        check_ranges(&box, rand() % 60, 1 + rand() % 4);
    }
}

/* Tiles that are shorter than a chunk end with it, also where the box begins within one. */
static void tiles_end_with_chunks(void **state) {
    (void)state;
    const int64_t chunk[2] = {262, 30};
    for (int64_t first = 0; first < 300; first += 77) {
        const int64_t offsets[2] = {first, 0}, sizes[2] = {700, 100};
        const fc_box box = {2, offsets, sizes};
        fc_tiles tiles;
        fc_tile tile;
        int64_t next = 0;
        int ends = 0;
        fc_tiles_begin(&tiles, &box, 6500, 7);
        fc_tiles_within_chunks(&tiles, chunk);
        while (fc_tiles_next(&tiles, &tile)) {
            const int64_t end = tile.offsets[0] + tile.sizes[0];
            assert_int_equal(tile.start, next);
            assert_in_range(tile.count, 1, 6500);
            assert_int_equal(tile.offsets[0] / 262, (end - 1) / 262);
            assert_int_equal(tile.ends_chunk, end % 262 == 0 || end == first + 700);
            check_contiguous(&box, &tile);
            next += tile.count;
            ends += tile.ends_chunk;
        }
        assert_int_equal(next, 70000);
        assert_int_equal(ends, (first + 699) / 262 - first / 262 + 1);
    }
}

static void scalar_is_one_tile(void **state) {
    (void)state;
    fc_box box = {0, NULL, NULL};
    fc_tiles tiles;
    fc_tile tile;
    fc_tiles_begin(&tiles, &box, 100, 1);
    assert_true(fc_tiles_next(&tiles, &tile));
    assert_int_equal(tile.count, 1);
    assert_false(fc_tiles_next(&tiles, &tile));
}

/* 1001 rows of 1000 at a limit of 500,000: three tiles of nearly the same size, not two and a sliver of one row. */
static void tiles_are_even(void **state) {
    (void)state;
    int64_t offsets[2] = {0, 0}, sizes[2] = {1001, 1000};
    fc_box box = {2, offsets, sizes};
    fc_tiles tiles;
    fc_tile tile;
    int64_t counts[3];
    fc_tiles_begin(&tiles, &box, 500000, 1);
    for (int i = 0; i < 3; i++) {
        assert_true(fc_tiles_next(&tiles, &tile));
        counts[i] = tile.count;
    }
    assert_false(fc_tiles_next(&tiles, &tile));
    assert_int_equal(counts[0], 334000);
    assert_int_equal(counts[2], 333000);
}

/* Tiles begin at multiples of 2048 elements for any row length: 4 rows of 5632 elements, 512 rows of 300. */
static void tiles_begin_at_multiples(void **state) {
    (void)state;
    const int64_t shapes[][2] = {{4096, 5632}, {32000, 300}, {1001, 2048}, {9, 1 << 20}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        int64_t offsets[2] = {0, 0}, sizes[2] = {shapes[i][0], shapes[i][1]}, tiles_seen = 0;
        fc_box box = {2, offsets, sizes};
        fc_tiles tiles;
        fc_tile tile;
        fc_tiles_begin(&tiles, &box, 1 << 19, 2048);
        while (fc_tiles_next(&tiles, &tile)) {
            assert_int_equal(tile.start % 2048, 0);
            assert_in_range(tile.count, 1, 1 << 19);
            tiles_seen++;
        }
        assert_in_range(tiles_seen, 2, 64);
    }
}

/* If the rows up to the next multiple do not fit a tile, the tile ends at its limit. */
static void rows_that_never_fit_a_multiple(void **state) {
    (void)state;
    int64_t offsets[2] = {0, 0}, sizes[2] = {600, 1001};
    fc_box box = {2, offsets, sizes};
    fc_tiles tiles;
    fc_tile tile;
    fc_tiles_begin(&tiles, &box, 300 * 1001, 2048);
    assert_true(fc_tiles_next(&tiles, &tile));
    assert_int_equal(tile.count, 300 * 1001);
    assert_true(fc_tiles_next(&tiles, &tile));
    assert_int_equal(tile.count, 300 * 1001);
    assert_false(fc_tiles_next(&tiles, &tile));
}

/* A box of 2^62 elements is walked lazily: the first tiles are available at once, and nothing overflows. */
static void huge_box(void **state) {
    (void)state;
    int64_t offsets[3] = {0, 0, 0}, sizes[3] = {(int64_t)1 << 20, (int64_t)1 << 21, (int64_t)1 << 21};
    fc_box box = {3, offsets, sizes};
    fc_tiles tiles;
    fc_tile tile;
    fc_tiles_begin(&tiles, &box, 1 << 18, 1);
    tiles.next = tiles.total - (1 << 18);
    assert_true(fc_tiles_next(&tiles, &tile));
    assert_int_equal(tile.offsets[0], (1 << 20) - 1);
    assert_int_equal(tile.offsets[1], (1 << 21) - 1);
    assert_int_equal(tile.offsets[2], (1 << 21) - (1 << 18));
    assert_false(fc_tiles_next(&tiles, &tile));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(random_boxes),
        cmocka_unit_test(tiles_end_with_chunks),
        cmocka_unit_test(scalar_is_one_tile),
        cmocka_unit_test(tiles_are_even),
        cmocka_unit_test(tiles_begin_at_multiples),
        cmocka_unit_test(rows_that_never_fit_a_multiple),
        cmocka_unit_test(huge_box),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
