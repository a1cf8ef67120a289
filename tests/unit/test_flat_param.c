/*
 * Flat parameters: what torch refuses, extreme sizes, and round trips of data. tests/oracle/flat_param.py compares
 * layouts with torch's.
 */
#include "fsdpckpt/train/flat_data.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

static fc_flat_desc desc(const char *fqn, int ndim, const int64_t *shape) {
    return (fc_flat_desc){fqn, ndim, shape, NULL, FC_F32, true, -1};
}

static void refuse(const fc_flat_desc *descs, size_t count, int64_t ranks, bool orig, const char *text) {
    fc_arena *arena = fc_arena_new();
    fc_flat_layout layout;
    fc_error err = {FC_OK, ""};
    fc_code rc = fc_flat_layout_new(descs, count, ranks, orig, FC_F32, arena, &layout, &err);
    assert_int_not_equal(rc, FC_OK);
    if (!strstr(err.message, text)) {
        fail_msg("%s", err.message);
    }
    fc_arena_free(arena);
}

static void bad_parameters_are_refused(void **state) {
    (void)state;
    static const int64_t three[] = {3}, zero[] = {0}, huge[] = {INT64_MAX / 2, 2}, negative[] = {-1};
    static const int64_t gaps[] = {2};
    fc_flat_desc two[] = {desc("a", 1, three), desc("b", 1, three)};
    refuse(two, 0, 2, false, "at least one parameter");
    refuse(two, 2, 0, false, "at least one rank, not 0");
    two[1].dtype = FC_BF16;
    refuse(two, 2, 2, false, "b: must flatten tensors with uniform dtype but got float32 and bfloat16");
    two[1].dtype = FC_F32;
    two[0].dtype = FC_I64;
    refuse(two, 2, 2, false, "a: cannot flatten tensors of int64");
    two[0].dtype = FC_F32;
    two[1].requires_grad = false;
    refuse(two, 2, 2, false, "b: must flatten tensors with uniform requires_grad when use_orig_params=False");
    two[1] = desc("b", 1, three);
    two[1].shared_with = 1;
    refuse(two, 2, 2, true, "b: shared with parameter 1, which is not an earlier one");
    two[1].shared_with = -1;
    two[1].strides = gaps;
    refuse(two, 2, 2, true, "b: its strides leave gaps or overlap");
    two[1] = desc("b", 2, huge);
    refuse(two, 2, 2, true, "larger than 64-bit sizes allow");
    two[1] = desc("b", 1, negative);
    refuse(two, 2, 2, true, "b: a size is negative");
    two[0] = desc("a", 1, zero);
    refuse(two, 1, 2, false, "a: a flat parameter without elements has no shards");
}

static void use_orig_params_allows_mixed_frozen(void **state) {
    (void)state;
    static const int64_t three[] = {3};
    fc_flat_desc two[] = {desc("a", 1, three), desc("b", 1, three)};
    fc_arena *arena = fc_arena_new();
    fc_flat_layout layout;
    two[0].requires_grad = false;
    assert_int_equal(fc_flat_layout_new(two, 2, 2, true, FC_F32, arena, &layout, NULL), FC_OK);
    assert_true(layout.requires_grad && !layout.params[0].requires_grad && layout.params[1].requires_grad);
    fc_arena_free(arena);
}

/* One element over five ranks: the other four hold only padding. */
static void most_ranks_hold_only_padding(void **state) {
    (void)state;
    fc_flat_desc scalar = desc("s", 0, NULL);
    fc_arena *arena = fc_arena_new();
    fc_flat_layout layout;
    assert_int_equal(fc_flat_layout_new(&scalar, 1, 5, false, FC_F32, arena, &layout, NULL), FC_OK);
    assert_int_equal(layout.numel, 1);
    assert_int_equal(layout.shard_numel, 1);
    for (int64_t rank = 0; rank < 5; rank++) {
        assert_int_equal(fc_flat_shard_padding(&layout, rank), rank > 0);
        assert_int_equal(fc_flat_shard_of(&layout, 0, rank).in_shard, rank == 0);
    }
    assert_int_equal(fc_flat_layout_new(&scalar, 1, 5, true, FC_BF16, arena, &layout, NULL), FC_OK);
    assert_int_equal(layout.numel, 5);
    assert_int_equal(layout.aligned_numel, 8);
    fc_arena_free(arena);
}

enum { A = 15, B = 2, C = 7 };

/* Flattens, shards, joins the shards and views them: the result equals the input. One parameter is transposed. */
static void there_and_back(int64_t ranks, bool orig) {
    static const int64_t sa[] = {3, 5}, ta[] = {1, 3}, sb[] = {2, 1}, sc[] = {C};
    fc_device *cpu;
    fc_arena *arena = fc_arena_new();
    fc_flat_layout layout;
    fc_flat_desc descs[] = {desc("a", 2, sa), desc("b", 2, sb), desc("a2", 2, sa), desc("c", 1, sc)};
    fc_array params[3], flat, shards, view, shard;
    float values[3][A];
    descs[0].strides = ta;
    descs[2].shared_with = 0;
    assert_int_equal(fc_device_cpu(&cpu, NULL), FC_OK);
    assert_int_equal(fc_flat_layout_new(descs, 4, ranks, orig, FC_F32, arena, &layout, NULL), FC_OK);
    assert_int_equal(layout.nparams, 3);
    assert_int_equal(layout.nshared, 1);
    assert_string_equal(layout.shared[0].fqn, "a2");
    for (int i = 0; i < 3; i++) {
        for (int k = 0; k < A; k++) {
            values[i][k] = (float)(100 * i + k);
        }
        const fc_flat_param *p = &layout.params[i];
        assert_int_equal(fc_array_over(cpu, FC_F32, p->ndim, p->shape, values[i], &params[i], NULL), FC_OK);
    }
    memcpy(params[0].strides, ta, sizeof ta);
    int64_t padded = layout.shard_numel * ranks;
    assert_int_equal(fc_array_new(cpu, FC_F32, 1, &layout.numel, &flat, NULL), FC_OK);
    assert_int_equal(fc_array_new(cpu, FC_F32, 1, &padded, &shards, NULL), FC_OK);
    assert_int_equal(fc_flat_flatten(&layout, params, &flat, NULL, NULL), FC_OK);
    int64_t held[3] = {0};
    for (int64_t rank = 0; rank < ranks; rank++) {
        assert_int_equal(fc_array_narrow(&shards, 0, rank * layout.shard_numel, layout.shard_numel, &shard, NULL),
                         FC_OK);
        assert_int_equal(fc_flat_shard(&layout, &flat, rank, &shard, NULL, NULL), FC_OK);
        for (size_t i = 0; i < 3; i++) {
            fc_flat_shard_info info = fc_flat_shard_of(&layout, i, rank);
            assert_int_equal(fc_flat_shard_view(&layout, &shard, rank, i, &view, NULL), FC_OK);
            assert_int_equal(view.sizes[0], info.numel_in_shard);
            for (int64_t k = 0; k < view.sizes[0]; k++) {
                assert_true(((float *)view.data)[k] == values[i][info.intra_param_start + k]);
            }
            held[i] += info.numel_in_shard;
        }
        for (int64_t k = layout.shard_numel - fc_flat_shard_padding(&layout, rank); k < layout.shard_numel; k++) {
            assert_true(((float *)shard.data)[k] == 0);
        }
    }
    assert_true(held[0] == A && held[1] == B && held[2] == C);
    for (size_t i = 0; i < 3; i++) {
        assert_int_equal(fc_flat_view(&layout, &shards, i, &view, NULL), FC_OK);
        assert_memory_equal(view.data, values[i], (size_t)layout.params[i].numel * sizeof(float));
    }
    assert_int_equal(view.requires_grad, true);
    int64_t at = 0;
    for (size_t i = 0; i < layout.nentries; at += layout.numels_with_padding[i++]) {
        for (int64_t k = 0; layout.is_padding[i] && k < layout.numels_with_padding[i]; k++) {
            assert_true(((float *)flat.data)[at + k] == FC_FLAT_PADDING_VALUE);
        }
    }
    assert_int_equal(at, layout.numel);
    /* An array of another shape is not flattened. */
    params[1].sizes[0] = 1;
    fc_error err;
    assert_int_equal(fc_flat_flatten(&layout, params, &flat, NULL, &err), FC_EUSAGE);
    assert_string_equal(err.message, "b: the array to flatten has another shape or dtype than the parameter");
    fc_array_free(&flat);
    fc_array_free(&shards);
    fc_arena_free(arena);
    cpu->destroy(cpu);
}

static void flattening_is_reversible(void **state) {
    (void)state;
    for (int64_t ranks = 1; ranks <= 40; ranks++) {
        there_and_back(ranks, false);
        there_and_back(ranks, true);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bad_parameters_are_refused),
        cmocka_unit_test(use_orig_params_allows_mixed_frozen),
        cmocka_unit_test(most_ranks_hold_only_padding),
        cmocka_unit_test(flattening_is_reversible),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
