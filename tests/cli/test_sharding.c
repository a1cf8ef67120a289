/*
 * Recognising how a tensor is sharded, from boxes and ranks alone.
 */
#include "inspect/sharding.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

/* A tensor of two dimensions. `boxes` has (row, column, rows, columns, rank) of each chunk. */
typedef struct sample {
    fc_tensor tensor;
    int64_t shape[2];
    int64_t dims[64][4];
    fc_chunk chunks[64];
} sample;

static void fill(sample *s, int64_t rows, int64_t columns, size_t n, const int64_t (*boxes)[5]) {
    memset(s, 0, sizeof *s);
    s->shape[0] = rows;
    s->shape[1] = columns;
    s->tensor =
        (fc_tensor){.name = "w", .dtype = FC_F32, .ndim = 2, .shape = s->shape, .chunks = s->chunks, .nchunks = n};
    for (size_t i = 0; i < n; i++) {
        memcpy(s->dims[i], boxes[i], sizeof s->dims[i]);
        s->chunks[i].dims = s->dims[i];
        s->chunks[i].rank = boxes[i][4] < 0 ? FC_NO_RANK : (uint32_t)boxes[i][4];
    }
}

static void recognise(const sample *s, fc_sharding *c) {
    fc_sharding_scratch scratch = {0};
    assert_true(fc_recognise_sharding(&s->tensor, &scratch, c));
    fc_sharding_scratch_free(&scratch);
}

static void check_text(const sample *s, const char *grid, const char *placements) {
    char text[128];
    fc_sharding c;
    recognise(s, &c);
    assert_string_equal(sharding_describe(&s->tensor, &c, text, sizeof text), grid);
    text[0] = '\0';
    if (c.placed) {
        fc_placements_format(c.mesh_ndim, c.placements, text, sizeof text);
    }
    assert_string_equal(text, placements);
}

static void shard_over_uneven_ranks(void **state) {
    (void)state;
    static const int64_t boxes[][5] = {{0, 0, 2, 4, 0}, {2, 0, 2, 4, 1}, {4, 0, 1, 4, 2}};
    sample s;
    fill(&s, 5, 4, 3, boxes);
    check_text(&s, "3×1", "[Shard(0)]");
    static const int64_t columns[][5] = {{0, 0, 5, 2, 0}, {0, 2, 5, 2, 1}};
    fill(&s, 5, 4, 2, columns);
    check_text(&s, "1×2", "[Shard(1)]");
}

static void tp_major_order_is_strided(void **state) {
    (void)state;
    sample s;
    int64_t boxes[8][5];
    static const int64_t offsets[] = {0, 32, 8, 40, 16, 48, 24, 56}; /* as torch wrote them: 64 rows, dp 4 × tp 2 */
    for (int i = 0; i < 8; i++) {
        const int64_t box[5] = {offsets[i], 0, 8, 4, i};
        memcpy(boxes[i], box, sizeof box);
    }
    fill(&s, 64, 4, 8, boxes);
    check_text(&s, "8×1", "[_StridedShard(0, 2), Shard(0)]");
    s.chunks[3].rank = 5; /* two ranks swapped: no placement gives this order */
    s.chunks[5].rank = 3;
    check_text(&s, "8×1", "");
}

static void two_dimensions(void **state) {
    (void)state;
    static const int64_t boxes[][5] = {{0, 0, 2, 3, 0}, {0, 3, 2, 3, 1}, {2, 0, 2, 3, 2}, {2, 3, 2, 3, 3}};
    sample s;
    fill(&s, 4, 6, 4, boxes);
    check_text(&s, "2×2", "[Shard(0), Shard(1)]");
}

static void replicas_are_copies(void **state) {
    (void)state;
    static const int64_t boxes[][5] = {{0, 0, 2, 4, 0}, {2, 0, 2, 4, 1}, {0, 0, 2, 4, 2}, {2, 0, 2, 4, 3}};
    sample s;
    fill(&s, 4, 4, 4, boxes);
    check_text(&s, "2×1, 2 copies", "");
    fill(&s, 4, 4, 3, boxes); /* one half has two copies, the other one */
    check_text(&s, "irregular, 3 chunks", "");
}

static void holes_and_overlaps_are_not_a_grid(void **state) {
    (void)state;
    static const int64_t hole[][5] = {{0, 0, 1, 4, 0}, {2, 0, 2, 4, 1}};
    static const int64_t overlap[][5] = {{0, 0, 3, 4, 0}, {2, 0, 2, 4, 1}};
    static const int64_t missing[][5] = {{0, 0, 2, 2, 0}, {0, 2, 2, 2, 1}, {2, 0, 2, 2, 2}};
    static const int64_t off[][5] = {{1, 1, 1, 1, 0}};
    sample s;
    fill(&s, 4, 4, 2, hole);
    check_text(&s, "irregular, 2 chunks", "");
    fill(&s, 4, 4, 2, overlap);
    check_text(&s, "irregular, 2 chunks", "");
    fill(&s, 4, 4, 3, missing);
    check_text(&s, "irregular, 3 chunks", "");
    fill(&s, 4, 4, 1, off);
    check_text(&s, "irregular, 1 chunk", "");
}

static void whole_scalar_and_empty(void **state) {
    (void)state;
    static const int64_t boxes[][5] = {{0, 0, 4, 4, -1}};
    sample s;
    fill(&s, 4, 4, 1, boxes);
    check_text(&s, "whole", "");
    s.tensor.ndim = 0;
    check_text(&s, "whole", "");
    s.tensor.nchunks = 0;
    check_text(&s, "no data", "");
    s.tensor.ndim = 2;
    check_text(&s, "no data", "");
    s.tensor.shape = (const int64_t[]){4, 0};
    check_text(&s, "empty", "");
}

static void summary_names_the_mesh(void **state) {
    (void)state;
    static const int64_t boxes[][5] = {{0, 0, 2, 3, 0}, {0, 3, 2, 3, 1}, {2, 0, 2, 3, 2}, {2, 3, 2, 3, 3}};
    static const int64_t rows[][5] = {{0, 0, 2, 6, 0}, {2, 0, 2, 6, 2}};
    fc_mesh none = {0}, recorded = {.ndim = 2, .sizes = {2, 4}, .names = {"dp", "tp"}};
    sharding_summary summary = {0};
    char text[192];
    sample s;
    fc_sharding c;
    fill(&s, 4, 6, 2, rows);
    recognise(&s, &c);
    sharding_summary_add(&summary, &none, &s.tensor, &c);
    assert_string_equal(sharding_summary_layout(&summary, &none, text, sizeof text), "3 ranks, Shard(0) over 2");
    fill(&s, 4, 6, 4, boxes);
    recognise(&s, &c);
    sharding_summary_add(&summary, &none, &s.tensor, &c);
    assert_string_equal(sharding_summary_layout(&summary, &none, text, sizeof text), "4 ranks, 2 × 2 mesh (FSDP × TP)");
    assert_string_equal(sharding_summary_layout(&summary, &recorded, text, sizeof text), "8 ranks, mesh dp 2 × tp 4");
    assert_int_equal(summary.nstyles, 2);
    assert_string_equal(summary.styles[0].text, "Shard(0) in 2 chunks");
    assert_string_equal(summary.styles[1].text, "[Shard(0), Shard(1)] over 2 × 2");
}

/* Many chunks in an arbitrary order give the same layout, in reasonable time. */
static void many_chunks_in_any_order(void **state) {
    (void)state;
    enum { N = 200000 };
    int64_t shape[1] = {N * 3}, *dims = calloc(N, 2 * sizeof *dims);
    fc_chunk *chunks = calloc(N, sizeof *chunks);
    fc_tensor t = {.name = "w", .dtype = FC_F32, .ndim = 1, .shape = shape, .chunks = chunks, .nchunks = N};
    fc_sharding_scratch scratch = {0};
    fc_sharding c;
    assert_non_null(dims);
    assert_non_null(chunks);
    for (size_t i = 0; i < N; i++) {
        size_t k = i * 7919 % N; /* coprime to N, so every chunk comes once */
        dims[2 * i] = (int64_t)k * 3;
        dims[2 * i + 1] = 3;
        chunks[i].dims = &dims[2 * i];
        chunks[i].rank = (uint32_t)k;
    }
    assert_true(fc_recognise_sharding(&t, &scratch, &c));
    assert_true(c.grid);
    assert_int_equal(c.counts[0], N);
    assert_true(c.placed);
    fc_sharding_scratch_free(&scratch);
    free(chunks);
    free(dims);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(shard_over_uneven_ranks),
        cmocka_unit_test(tp_major_order_is_strided),
        cmocka_unit_test(two_dimensions),
        cmocka_unit_test(replicas_are_copies),
        cmocka_unit_test(holes_and_overlaps_are_not_a_grid),
        cmocka_unit_test(whole_scalar_and_empty),
        cmocka_unit_test(summary_names_the_mesh),
        cmocka_unit_test(many_chunks_in_any_order),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
